"""Our index beside one that nobody here wrote: Dynamo's, as a process, fed by our publisher over real ZMQ.

Where its rules are ours (64-bit hashes, upper-case media, full attention, a parent that is known, no block
removed before those that follow it) both must answer the same to every prompt. `KVEVENTS_DYNAMO` names the
environment that has it.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from benches.dynamo_indexer import NOT_HERE, DynamoIndexer, dynamo_python

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventsConfig,
    PrefixIndex,
    Source,
    Subscriber,
)
from kvevents.publish import EventPublisherFactory
from kvevents.simulate import WORKLOADS, EngineConfig, MockEngine
from kvevents.testing.link import FaultyLink, LinkConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PYTHON = dynamo_python()
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(PYTHON is None, reason=f"not run: {NOT_HERE}"),
]


class Stream:
    """One rank's publisher, and how far it is."""

    def __init__(self, instance: int, rank: int, block_size: int, ports: list[int]) -> None:
        self.instance, self.rank, self.block_size = instance, rank, block_size
        self.live, self.replay = (f"tcp://127.0.0.1:{p}" for p in ports)
        self.publisher = EventPublisherFactory.create(
            KVEventsConfig(enable_kv_cache_events=True, endpoint=self.live, replay_endpoint=self.replay), 0
        )
        self.next = 0
        self.marked = 0
        # Where readers listen; a link may stand in between.
        self.heard_at = self.live

    def publish(self, batch: KVEventBatch) -> None:
        self.publisher.publish(batch)
        self.next += 1

    def mark(self) -> list[int]:
        """Publish a block of its own, by which a reader shows that it has read so far; its tokens."""
        self.marked += 1
        n = 2**40 + (self.instance * 16 + self.rank) * 100_000 + self.marked
        tokens = [200_000 + self.instance * 16 + self.rank] + [self.marked] * (self.block_size - 1)
        event = BlockStored([n], None, tokens, self.block_size, None, "GPU", None)
        self.publish(KVEventBatch(time.time(), [event], self.rank))
        return tokens


@dataclass
class Readers:
    """Both indexes, and how they are kept up with the streams."""

    theirs: DynamoIndexer
    free_ports: Callable[[int], list[int]]
    made: list[Stream] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    index: PrefixIndex = field(default_factory=PrefixIndex)
    ours: Subscriber | None = None

    def stream(self, instance: int, rank: int, block_size: int) -> Stream:
        """A publisher, which nobody reads yet."""
        self.made.append(Stream(instance, rank, block_size, self.free_ports(2)))
        return self.made[-1]

    def follow(self, stream: Stream) -> None:
        """From now on both read this stream, the past from its replay socket."""
        source = Source(stream.heard_at, stream.replay, name=f"{stream.instance}/{stream.rank}")
        if self.ours is None:
            self.ours = Subscriber([source])
        else:
            self.ours.add_source(source)
        self.theirs.register(
            stream.instance, stream.heard_at, stream.block_size, replay=stream.replay, rank=stream.rank
        )
        self.streams.append(stream)

    def catch_up(self) -> None:
        """Until both have read everything."""
        end = time.monotonic() + 40
        for stream in self.streams:
            # The first live batch is what makes the other reader ask for the past; it may be lost, too.
            while True:
                tokens = stream.mark()
                soon = time.monotonic() + 1.0
                while self.theirs.device_tokens(tokens, stream.instance, stream.rank) == 0:
                    assert time.monotonic() < end, self.theirs.log()[-2000:]
                    if time.monotonic() > soon:
                        break
                    time.sleep(0.02)
                else:
                    break
        assert self.ours is not None
        while any(self._behind(s) for s in self.streams):
            assert time.monotonic() < end, self.ours.stats()
            item = self.ours.poll(0.1)
            if item is not None:
                self.index.apply_item(item)

    def _behind(self, stream: Stream) -> bool:
        name = f"{stream.instance}/{stream.rank}"
        last = [s["last_seq"] for s in self.index.stats() if s["source"] == name]
        return not last or last[0] is None or last[0] < stream.next - 1

    def close(self) -> None:
        if self.ours is not None:
            self.ours.close()
        for s in self.made:
            s.publisher.shutdown()


@pytest.fixture
def readers(free_ports: Callable[[int], list[int]]) -> Iterator[Readers]:
    assert PYTHON is not None
    with DynamoIndexer(PYTHON) as theirs:
        made = Readers(theirs, free_ports)
        try:
            yield made
        finally:
            made.close()


def test_both_indexes_answer_the_same_about_mock_engines(readers: Readers) -> None:
    """Three ranks of two engines; one is heard late, one behind a link that loses, repeats and reorders."""
    streams = [readers.stream(instance, rank, 16) for instance, rank in ((1, 0), (2, 0), (2, 1))]
    engines = [
        MockEngine(
            EngineConfig(num_blocks=160, hash_form="int", data_parallel_rank=s.rank, tokens_per_step=4),
            publisher=s,
        )
        for s in streams
    ]
    requests = [replace(r, cache_salt=None) for r in islice(WORKLOADS["chat"](seed=5), 90)]
    asked = 0

    def same() -> int:
        readers.catch_up()
        found = 0
        for request in requests:
            prompt = list(request.prompt)
            got = {tuple(map(int, m.source.split("/"))): m.tokens for m in readers.index.find(prompt)}
            scores = readers.theirs.query(prompt)["scores"]
            want = {(int(i), int(r)): n for i, ranks in scores.items() for r, n in ranks.items() if n}
            assert got == want
            found += len(want)
        return found

    link = LinkConfig(upstream=streams[0].live, drop=0.1, duplicate=0.1, reorder=0.1, seed=1)
    with FaultyLink(link) as faulty:
        streams[0].heard_at = faulty.live_endpoint
        readers.follow(streams[0])
        readers.follow(streams[1])
        for n, request in enumerate(requests):
            engines[n % 3].serve(request)
            if n == 30:
                asked += same()
            if n == 45:
                readers.follow(streams[2])
            if n == 60:
                assert engines[1].reset_prefix_cache()
                engines[1].step()
                asked += same()
        asked += same()
        assert faulty.counters.dropped > 0
    assert asked > 150
    assert all(e.stats.blocks_removed > 50 for e in engines)
    assert all(s["orphaned"] == 0 for s in readers.index.stats()), "then the rules are not the same"


class Path:
    """One prompt's blocks: a beginning of it on the device, a stretch of it in a lower tier."""

    def __init__(self, number: int, lora_name: str | None, lower: str) -> None:
        self.number, self.lora_name, self.lower = number, lora_name, lower
        self.device = 0
        self.first = self.last = 0

    def hashes(self, start: int, end: int) -> list[int]:
        return [2**33 + self.number * 100 + i for i in range(start, end)]

    def tokens(self, start: int, end: int) -> list[int]:
        return [t for i in range(start, end) for t in (self.number, i, 7, 9)]

    def stored(self, start: int, end: int, medium: str) -> BlockStored:
        parent = self.hashes(start - 1, start)[0] if start else None
        hashes, tokens = self.hashes(start, end), self.tokens(start, end)
        return BlockStored(hashes, parent, tokens, 4, None, medium, self.lora_name)

    def step(self, rng: random.Random) -> BlockStored | BlockRemoved | None:
        """A store at an end, or the removal of the end."""
        n = rng.randint(1, 4)
        what = rng.choice(("device", "evict", "offload", "drop"))
        if what == "device" and self.device < 12:
            start, self.device = self.device, min(12, self.device + n)
            return self.stored(start, self.device, "GPU")
        if what == "evict" and self.device:
            end, self.device = self.device, max(0, self.device - n)
            return BlockRemoved(self.hashes(self.device, end)[::-1], "GPU")
        if what == "offload" and self.last < 12:
            if self.first == self.last:
                self.first = self.last = rng.randint(0, self.device)
            start, self.last = self.last, min(12, self.last + n)
            return self.stored(start, self.last, self.lower) if start < self.last else None
        if what == "drop" and self.first < self.last:
            end, self.last = self.last, max(self.first, self.last - n)
            return BlockRemoved(self.hashes(self.last, end), self.lower)
        return None


def test_both_indexes_answer_the_same_by_tier_and_adapter(readers: Readers) -> None:
    stream = readers.stream(3, 0, 4)
    readers.follow(stream)
    rng = random.Random(11)
    adapters = (None, "one", "two")
    paths = [Path(n, adapters[n % 3], ("CPU", "STORAGE")[n % 2]) for n in range(30)]
    seen: set[tuple[int, int, int]] = set()
    for life in range(4):
        for _ in range(60):
            events = [e for p in rng.sample(paths, 8) if (e := p.step(rng)) is not None]
            stream.publish(KVEventBatch(time.time(), events, 0))
        readers.catch_up()
        for path in paths:
            prompt = path.tokens(0, 14) + [1]
            for lora in adapters:
                theirs = readers.theirs.query(prompt, lora)["instances"].get("3", {})
                want = tuple(theirs.get(k, 0) for k in ("gpu", "cpu", "disk"))
                got = _by_tier(readers.index.find(prompt, lora_name=lora))
                assert got == want, (path.__dict__, lora)
                seen.add(want)
        if life == 2:
            stream.publish(KVEventBatch(time.time(), [AllBlocksCleared()], 0))
            paths = [Path(p.number, p.lora_name, p.lower) for p in paths]
    # On the device only, longer with the host, longer with the disk, only in a lower tier, nowhere.
    assert {(g > 0, c > g, d > c) for g, c, d in seen} >= {
        (True, False, False), (True, True, False), (True, False, True), (False, True, False),
        (False, False, False),
    }  # fmt: skip


def _by_tier(matches: Any) -> tuple[int, int, int]:
    """Usable from each tier and all nearer ones; a tier that never was is no more than the one before it."""
    if not len(matches):
        return (0, 0, 0)
    tiers = matches[0].cumulative
    gpu = tiers.get("GPU", 0)
    cpu = tiers.get("CPU", gpu)
    return (gpu, cpu, tiers.get("STORAGE", cpu))
