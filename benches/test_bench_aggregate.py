"""Aggregation over workers beside vLLM's KVEventAggregator and a container of Structs."""

from __future__ import annotations

import pickle
import random
import time
from typing import Any

from benches import workloads
from benches.harness import Absent, Work, as_tests, compare, have, value
from kvevents import Aggregator, BlockRemoved, BlockStored, EventList, KVEventAggregator
from kvevents.connectors import WorkerKVEvents

WORKERS = 8
EVENTS = 1000
VLLM = "vLLM's KVEventAggregator"


def structs(per_event: int, cls: type = BlockStored) -> list:
    """One worker's events; the objects are made anew, as they are by unpickling."""
    hashes = workloads.hashes(3, EVENTS * per_event)
    ids = workloads.token_ids(3, EVENTS * per_event * workloads.BLOCK)
    size = per_event * workloads.BLOCK
    return [
        cls(
            block_hashes=[bytes(bytearray(h)) for h in hashes[e * per_event : (e + 1) * per_event]],
            parent_block_hash=None,
            token_ids=[int(str(t)) for t in ids[e * size : (e + 1) * size]],
            block_size=workloads.BLOCK,
            lora_id=None,
            medium="CPU",
            lora_name=None,
        )
        for e in range(EVENTS)
    ]


def reports(per_event: int, cls: type = BlockStored) -> list[list]:
    """What eight workers report: equal, and nothing shared."""
    return [structs(per_event, cls) for _ in range(WORKERS)]


def vllm() -> tuple[type, type] | Absent:
    """Their aggregator and their Struct."""
    if not have("vllm"):
        return Absent("vllm is not installed here")
    from vllm.distributed.kv_events import BlockStored as TheirStored
    from vllm.distributed.kv_events import KVEventAggregator as Theirs

    return Theirs, TheirStored


def interval(cls: type, lists: list) -> object:
    """One interval, by vLLM's methods."""
    aggregator = cls(WORKERS)
    for events in lists:
        aggregator.add_events(events)
    return aggregator.get_common_events()


def theirs_work(per_event: int) -> tuple[object, object]:
    """What vLLM does with the same events, and what it gives."""
    names = vllm()
    if isinstance(names, Absent):
        return names, None
    lists = reports(per_event, names[1])
    return (lambda: interval(names[0], lists)), len(interval(names[0], lists))


def columns(per_event: int) -> Work:
    """Columns in, columns out."""
    lists = [EventList(r) for r in reports(per_event)]
    want = structs(per_event)
    theirs, count = theirs_work(per_event)

    def ours() -> EventList:
        return Aggregator(WORKERS).step(lists)

    def check() -> None:
        assert [h for e in ours() for h in e.block_hashes] == [h for e in want for h in e.block_hashes]
        assert [t for e in ours() for t in e.token_ids] == [t for e in want for t in e.token_ids]
        assert count in (None, EVENTS)

    return Work(ours, theirs, WORKERS * EVENTS, check)


@compare(
    "8 workers, 1,000 common events of 16 hashes", per="event and worker", floor=20, aim=40, against=VLLM
)
def common_16() -> Work:
    """16 hashes of 32 bytes and 256 token ids an event."""
    return columns(16)


@compare("8 workers, 1,000 common events of 1 hash", per="event and worker", floor=5, aim=12, against=VLLM)
def common_1() -> Work:
    """1 hash and 16 token ids an event."""
    return columns(1)


def drop_in(per_event: int) -> Work:
    """Fed with Structs, by the same methods."""
    lists = reports(per_event)
    theirs, count = theirs_work(per_event)

    def ours() -> object:
        return interval(KVEventAggregator, lists)

    def check() -> None:
        assert ours() == lists[0]
        assert count in (None, EVENTS)

    return Work(ours, theirs, WORKERS * EVENTS, check)


@compare(
    "KVEventAggregator fed with Structs of 16 hashes", per="event and worker", floor=2, aim=4, against=VLLM
)
def structs_16() -> Work:
    """16 hashes and 256 token ids an event."""
    return drop_in(16)


@compare("KVEventAggregator fed with Structs of 1 hash", per="event and worker", floor=2, aim=4, against=VLLM)
def structs_1() -> Work:
    """1 hash and 16 token ids an event."""
    return drop_in(1)


class StructContainer:
    """The container that LMCache's connector has in vLLM: a list of Structs and a number of workers."""

    def __init__(self, aggregator: object) -> None:
        self.aggregator = aggregator


@compare(
    "worker to scheduler with pickle, events of 16 hashes",
    per="event and worker",
    floor=50,
    aim=100,
    against="a container of Structs, pickled, over vLLM's aggregator",
)
def across() -> Work:
    """Every worker pickles its container; the scheduler loads, aggregates, and has the events.

    Protocol 5 with large buffers out of band for both, as vLLM's message queue between workers and scheduler
    does it; Structs have none.
    """
    ours_lists = [EventList(r) for r in reports(16)]

    def border(container: object) -> Any:
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(container, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        return pickle.loads(data, buffers=buffers)

    def ours() -> EventList:
        votes = Aggregator(WORKERS)
        for worker, events in enumerate(ours_lists):
            container = border(WorkerKVEvents(events))
            for _, part in container.by_worker():
                votes.add(worker, part)
        return votes.drain()

    names = vllm()
    theirs: object = names
    if not isinstance(names, Absent):
        their_lists = reports(16, names[1])

        def theirs() -> object:
            combined = None
            for events in their_lists:
                aggregator = names[0](1)
                aggregator.add_events(events)
                loaded = border(StructContainer(aggregator))
                if combined is None:
                    combined = loaded.aggregator
                else:
                    combined.add_events(loaded.aggregator.get_all_events())
                    combined.increment_workers(1)
            return combined.get_common_events()

    def check() -> None:
        assert sum(len(e.block_hashes) for e in ours()) == EVENTS * 16
        assert isinstance(theirs, Absent) or len(theirs()) == EVENTS

    return Work(ours, theirs, WORKERS * EVENTS, check)


def per_call(call: object, n: int, samples: int = 15) -> float:
    """Median CPU nanoseconds of one of `n` units."""
    times = []
    for _ in range(samples):
        start = time.thread_time_ns()
        call()
        times.append((time.thread_time_ns() - start) / n)
    return sorted(times)[samples // 2]


@value("a step in which 8 workers say nothing", unit="us", floor=2, aim=0.5)
def silence() -> float:
    """One call with eight times nothing, with 4,000 blocks held."""
    aggregator = Aggregator(WORKERS)
    aggregator.step([EventList(structs(4))] * WORKERS)
    nothing: list[EventList | None] = [EventList()] * WORKERS
    assert not aggregator.step(nothing)
    assert len(aggregator) == 4 * EVENTS

    def call() -> None:
        for _ in range(10_000):
            aggregator.step(nothing)

    return per_call(call, 10_000) / 1000


def held(blocks: int) -> list[EventList]:
    """Stores of `blocks` blocks in events of 16, cut into lists of 1,000 events."""
    hashes = workloads.hashes(5, blocks)
    return [
        EventList(
            [
                BlockStored(hashes[i : i + 16], None, list(range(i, i + 256)), 16, None, "CPU", None)
                for i in range(at, min(at + 16_000, blocks), 16)
            ]
        )
        for at in range(0, blocks, 16_000)
    ]


def fresh(step: int) -> EventList:
    """25 events of 16 blocks that nobody has."""
    hashes = workloads.hashes(1_000 + step, 400)
    return EventList(
        [
            BlockStored(hashes[i : i + 16], None, list(range(i, i + 256)), 16, None, "CPU", None)
            for i in range(0, 400, 16)
        ]
    )


def filled(blocks: int) -> tuple[Aggregator, list]:
    """A tier in which all workers hold so many blocks, and its events."""
    aggregator = Aggregator(WORKERS, max_waiting=blocks)
    lists = held(blocks)
    for events in lists:
        aggregator.step([events] * WORKERS)
    assert len(aggregator) == blocks
    return aggregator, [event for events in lists for event in events]


def vote_cost(blocks: int, steps: int = 60) -> float:
    """CPU nanoseconds of a vote for a block: eight workers store blocks that are new to a full tier."""
    aggregator, _ = filled(blocks)
    times = []
    for step in range(steps):
        reports = [fresh(step) for _ in range(WORKERS)]
        start = time.thread_time_ns()
        out = aggregator.step(reports)
        times.append((time.thread_time_ns() - start) / (400 * WORKERS))
        assert sum(len(e.block_hashes) for e in out) == 400
    return sorted(times)[steps // 2]


def revote_cost(blocks: int) -> float:
    """CPU nanoseconds a block where one worker drops blocks that all hold, and stores them again."""
    aggregator, everything = filled(blocks)
    random.Random(1).shuffle(everything)
    times = []
    for at in range(0, min(len(everything), 1000), 25):
        stores = EventList(everything[at : at + 25])
        removals = EventList([BlockRemoved(e.block_hashes, e.medium) for e in everything[at : at + 25]])
        start = time.thread_time_ns()
        aggregator.add(3, removals)
        aggregator.drain()
        aggregator.add(3, stores)
        aggregator.drain()
        times.append((time.thread_time_ns() - start) / (400 * 2))
    assert len(aggregator) == blocks
    return sorted(times)[len(times) // 2]


@value("a vote for a new block with 400,000 blocks held, against 4,000", unit="x", floor=2.5, aim=1.5)
def large_state() -> float:
    """The state of a CPU tier of 100 GB beside a small one."""
    return vote_cost(400_000) / vote_cost(4_000)


@value("the same for blocks that are held, dropped and stored again in random order", unit="x")
def large_state_random() -> float:
    """Every block touched is far from the last one: what caches cannot help with."""
    return revote_cost(400_000) / revote_cost(4_000)


def memory(keep: bool) -> float:
    """Bytes a block beside its hash, with 400,000 blocks that eight workers hold."""
    aggregator = Aggregator(WORKERS, keep_content=keep)
    for events in held(400_000):
        for worker in range(WORKERS):
            aggregator.add(worker, events)
        aggregator.drain()
    assert len(aggregator) == 400_000
    return aggregator.nbytes / 400_000 - 32


@value("state of a block at 8 workers, beside its hash", unit="B", floor=96, aim=48)
def bytes_a_block() -> float:
    """400,000 blocks held by all."""
    return memory(False)


@value("the same with kept tokens", unit="B")
def bytes_a_block_with_content() -> float:
    """16 token ids a block, ready to be announced again."""
    return memory(True)


test_rows = as_tests(__name__)
