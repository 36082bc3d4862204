"""The replay log from Python; what it keeps is tested against a plain list in Rust."""

from __future__ import annotations

import threading

import pytest

from kvevents import BlockStored, EventList, encode
from kvevents._core import ReplayLog
from kvevents.errors import ConfigError, EventTypeError, SequenceError
from kvevents.events import KVEventBatch

END = 2**64 - 1


def numbers(batches):
    return [int.from_bytes(seq, "big") for seq, _ in batches]


def test_reads_ranges_within_both_limits():
    log = ReplayLog(100, 1 << 20)
    for seq in [0, 1, 2, 5, 6, 7]:
        assert log.append(seq, bytes([seq]) * 10)
    assert len(log) == 6
    assert (log.oldest, log.newest, log.payload_bytes) == (0, 7, 60)
    assert numbers(log.read(1, END, 100, 1 << 20)) == [1, 2, 5, 6, 7]
    assert numbers(log.read(3, 6, 100, 1 << 20)) == [5, 6]
    assert numbers(log.read(0, END, 2, 1 << 20)) == [0, 1]
    assert numbers(log.read(0, END, 100, 25)) == [0, 1]
    assert numbers(log.read(0, END, 100, 1)) == [0], "always one, or a reader of large batches would stall"
    assert log.read(8, END, 100, 1 << 20) == []
    assert log.read(5, END, 1, 1)[0] == ((5).to_bytes(8, "big"), b"\x05" * 10)
    assert log.get(5) == b"\x05" * 10
    assert log.get(4) is None


def test_numbers_that_cannot_follow_are_refused():
    log = ReplayLog(10, 1000)
    log.append(3, b"x")
    for seq in (3, 2):
        with pytest.raises(SequenceError, match="not above"):
            log.append(seq, b"x")
    with pytest.raises(SequenceError, match="end marker"):
        log.append(END, b"x")
    with pytest.raises(TypeError):
        log.append(4, bytearray(b"x"))
    with pytest.raises(OverflowError):
        log.append(-1, b"x")
    assert (log.newest, len(log)) == (3, 1)


def test_costs_at_most_24_bytes_a_batch_beyond_the_payloads():
    log = ReplayLog(10_000, 1 << 30)
    for seq in range(20_000):
        log.append(seq, b"\0" * 700)
    assert log.nbytes - log.payload_bytes <= 24 * len(log)
    assert log.evicted == 10_000


def test_a_reader_beside_the_writer_sees_whole_batches_in_order():
    log = ReplayLog(64, 1 << 20)
    done = threading.Event()

    def write():
        for seq in range(20_000):
            log.append(seq, seq.to_bytes(4, "big") * 33)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    at = 0
    while not done.is_set() or at <= (log.newest or 0):
        for seq_bytes, payload in log.read(at, END, 16, 1 << 20):
            seq = int.from_bytes(seq_bytes, "big")
            assert seq >= at
            assert payload == seq.to_bytes(4, "big") * 33
            at = seq + 1
    thread.join()
    assert at == 20_000


def test_encodes_into_the_log_what_encode_gives():
    log = ReplayLog(10, 1 << 20)
    events = EventList([BlockStored([1, 2], None, list(range(32)), 16, None, "GPU", None)])
    payload, losses = log.append_encoded(4, events, 1.5, 3, "vllm-map-0.33")
    assert payload == encode(KVEventBatch(1.5, events, 3)) == log.get(4)
    assert losses == []
    salted = BlockStored([3], None, list(range(16)), 16, None, "GPU", None, cache_salt="tenant")
    payload, losses = log.append_encoded(5, [salted, *events], 1.5, 3, "vllm-map-0.33")
    assert [(index, field) for index, field, _ in losses] == [(0, "cache_salt")]
    assert payload == encode(KVEventBatch(1.5, events, 3)) == log.get(5)


def test_an_encoding_that_fails_adds_nothing():
    log = ReplayLog(10, 1 << 20)
    for events, ts, dialect, error in [
        ([1], 0.0, "vllm-map-0.33", EventTypeError),
        ([], "now", "vllm-map-0.33", EventTypeError),
        ([], 0.0, "vllm", ConfigError),
    ]:
        with pytest.raises(error):
            log.append_encoded(0, events, ts, 0, dialect)
    assert log.newest is None
    log.append(1, b"x")
    with pytest.raises(SequenceError):
        log.append_encoded(1, [], 0.0, 0, "vllm-map-0.33")
    assert len(log) == 1
