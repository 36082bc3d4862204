"""Any number of threads may ask and tell: no borrow errors, no torn answers, no lock held for long."""

from __future__ import annotations

import threading
import time
from array import array

import pytest

from kvevents import BlockRemoved, BlockStored, EventList, KVEventBatch, PrefixIndex, encode

SIZE = 4


def stored(prompt: int, start: int, end: int) -> BlockStored:
    """Blocks of prompt number `prompt`, whose tokens are its own."""
    hashes = [(prompt << 20) + i + 1 for i in range(end)]
    tokens = [prompt * 1000 + t for t in range(start * SIZE, end * SIZE)]
    parent = hashes[start - 1] if start else None
    return BlockStored(hashes[start:], parent, tokens, SIZE, None, "GPU", None)


def ids(prompt: int, blocks: int) -> array[int]:
    return array("I", range(prompt * 1000, prompt * 1000 + blocks * SIZE))


@pytest.mark.timeout(60)
def test_eight_threads_apply_ask_count_and_dump() -> None:
    """R130: an answer is always one that was true at some moment of the source's life."""
    index = PrefixIndex()
    stop = threading.Event()
    errors: list[BaseException] = []

    def run(work: object) -> None:
        try:
            while not stop.is_set():
                work()  # type: ignore[operator]
        except BaseException as e:
            errors.append(e)
            stop.set()

    def apply(source: int) -> None:
        name = f"w{source}"
        for prompt in range(20):
            events = [stored(prompt, 0, 10)]
            index.apply(name, 0, None, encode(KVEventBatch(0.0, events)))
        gone = [BlockRemoved([(p << 20) + 10 for p in range(20)], "GPU")]
        index.apply_events(name, 0, EventList(gone))

    def find() -> None:
        for match in index.find(ids(3, 10)):
            assert match.tokens in (36, 40)
            assert match.complete
        for found in index.find_many([ids(p, 10) for p in range(20)]):
            assert all(m.tokens in (36, 40) for m in found)
        # A question from inside an iteration over an answer.
        for _ in index.find(ids(1, 10)):
            index.find(ids(2, 10))

    def look() -> None:
        assert all(s["conflicts"] == 0 for s in index.stats())
        # Without numbers nobody can make such a dump exact again, so it does not claim to be.
        loaded = PrefixIndex.load(index.dump())
        assert len(loaded.stats()) <= 3

    works = [lambda s=s: apply(s) for s in range(3)] + [find, find, find, look, look]  # type: ignore[misc]
    threads = [threading.Thread(target=run, args=(w,)) for w in works]
    for t in threads:
        t.start()
    stop.wait(3)
    stop.set()
    for t in threads:
        t.join(20)
    assert not errors, errors
    assert not any(t.is_alive() for t in threads)
    for source in range(3):
        apply(source)
    assert {m.tokens for m in index.find(ids(0, 10))} == {36}


@pytest.mark.timeout(60)
def test_a_long_question_keeps_no_writer_waiting() -> None:
    """R130: readers let go of the lock every 128 look-ups, so that a writer gets in between."""
    index = PrefixIndex()
    blocks = 200_000
    tokens = array("I", range(blocks * SIZE))
    events = EventList([BlockStored(list(range(1, blocks + 1)), None, list(tokens), SIZE, None, "GPU", None)])
    index.apply_events("w", 0, events)
    small = EventList([stored(2**20, 0, 1)])
    times: list[float] = []
    done = threading.Event()

    def ask() -> None:
        for _ in range(5):
            assert index.find(tokens)[0].tokens == blocks * SIZE
        done.set()

    asking = threading.Thread(target=ask)
    began = time.perf_counter()
    asking.start()
    while not done.is_set():
        start = time.perf_counter()
        index.apply_events("w", 0, small)
        times.append(time.perf_counter() - start)
    asking.join(30)
    one_question = (time.perf_counter() - began) / 5
    times.sort()
    assert len(times) > 20
    assert times[len(times) // 2] < one_question / 10


@pytest.mark.timeout(60)
def test_a_dump_that_was_written_while_the_source_changed_is_made_exact_by_the_batches_after_it() -> None:
    """As a router does after a restart: load, then apply what came after `last_seq` once more."""
    index = PrefixIndex()
    sent: list[bytes] = []

    def send(events: list[BlockStored | BlockRemoved]) -> None:
        sent.append(encode(KVEventBatch(0.0, events)))
        index.apply("w", 0, len(sent) - 1, sent[-1])

    for prompt in range(2000):
        send([stored(prompt, 0, 10)])
    stop = threading.Event()

    def change() -> None:
        n = 0
        while not stop.is_set():
            send([BlockRemoved([(n % 2000 << 20) + 10], "GPU"), stored(2000 + n, 0, 3)])
            n += 1

    writer = threading.Thread(target=change)
    writer.start()
    try:
        dumps = [index.dump() for _ in range(3)]
    finally:
        stop.set()
        writer.join(30)
    for dump in dumps:
        loaded = PrefixIndex.load(dump)
        last = loaded.stats()[0]["last_seq"]
        loaded.confirm("w")
        for seq in range(last + 1, len(sent)):
            loaded.apply("w", 0, seq, sent[seq])
        assert loaded.digest("w") == index.digest("w") is not None
        assert list(loaded.find(ids(5, 10))) == list(index.find(ids(5, 10)))
