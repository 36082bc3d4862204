"""Events of two real workers: several connectors at once, each heard by its own rule."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from engine_process import HERE, EngineProcess, Reader, free_port, ids, make_site, needs_engine, warnings

from kvevents import BlockRemoved, BlockStored

pytestmark = [needs_engine, pytest.mark.timeout(1800)]
EXAMPLES = HERE.parents[1] / "examples"


def child(name, medium, ledger, **extra):
    return {
        "kv_connector": name, "kv_connector_module_path": "engine_connectors", "kv_role": "kv_both",
        "kv_connector_extra_config": {"medium": medium, "ledger": str(ledger)} | extra,
    }  # fmt: skip


def several(*children):
    return {
        "kv_connector": "MultiConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }  # fmt: skip


def lines(ledger, medium, role, rank, key):
    path = ledger / f"{medium}-{role}-{rank}"
    told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line[key] for line in told if key in line]


def reported(ledger, medium, rank, role="WORKER"):
    return [h for hashes in lines(ledger, medium, role, rank, "reported") for h in hashes]


def serve(engine):
    """Some prompts with a common prefix, and steps enough for whoever reports late."""
    prefix = ids(1, 64)
    engine.generate(prefix + ids(2, 60), seconds=300.0)
    engine.generate(prefix + ids(3, 70), ids(4, 100), seconds=300.0)
    engine.generate(ids(5, 40), max_tokens=6, seconds=300.0)
    engine.generate(ids(6, 10), max_tokens=6, seconds=300.0)  # fills no block


def announced(reader, medium):
    return [h for e in reader.events(medium) if isinstance(e, BlockStored) for h in e.block_hashes]


def gone(reader, medium):
    return [h for e in reader.events(medium) if isinstance(e, BlockRemoved) for h in e.block_hashes]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return make_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def heard(site, tmp_path_factory):
    """One engine with all of them, and what a reader heard."""
    ledger = tmp_path_factory.mktemp("ledger")
    port, log = free_port(), ledger / "engine.log"
    config = several(
        child("Reporting", "LATE", ledger, late=1),
        child("Reporting", "TWICE", ledger, twice=0, silent=1),
        child("Quiet", "QUIET", ledger),
        several(
            child("Reporting", "NESTED", ledger, container="counting"),
            child("SeenTier", "TIER", ledger, cpu_blocks=6),
        ),
        child("AnyWorker", "ANY", ledger, silent=0),
        child("FromScheduler", "SCHEDULER", ledger),
    )
    more = {"tensor_parallel_size": 2, "kv_transfer_config": config}
    with Reader(port) as reader, EngineProcess(site, port, log=log, paths=(HERE, EXAMPLES), **more) as engine:
        reader.connected()
        serve(engine)
        reader.read(
            lambda: set(announced(reader, "SCHEDULER")) == set(reported(ledger, "SCHEDULER", 0, "SCHEDULER"))
        )
        reader.read(lambda: set(announced(reader, "LATE")) == set(reported(ledger, "LATE", 0)))
    return ledger, reader, log


def test_a_block_is_announced_once_when_both_workers_reported_it_steps_apart(heard):
    ledger, reader, _ = heard
    first, second = reported(ledger, "LATE", 0), reported(ledger, "LATE", 1)
    assert len(set(first)) >= 8
    assert set(first) == set(second)
    # Worker 1 was silent in the steps of worker 0: stock vLLM would have announced each block twice.
    assert Counter(announced(reader, "LATE")) == Counter(set(first))
    kinds = lines(ledger, "LATE", "SCHEDULER", 0, "kind")
    assert set(kinds) == {"PlainContainer"}
    assert set(lines(ledger, "LATE", "SCHEDULER", 0, "workers")) == {1}


def test_one_worker_that_says_it_twice_is_not_two_workers(heard):
    ledger, reader, _ = heard
    assert len(reported(ledger, "TWICE", 0)) >= 2 * len(set(reported(ledger, "TWICE", 0))) > 0
    assert announced(reader, "TWICE") == []


def test_children_of_a_child_are_heard_and_count_through_the_replaced_aggregator(heard):
    ledger, reader, _ = heard
    assert Counter(announced(reader, "NESTED")) == Counter(set(reported(ledger, "NESTED", 0)))
    assert set(lines(ledger, "NESTED", "SCHEDULER", 0, "kind")) == {"CountingContainer"}
    assert all(m.startswith("kvevents.") for m in lines(ledger, "NESTED", "SCHEDULER", 0, "counter"))


def test_a_mixin_gets_its_containers_untouched_and_tagged(heard):
    ledger, reader, _ = heard
    assert set(lines(ledger, "TIER", "SCHEDULER", 0, "kind")) == {"WorkerKVEvents"}
    assert [0, 1] in lines(ledger, "TIER", "SCHEDULER", 0, "said")
    holds = Counter(announced(reader, "TIER"))
    holds.subtract(gone(reader, "TIER"))
    held = [lines(ledger, "TIER", "WORKER", rank, "held")[-1] for rank in (0, 1)]
    assert held[0] == held[1]
    assert {h for h, n in holds.items() if n} == set(held[0])
    assert gone(reader, "TIER")  # it is full, and says what it drops


def test_a_connector_names_its_rule_and_the_scheduler_half_has_events_too(heard):
    ledger, reader, _ = heard
    assert reported(ledger, "ANY", 0) == []
    assert Counter(announced(reader, "ANY")) == Counter(set(reported(ledger, "ANY", 1)))
    made = reported(ledger, "SCHEDULER", 0, "SCHEDULER")
    assert Counter(announced(reader, "SCHEDULER")) == Counter(made)


def test_who_has_no_events_is_fine_and_nothing_was_warned_of(heard):
    _, reader, log = heard
    assert reader.events("QUIET") == []
    assert warnings(log) == []


def test_without_the_plug_in_the_mixin_hears_both_workers(site, tmp_path):
    """vLLM's own aggregation joins the lists; each container said whose it is."""
    port, log = free_port(), tmp_path / "engine.log"
    more = {
        "tensor_parallel_size": 2,
        "kv_transfer_config": child("SeenTier", "TIER", tmp_path, cpu_blocks=6),
    }
    with (
        Reader(port) as reader,
        EngineProcess(site, port, log=log, plugins="", paths=(HERE, EXAMPLES), **more) as engine,
    ):
        reader.connected()
        assert engine.parts == set()
        serve(engine)
        held = [set(lines(tmp_path, "TIER", "WORKER", rank, "held")[-1]) for rank in (0, 1)]
        assert held[0] == held[1]
        assert len(held[0]) == 6
        keys = reader.resident.keys
        reader.read(lambda: {key.hash for key in keys() if key.medium == "TIER"} == held[0])
    assert [0, 1] in lines(tmp_path, "TIER", "SCHEDULER", 0, "said")
