"""The main job with real worker processes behind the engine: truth from their own books."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)


def kvevents(*args):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "kvevents", "demo", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )


def finish(process):
    try:
        out, err = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


SMALL = ("--requests", "150", "--blocks", "200", "--rate", "2000", "--json")


@pytest.mark.parametrize(
    "args",
    [
        ("--workers", "3", "--connectors", "2"),
        ("--workers", "2", "--connectors", "2", "--same-medium", "--rule", "any"),
        ("--workers", "3", "--rule", "2"),
    ],
    ids=" ".join,
)
def test_the_reader_holds_what_the_workers_books_say_at_every_sequence(args):
    code, out, err = finish(kvevents(*args, *SMALL))
    assert code == 0, err
    result = json.loads(out)
    assert result["verdict"] == "identical"
    assert result["identical"] == result["sequences"] > 300
    work = result["connector_work"]
    assert all(work[k] > 0 for k in ("late_stores", "failed_stores", "evicted", "reannounced"))
    assert work["restarts"] == 1


def test_a_reader_that_leaves_one_removal_out_is_found_with_workers_too():
    code, out, err = finish(kvevents("--workers", "2", "--connectors", "2", "--break-reader", *SMALL))
    assert code == 1, err
    first = json.loads(out)["first_difference"]
    assert (len(first["missing"]), len(first["extra"])) == (0, 1)


def children(pid):
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds children in /proc")
@pytest.mark.parametrize("how", ["interrupt", "terminate", "kill a worker"])
def test_no_worker_stays_behind(how):
    process = kvevents("--workers", "2", "--requests", "100000", "--rate", "200")
    deadline = time.monotonic() + 60
    family = []
    # Engine, link, reader and the resource tracker; two workers below the engine.
    while len(family) < 6:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
        try:
            born = children(process.pid)
            workers = [w for child in born for w in children(child)]
        except FileNotFoundError:
            continue
        family = born + workers
    if how == "kill a worker":
        os.kill(workers[0], signal.SIGKILL)
    elif how == "interrupt":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert out == ""
    if how == "kill a worker":
        assert code == 3
        assert "worker" in err.splitlines()[-1]
        assert "(exit code -9)" in err.splitlines()[-1]
    else:
        assert (code, err.splitlines()[-1]) == (130, "kvevents: interrupted")
    deadline = time.monotonic() + 10
    while any(state(pid) != "Z" for pid in family):
        assert time.monotonic() < deadline
        time.sleep(0.02)
