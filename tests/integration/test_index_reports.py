"""Reports of other systems' readers, with the smallest input of each, from publisher to answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import zmq
from plain_publisher import PlainPublisher

from kvevents import (
    BlockPool,
    BlockStored,
    EventList,
    KVCacheGroup,
    KVEventBatch,
    KVEventCollector,
    KVEventsConfig,
    PrefixIndex,
    ResidentSet,
    Source,
    Subscriber,
    TokenBlocks,
    encode,
)
from kvevents.publish import EventPublisherFactory
from kvevents.simulate import WORKLOADS, EngineConfig, MockEngine
from kvevents.subscribe import Snapshot, Timing

pytestmark = pytest.mark.timeout(60)
QUICK = Timing(silence_s=0.3, look_s=0.3, hello_timeout_s=0.5)


@pytest.fixture
def make_publisher(free_ports: Callable[[int], list[int]]) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(**config: Any) -> Any:
        live, replay = (f"tcp://127.0.0.1:{p}" for p in free_ports(2))
        made.append(
            EventPublisherFactory.create(
                KVEventsConfig(enable_kv_cache_events=True, endpoint=live, replay_endpoint=replay, **config),
                0,
            )
        )
        return made[-1]

    yield make
    for publisher in made:
        publisher.shutdown()


def source_of(publisher: Any, name: str = "w") -> Source:
    config = publisher.get_publisher_config()
    return Source(config.endpoint, config.replay_endpoint, name=name)


def read_until(stream: Subscriber, index: PrefixIndex, done: Callable[[], bool]) -> list[Any]:
    items = []
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end, (stream.stats(), index.stats())
        if (item := stream.poll(0.05)) is not None:
            items.append(item)
            index.apply_item(item)
    return items


def last_seq(index: PrefixIndex) -> int:
    return max((s["last_seq"] for s in index.stats() if s["last_seq"] is not None), default=-1)


def test_a_reader_that_comes_after_twice_the_log_knows_what_the_pool_holds(
    make_publisher: Callable[..., Any],
) -> None:
    """R09: a snapshot, exact at its number; what follows applies to it."""
    publisher = make_publisher(buffer_steps=10, exact_for="engine")
    engine = MockEngine(EngineConfig(num_blocks=200), publisher=publisher)
    requests = list(islice(WORKLOADS["shared-prefix"](seed=1), 30))
    for request in requests[:20]:
        engine.serve(request)
    while publisher.stats().sent < engine.stats.batches:
        time.sleep(0.001)
    assert engine.stats.batches > 20
    index = PrefixIndex()
    with Subscriber(source_of(publisher), timing=QUICK) as stream:
        items = read_until(stream, index, lambda: last_seq(index) == engine.stats.batches - 1)
        assert any(isinstance(i, Snapshot) for i in items)
        assert index.digest("w") == engine.pool.digest()
        for request in requests[20:]:
            engine.serve(request)
        read_until(stream, index, lambda: last_seq(index) == engine.stats.batches - 1)
    assert index.digest("w") == engine.pool.digest()
    for request in requests:
        blocks = TokenBlocks(16, cache_salt=request.cache_salt)
        blocks.extend(request.prompt)
        found = index.find(request.prompt, cache_salt=request.cache_salt)
        got = found[0] if len(found) else None
        assert (got.blocks if got else 0) == len(engine.pool.find_longest_cache_hit(blocks))
        assert got is None or got.complete


def filled(pool: BlockPool, tokens: range) -> TokenBlocks:
    request = TokenBlocks(4)
    request.extend(tokens)
    blocks = pool.get_new_blocks(len(tokens) // 4)
    pool.cache_full_blocks(request, blocks, 0, len(blocks))
    pool.free_blocks(list(blocks)[::-1])
    return request


def test_a_reset_of_an_idle_engine_reaches_the_reader_at_once(make_publisher: Callable[..., Any]) -> None:
    """R19: no request comes, and so no step; `flush()` is what an administrative call ends with."""
    publisher, pool = make_publisher(), BlockPool(8, 4)
    collector = KVEventCollector(pool, publisher=publisher, data_parallel_rank=0)
    filled(pool, range(8))
    collector.step()
    index = PrefixIndex()
    with Subscriber(source_of(publisher), timing=QUICK) as stream:
        read_until(stream, index, lambda: len(index.find(range(8))) > 0)
        assert pool.reset_prefix_cache()
        collector.flush()
        read_until(stream, index, lambda: len(index.find(range(8))) == 0)
    assert index.digest("w") == ResidentSet([]).digest()
    collector.close()


class Tier:
    """The scheduler half of a connector whose tier a reset of the pool leaves alone."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def update_connector_output(self, output: Any) -> None:
        self.events += output

    def take_events(self) -> EventList:
        events, self.events = EventList(self.events), []
        return events


@pytest.mark.parametrize("clear", ["reannounce", "expand"])
def test_a_reset_of_the_device_leaves_the_host_tier_in_the_index(clear: Any) -> None:
    """R54: the wire's clear has no tier; what connectors still hold stays known all the same."""
    pool, tier = BlockPool(8, 4), Tier()
    collector = KVEventCollector(pool, [tier], clear=clear, flush_interval_s=0)
    request = filled(pool, range(8))
    tier.events = [
        BlockStored(list(request.block_hashes), None, list(range(8)), 4, None, "CPU", None, group_idx=0)
    ]
    index = PrefixIndex()
    batch = collector.step()
    assert batch is not None
    index.apply_events("w", 0, batch.events, seq=0)
    assert index.find(range(8))[0].alone == {"GPU": 8, "CPU": 8}
    assert pool.reset_prefix_cache()
    batch = collector.step()
    assert batch is not None
    index.apply_events("w", 0, batch.events, seq=1)
    assert index.find(range(8))[0].alone == {"GPU": 0, "CPU": 8}
    assert index.find(range(8))[0].complete


def test_a_lookup_changes_nothing_for_a_reader() -> None:
    """R55: a hundred of them make no event, so that an index stays as it is."""
    pool, index = BlockPool(8, 4), PrefixIndex()
    request = filled(pool, range(8))
    index.apply_events("w", 0, pool.take_events())
    for _ in range(100):
        assert len(pool.find_longest_cache_hit(request)) == 2
    assert len(pool.take_events()) == 0
    assert index.find(range(8))[0].tokens == 8
    assert index.digest("w") == pool.digest()


def test_a_prompt_shorter_than_a_large_block_is_found_by_its_hash_steps() -> None:
    """R61: blocks of 16, a hash every 4 tokens, a prompt of 12."""
    pool = BlockPool(8, 4, groups=[KVCacheGroup(16)])
    request = TokenBlocks(4)
    request.extend(range(12))
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, [block], 0, 0)
    assert pool.cache_partial_block(request, block, 12) is not None
    events = pool.take_events()
    assert [(e.token_ids, e.block_size) for e in events] == [(list(range(12)), 12)]
    index = PrefixIndex()
    index.apply_events("w", 0, events)
    assert index.find(range(16))[0].tokens == 12
    pool.free_blocks([block])
    pool.evict_blocks([block])
    index.apply_events("w", 0, pool.take_events())
    assert len(index.find(range(16))) == 0
    assert index.digest("w") == pool.digest() == ResidentSet([]).digest()


def test_blocks_that_context_parallelism_doubled_are_found_as_they_are() -> None:
    """R63: 32 tokens under one hash beside a source with 16; no size is advertised that could differ."""
    index = PrefixIndex()
    tokens = list(range(32))
    index.apply_events("doubled", 0, [BlockStored([1], None, tokens, 32, None, "GPU", None)])
    index.apply_events("plain", 0, [BlockStored([1, 2], None, tokens, 16, None, "GPU", None)])
    assert {m.source: (m.tokens, m.blocks) for m in index.find(tokens)} == {
        "doubled": (32, 1),
        "plain": (32, 2),
    }
    assert index.stats()[0]["irregular"] == 0
    assert {m.source: m.tokens for m in index.find(tokens[:20])} == {"plain": 16}


@pytest.mark.parametrize(
    "options", [{"enable_kv_cache_events": False}, {"enable_caching": False}, {"groups": []}, {}]
)
def test_every_kind_of_pool_answers_a_step_with_a_list(options: dict[str, Any]) -> None:
    """R72: events off, caching off, no group that could be cached: the scheduler's call is the same."""
    pool = BlockPool(4, 4, **options)
    assert list(pool.take_events()) == []
    assert KVEventCollector(pool, flush_interval_s=0).step() is None


def test_a_subclass_that_only_changes_caching_has_events_and_a_pool_without_them_is_refused() -> None:
    """R73: events come from the shared layer; what has none is told at start-up, not by the hit rate."""

    class Chatty(BlockPool):
        def cache_full_blocks(self, *args: Any, **options: Any) -> None:
            super().cache_full_blocks(*args, **options)

    pool, index = Chatty(8, 4), PrefixIndex()
    filled(pool, range(8))
    batch = KVEventCollector(pool, flush_interval_s=0).step()
    assert batch is not None
    index.apply_events("w", 0, batch.events)
    assert index.find(range(8))[0].tokens == 8

    class Mute:
        pass

    from kvevents.errors import ConfigError

    with pytest.raises(ConfigError, match=r"Mute.*take_events"):
        KVEventCollector(Mute())


def test_a_tier_that_never_announces_its_evictions_does_not_over_promise() -> None:
    """R75: a thousand stored, nine hundred gone, a thousand announced."""
    now = 0.0
    index = PrefixIndex(clock=lambda: now, expires_s=60)
    index.add_source("w", store_only=["STORAGE"])
    for i in range(1000):
        if i == 900:
            now += 50
        index.apply_events("w", 0, [BlockStored([i + 1], None, [i] * 4, 4, None, "STORAGE", None)])
    now += 20
    answers = [len(index.find([i] * 4)) for i in range(1000)]
    assert answers == [0] * 900 + [1] * 100
    assert index.expire() == 900
    assert index.stats()[0]["blocks"] == 100


def test_an_adapter_is_known_by_its_name_whatever_number_an_engine_gives_it() -> None:
    """R78: the base model, and adapter 'a' as number 1 here and 2 there."""
    index = PrefixIndex()
    tokens = [1, 2, 3, 4]
    for source, lora_id, name in (("base", None, None), ("x", 1, "a"), ("y", 2, "a"), ("z", 1, None)):
        index.apply_events(source, 0, [BlockStored([1], None, tokens, 4, lora_id, "GPU", name)])
    assert index.find(tokens).to_dict() == {("base", 0): 4}
    assert index.find(tokens, lora_name="a").to_dict() == {("x", 0): 4, ("y", 0): 4}


def test_versions_of_the_weights_are_told_apart_by_a_clear_or_by_the_salt() -> None:
    """R82: the same tokens before and after an update."""
    index, pool = PrefixIndex(), BlockPool(8, 4)
    old, new = TokenBlocks(4, cache_salt="v1"), TokenBlocks(4, cache_salt="v2")
    old.extend(range(4))
    new.extend(range(4))
    assert list(old.block_hashes) != list(new.block_hashes)
    pool.cache_full_blocks(old, pool.get_new_blocks(1), 0, 1)
    index.apply_events("w", 0, pool.take_events())
    assert len(index.find(range(4), cache_salt="v1")) == 1
    assert len(index.find(range(4), cache_salt="v2")) == 0
    # Without a version in the salt the engine's clear is what says it.
    pool.free_blocks([1])
    assert pool.reset_prefix_cache()
    index.apply_events("w", 0, pool.take_events())
    assert len(index.find(range(4), cache_salt="v1")) == 0


class Relay:
    """Three publishers behind one address: a topic for each, numbers and payloads as they were."""

    def __init__(self, upstream: dict[str, str]) -> None:
        self.context: Any = zmq.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.pub.linger = 0
        self.pub.bind("tcp://127.0.0.1:*")
        self.endpoint = self.pub.last_endpoint.decode()
        self.subs = {}
        for name, endpoint in upstream.items():
            sub = self.context.socket(zmq.SUB)
            sub.linger = 0
            sub.subscribe(b"")
            sub.connect(endpoint)
            self.subs[sub] = name.encode()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for sub in self.subs:
            poller.register(sub, zmq.POLLIN)
        while not self.stop.is_set():
            for sub, _ in poller.poll(20):
                _, seq, payload = sub.recv_multipart()
                self.pub.send_multipart([self.subs[sub], seq, payload])
        for s in (*self.subs, self.pub):
            s.close()

    def close(self) -> None:
        self.stop.set()
        self.thread.join(10)
        self.context.term()


def test_two_readers_of_three_publishers_behind_one_relay(publisher: type[PlainPublisher]) -> None:
    """R131: any number of readers; a relay keeps who it was (the topic) and which number it had."""
    engines = {name: publisher(replay=None) for name in ("a", "b", "c")}
    relay = Relay({name: p.live for name, p in engines.items()})
    try:
        for p in engines.values():
            p.wait_for_reader()
        sources = [Source(relay.endpoint, topic=name, name=name) for name in engines]
        indexes = [PrefixIndex(), PrefixIndex()]
        with Subscriber(sources) as one, Subscriber(sources) as two:
            readers = list(zip((one, two), indexes, strict=True))
            for _ in range(3):  # connections and subscriptions
                for stream, _index in readers:
                    stream.poll(0.2)
            truth = {}
            for n, (name, p) in enumerate(engines.items()):
                truth[name] = ResidentSet()
                for seq in range(5):
                    event = BlockStored([2**40 + n * 100 + seq], None, [n, seq, 7, 9], 4, None, "GPU", None)
                    p.publish(encode(KVEventBatch(1.0 + seq, [event], n)))
                    truth[name].apply([event])
            for stream, index in readers:
                read_until(
                    stream,
                    index,
                    lambda index=index: sorted(s["last_seq"] for s in index.stats()) == [4, 4, 4],  # type: ignore[misc]
                )
                for n, name in enumerate(engines):
                    assert index.digest(name, n) == truth[name].digest()
                    assert index.find([n, 3, 7, 9]).to_dict() == {(name, n): 4}
    finally:
        relay.close()
