"""Mooncake's trace format: what an id stands for, and what a broken line costs."""

from __future__ import annotations

import json
from array import array

import pytest

from kvevents.errors import KVEventsError, TraceError
from kvevents.simulate.trace import TOKENS_PER_ID, TraceTokens, read_trace, trace_requests

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


def test_reads_records_in_order_and_passes_blank_lines(tmp_path):
    records = list(read_trace(write(tmp_path, GOOD, b"", {**GOOD, "timestamp": 7, "extra": "kept out"})))
    assert [r.timestamp for r in records] == [5, 7]
    assert records[0].hash_ids == (0, 1)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"timestamp": 1, "input_le', "malformed"),
        (b"\xff\xfe garbage", "malformed"),
        (b"[]", "object"),
        ({k: v for k, v in GOOD.items() if k != "hash_ids"}, "hash_ids"),
        ({**GOOD, "input_length": "600"}, "input_length"),
        ({**GOOD, "input_length": 0}, "input_length is 0"),
        ({**GOOD, "output_length": -1}, "output_length is -1"),
        ({**GOOD, "timestamp": -1}, "timestamp is -1"),
        ({**GOOD, "hash_ids": [0]}, "needs 2"),
        ({**GOOD, "hash_ids": [0, 1, 2]}, "needs 2"),
        ({**GOOD, "hash_ids": [0, -4]}, "hash id -4"),
        ({**GOOD, "hash_ids": [0, 1 << 70]}, ""),
    ],
)
def test_a_broken_line_is_named_and_the_rest_usable(tmp_path, line, says):
    path = write(tmp_path, GOOD, line, {**GOOD, "timestamp": 9})
    with pytest.raises(TraceError, match="line 2") as caught:
        list(read_trace(path))
    assert says in str(caught.value)
    assert isinstance(caught.value, KVEventsError)
    assert isinstance(caught.value, ValueError)
    seen = line if isinstance(line, bytes) else json.dumps(line).encode()
    assert "seen: " + repr(seen.decode("utf-8", "replace"))[:40] in str(caught.value)

    skipped: list[TraceError] = []
    records = list(read_trace(path, skip_bad=True, on_skip=skipped.append))
    assert [r.timestamp for r in records] == [5, 9]
    assert len(skipped) == 1
    assert "line 2" in str(skipped[0])


def test_a_long_broken_line_is_shown_in_short(tmp_path):
    path = write(tmp_path, b"x" * 100_000)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert len(str(caught.value)) < 400


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read_trace(tmp_path / "nothing"))


def test_token_j_of_id_k_depends_on_nothing_else():
    tokens = TraceTokens(7)
    whole = tokens.prompt([3, 9], 2 * TOKENS_PER_ID)
    assert len(whole) == 2 * TOKENS_PER_ID
    assert tokens.prompt([9], TOKENS_PER_ID) == whole[TOKENS_PER_ID:]
    assert tokens.prompt([3, 9], 700) == whole[:700]
    assert tokens.prompt([3, 8], 2 * TOKENS_PER_ID)[:TOKENS_PER_ID] == whole[:TOKENS_PER_ID]
    assert tokens.prompt([3, 8], 2 * TOKENS_PER_ID) != whole
    assert TraceTokens(8).prompt([3, 9], 2 * TOKENS_PER_ID) != whole
    assert max(whole) < 1 << 17


def test_the_tokens_of_an_id_never_change():
    # Written down once: a trace replayed by another version must mean the same blocks.
    assert list(TraceTokens(0).prompt([0], 4)) == [21098, 32887, 120720, 95712]


def test_output_tokens_are_private_to_the_request(tmp_path):
    path = write(tmp_path, GOOD, GOOD, {**GOOD, "output_length": 0})
    a, b, c = trace_requests(read_trace(path), seed=1)
    assert a.prompt == b.prompt
    assert isinstance(a.prompt, array)
    assert (len(a.prompt), len(a.output)) == (600, 3)
    assert a.output != b.output
    assert len(c.output) == 1
    assert a.arrival_s == 0.005


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_that_does_not_fit_is_refused(seed):
    with pytest.raises(ValueError, match="seed"):
        TraceTokens(seed)
