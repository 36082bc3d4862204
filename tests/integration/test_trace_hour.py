"""The recorded hour through the pool: `make trace`, in part on every run and whole on request."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*args, timeout):
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "benches" / "trace_hour.py"), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture
def trace(shared):
    path = shared / "traces" / "mooncake_conversation.jsonl"
    if not path.exists():
        pytest.skip("no trace in the conformance data")
    return str(path)


@pytest.mark.timeout(120)
def test_the_replayed_stream_is_the_resident_set_while_blocks_are_evicted(trace):
    done = run(trace, "--requests", "200", "--blocks", "20000", "--every", "20", timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical at 10 of 10 comparisons" in done.stdout
    assert int(re.search(r"stored, ([\d,]+) removed", done.stdout)[1].replace(",", "")) > 50_000


@pytest.mark.skipif(not os.environ.get("KVEVENTS_CHAOS"), reason="minutes long: KVEVENTS_CHAOS=1")
@pytest.mark.timeout(1200)
def test_the_whole_hour_hits_what_its_ids_say(trace):
    done = run(trace, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    bounded, unbounded = done.stdout.split("pool that never evicts")
    assert "identical at 13 of 13 comparisons" in bounded
    assert "trace ids found         36.64% of 288,500" in unbounded


def test_a_trace_that_cannot_be_read_is_one_line(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("nothing\n")
    for path, says in ((bad, "line 1"), (tmp_path / "absent", "absent")):
        done = run(str(path), timeout=60)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
        assert says in done.stderr
