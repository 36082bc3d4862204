"""`kvevents simulate` publishes, `kvevents tail` hears it, and both end as they should."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(90)


def start(*args):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "kvevents", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"},
    )


def ports(n):
    held = [socket.socket() for _ in range(n)]
    for s in held:
        s.bind(("127.0.0.1", 0))
    found = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return found


@pytest.fixture
def endpoints():
    return [f"tcp://127.0.0.1:{port}" for port in ports(2)]


def test_tail_hears_what_simulate_publishes_from_the_first_batch_on(endpoints):
    live, replay = endpoints
    engine = start(
        "simulate", "--endpoint", live, "--replay-endpoint", replay, "--speed", "0",
        "--requests", "40", "--linger", "60", "--dialect", "vllm-map-0.32",
    )  # fmt: skip
    try:
        assert "publishing vllm-map-0.32" in engine.stderr.readline()
        # Whatever was sent before the tail connected comes by replay.
        heard = start("tail", live, "--replay-endpoint", replay, "--count", "30", "--timeout", "30", "--json")
        out, err = heard.communicate(timeout=60)
        assert heard.returncode == 0, err
    finally:
        engine.send_signal(signal.SIGINT)
        counts, said = engine.communicate(timeout=30)
    assert engine.returncode == 130
    assert said.splitlines()[-1] == "kvevents: interrupted"
    assert "blocks_stored" in counts
    batches = [json.loads(line) for line in out.splitlines()]
    assert [b["seq"] for b in batches] == list(range(30))
    assert {b["type"] for b in batches} == {"batch"}
    first = batches[0]["events"][0]
    assert first["type"] == "BlockStored"
    assert len(bytes.fromhex(first["block_hashes"][0])) == 32
    assert len(first["token_ids"]) == 16 * len(first["block_hashes"])


def test_tail_for_people_is_a_line_a_batch_and_a_line_an_event(endpoints):
    live, replay = endpoints
    engine = start(
        "simulate", "--endpoint", live, "--replay-endpoint", replay, "--speed", "0",
        "--requests", "10", "--linger", "60", "--hash-form", "int",
    )  # fmt: skip
    try:
        engine.stderr.readline()
        heard = start(
            "tail", live, "--replay-endpoint", replay, "--count", "5", "--timeout", "30", "--events"
        )
        out, err = heard.communicate(timeout=60)
        assert heard.returncode == 0, err
    finally:
        engine.terminate()
        engine.communicate(timeout=30)
    assert engine.returncode == 130
    lines = out.splitlines()
    assert sum(" #" in line for line in lines) == 5
    assert any(line.startswith("    + ") and "medium=GPU" in line for line in lines)


def test_tail_gives_up_on_a_silent_peer(endpoints):
    heard = start("tail", endpoints[0], "--timeout", "0.5")
    out, err = heard.communicate(timeout=30)
    assert (heard.returncode, out) == (3, "")
    assert err.count("\n") == 1
    assert "nothing was heard" in err


def test_simulate_says_which_port_is_in_use(endpoints):
    live, replay = endpoints
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(live.rpartition(":")[2])))
        taken.listen()
        done = start("simulate", "--endpoint", live, "--replay-endpoint", replay, "--requests", "1")
        out, err = done.communicate(timeout=30)
    assert (done.returncode, out) == (3, "")
    assert err.count("\n") == 1
    assert live in err


def test_simulate_serves_a_trace_to_its_end_on_two_ranks(tmp_path, endpoints):
    trace = tmp_path / "trace.jsonl"
    good = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    trace.write_text("\n".join([json.dumps(good)] * 4 + ["broken"] + [json.dumps(good)] * 4))
    base = ["simulate", "--trace", str(trace), "--speed", "0", "--dp", "2", "--json", "--replay-endpoint", ""]
    low = min(p for p in range(20000, 60000, 97) if _free(p) and _free(p + 1))
    base += ["--endpoint", f"tcp://127.0.0.1:{low}"]

    stopped = start(*base)
    out, err = stopped.communicate(timeout=30)
    assert (stopped.returncode, out) == (3, "")
    assert "line 5" in err
    assert "broken" in err

    done = start(*base, "--skip-bad")
    out, err = done.communicate(timeout=30)
    assert done.returncode == 0, err
    assert "line 5" in err
    counts = json.loads(out)
    assert counts["finished"] == 8
    assert counts["prompt_tokens"] == 4800
    # Each rank computes the prompt once and finds it three times.
    assert counts["hit_tokens"] == 2 * 3 * 592


def _free(port):
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
