"""Workers' events in `KVOutputAggregator`, with vLLM's containers, ours, and those of several children."""

from __future__ import annotations

import importlib
import pickle
from collections import Counter
from types import SimpleNamespace

import pytest

from kvevents import events as ours
from kvevents.connectors import KVEventsMixin, WorkerKVEvents


def make_container(engine, name="Foreign"):
    """A container as connectors of vLLM have: counts whole events, takes only a real list."""

    class Foreign(engine.events.KVConnectorKVEvents):
        def __init__(self, events=()):
            self.workers = 1
            self.counts = Counter(events)

        def add_events(self, events):
            if type(events) is not list:
                raise TypeError("a list")
            self.counts.update(events)

        def get_all_events(self):
            return list(self.counts.elements())

        def increment_workers(self, count=1):
            self.workers += count

        def get_number_of_workers(self):
            return self.workers

        def clear_events(self):
            self.counts.clear()
            self.workers = 1

        def aggregate(self):
            self.counts = Counter(e for e, n in self.counts.items() if n == self.workers)
            return self

    Foreign.__name__ = name
    return Foreign


def stored(engine, block, parent=None, tokens=(1, 2), **fields):
    return engine.events.BlockStored(
        block_hashes=[block], parent_block_hash=parent, token_ids=list(tokens), block_size=2, lora_id=None,
        medium="CPU", lora_name=None, **fields,
    )  # fmt: skip


def removed(engine, block):
    return engine.events.BlockRemoved(block_hashes=[block], medium="CPU")


class Workers:
    def __init__(self, engine, connector=None, count=2):
        self.engine, self.count = engine, count
        connector = connector or SimpleNamespace(get_finished_count=lambda: None)
        self.aggregator = engine.utils.KVOutputAggregator.from_connector(connector, count)

    def step(self, *containers):
        outputs = []
        for container in containers:
            part = self.engine.outputs.KVConnectorOutput()
            part.kv_cache_events = container
            outputs.append(SimpleNamespace(kv_connector_output=part))
        result = self.aggregator.aggregate(outputs, 0)
        return None if result is None else result.kv_connector_output.kv_cache_events


def agreed(container):
    """What a connector of vLLM makes of its container."""
    return [] if container is None else container.aggregate().get_all_events()


def test_a_block_counts_when_every_worker_has_it_also_steps_later(engine):
    engine.register("aggregator")
    box, workers = make_container(engine), Workers(engine)
    one = stored(engine, 1)
    assert workers.step(box([one]), None) is None
    assert workers.step(None, None) is None
    got = workers.step(None, box([stored(engine, 1)]))
    assert type(got).__name__ == "Foreign"
    assert agreed(got) == [one]
    assert type(agreed(got)[0]) is engine.events.BlockStored


def test_a_silent_worker_is_not_agreement(engine):
    """vLLM counts only those that reported: with one of two silent it would publish the other's."""
    engine.register("aggregator")
    box, workers = make_container(engine), Workers(engine)
    assert workers.step(box([stored(engine, 1)]), None) is None


def test_one_removal_is_enough_and_is_told_once(engine):
    engine.register("aggregator")
    box, workers = make_container(engine), Workers(engine)
    assert len(agreed(workers.step(box([stored(engine, 1)]), box([stored(engine, 1)])))) == 1
    assert agreed(workers.step(box([removed(engine, 1)]), None)) == [removed(engine, 1)]
    assert workers.step(None, box([removed(engine, 1)])) is None


def test_workers_may_cut_their_runs_differently(engine):
    engine.register("aggregator")
    box, workers = make_container(engine), Workers(engine)
    whole = engine.events.BlockStored(
        block_hashes=[1, 2], parent_block_hash=None, token_ids=[1, 2, 3, 4], block_size=2, lora_id=None,
        medium="CPU", lora_name=None,
    )  # fmt: skip
    halves = [stored(engine, 1), stored(engine, 2, parent=1, tokens=(3, 4))]
    got = agreed(workers.step(box([whole]), box(halves)))
    assert [h for e in got for h in e.block_hashes] == [1, 2]


def test_nothing_is_lost_in_a_step_without_output(engine):
    engine.register("aggregator")
    box, workers = make_container(engine), Workers(engine)
    assert workers.step(None, box([stored(engine, 1)])) is None
    part = engine.outputs.KVConnectorOutput()
    part.kv_cache_events = box([stored(engine, 2)])
    outputs = [None, SimpleNamespace(kv_connector_output=part)]
    assert workers.aggregator.aggregate(outputs, 0) is None
    got = agreed(workers.step(box([stored(engine, 1), stored(engine, 2)]), None))
    assert sorted(h for e in got for h in e.block_hashes) == [1, 2]


def test_a_store_only_connector_announces_a_block_each_time(engine):
    engine.register("aggregator")
    workers = Workers(engine)
    box = make_container(engine, "LMCacheKVEvents")
    for _ in range(2):
        assert len(agreed(workers.step(box([stored(engine, 1)]), box([stored(engine, 1)])))) == 1


def test_a_connector_names_its_rule(engine):
    engine.register("aggregator")
    connector = SimpleNamespace(get_finished_count=lambda: None, kv_events_rule="any")
    box, workers = make_container(engine), Workers(engine, connector)
    assert len(agreed(workers.step(None, box([stored(engine, 1)])))) == 1


def test_replicated_groups_need_one_worker_of_each_replica(engine):
    engine.register("aggregator")
    box, workers = make_container(engine, "MooncakeStoreKVEvents"), Workers(engine)
    container = box([stored(engine, 1, group_idx=1), stored(engine, 2, group_idx=0)])
    container._group_tp_replication_factors = (1, 2)
    got = agreed(workers.step(container, None))
    assert [e.block_hashes for e in got] == [[1]]


def test_hashes_that_columns_cannot_hold_are_merged_as_vllm_does(engine, caplog):
    engine.register("aggregator")
    box, workers = make_container(engine), Workers(engine)
    for _ in range(2):
        got = workers.step(box([stored(engine, "text")]), box([stored(engine, "text")]))
        assert got.get_number_of_workers() == 2
        assert agreed(got) == [stored(engine, "text")]
    assert caplog.text.count("vLLM's own rule") == 1


def test_our_containers_arrive_untouched_and_tagged(engine):
    engine.register("aggregator")
    workers = Workers(engine)
    block = ours.BlockStored([1], None, [1, 2], 2, None, "CPU", None)
    got = workers.step(None, WorkerKVEvents([block]))
    assert [(w, list(events)) for w, events in got.by_worker()] == [(1, [block])]


def test_our_containers_wait_where_there_is_no_output(engine):
    engine.register("aggregator")
    workers = Workers(engine)
    first, second = (ours.BlockStored([n], None, [1, 2], 2, None, "CPU", None) for n in (1, 2))
    part = engine.outputs.KVConnectorOutput()
    part.kv_cache_events = WorkerKVEvents([first])
    assert workers.aggregator.aggregate([None, SimpleNamespace(kv_connector_output=part)], 0) is None
    got = workers.step(WorkerKVEvents([second]), None)
    assert sorted((w, [e.block_hashes for e in events]) for w, events in got.by_worker()) == [
        (0, [[2]]),
        (1, [[1]]),
    ]


def of_vllm(engine, name):
    """The scheduler half of one of vLLM's own connectors, and its container of one worker's events."""
    if engine.fake:
        pytest.skip("vLLM's own connectors need a real vLLM")
    where = {"LMCacheConnectorV1": "lmcache_connector", "MooncakeStoreConnector": "mooncake.store.connector"}
    path = f"vllm.distributed.kv_transfer.kv_connector.v1.{where[name]}"
    module = importlib.import_module(path)
    scheduler = object.__new__(getattr(module, name))
    scheduler._kv_cache_events = None
    scheduler.connector_scheduler = SimpleNamespace(update_connector_output=lambda output: None)
    scheduler.get_finished_count = lambda: None
    make = getattr(module, {"LMCacheConnectorV1": "LMCacheKVEvents"}.get(name, "MooncakeStoreKVEvents"))

    def container(*events):
        made = make(1)
        made.add_events(list(events))
        return made

    return scheduler, container


@pytest.mark.parametrize("name", ["LMCacheConnectorV1", "MooncakeStoreConnector"])
def test_vllms_own_connectors_hear_a_block_once_both_workers_have_it(engine, name):
    """Also where the second worker reports a step later, and again when it is stored again."""
    engine.register("aggregator")
    scheduler, box = of_vllm(engine, name)
    workers = Workers(engine, scheduler)
    one, two = stored(engine, 1, group_idx=0), stored(engine, 2, parent=1, group_idx=0)
    published = []
    for containers in ((box(one), None), (None, box(one)), (None, None), (box(one, two), box(two, one))):
        output = engine.outputs.KVConnectorOutput()
        output.kv_cache_events = workers.step(*containers)
        scheduler.update_connector_output(output)
        published.append([h for e in scheduler.take_events() for h in e.block_hashes])
    assert published == [[], [1], [], [1, 2]]


class Mixed(KVEventsMixin):
    """A connector's two halves."""

    def __init__(self, rank=0, size=2):
        self._vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=rank, world_size=size))

    def store(self, block):
        ticket = self.kv_events.begin_store([block], None, [1, 2], 2)
        self.kv_events.complete(ticket)
        return self

    def get_finished_count(self):
        return None


def as_stock_merges(containers):
    """vLLM's aggregation without the plug-in."""
    containers = [c for c in containers if c is not None]
    first = containers[0]
    for container in containers[1:]:
        first.add_events(container.get_all_events())
        first.increment_workers(1)
    return first


@pytest.mark.parametrize("plugged", [True, False])
def test_the_mixin_votes_with_and_without_the_plug_in(engine, plugged):
    if plugged:
        engine.register("aggregator")
    scheduler, halves = Mixed(), [Mixed(0), Mixed(1)]
    workers = Workers(engine, scheduler)
    published = []
    for blocks in ((1, 1), (2, None), (None, 2), (3, None)):
        for half, block in zip(halves, blocks, strict=True):
            if block is not None:
                half.store(block)
        containers = [half.get_kv_connector_kv_cache_events() for half in halves]
        container = workers.step(*containers) if plugged else as_stock_merges(containers)
        scheduler.update_connector_output(SimpleNamespace(kv_cache_events=container))
        published.append([e.block_hashes for e in scheduler.take_events()])
    assert published == [[[1]], [], [[2]], []]


class Child:
    def __init__(self, container=None):
        self.container, self.got = container, []

    def get_kv_connector_kv_cache_events(self):
        return self.container

    def update_connector_output(self, output):
        self.got.append((output.kv_cache_events, output.kv_connector_worker_meta))


def multi(engine, *children):
    connector = object.__new__(engine.multi.MultiConnector)
    connector._connectors = list(children)
    return connector


def through_the_engine(engine, workers, scheduler, meta=None):
    """One step: every worker's events by pickle, aggregated, to the scheduler's half."""
    containers = [w.get_kv_connector_kv_cache_events() for w in workers]
    aggregated = Workers(engine, count=len(workers)).step(*containers)
    output = engine.outputs.KVConnectorOutput()
    output.kv_cache_events, output.kv_connector_worker_meta = aggregated, meta
    scheduler.update_connector_output(output)
    assert output.kv_cache_events is aggregated
    return aggregated


def test_each_child_gets_its_own_events_and_nested_children_too(engine):
    engine.register("aggregator,multi")
    box = make_container(engine)

    def worker():
        inner = multi(engine, Child(box([stored(engine, 3)])), Child())
        return multi(engine, Child(box([stored(engine, 1)])), Child(), Child(box([stored(engine, 2)])), inner)

    leaves = [Child() for _ in range(5)]
    scheduler = multi(engine, *leaves[:3], multi(engine, *leaves[3:]))
    meta = engine.multi.MultiKVConnectorWorkerMetadata(metadata=("a", "b", "c", None))
    through_the_engine(engine, [worker(), worker()], scheduler, meta)
    got = [[e.block_hashes for e in agreed(leaf.got[0][0])] for leaf in leaves]
    assert got == [[[1]], [], [[2]], [[3]], []]
    assert [leaf.got[0][1] for leaf in leaves[:3]] == ["a", "b", "c"]


def test_children_without_events_send_nothing(engine):
    engine.register("multi")
    assert multi(engine, Child(), Child()).get_kv_connector_kv_cache_events() is None


def test_without_our_aggregation_vllms_merging_keeps_the_children_apart(engine):
    engine.register("multi")
    box = make_container(engine)
    first = multi(engine, Child(box([stored(engine, 1)])), Child()).get_kv_connector_kv_cache_events()
    second = multi(
        engine, Child(box([stored(engine, 1)])), Child(box([stored(engine, 2)]))
    ).get_kv_connector_kv_cache_events()
    merged = as_stock_merges([first, second])
    assert agreed(merged.children[0]) == [stored(engine, 1)]
    assert agreed(merged.children[1]) == [stored(engine, 2)]


def test_the_container_of_children_travels_by_pickle(engine):
    engine.register("multi")
    block = ours.BlockStored([1], None, [1, 2], 2, None, "CPU", None)
    container = multi(engine, Child(), Child(WorkerKVEvents([block]))).get_kv_connector_kv_cache_events()
    again = pickle.loads(pickle.dumps(container))
    assert again.children[0] is None
    assert list(again.children[1].get_all_events()) == [block]


def test_the_event_aggregator_is_replaced_where_connectors_look_for_it(engine):
    engine.register("aggregator")
    made = engine.events.KVEventAggregator(2)
    for _ in range(2):
        made.add_events([stored(engine, 1)])
    assert made.get_common_events() == [stored(engine, 1)]


def test_a_class_that_a_connector_took_earlier_still_travels_by_pickle(engine):
    earlier = engine.events.KVEventAggregator
    held = earlier.__new__(earlier) if engine.fake else earlier(1)
    engine.register("aggregator")
    assert type(pickle.loads(pickle.dumps(held))) is earlier


def test_containers_over_the_replaced_class_travel_by_pickle(engine):
    engine.register("aggregator")
    made = engine.events.KVEventAggregator(1)
    made.add_events([stored(engine, 1)])
    assert pickle.loads(pickle.dumps(made)).get_all_events() == [stored(engine, 1)]
