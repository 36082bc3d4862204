"""A router restarts from its dump, over real sockets: it goes on where it was, or knows that it cannot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from plain_publisher import PlainPublisher

from kvevents import BlockRemoved, BlockStored, KVEventBatch, KVEventsConfig, PrefixIndex, ResidentSet
from kvevents.publish import EventPublisherFactory
from kvevents.subscribe import Batch, Gap, Reset, Resumed, Snapshot, Source, StoreOnly, Subscriber, Timing

pytestmark = pytest.mark.timeout(60)
QUICK = Timing(silence_s=0.3, look_s=0.3, hello_timeout_s=0.5)


def tokens(n: int) -> list[int]:
    return [n % 1000, n // 1000, 7, 9]


class Engine:
    """A publisher, and what it holds: one block a batch, of which the oldest goes at ten."""

    def __init__(self, **config: Any) -> None:
        self.config = KVEventsConfig(enable_kv_cache_events=True, **config)
        self.life = 0
        self.start()

    def start(self) -> None:
        self.publisher: Any = EventPublisherFactory.create(self.config, 0)
        self.truth = ResidentSet()
        self.next = 0

    def restart(self) -> None:
        self.publisher.shutdown()
        self.life += 1
        self.start()

    def publish(self, batches: int, medium: str = "GPU") -> None:
        for _ in range(batches):
            n = 2**40 + self.life * 10_000 + self.next
            events: list[Any] = [BlockStored([n], None, tokens(n), 4, None, medium, None)]
            if self.next >= 10:
                events.append(BlockRemoved([n - 10], medium))
            self.publisher.publish(KVEventBatch(time.time(), events, 0))
            self.truth.apply(events)
            self.next += 1
        end = time.monotonic() + 10
        while self.publisher.stats().sent < self.next:
            assert time.monotonic() < end
            time.sleep(0.001)


@pytest.fixture
def make_engine(free_ports: Callable[[int], list[int]]) -> Iterator[Callable[..., Engine]]:
    made = []

    def make(*, replay: bool = True, **config: Any) -> Engine:
        live, at = (f"tcp://127.0.0.1:{p}" for p in free_ports(2))
        made.append(Engine(endpoint=live, replay_endpoint=at if replay else None, **config))
        return made[-1]

    yield make
    for engine in made:
        engine.publisher.shutdown()


def read(index: PrefixIndex, source: Source, last_seq: int, *, resumes: bool = False) -> list[Any]:
    """A router's life: from the index's own points until a number is accounted for."""
    items = []
    end = time.monotonic() + 20
    points = index.resume_points() if resumes else None
    with Subscriber(source, resume=points, timing=QUICK, seed=1) as stream:
        while True:
            item = stream.poll(0.05)
            if item is not None:
                items.append(item)
                index.apply_item(item)
                continue
            state = stream.stats()[0]
            if state.last_seq == last_seq and state.state == "live" and items:
                return items
            assert time.monotonic() < end, (state, items)


def source_of(engine: Engine) -> Source:
    return Source(engine.config.endpoint, engine.config.replay_endpoint, name="w")


def dumped(engine: Engine, batches: int = 20) -> bytes:
    """The dump of a router that has read everything so far."""
    engine.publish(batches)
    index = PrefixIndex()
    read(index, source_of(engine), engine.next - 1)
    assert index.digest("w") == engine.truth.digest()
    return index.dump()


def complete(index: PrefixIndex) -> bool:
    return bool(index.stats()[0]["complete"])


def test_a_restarted_router_reads_only_what_came_since(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    dump = dumped(engine)
    engine.publish(15)
    index = PrefixIndex.load(dump)
    assert not complete(index)
    items = read(index, source_of(engine), 34, resumes=True)
    assert items[0] == Resumed("w", 19)
    assert [i.seq for i in items[1:]] == list(range(20, 35))
    assert complete(index)
    assert index.digest("w") == engine.truth.digest()


def test_an_idle_engine_confirms_the_dump(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    index = PrefixIndex.load(dumped(engine))
    assert read(index, source_of(engine), 19, resumes=True) == [Resumed("w", 19)]
    assert complete(index)
    assert index.digest("w") == engine.truth.digest()


@pytest.mark.parametrize("since", [5, 19, 20, 40])
def test_an_engine_that_restarted_meanwhile_is_begun_anew(
    make_engine: Callable[..., Engine], since: int
) -> None:
    """Also where it has counted to the very number of the dump, or past it."""
    engine = make_engine()
    index = PrefixIndex.load(dumped(engine))
    engine.restart()
    engine.publish(since)
    items = read(index, source_of(engine), since - 1, resumes=True)
    assert items[0] == Reset("w", "restart")
    assert not any(isinstance(i, Resumed) for i in items)
    assert complete(index)
    assert index.digest("w") == engine.truth.digest()
    assert len(index.find(tokens(2**40 + 15))) == 0


def test_a_log_that_is_too_short_is_healed_by_a_snapshot(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(buffer_steps=5)
    index = PrefixIndex.load(dumped(engine))
    engine.publish(30)
    items = read(index, source_of(engine), 49, resumes=True)
    assert items[0] == Resumed("w", 19)
    assert any(isinstance(i, Snapshot) for i in items)
    assert complete(index)
    assert index.digest("w") == engine.truth.digest()


def test_a_log_that_is_too_short_without_snapshots_is_said(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(buffer_steps=5, mirror=False)
    index = PrefixIndex.load(dumped(engine, 4))
    engine.publish(30)
    items = read(index, source_of(engine), 33, resumes=True)
    assert items[:2] == [Resumed("w", 3), Gap("w", 4, 28, "too old")]
    assert not complete(index)
    assert index.digest("w") is None


def test_without_a_replay_address_nobody_can_tell(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(replay=False)
    index = PrefixIndex()
    with Subscriber(source_of(engine), timing=QUICK) as stream:
        stream.poll(0.5)
        engine.publish(3)
        while not index.stats() or index.stats()[0]["last_seq"] != 2:
            index.apply_item(stream.poll(10))  # type: ignore[arg-type]
    assert complete(index)
    loaded = PrefixIndex.load(index.dump())
    with Subscriber(source_of(engine), resume=loaded.resume_points(), timing=QUICK) as stream:
        assert stream.poll(0.5) is None
        engine.publish(1)
        item = stream.poll(10)
        assert isinstance(item, Batch)
        loaded.apply_item(item)
    assert len(loaded.find(tokens(2**40)))
    assert not complete(loaded)


# ------------------------------------------------------------------ vLLM's wire


def dumped_plainly(p: PlainPublisher) -> bytes:
    for _ in range(20):
        p.publish()
    index = PrefixIndex()
    read(index, Source(p.live, p.replay, name="w"), 19)
    assert complete(index)
    return index.dump()


def truth_of(p: PlainPublisher) -> bytes:
    index = PrefixIndex()
    for seq, payload in sorted(p.log.items()):
        index.apply("w", 0, seq, payload)
    digest = index.digest("w")
    assert digest is not None
    return digest


@pytest.mark.parametrize("layout", [3, 4])
def test_a_plain_log_confirms_a_dump_by_the_batch_behind_it(
    publisher: type[PlainPublisher], layout: int
) -> None:
    p = publisher()
    p.layout = layout
    index = PrefixIndex.load(dumped_plainly(p))
    for _ in range(5):
        p.publish()
    items = read(index, Source(p.live, p.replay, name="w"), 24, resumes=True)
    assert items[0] == Resumed("w", 19)
    assert [i.seq for i in items[1:]] == list(range(20, 25))
    assert complete(index)
    assert index.digest("w") == truth_of(p)
    # Everything from the batch behind the dump on, and no more.
    assert p.requests[-1] >= 19


@pytest.mark.parametrize("since", [5, 20, 30])
def test_a_plain_publisher_that_restarted_is_begun_anew(publisher: type[PlainPublisher], since: int) -> None:
    p = publisher()
    index = PrefixIndex.load(dumped_plainly(p))
    p = p.restart()
    for _ in range(since):
        p.publish()
    items = read(index, Source(p.live, p.replay, name="w"), since - 1, resumes=True)
    assert items[0] == Reset("w", "restart")
    assert complete(index)
    assert index.digest("w") == truth_of(p)


def test_a_plain_log_that_lost_the_batch_behind_the_dump_cannot_tell(publisher: type[PlainPublisher]) -> None:
    p = publisher()
    index = PrefixIndex.load(dumped_plainly(p))
    for _ in range(5):
        p.publish()
    for seq in range(21):
        del p.log[seq]
    items = read(index, Source(p.live, p.replay, name="w"), 24, resumes=True)
    assert items[:2] == [Reset("w", "unsure"), Gap("w", 0, 20, "too old")]
    assert not complete(index)


# ------------------------------------------------------------------ store-only tiers


def test_a_store_only_tier_is_learned_from_the_publisher(make_engine: Callable[..., Engine]) -> None:
    now = 0.0
    engine = make_engine(store_only=("STORAGE",))
    engine.publish(3, "STORAGE")
    index = PrefixIndex(clock=lambda: now, expires_s=60)
    items = read(index, source_of(engine), 2)
    assert items[0] == StoreOnly("w", ("STORAGE",), 0)
    assert index.find(tokens(2**40))[0].tokens == 4
    now += 61
    assert len(index.find(tokens(2**40))) == 0
    # A medium that is declared later is heard of at the next look.
    engine.publisher.declare_store_only(["DISK"])
    with Subscriber(source_of(engine), timing=QUICK) as stream:
        end = time.monotonic() + 10
        while StoreOnly("w", ("STORAGE", "DISK"), 0) != stream.poll(0.1):
            assert time.monotonic() < end
