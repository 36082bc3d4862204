"""The collector: one batch a step, held blocks once, tiers repaired after a clear, an idle engine speaks."""

from __future__ import annotations

import threading

import pytest

from kvevents import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStored,
    EventList,
    KVEventCollector,
    ResidentSet,
    TokenBlocks,
    errors,
)
from kvevents.sinks import EventSink, EventSinkFactory


def stored(*numbers, medium="CPU", tokens=True):
    return BlockStored(
        [bytes([n]) * 32 for n in numbers],
        None,
        [t for n in numbers for t in (n, n)] if tokens else [],
        2 if tokens else 0,
        None,
        medium,
        None,
    )


def removed(*numbers, medium="CPU"):
    return BlockRemoved([bytes([n]) * 32 for n in numbers], medium)


class Tier:
    """A scheduler half that gives what the test puts in."""

    def __init__(self):
        self.events = []
        self.fails = False

    def update_connector_output(self, output):
        self.events.extend(output)

    def take_events(self):
        if self.fails:
            raise OSError("tier gone")
        events, self.events = EventList(self.events), []
        return events


class Publisher:
    def __init__(self):
        self.batches = []
        self.came = threading.Event()

    def publish(self, batch):
        self.batches.append(batch)
        self.came.set()


def filled_pool():
    pool = BlockPool(8, 2)
    request = TokenBlocks(2)
    request.extend([1, 2, 3, 4])
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 2)
    pool.free_blocks(list(blocks)[::-1])
    return pool


def collector(pool, *tiers, **kwargs):
    return KVEventCollector(pool, tiers, flush_interval_s=0, **kwargs)


def test_one_batch_a_step_with_pool_and_connectors_and_nothing_where_nothing_happened():
    pool, tier, publisher = filled_pool(), Tier(), Publisher()
    c = collector(pool, tier, publisher=publisher, data_parallel_rank=3)
    tier.events = [stored(9)]
    batch = c.step()
    assert [e.medium for e in batch.events] == ["GPU", "CPU"]
    assert publisher.batches == [batch]
    assert batch.data_parallel_rank == 3
    assert c.step() is None


def test_a_key_of_two_connectors_is_announced_once_and_removed_with_the_last():
    a, b = Tier(), Tier()
    c = collector(None, a, b)
    a.events, b.events = [stored(1)], [stored(1)]
    assert list(c.step().events) == [stored(1)]
    a.events = [removed(1)]
    assert c.step() is None
    b.events = [removed(1)]
    assert list(c.step().events) == [removed(1)]


def test_after_the_pools_clear_everything_that_connectors_hold_is_told_again_in_the_same_batch():
    pool, tier, reader = filled_pool(), Tier(), ResidentSet()
    c = collector(pool, tier)
    tier.events = [stored(1, 2)]
    reader.apply(c.step().events)
    pool.reset_prefix_cache()
    batch = c.step()
    assert isinstance(batch.events[0], AllBlocksCleared)
    assert list(batch.events[1:]) == [stored(1, 2)]
    reader.apply(batch.events)
    assert {k.medium for k in reader.keys()} == {"CPU"}  # noqa: SIM118 - no mapping
    assert len(reader) == 2


def test_removals_can_stand_in_place_of_the_clear():
    pool, tier, reader = filled_pool(), Tier(), ResidentSet()
    c = collector(pool, tier, clear="expand")
    tier.events = [stored(1)]
    reader.apply(c.step().events)
    pool.reset_prefix_cache()
    events = c.step().events
    assert not any(isinstance(e, AllBlocksCleared) for e in events)
    reader.apply(events)
    assert [k.medium for k in reader.keys()] == ["CPU"]  # noqa: SIM118 - no mapping
    with pytest.raises(errors.ConfigError, match="clear"):
        collector(pool, clear="never")


def test_a_failing_connector_is_counted_and_costs_the_others_nothing():
    bad, good = Tier(), Tier()
    bad.fails = True
    good.events = [stored(2)]
    c = collector(None, bad, good)
    assert list(c.step().events) == [stored(2)]
    assert c.stats()["connector_failures"] == 1
    bad.fails, bad.events = False, [stored(3)]
    assert list(c.step().events) == [stored(3)]


def test_an_idle_engine_still_speaks():
    tier, publisher = Tier(), Publisher()
    c = KVEventCollector(None, [tier], publisher=publisher, flush_interval_s=0.01)
    try:
        c.update([stored(4)])
        # No step follows: the timer publishes.
        assert publisher.came.wait(10)
        assert list(publisher.batches[0].events) == [stored(4)]
        assert c.stats()["flushes"] >= 1
    finally:
        c.close()


def test_close_publishes_what_waits():
    tier, publisher = Tier(), Publisher()
    c = collector(None, tier, publisher=publisher)
    c.update([stored(5)])
    c.close()
    assert list(publisher.batches[0].events) == [stored(5)]


class Keeps(EventSink):
    def __init__(self, config, engine_index):
        self.config, self.engine_index, self.got = config, engine_index, []
        self.closed = False

    def record(self, batch, counters):
        self.got.append((batch, dict(counters)))

    def shutdown(self):
        self.closed = True


class Raises(EventSink):
    def __init__(self, config, engine_index):
        pass

    def record(self, batch, counters):
        raise RuntimeError("no")


def test_sinks_get_batches_with_metadata_and_counters_and_one_that_raises_costs_nobody():
    pool = BlockPool(8, 2)
    bad = EventSinkFactory.create(f"{__name__}:Raises", None, 0)
    good = EventSinkFactory.create(f"{__name__}:Keeps", {"x": 1}, 2)
    tier = Tier()
    c = collector(pool, tier, sinks=[bad, good])
    event = stored(6)
    event.metadata = {"why": "test"}
    tier.events = [event]
    c.step()
    tier.events = [stored(7)]
    c.step()
    c.close()
    assert (good.config, good.engine_index, good.closed) == ({"x": 1}, 2, True)
    assert [b.events[0].block_hashes[0][0] for b, _ in good.got] == [6, 7]
    assert good.got[0][0].events[0].metadata == {"why": "test"}
    assert [n["batches"] for _, n in good.got] == [1, 2]
    assert c.stats()["sink_failures"] == 2


def test_sinks_by_name_list_the_known_ones(monkeypatch):
    monkeypatch.setattr(EventSinkFactory, "_registry", {})
    EventSinkFactory.register_sink("mine", Keeps)
    assert isinstance(EventSinkFactory.create("mine", None, 0), Keeps)
    with pytest.raises(errors.ConfigError, match="registered are: mine"):
        EventSinkFactory.create("other", None, 0)
    with pytest.raises(errors.ConfigError, match="already registered"):
        EventSinkFactory.register_sink("mine", Keeps)
    with pytest.raises(errors.ConfigError, match="no_such_module"):
        EventSinkFactory.create("no_such_module:x", None, 0)


def test_two_children_of_one_wrapper_that_hold_a_block_announce_it_once_and_remove_it_with_the_last():
    tier = Tier()
    c = collector(None, tier)

    def say(child, *events):
        tier.events = EventList(events).with_source(str(child))
        return c.step()

    assert list(say(0, stored(1)).events) == [stored(1)]
    assert say(1, stored(1)) is None
    assert say(0, removed(1)) is None
    assert list(say(1, removed(1)).events) == [removed(1)]
