"""Our publisher, a bad link and our subscriber: what is rebuilt is what was published."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from plain_publisher import batch_of

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventList,
    KVEventBatch,
    KVEventsConfig,
    ResidentSet,
    Source,
    Subscriber,
    ZmqEventPublisher,
)
from kvevents.subscribe import Batch, Gap, Reset, Timing
from kvevents.testing.link import FaultyLink, LinkConfig

if TYPE_CHECKING:
    from collections.abc import Callable

TIMING = Timing(replay_timeout_s=0.5, backoff_s=0.02, jitter_s=0.01, silence_s=0.2, cooldown_s=0.1)


def random_events(rng: random.Random, known: list[int]) -> EventList:
    events: list[Any] = []
    for _ in range(rng.randrange(1, 4)):
        if known and rng.random() < 0.4:
            events.append(BlockRemoved([known.pop(rng.randrange(len(known)))], "GPU"))
        elif rng.random() < 0.005:
            events.append(AllBlocksCleared())
            known.clear()
        else:
            h = rng.randrange(2**40, 2**63)
            known.append(h)
            events.append(BlockStored([h], None, [1, 2, 3, 4], 4, None, "GPU", None))
    return EventList(events)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_bad_link_changes_nothing_in_what_is_rebuilt(seed: int) -> None:
    """The digest agrees at every number, and the replay makes up for every fault."""
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0"
    )
    publisher = ZmqEventPublisher(0, **fields(config))
    effective = publisher.get_publisher_config()
    link_config = LinkConfig(
        upstream=effective.endpoint,
        upstream_replay=effective.replay_endpoint,
        seed=seed,
        drop=0.05,
        duplicate=0.05,
        delay=0.05,
        reorder=0.05,
        cut_every=300,
        cut_s=0.02,
    )
    rng, known = random.Random(seed), []
    truth, digests = ResidentSet(), []
    mine = ResidentSet()
    total = 900
    try:
        with FaultyLink(link_config) as link:
            source = Source(link.live_endpoint, link.replay_endpoint, name="a")
            with Subscriber([source], timing=TIMING, seed=seed) as sub:
                deadline = time.monotonic() + 60
                while mine._next.get("a", 0) < total:
                    assert time.monotonic() < deadline, (sub.stats(), link.counters)
                    # The first goes out until the link hears, so that the faults have something to work on.
                    slow = link.counters.received == 0
                    if len(digests) < (total // 3 if slow else total):
                        events = random_events(rng, known)
                        truth.apply(events)
                        digests.append(truth.digest())
                        publisher.publish(KVEventBatch(time.time(), events))
                    item = sub.poll(0.02 if slow else 0.0 if len(digests) < total else 0.5)
                    if item is None:
                        continue
                    assert isinstance(item, Batch), item
                    mine.apply(item)
                    assert mine.digest() == digests[item.seq]
                stats = sub.stats()[0]
            c = link.counters
    finally:
        publisher.shutdown()
    assert mine.keys() == truth.keys()
    assert mine.why_invalid() is None
    assert (stats.complete, stats.gaps, stats.resets) == (True, 0, 0)
    assert min(c.dropped, c.duplicated, c.delayed, c.reordered) > 5
    assert stats.replayed > 0


def fields(config: KVEventsConfig) -> dict[str, Any]:
    """What the factory hands to the class."""
    names = ("endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic")
    return {n: getattr(config, n) for n in names}


def test_our_publisher_restarted_on_its_port_is_recovered(free_port: int) -> None:
    """Publisher and reader are both pyzmq here; the other three pairings are other libraries' business."""
    options = {"endpoint": f"tcp://127.0.0.1:{free_port}", "replay_endpoint": None}
    held = ResidentSet()
    with Subscriber([Source(options["endpoint"] or "", name="a")], timing=TIMING) as sub:
        for life in range(3):
            publisher = ZmqEventPublisher(0, **options)
            try:
                got: list[Any] = []
                deadline = time.monotonic() + 30
                n = 0
                while not any(isinstance(i, Batch) for i in got):
                    assert time.monotonic() < deadline
                    events = EventList([BlockStored([2**40 + life], None, [1], 1, None, "GPU", None)])
                    publisher.publish(KVEventBatch(time.time(), events))
                    n += 1
                    item = sub.poll(0.05)
                    if item is not None:
                        got.append(item)
                        held.apply(item)
                while (item := sub.poll(0.1)) is not None:
                    got.append(item)
                    held.apply(item)
            finally:
                publisher.shutdown()
            if life:
                assert isinstance(got[0], (Reset, Gap, Batch))
            assert (2**40 + life, "GPU") in held
    assert held.keys() == {(2**40 + 2, "GPU", None, None, None)}


def test_a_reader_that_is_slow_repairs_what_its_queue_dropped(publisher: Callable[..., Any]) -> None:
    pub = publisher()
    with Subscriber([Source(pub.live, pub.replay, name="a")], timing=TIMING, hwm=10) as sub:
        while not pub.requests or sub.stats()[0].connects == 0:
            assert sub.poll(0.01) is None
        for i in range(2000):
            pub.publish(batch_of(i))
        got: list[Any] = []
        while len(got) < 2000:
            item = sub.poll(10)
            assert isinstance(item, Batch), item
            got.append(item.seq)
    assert got == list(range(2000))
