"""What went wrong with connectors elsewhere, and bad input of every kind."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass

import pytest

from kvevents import BlockRemoved, BlockStored, EventList, ResidentSet, errors
from kvevents._core import KVEventRecorder
from kvevents.connectors import (
    KVConnectorBase,
    KVConnectorFactory,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVEventsMixin,
    KVOutputAggregator,
    ModelRunnerOutput,
    MultiConnector,
    MultiKVConnectorMetadata,
    WorkerKVEvents,
    check_chunk_size,
)


def name(n):
    return bytes([n]) * 32


def stored(*numbers, medium="CPU", token=0, parent=None):
    tokens = [t + token for n in numbers for t in (n, n)]
    hashes = [name(n) for n in numbers]
    return BlockStored(hashes, None if parent is None else name(parent), tokens, 2, None, medium, None)


class Metadata(KVConnectorMetadata):
    pass


class Connector(KVConnectorBase):
    """Does nothing but record."""

    workers = 2

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return Metadata()

    def kv_events_num_workers(self):
        return self.workers


def halves(cls=Connector, workers=2):
    return cls(None, KVConnectorRole.SCHEDULER), [cls(None, KVConnectorRole.WORKER) for _ in range(workers)]


def step(scheduler, workers):
    """One step: what becomes of what the workers recorded."""
    outputs = [
        ModelRunnerOutput(KVConnectorOutput(kv_cache_events=w.get_kv_connector_kv_cache_events()))
        for w in workers
    ]
    output = KVOutputAggregator(len(workers)).aggregate(outputs).kv_connector_output
    scheduler.update_connector_output(output)
    return scheduler.take_events()


def begin(worker, *numbers, parent=None):
    tokens = [t for n in numbers for t in (n, n)]
    return worker.kv_events.begin_store([name(n) for n in numbers], parent, tokens, 2)


# ---------------------------------------------------------------- field reports


def test_a_store_that_finishes_after_its_request_is_gone_keeps_its_fields_and_leaves_nothing_behind():
    scheduler, workers = halves()
    tickets = [begin(w, 1, 2, 3) for w in workers]  # the lists are gone by now
    resident = ResidentSet()
    resident.apply(step(scheduler, workers))
    assert len(resident) == 0
    workers[0].kv_events.complete(tickets[0])
    workers[1].kv_events.complete(tickets[1], stored=2)
    events = step(scheduler, workers)
    assert list(events) == [stored(1, 2)]
    resident.apply(events)
    for w in workers:
        w.kv_events.removed([name(1), name(2), name(3)])
        assert w.kv_events.open_stores == 0
    resident.apply(step(scheduler, workers))
    assert (len(resident), resident.unknown_removals) == (0, 0)


def test_nothing_is_announced_before_the_data_is_there_and_never_what_failed_in_one_worker():
    scheduler, workers = halves()
    first = [begin(w, 1) for w in workers]
    assert len(step(scheduler, workers)) == 0
    workers[0].kv_events.complete(first[0])
    assert len(step(scheduler, workers)) == 0
    workers[1].kv_events.fail(first[1])
    assert len(step(scheduler, workers)) == 0
    assert scheduler.kv_event_votes.stats().waiting_for == (0, 1)


class TwoTiers(Connector):
    """Storage below CPU memory; every way in and out records where the change is made."""

    def __init__(self, *args):
        super().__init__(*args)
        self.tiers = {"CPU": {}, "STORAGE": {}}

    def put(self, medium, event):
        self.tiers[medium][event.block_hashes[0]] = event
        self.kv_events.append(stored(event.block_hashes[0][0], medium=medium))

    def delete(self, medium, block_hash):
        del self.tiers[medium][block_hash]
        self.kv_events.removed([block_hash], medium=medium)

    def write_back(self, event):
        self.put("CPU", event)
        self.put("STORAGE", event)

    def prefetch(self, block_hash):
        self.put("CPU", self.tiers["STORAGE"][block_hash])


def test_every_way_into_a_tier_and_out_of_it_is_announced():
    scheduler, workers = halves(TwoTiers)
    resident = ResidentSet()

    def check(*expected):
        resident.apply(step(scheduler, workers))
        assert sorted((k.medium, k.hash[0]) for k in resident.keys()) == sorted(expected)  # noqa: SIM118
        assert len(resident) == sum(map(len, workers[0].tiers.values()))

    for w in workers:
        w.write_back(stored(1))
    check(("CPU", 1), ("STORAGE", 1))
    for w in workers:
        w.delete("CPU", name(1))
    check(("STORAGE", 1))
    for w in workers:
        w.prefetch(name(1))
    check(("CPU", 1), ("STORAGE", 1))
    for w in workers:
        w.delete("STORAGE", name(1))
    check(("CPU", 1))


def test_a_hash_only_store_of_a_lower_tier_is_a_tier_update():
    scheduler, workers = halves()
    for w in workers:
        w.kv_events.append(BlockStored([name(1)], None, [], 0, None, "CPU", None))
    resident = ResidentSet([stored(1, medium="GPU")])
    resident.apply(step(scheduler, workers))
    assert sorted(k.medium for k in resident.keys()) == ["CPU", "GPU"]  # noqa: SIM118 - not a dict


def test_a_source_says_whether_it_emits_removals_and_a_wrapper_says_it_for_its_children():
    class StoreOnly(Connector):
        emits_removals = False

    class Silent(StoreOnly):
        emits_kv_events = False

    def wrapper(*classes):
        role = KVConnectorRole.WORKER
        return MultiConnector(None, role, connectors=[c(None, role) for c in classes])

    assert wrapper(Connector, Connector).emits_removals
    assert not wrapper(Connector, StoreOnly).emits_removals
    assert wrapper(Connector, Silent).emits_removals
    assert not wrapper(Silent).emits_kv_events


@pytest.mark.parametrize(
    ("given", "tier"), [("cuda:0", "GPU"), ("cpu", "CPU"), ("Cpu", "CPU"), ("disk", "DISK")]
)
def test_a_device_or_another_spelling_is_announced_as_its_tier_with_a_warning(given, tier):
    r = KVEventRecorder()
    with pytest.warns(UserWarning, match=f'"{given}" is announced as "{tier}"'):
        r.complete(r.begin_store([1], None, [1, 1], 2, medium=given))
    with pytest.warns(UserWarning, match=tier):
        r.removed([1], medium=given)
    assert [e.medium for e in r.take()] == [tier, tier]


class Device:
    """As a tensor's device: an object whose text looks like a medium."""

    def __str__(self):
        return "cpu"


@pytest.mark.parametrize("given", [Device(), 0, b"CPU", "", "my tier", "ramdisk"])
def test_a_medium_that_names_no_tier_is_refused(given):
    r = KVEventRecorder()
    kind = errors.RecordError if isinstance(given, str) else errors.EventTypeError
    with pytest.raises(kind, match="medium"):
        r.begin_store([1], None, [1, 1], 2, medium=given)
    with pytest.raises(kind, match="medium"):
        r.removed([1], medium=given)
    assert (len(r), r.open_stores) == (0, 0)


class Chunked(Connector):
    kv_events_chunk_size = 256


class Odd(Connector):
    kv_events_chunk_size = 100


def test_chunks_that_readers_cannot_match_are_told_at_start_up(caplog, monkeypatch):
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})

    def make(cls, block_size):
        config = {"num_workers": 2, "block_size": block_size}
        return KVConnectorFactory.create_connector(
            cls.__name__, config, KVConnectorRole.SCHEDULER, module_path=__name__
        )

    with caplog.at_level(logging.WARNING):
        make(Connector, 16)
        make(Chunked, 256)
        assert not caplog.records
        make(Chunked, 16)
        assert "chunks of 256 tokens" in caplog.text
    with pytest.raises(errors.ConfigError, match="Odd: its chunks of 100 tokens"):
        make(Odd, 16)
    check_chunk_size(object(), 16)  # what does not say has nothing to compare


def test_removals_for_space_come_before_the_store_and_children_in_their_order():
    def build(role):
        return MultiConnector(None, role, connectors=[Connector(None, role) for _ in range(2)])

    scheduler, workers = build(KVConnectorRole.SCHEDULER), [build(KVConnectorRole.WORKER) for _ in range(2)]
    media = ("CPU", "STORAGE")
    for w in workers:
        for child, medium in zip(w.sub_connectors, media, strict=True):
            child.kv_events.append(stored(1, medium=medium))
    step(scheduler, workers)
    for w in workers:  # one promotion: block 1 leaves, block 2 comes
        for child, medium in reversed(list(zip(w.sub_connectors, media, strict=True))):
            child.kv_events.removed([name(1)], medium=medium)
            child.kv_events.append(stored(2, medium=medium))
    events = step(scheduler, workers)
    assert list(events) == [
        BlockRemoved([name(1)], "CPU"),
        stored(2),
        BlockRemoved([name(1)], "STORAGE"),
        stored(2, medium="STORAGE"),
    ]


# ---------------------------------------------------------------- bad input


def test_a_worker_that_there_is_not_is_refused_and_nothing_was_counted():
    scheduler, _ = halves()
    container = WorkerKVEvents([stored(1)]).tagged(0)
    container.merge(WorkerKVEvents([stored(1)]).tagged(7))
    with pytest.raises(errors.AggregatorError, match="Connector: a report of worker 7, there are 2"):
        scheduler.update_connector_output(KVConnectorOutput(kv_cache_events=container))
    assert scheduler.kv_event_votes.stats().held == (0, 0)
    with pytest.raises(errors.AggregatorError):
        scheduler.forget_worker(2)


def test_two_reports_of_one_worker_in_a_step_count_once():
    scheduler, _ = halves()
    container = WorkerKVEvents([stored(1)]).tagged(0).merge(WorkerKVEvents([stored(1)]).tagged(0))
    scheduler.update_connector_output(KVConnectorOutput(kv_cache_events=container))
    assert len(scheduler.take_events()) == 0
    assert scheduler.kv_event_votes.stats().held == (1, 0)


def test_tokens_that_disagree_are_told_and_the_first_workers_go_out(caplog):
    scheduler, workers = halves()
    workers[0].kv_events.append(stored(1))
    workers[1].kv_events.append(stored(1, token=5))
    with caplog.at_level(logging.WARNING):
        assert list(step(scheduler, workers)) == [stored(1)]
    assert "worker 1 gives another token_ids than the first worker" in caplog.text
    assert scheduler.kv_event_votes.stats().disagreeing_tokens == 1


@pytest.mark.parametrize("rule", [0, 3, "most", -1])
def test_a_rule_that_two_workers_cannot_meet_is_refused(rule):
    class Strict(Connector):
        kv_events_rule = rule

    scheduler, workers = halves(Strict)
    workers[0].kv_events.append(stored(1))
    with pytest.raises((errors.AggregatorError, errors.AggregatorTypeError)):
        step(scheduler, workers)


def test_cutting_off_a_worker_that_still_votes_is_refused():
    scheduler, workers = halves()
    for w in workers:
        w.kv_events.append(stored(1))
    step(scheduler, workers)
    with pytest.raises(errors.AggregatorError, match="1"):
        scheduler.kv_event_votes.resize(1)
    scheduler.forget_worker(1)
    scheduler.kv_event_votes.resize(1)
    # The one worker that is left holds it, so by the rule it is there: nothing changed for readers.
    assert len(scheduler.take_events()) == 0


def test_worker_metadata_without_aggregate_is_named():
    @dataclass
    class Plain:
        n: int

    outputs = [ModelRunnerOutput(KVConnectorOutput(kv_connector_worker_meta=Plain(i))) for i in range(2)]
    with pytest.raises(errors.ConnectorError, match=r"worker 0: .* is a Plain, which has no aggregate\(\)"):
        KVOutputAggregator(2).aggregate(outputs)


def calls():
    """Every hook of the base with arguments that fit."""
    request = type("R", (), {"request_id": "r"})()
    given = {
        "request": request,
        "connector_metadata": MultiKVConnectorMetadata((Metadata(), Metadata())),
        "connector_output": KVConnectorOutput(),
        "finished_req_ids": set(),
        "num_computed_tokens": 0,
        "num_external_tokens": 0,
        "worker": 0,
        "kv_caches": {},
    }
    own = {"has_connector_metadata", "kv_events_num_workers", "kv_events_worker"}
    for hook, method in inspect.getmembers(KVConnectorBase, inspect.isfunction):
        if hook.startswith("_") or hook in own:
            continue
        parameters = [
            p for p in inspect.signature(method).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD
        ]
        yield hook, [given.get(p.name) for p in parameters[1:]]


@pytest.mark.parametrize(("hook", "args"), list(calls()), ids=lambda x: x if isinstance(x, str) else "")
def test_a_child_that_raises_in_any_hook_is_named_and_the_others_are_called(hook, args):
    asked = []

    class Broken(Connector):
        pass

    class Other(Connector):
        pass

    def broken(self, *args, **kwargs):
        raise OSError("disk")

    def other(self, *args, **kwargs):
        asked.append(hook)
        return getattr(Connector, hook)(self, *args, **kwargs)

    setattr(Broken, hook, broken)
    setattr(Other, hook, other)
    role = KVConnectorRole.WORKER
    wrapper = MultiConnector(None, role, connectors=[Broken(None, role), Other(None, role)])
    with pytest.raises(
        errors.ConnectorError, match=rf"{hook}\(\) failed in child 0 \(Broken\): OSError: disk"
    ):
        getattr(wrapper, hook)(*args)
    assert asked == [hook]


def test_a_report_of_one_child_that_cannot_be_counted_costs_the_other_nothing():
    def build(role):
        return MultiConnector(None, role, connectors=[Connector(None, role) for _ in range(2)])

    scheduler, workers = build(KVConnectorRole.SCHEDULER), [build(KVConnectorRole.WORKER) for _ in range(2)]
    scheduler.sub_connectors[0].workers = 1  # somebody configured the halves differently
    for w in workers:
        for child in w.sub_connectors:
            child.kv_events.append(stored(1))
    with pytest.raises(errors.ConnectorError, match="child 0"):
        step(scheduler, workers)
    assert list(scheduler.take_events()) == [stored(1)]


def test_the_mixin_alone_has_no_state_until_it_is_used():
    class Plain(KVEventsMixin):
        pass

    half = Plain()
    assert half.get_kv_connector_kv_cache_events() is None
    assert half.take_events() == EventList()
