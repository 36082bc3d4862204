"""Connectors: worker halves record, containers travel, the scheduler half votes, several work at once."""

from __future__ import annotations

import inspect
import pickle
import threading
from dataclasses import dataclass

import pytest

from kvevents import BlockRemoved, BlockStored, EventList, errors
from kvevents._core import KVEventRecorder
from kvevents.connectors import (
    KVConnectorBase,
    KVConnectorBase_V1,
    KVConnectorFactory,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
    KVEventsMixin,
    KVOutputAggregator,
    ModelRunnerOutput,
    MultiConnector,
    MultiConnectorKVEvents,
    MultiKVConnectorMetadata,
    MultiKVConnectorStats,
    MultiKVConnectorWorkerMetadata,
    WorkerKVEvents,
    check_event_hooks,
)
from kvevents.connectors.tagging import iter_worker_events, tag_container

WORKERS = 2


def block(n: int) -> bytes:
    return bytes([n]) * 32


def stored(*numbers: int, medium: str = "CPU", parent: int | None = None) -> BlockStored:
    return BlockStored(
        [block(n) for n in numbers],
        None if parent is None else block(parent),
        [t for n in numbers for t in (n, n)],
        2,
        None,
        medium,
        None,
    )


@dataclass
class Sums(KVConnectorStats):
    def reset(self):
        self.data = {}

    def aggregate(self, other):
        return Sums(data={k: self.data.get(k, 0) + other.data.get(k, 0) for k in self.data | other.data})

    def reduce(self):
        return dict(self.data)

    def is_empty(self):
        return not self.data


@dataclass
class Names(KVConnectorWorkerMetadata):
    names: tuple[str, ...]

    def aggregate(self, other):
        return Names(self.names + other.names)


class Metadata(KVConnectorMetadata):
    pass


class Connector(KVConnectorBase):
    """Records what the test tells it."""

    loads = 0

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self.loads, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.allocated = num_external_tokens

    def build_connector_meta(self, scheduler_output):
        return Metadata()

    def kv_events_num_workers(self):
        return WORKERS


class OtherConnector(Connector):
    kv_events_rule = "any"


class SilentConnector(Connector):
    """Without events, as connectors of engines are that only inherit the base class's hooks."""

    emits_kv_events = False
    get_kv_connector_kv_cache_events = None
    take_events = None

    def update_connector_output(self, connector_output):
        self.seen = connector_output


def make(cls, role):
    return cls(None, role)


class Engine:
    """Worker and scheduler halves of some connectors, and the step between them."""

    def __init__(self, *classes, nest=False):
        def build(role):
            children = [make(c, role) for c in classes]
            if nest:
                children = [MultiConnector(None, role, connectors=children[:2]), *children[2:]]
            return MultiConnector(None, role, connectors=children)

        self.workers = [build(KVConnectorRole.WORKER) for _ in range(WORKERS)]
        self.scheduler = build(KVConnectorRole.SCHEDULER)
        self.aggregator = KVOutputAggregator.from_connector(self.scheduler, WORKERS)

    def step(self, output_rank=0, silent=()):
        outputs = []
        for i, worker in enumerate(self.workers):
            if i in silent:
                outputs.append(None)
                continue
            container = worker.get_kv_connector_kv_cache_events()
            output = ModelRunnerOutput(KVConnectorOutput(kv_cache_events=container))
            outputs.append(pickle.loads(pickle.dumps(output)))
        joined = self.aggregator.aggregate(outputs, output_rank)
        if joined is not None:
            self.scheduler.update_connector_output(joined.kv_connector_output)
        return self.scheduler.take_events()


def hashes(events):
    return [h[0] for e in events for h in e.block_hashes]


# ---------------------------------------------------------------- several connectors


def test_worker_events_of_all_children_reach_take_events_in_child_order():
    engine = Engine(Connector, OtherConnector)
    for w in engine.workers:
        w.sub_connectors[0].kv_events.append(stored(1))
        w.sub_connectors[1].kv_events.append(stored(2, medium="STORAGE"))
    events = engine.step()
    assert hashes(events) == [1, 2]
    assert [events.origin(i)[0] for i in range(2)] == ["0", "1"]


def test_two_children_of_one_class_never_mix():
    engine = Engine(Connector, Connector)
    engine.workers[0].sub_connectors[0].kv_events.append(stored(1))
    engine.workers[1].sub_connectors[1].kv_events.append(stored(1))
    # Both workers name the block, but of different connectors: nobody agrees.
    assert len(engine.step()) == 0
    engine.workers[1].sub_connectors[0].kv_events.append(stored(1))
    assert hashes(engine.step()) == [1]


def test_each_child_has_its_own_rule():
    engine = Engine(Connector, OtherConnector)
    engine.workers[0].sub_connectors[0].kv_events.append(stored(1))
    engine.workers[0].sub_connectors[1].kv_events.append(stored(2))
    assert hashes(engine.step()) == [2]


def test_children_without_events_are_fine():
    engine = Engine(SilentConnector, Connector)
    for w in engine.workers:
        w.sub_connectors[1].kv_events.append(stored(3))
    assert hashes(engine.step()) == [3]
    assert engine.scheduler.sub_connectors[0].seen.kv_cache_events is None


def test_multi_connectors_nest():
    engine = Engine(Connector, Connector, Connector, nest=True)
    for w in engine.workers:
        inner, last = w.sub_connectors
        inner.sub_connectors[0].kv_events.append(stored(1))
        inner.sub_connectors[1].kv_events.append(stored(2))
        last.kv_events.append(stored(3))
    events = engine.step()
    assert hashes(events) == [1, 2, 3]
    assert [events.origin(i)[0] for i in range(3)] == ["0/0", "0/1", "1"]


def test_the_wrapper_forwards_every_public_method_of_the_base():
    own = {"role", "has_connector_metadata", "kv_events", "kv_event_votes"}
    own |= {"kv_events_num_workers", "kv_events_worker"}
    public = {n for n, _ in inspect.getmembers(KVConnectorBase) if not n.startswith("_")}
    data = {
        "emits_kv_events",
        "emits_removals",
        "kv_events_rule",
        "kv_events_group_rules",
        "kv_events_chunk_size",
    }
    missing = {n for n in public - own - data if n not in vars(MultiConnector)}
    assert not missing


def test_a_child_that_raises_is_named_and_costs_the_others_nothing():
    class Broken(Connector):
        def get_kv_connector_kv_cache_events(self):
            raise OSError("disk")

    engine = Engine(Broken, Connector)
    worker = engine.workers[0]
    worker.sub_connectors[1].kv_events.append(stored(1))
    with pytest.raises(errors.ConnectorError, match=r"child 0 \(Broken\): OSError: disk"):
        worker.get_kv_connector_kv_cache_events()
    worker.sub_connectors[0].get_kv_connector_kv_cache_events = lambda: None
    kept = worker.get_kv_connector_kv_cache_events()
    assert hashes(kept.get_all_events()) == [1]


def test_events_of_others_survive_a_child_that_fails_in_take_events():
    engine = Engine(Connector, OtherConnector)
    engine.workers[0].sub_connectors[1].kv_events.append(stored(2))
    engine.scheduler.sub_connectors[0].take_events = lambda: 1 / 0
    with pytest.raises(errors.ConnectorError, match="child 0") as e:
        engine.step()
    assert hashes(e.value.events) == [2]


def test_stats_and_worker_metadata_stay_with_their_child():
    a, b = Sums({"n": 1}), Sums({"n": 10})
    joined = MultiKVConnectorStats({0: a, 1: b}).aggregate(MultiKVConnectorStats({1: Sums({"n": 5})}))
    assert joined.reduce() == {"0.n": 1, "1.n": 15}
    meta = MultiKVConnectorWorkerMetadata((None, Names(("x",))))
    both = meta.aggregate(MultiKVConnectorWorkerMetadata((Names(("a",)), Names(("y",)))))
    assert both.metadata == (Names(("a",)), Names(("x", "y")))


def test_the_first_child_that_has_tokens_loads_them():
    scheduler = Engine(Connector, Connector).scheduler
    request = type("R", (), {"request_id": "r"})()
    scheduler.sub_connectors[1].loads = 32
    assert scheduler.get_num_new_matched_tokens(request, 0) == (32, False)
    scheduler.update_state_after_alloc(request, [], 32)
    assert [c.allocated for c in scheduler.sub_connectors] == [0, 32]


def test_metadata_reaches_each_child_and_a_wrong_kind_is_refused():
    engine = Engine(Connector, Connector)
    meta = engine.scheduler.build_connector_meta(None)
    worker = engine.workers[0]
    worker.bind_connector_metadata(pickle.loads(pickle.dumps(meta)))
    assert all(c.has_connector_metadata() for c in worker.sub_connectors)
    worker.clear_connector_metadata()
    assert not any(c.has_connector_metadata() for c in worker.sub_connectors)
    with pytest.raises(errors.ConnectorError, match="Metadata"):
        worker.bind_connector_metadata(Metadata())
    with pytest.raises(errors.ConnectorError, match="1 connectors, there are 2"):
        worker.bind_connector_metadata(MultiKVConnectorMetadata((Metadata(),)))


# ---------------------------------------------------------------- containers of several


def test_an_untagged_list_is_refused_with_the_remedy():
    multi = MultiConnectorKVEvents(2)
    with pytest.raises(errors.EventTypeError, match="set_child"):
        multi.add_events([stored(1)])


def test_all_events_go_into_another_container_and_keep_child_and_worker():
    multi = MultiConnectorKVEvents(2)
    multi.set_child(0, WorkerKVEvents([stored(1)]).tagged(0))
    multi.set_child(1, WorkerKVEvents([stored(2)]).tagged(1))
    other = MultiConnectorKVEvents(2)
    other.add_events(multi.get_all_events())
    assert other.get_all_events() == multi.get_all_events()
    assert [other.get_all_events().origin(i) for i in range(2)] == [("0", 0), ("1", 1)]


def test_a_single_container_merges_where_exactly_one_child_has_its_type():
    multi = MultiConnectorKVEvents(2)
    multi.set_child(1, WorkerKVEvents([stored(1)]).tagged(0))
    multi.merge(WorkerKVEvents([stored(2)]).tagged(1))
    assert hashes(multi.children[1].get_all_events()) == [1, 2]
    multi.set_child(0, WorkerKVEvents([stored(3)]).tagged(0))
    with pytest.raises(errors.EventTypeError, match="exactly one child"):
        multi.merge(WorkerKVEvents([stored(4)]))


def test_pickles_of_another_version_are_refused():
    multi = MultiConnectorKVEvents(1)
    multi.set_child(0, WorkerKVEvents([stored(1)]))
    function, (_, children) = multi.__reduce__()
    with pytest.raises(errors.PickleError, match="version 2"):
        function(2, children)
    assert pickle.loads(pickle.dumps(multi)).get_all_events() == multi.get_all_events()


# ---------------------------------------------------------------- from the workers to the scheduler


def test_silence_changes_nothing_and_a_late_worker_still_agrees():
    engine = Engine(Connector)
    engine.workers[0].sub_connectors[0].kv_events.append(stored(1, 2))
    assert len(engine.step()) == 0
    assert len(engine.step()) == 0
    late = engine.workers[1].sub_connectors[0].kv_events
    late.append(stored(1))
    late.append(stored(2, parent=1))
    assert hashes(engine.step()) == [1, 2]


@pytest.mark.parametrize("silent", [(0,), (1,)])
def test_no_output_of_one_rank_loses_nothing_of_the_others(silent):
    engine = Engine(Connector)
    for w in engine.workers:
        w.sub_connectors[0].kv_events.append(stored(1))
    first = engine.step(output_rank=0, silent=silent)
    assert len(first) == 0
    assert hashes(engine.step()) == [1]


def test_finished_requests_are_counted_over_workers_and_across_missing_outputs():
    aggregator = KVOutputAggregator(2)

    def output(sent):
        return ModelRunnerOutput(KVConnectorOutput(finished_sending=sent, invalid_block_ids={len(sent)}))

    first = aggregator.aggregate([output({"a", "b"}), output({"b"})])
    assert first.kv_connector_output.finished_sending == {"b"}
    assert first.kv_connector_output.invalid_block_ids == {1, 2}
    assert aggregator.aggregate([None, output({"a"})]) is None
    assert aggregator.aggregate([output(set()), None]).kv_connector_output.finished_sending == {"a"}


def test_aggregating_leaves_the_workers_containers_as_they_were():
    containers = [WorkerKVEvents([stored(w)]) for w in range(2)]
    outputs = [ModelRunnerOutput(KVConnectorOutput(kv_cache_events=c)) for c in containers]
    joined = KVOutputAggregator(2).aggregate(outputs).kv_connector_output.kv_cache_events
    assert [(w, hashes(e)) for w, e in joined.by_worker()] == [(0, [0]), (1, [1])]
    assert [hashes(c.get_all_events()) for c in containers] == [[0], [1]]


def test_an_output_with_events_only_is_not_empty():
    assert KVConnectorOutput().is_empty()
    assert not KVConnectorOutput(kv_cache_events=WorkerKVEvents([stored(1)])).is_empty()
    assert KVConnectorOutput(kv_cache_events=WorkerKVEvents()).is_empty()
    assert KVConnectorOutput(kv_connector_stats=Sums()).is_empty()


def test_a_container_of_another_package_is_carried_too():
    class Foreign:
        def get_all_events(self):
            return [stored(1)]

    tagged = tag_container(Foreign(), 1)
    assert [(w, hashes(e)) for w, e in iter_worker_events(tagged)] == [(1, [1])]


# ---------------------------------------------------------------- recording


def test_a_failed_store_announces_nothing_and_a_part_its_part():
    r = KVEventRecorder()
    lists = ([block(n) for n in range(4)], None, [n for n in range(4) for _ in (0, 1)], 2)
    r.fail(r.begin_store(*lists))
    r.complete(r.begin_store(*lists), stored=2)
    r.complete(r.begin_store(*lists), stored=[3])
    events = r.take()
    assert [hashes([e]) for e in events] == [[0, 1], [3]]
    assert events[1].parent_block_hash == block(2)
    with pytest.raises(errors.RecordError, match="ticket 0"):
        r.complete(0)


def test_fields_are_captured_when_the_store_begins():
    r = KVEventRecorder()
    tokens, keys = [1, 1], [("salt",)]
    ticket = r.begin_store([block(1)], None, tokens, 2, extra_keys=keys, session_id="s", lora_name="l")
    tokens[:] = [9, 9]
    keys[:] = [None]
    r.complete(ticket)
    event = r.take()[0]
    assert (event.token_ids, event.extra_keys, event.session_id) == ([1, 1], [("salt",)], "s")


def test_a_range_of_whole_lists_is_recorded_with_the_block_before_as_parent():
    r = KVEventRecorder()
    r.complete(r.begin_store([1, 2, 3], 7, range(6), 2, start=1, end=3))
    assert list(r.take()) == [BlockStored([2, 3], 1, [2, 3, 4, 5], 2, None, "CPU", None)]
    with pytest.raises(errors.EventError, match="blocks 2 to 9 of 3"):
        r.begin_store([1, 2, 3], 7, range(6), 2, start=2, end=9)


def test_removal_comes_before_the_store_that_it_makes_room_for():
    r = KVEventRecorder()
    ticket = r.begin_store([block(2)], None, [2, 2], 2)
    r.removed([block(1)])
    r.complete(ticket)
    assert [type(e) for e in r.take()] == [BlockRemoved, BlockStored]


def test_recording_from_other_threads_loses_nothing_and_doubles_nothing():
    class Busy(Connector):
        pass

    connector = make(Busy, KVConnectorRole.WORKER)
    per_thread, threads = 25_000, 4

    def record(t):
        for i in range(per_thread):
            connector.kv_events.removed([t * per_thread + i])

    workers = [threading.Thread(target=record, args=(t,)) for t in range(threads)]
    seen = []

    def drain():
        container = connector.get_kv_connector_kv_cache_events()
        if container is not None:
            seen.extend(h for e in container.get_all_events() for h in e.block_hashes)

    for w in workers:
        w.start()
    while any(w.is_alive() for w in workers):
        drain()
    drain()
    assert sorted(seen) == list(range(per_thread * threads))


# ---------------------------------------------------------------- start-up


class EngineBase:
    """An engine's own base class, whose hooks do nothing."""

    def get_kv_connector_kv_cache_events(self):
        """Nothing."""
        return

    def update_connector_output(self, connector_output):
        return

    def take_events(self):
        return ()


def test_a_connector_that_promises_events_without_handing_them_over_is_refused_by_name():
    class Promises(EngineBase):
        emits_kv_events = True

    with pytest.raises(
        errors.ConfigError, match=r"Promises.*get_kv_connector_kv_cache_events\(\) is a no-op"
    ):
        check_event_hooks(Promises())


def test_the_mixin_beside_an_engines_base_class_is_enough():
    class Good(KVEventsMixin, EngineBase):
        pass

    check_event_hooks(Good())


def test_the_factory_knows_names_modules_and_what_failed(monkeypatch):
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    KVConnectorFactory.register_connector("mine", __name__, "Connector")
    made = KVConnectorFactory.create_connector("mine", {"num_workers": 2}, KVConnectorRole.WORKER)
    assert isinstance(made, KVConnectorBase_V1)
    with pytest.raises(errors.ConfigError, match="registered are: mine"):
        KVConnectorFactory.get_connector_class("other")
    with pytest.raises(errors.ConfigError, match="already registered"):
        KVConnectorFactory.register_connector("mine", "x", "y")
    with pytest.raises(errors.ConfigError, match="no_such_module"):
        KVConnectorFactory.get_connector_class("C", "no_such_module")
    with pytest.raises(errors.ConfigError, match="no class 'Missing'"):
        KVConnectorFactory.get_connector_class("Missing", __name__)


def test_the_number_of_workers_must_be_known():
    class Unknown(KVEventsMixin):
        _vllm_config = None

    with pytest.raises(errors.ConfigError, match="num_workers"):
        _ = Unknown().kv_event_votes


def test_a_metadata_class_without_aggregate_cannot_be_made():
    class Lazy(KVConnectorWorkerMetadata):
        pass

    with pytest.raises(TypeError, match="aggregate"):
        Lazy()


def test_a_worker_that_leaves_takes_its_votes():
    engine = Engine(Connector)
    for w in engine.workers:
        w.sub_connectors[0].kv_events.append(stored(1))
    assert hashes(engine.step()) == [1]
    engine.scheduler.forget_worker(1)
    events = engine.step()
    assert isinstance(events, EventList)
    assert list(events) == [BlockRemoved([block(1)], "CPU")]
