"""The prefix index: bytes in, answers out, beside Dynamo's radix tree; memory, restart, readers and writers.

Rows against Dynamo's tree need `ai-dynamo-runtime` in the same environment, those against its indexer there
or in the one that `KVEVENTS_DYNAMO` names. `KVEVENTS_BENCH_BLOCKS` sets the size of the large rows (10^6 by
default).
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from benches import workloads
from benches.dynamo_indexer import NOT_HERE, dynamo_python
from benches.harness import Absent, Work, as_tests, compare, have, value
from benches.zmq_race import Ours, Theirs, stored, write_messages
from kvevents import BlockStored, EventList, KVEventBatch, PrefixIndex, encode

NO_DYNAMO = Absent("ai-dynamo-runtime is not installed here")
BLOCK = workloads.BLOCK
BLOCKS = 2048
LARGE = int(os.environ.get("KVEVENTS_BENCH_BLOCKS", "1000000"))


def theirs() -> Any:
    """Dynamo's extension module."""
    from dynamo import _core

    return _core


@cache
def events(per_event: int) -> tuple[list[BlockStored], list[int]]:
    """One prompt of 2,048 blocks, in events of so many, and its tokens."""
    made = workloads.stored_events(BLOCKS // per_event, per_event)
    return made, [t for e in made for t in e.token_ids]


@cache
def payloads(per_event: int) -> list[bytes]:
    """One message an event."""
    return [encode(KVEventBatch(1.0, [e], 0)) for e in events(per_event)[0]]


@cache
def their_payloads(per_event: int) -> list[bytes]:
    """The same events as Dynamo's, whose blocks carry the hash of their tokens already."""
    made, tokens = events(per_event)
    hashes = theirs().compute_block_hash_for_seq(tokens, BLOCK)
    out = []
    for i, e in enumerate(made):
        first = i * per_event
        blocks = [{"block_hash": h, "tokens_hash": hashes[first + j]} for j, h in enumerate(e.block_hashes)]
        data = {"stored": {"parent_hash": e.parent_block_hash, "blocks": blocks}}
        out.append(json.dumps({"event_id": i, "data": data, "dp_rank": 0}).encode())
    return out


def applying(per_event: int) -> Work:
    """All of a prompt's events into an empty index; Dynamo's own thread has caught up when it answers."""
    mine, tokens = payloads(per_event), array("I", events(per_event)[1])
    ours: list[PrefixIndex] = []
    trees: list[Any] = []

    def before() -> None:
        ours[:] = [PrefixIndex()]

    def run() -> None:
        apply = ours[0].apply
        for seq, payload in enumerate(mine):
            apply("w", 0, seq, payload)

    def check() -> None:
        before()
        run()
        assert ours[0].find(tokens)[0].blocks == BLOCKS
        if have("dynamo"):
            their_before()
            their_run()
            hashes = theirs().compute_block_hash_for_seq(list(tokens), BLOCK)
            assert list(trees[0].find_matches(hashes).scores.values()) == [BLOCKS]

    def their_before() -> None:
        trees[:] = [theirs().RadixTree()]

    def their_run() -> None:
        apply = trees[0].apply_event
        for payload in their_payloads(per_event):
            apply(1, payload)
        trees[0].find_matches([1])  # waits for its thread

    other = their_run if have("dynamo") else NO_DYNAMO
    return Work(run, other, BLOCKS, check, before, their_before)


@compare(
    "apply payload bytes, 64 blocks an event", per="block", against="Dynamo", floor=3, aim=6, clock="process"
)
def apply_64() -> Work:
    """Process CPU time: Dynamo works in a thread of its own."""
    return applying(64)


@compare(
    "apply payload bytes, one block an event",
    per="block",
    against="Dynamo",
    floor=10,
    aim=20,
    clock="process",
)
def apply_1() -> Work:
    """A message a block, as when decoding."""
    return applying(1)


def finding(blocks: int, *, buffer: bool) -> Work:
    """Who holds these tokens: hashing them is part of it."""
    index = PrefixIndex()
    for payload in payloads(64):
        index.apply("w", 0, None, payload)
    tokens = events(64)[1][: blocks * BLOCK]
    asked = array("I", tokens) if buffer else tokens

    def check() -> None:
        assert index.find(asked)[0].blocks == blocks

    if not have("dynamo"):
        return Work(lambda: index.find(asked), NO_DYNAMO, 1, check)
    module = theirs()
    tree = module.RadixTree()
    for payload in their_payloads(64):
        tree.apply_event(1, payload)
    hash_tokens = module.compute_block_hash_for_seq
    assert list(tree.find_matches(hash_tokens(tokens, BLOCK)).scores.values()) == [blocks]
    return Work(lambda: index.find(asked), lambda: tree.find_matches(hash_tokens(tokens, BLOCK)), 1, check)


@compare(
    "find 64 blocks from a list of ids", per="question", against="Dynamo", floor=5, aim=10, clock="process"
)
def find_64() -> Work:
    """1,024 tokens."""
    return finding(64, buffer=False)


@compare(
    "find 64 blocks from an int32 buffer", per="question", against="Dynamo", floor=5, aim=10, clock="process"
)
def find_64_buffer() -> Work:
    """Dynamo takes lists only."""
    return finding(64, buffer=True)


@compare(
    "find 1,024 blocks from a list of ids", per="question", against="Dynamo", floor=3, aim=6, clock="process"
)
def find_1024() -> Work:
    """16,384 tokens."""
    return finding(1024, buffer=False)


@compare(
    "find 1,024 blocks from an int32 buffer",
    per="question",
    against="Dynamo",
    floor=3,
    aim=6,
    clock="process",
)
def find_1024_buffer() -> Work:
    """Dynamo takes lists only."""
    return finding(1024, buffer=True)


@value(
    "find_many of 1,000 prompts by 4 threads while 4 sources apply, against one thread",
    unit="x", floor=2, aim=3, more_is_better=True, against="one thread",
)  # fmt: skip
def find_many() -> float:
    """Questions a second, the same writers beside both. Two processors give what they have left."""
    index = PrefixIndex()
    mine = payloads(64)
    for source in range(4):
        for payload in mine:
            index.apply(f"w{source}", 0, None, payload)
    tokens = array("I", events(64)[1])
    prompts = [tokens[: (64 + i % 64) * BLOCK] for i in range(1000)]
    stop = threading.Event()

    def write(source: int) -> None:
        while not stop.is_set():
            for payload in mine:
                index.apply(f"w{source}", 0, None, payload)

    def ask(times: int) -> None:
        for _ in range(times):
            found = index.find_many(prompts)
            assert all(len(m) == 4 for m in found)

    def rate(threads: int) -> float:
        asking = [threading.Thread(target=ask, args=(4,)) for _ in range(threads)]
        began = time.perf_counter()
        for t in asking:
            t.start()
        for t in asking:
            t.join()
        return threads * 4000 / (time.perf_counter() - began)

    writing = [threading.Thread(target=write, args=(s,)) for s in range(4)]
    for t in writing:
        t.start()
    try:
        ratios = [rate(4) / rate(1) for _ in range(3)]
    finally:
        stop.set()
        for t in writing:
            t.join()
    return statistics.median(ratios)


def _snapshot(blocks: int, width: int) -> list[EventList]:
    """Stores of so many blocks, in pieces, made without a Python object a block where that matters."""
    rng = random.Random(7)
    pieces = []
    per_event = 512
    for first in range(0, blocks, per_event * 16):
        events = []
        for _ in range(first, min(blocks, first + per_event * 16), per_event):
            hashes: list[Any] = (
                [rng.getrandbits(64) for _ in range(per_event)]
                if width == 8
                else [rng.randbytes(32) for _ in range(per_event)]
            )
            ids = array("I", rng.randbytes(per_event * 4 * 4))
            events.append(BlockStored(hashes, None, ids.tolist(), 4, None, "GPU", None, group_idx=0))
        pieces.append(EventList(events))
    return pieces


def _rss() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(width: int) -> None:
    """Run in a process of its own: prints bytes of resident memory a block."""
    index = PrefixIndex()
    index.apply_events("w", 0, _snapshot(512, width)[0])
    gc.collect()
    blocks, before = 0, _rss()
    rng = random.Random(7)
    per = 512
    while blocks < LARGE:
        hashes: list[Any] = (
            [rng.getrandbits(64) for _ in range(per)]
            if width == 8
            else [rng.randbytes(32) for _ in range(per)]
        )
        ids = array("I", rng.randbytes(per * 4 * 4)).tolist()
        event = BlockStored(hashes, None, ids, 4, None, "GPU", None, group_idx=0)
        index.apply_events("w", 0, EventList([event]))
        blocks += per
    del hashes, ids, event
    gc.collect()
    used = _rss() - before
    assert index.stats()[0]["blocks"] >= blocks
    print(used / blocks)


def in_process(call: str) -> float:
    """A figure of a function here, run in a process of its own."""
    code = f"from benches import test_bench_index as b; b.{call}"
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    return float(out.stdout)


@value(f"memory a block-copy at {LARGE:,}, 64-bit hashes", unit="B", floor=64, aim=40)
def memory_ints() -> float:
    """Difference of resident memory, one source, one tier."""
    return in_process("memory(8)")


@value(f"memory a block-copy at {LARGE:,}, 32-byte hashes", unit="B", floor=100, aim=72)
def memory_digests() -> float:
    """The same with digests."""
    return in_process("memory(32)")


def restart() -> None:
    """Run in a process of its own: how many times faster a dump is loaded than a snapshot applied."""
    index = PrefixIndex()
    # What a router would get: pieces of a snapshot as bytes, decoded and applied.
    wire = [encode(KVEventBatch(1.0, piece, 0)) for piece in _snapshot(LARGE, 8)]
    began = time.perf_counter()
    for payload in wire:
        index.apply("w", 0, None, payload)
    rebuilt = time.perf_counter() - began
    dump = index.dump()
    began = time.perf_counter()
    loaded = PrefixIndex.load(dump)
    loaded.confirm("w")
    took = time.perf_counter() - began
    assert loaded.digest("w") == index.digest("w") is not None
    print(rebuilt / took)


@value(
    f"restart from a dump at {LARGE:,} blocks, against applying a snapshot",
    unit="x", floor=3, aim=10, more_is_better=True, against="own, snapshot",
)  # fmt: skip
def restart_time() -> float:
    """Both from bytes in memory."""
    return in_process("restart()")


def blocking() -> None:
    """Run in a process of its own: the longest that a reader holds a lock, in microseconds."""
    index = PrefixIndex()
    for piece in _snapshot(LARGE, 8):
        index.apply_events("w", 0, piece)
    # A prompt whose blocks lie anywhere in the tables: every look-up misses the caches.
    prompt = BlockStored(
        list(range(1, 100_001)), None, list(range(400_000)), 4, None, "GPU", None, group_idx=0
    )
    index.apply_events("w", 0, EventList([prompt]))
    tokens = array("I", range(400_000))
    best = []
    for _ in range(20):
        began = time.thread_time()
        assert index.find(tokens)[0].tokens == 400_000
        best.append(time.thread_time() - began)
    # Between two looks at the lock there are 128 look-ups (and the hashing, which is outside of it).
    print(statistics.median(best) / (100_000 / 128) * 1e6)


@value(f"longest that a reader keeps a writer waiting at {LARGE:,} blocks", unit="us", floor=100)
def reader_blocks_writer() -> float:
    """128 look-ups under one lock, from the processor time of a prompt of 100,000 blocks."""
    return in_process("blocking()")


def racing(blocks: int, per_event: int) -> Work:
    """An engine's socket, read until the last block can be asked for; the clock is the wall's."""
    folder = tempfile.TemporaryDirectory()
    messages = Path(folder.name) / "messages"
    write_messages(messages, blocks, per_event)
    python = dynamo_python()
    racers: dict[str, Any] = {}

    def end() -> None:
        while racers:
            racers.popitem()[1].close()

    def before() -> None:
        end()
        racers["ours"] = Ours(messages)

    def their_before() -> None:
        end()
        racers["theirs"] = Theirs(messages, python or "")

    def check_one(who: str) -> None:
        racers[who].run()
        events = stored(blocks, per_event)
        starts = [i for i, e in enumerate(events) if e.parent_block_hash is None] + [len(events)]
        for first, after in pairwise(starts):
            tokens = [t for e in events[first:after] for t in e.token_ids]
            assert racers[who].blocks(tokens) == len(tokens) // BLOCK

    def check() -> None:
        before()
        check_one("ours")
        if python is not None:
            their_before()
            check_one("theirs")

    def close() -> None:
        end()
        folder.cleanup()

    def run() -> None:
        racers["ours"].run()

    def their_run() -> None:
        racers["theirs"].run()

    theirs_run = Absent(NOT_HERE) if python is None else their_run
    return Work(run, theirs_run, blocks, check, before, their_before, close=close)


@compare(
    "engine's ZMQ to queryable index, 64 blocks a message",
    per="block", against="dynamo.indexer", floor=3, aim=6, clock="wall", pairs=5,
)  # fmt: skip
def race_64() -> Work:
    """Prefill: a message a step, with all of a prompt's chunk."""
    return racing(65_536, 64)


@compare(
    "engine's ZMQ to queryable index, one block a message",
    per="block", against="dynamo.indexer", clock="wall", pairs=5,
)  # fmt: skip
def race_1() -> Work:
    """Decoding of one request: what a message costs."""
    return racing(16_384, 1)


test_rows = as_tests(__name__)
