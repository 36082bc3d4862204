"""The main job in its own processes: identical when it is, different when something is left out."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)


def kvevents(*args, **kwargs):
    """The command line in a process of its own, with its own process group."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "kvevents", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        **kwargs,
    )


def finish(process):
    try:
        out, err = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def test_the_reader_holds_the_same_set_at_every_sequence_whatever_the_link_does():
    code, out, err = finish(
        kvevents("demo", "--requests", "1000", "--blocks", "600", "--rate", "2000", "--json")
    )
    assert code == 0, err
    result = json.loads(out)
    assert result["verdict"] == "identical"
    assert result["identical"] == result["sequences"] == result["batches_sent"] > 1000
    assert result["first_difference"] is None
    assert result["requests"] == 1000
    assert all(
        result["link"][kind] > 0 for kind in ("dropped", "duplicated", "delayed", "reordered", "reconnects")
    )
    assert result["repaired"] >= result["link"]["dropped"] > 0
    assert result["blocks_removed"] > 1000
    assert 0.1 < result["hit_rate"] < 0.9


def test_a_reader_that_leaves_one_removal_out_is_found_at_the_sequence():
    code, out, err = finish(
        kvevents("demo", "--requests", "150", "--blocks", "300", "--rate", "2000", "--break-reader", "--json")
    )
    assert code == 1, err
    result = json.loads(out)
    assert result["verdict"] == "different"
    first = result["first_difference"]
    assert 0 < first["seq"] < result["sequences"]
    assert (len(first["missing"]), len(first["extra"])) == (0, 1)
    assert re.fullmatch("[0-9a-f]{64}", first["extra"][0])
    assert result["identical"] >= first["seq"]


def test_breaking_the_reader_without_any_removal_is_told_not_passed():
    code, out, err = finish(kvevents("demo", "--requests", "5", "--blocks", "5000", "--break-reader"))
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("kvevents: break_reader: no block was removed")


def test_a_pool_that_serves_no_request_is_told_not_passed():
    code, _, err = finish(kvevents("demo", "--requests", "5", "--blocks", "2", "--json"))
    assert code == 2
    assert len(err.splitlines()) == 1
    assert err.startswith("kvevents: blocks: none of 5 requests fits into 2 blocks of 16 tokens")


def test_the_verdict_for_people_names_the_sequence_too():
    code, out, err = finish(
        kvevents("demo", "--requests", "100", "--blocks", "300", "--rate", "2000", "--break-reader")
    )
    assert code == 1, err
    assert re.search(
        r"^different from sequence \d+ on: identical at [\d,]+ of [\d,]+ sequence numbers$", out, re.MULTILINE
    )


def test_recorded_traffic_runs_too(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 10 * i, "input_length": 700 + i, "output_length": 5, "hash_ids": [i % 7, 100 + i]}
        for i in range(60)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = finish(
        kvevents("demo", "--trace", str(trace), "--blocks", "400", "--rate", "2000", "--json")
    )
    assert code == 0, err
    result = json.loads(out)
    assert result["requests"] == 60
    assert result["verdict"] == "identical"
    assert result["hit_rate"] > 0.2


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds children in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process_behind(how):
    process = kvevents("demo", "--requests", "100000", "--rate", "200")

    def children():
        found = []
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            found += [int(pid) for pid in (task / "children").read_text().split()]
        return found

    deadline = time.monotonic() + 60
    # Engine, link and reader, and the interpreter's own resource tracker.
    while len(children()) < 4:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    born = children()
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does
    else:
        process.send_signal(how)
    code, out, err = finish(process)
    assert code == 130
    assert out == ""
    assert err.splitlines()[-1] == "kvevents: interrupted"
    # The resource tracker sees that the command is gone, and goes too: that may take a moment.
    deadline = time.monotonic() + 10
    while any(state(pid) != "Z" for pid in born):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"  # as good as gone
