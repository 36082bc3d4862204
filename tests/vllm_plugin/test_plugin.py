"""What is plugged in, and when vLLM's own code runs instead."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvevents.integrations.vllm import settings

STOCK = ("publisher", "aggregator", "multi")


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "kvevents" in r.name]


def states(report):
    return {p.name: p.state for p in report.parts}


def test_by_default_everything_but_the_pool_is_plugged_in(engine, caplog):
    caplog.set_level(logging.INFO, "vllm.kvevents")
    report = engine.register()
    assert states(report) == dict.fromkeys(STOCK, "on") | {"pool": "off"}
    assert warnings(caplog) == []
    lines = [r.getMessage() for r in caplog.records if r.name == "vllm.kvevents"]
    assert len(lines) == 1
    assert "overflow=drop_oldest" in lines[0]


def test_a_second_call_changes_nothing(engine):
    first = engine.register()
    patched = engine.utils.KVOutputAggregator.aggregate
    assert engine.register() is first
    assert engine.utils.KVOutputAggregator.aggregate is patched


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "dev"])
def test_an_unknown_version_keeps_all_of_its_own_code(engine, monkeypatch, caplog, version):
    monkeypatch.setattr(engine.vllm, "__version__", version)
    before = engine.utils.KVOutputAggregator.aggregate, dict(engine.events.EventPublisherFactory._registry)
    report = engine.register()
    assert set(states(report).values()) == {"fallback", "off"}
    assert len(warnings(caplog)) == 3
    assert all(version in text and "own code" in text for text in warnings(caplog))
    assert before == (
        engine.utils.KVOutputAggregator.aggregate,
        engine.events.EventPublisherFactory._registry,
    )


@pytest.mark.parametrize(
    ("owner", "name", "part"),
    [
        ("events.EventPublisherFactory", "_registry", "publisher"),
        ("events.ZmqEventPublisher", "_is_bind_endpoint", "publisher"),
        ("utils.KVOutputAggregator", "aggregate", "aggregator"),
        ("multi", "MultiKVConnectorWorkerMetadata", "multi"),
    ],
)
def test_a_renamed_private_name_turns_off_its_part_only(engine, monkeypatch, caplog, owner, name, part):
    found = engine
    for step in owner.split("."):
        found = getattr(found, step)
    monkeypatch.delattr(found, name)
    report = engine.register()
    assert states(report) == dict.fromkeys(STOCK, "on") | {part: "fallback", "pool": "off"}
    assert len(warnings(caplog)) == 1
    assert name in warnings(caplog)[0]


def test_a_changed_signature_counts_as_another_name(engine, monkeypatch, caplog):
    monkeypatch.setattr(engine.utils.KVOutputAggregator, "aggregate", lambda self, results: None)
    assert states(engine.register())["aggregator"] == "fallback"
    assert "has no parameter output_rank, outputs" in warnings(caplog)[0]


def test_a_multi_connector_that_collects_events_itself_is_left_alone(engine, caplog):
    engine.multi.MultiConnector.get_kv_connector_kv_cache_events = lambda self: None
    assert states(engine.register("multi"))["multi"] == "fallback"
    assert "itself" in warnings(caplog)[0]


def test_a_vllm_without_the_names_of_the_pool_keeps_its_own_pool(engine, caplog):
    if not engine.fake:
        pytest.skip("this vLLM has them; what runs then is in test_plugin_pool.py")
    assert states(engine.register("pool"))["pool"] == "fallback"
    assert len(warnings(caplog)) == 1


def test_nothing_asked_for_imports_no_vllm_and_says_nothing():
    code = (
        "import os, sys; os.environ['KVEVENTS_VLLM'] = ''\n"
        "from kvevents.integrations.vllm import plugin; plugin.register()\n"
        "bad = {'vllm', 'zmq', 'typer', 'rich'} & set(sys.modules); print(bad or 'clean')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "clean"
    assert ran.stderr == ""


def test_nothing_asked_for_costs_an_engines_process_less_than_50_ms():
    """Processor time, beside the modules that an engine has loaded anyway; the best of three."""
    code = (
        "import collections, dataclasses, decimal, inspect, json, logging, os, time, typing, msgspec\n"
        "os.environ['KVEVENTS_VLLM'] = ''; start = time.process_time()\n"
        "from kvevents.integrations.vllm import plugin; plugin.register()\n"
        "print(time.process_time() - start)"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, timeout=60, check=True) for _ in range(3)]
    assert min(float(ran.stdout) for ran in runs) < 0.050


def test_unknown_parts_are_one_warning_and_the_others_stay():
    told = []
    found = settings.read({"KVEVENTS_VLLM": "multi, nonsense,publisher,bad"}, told.append)
    assert found.parts == ("publisher", "multi")
    assert len(told) == 1
    assert "bad, nonsense" in told[0]


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"overflow": "sometimes"}', '{"dialect": "morse"}', '{"speed": 9}', '{"buffer_bytes": -1}',
     '{"report": "some"}', '{"bind": "yes"}'],
)  # fmt: skip
def test_bad_options_are_one_warning_and_the_defaults(text):
    told = []
    found = settings.read({"KVEVENTS_VLLM_OPTIONS": text}, told.append)
    assert found == settings.Settings()
    assert len(told) == 1


def test_good_options_are_taken():
    text = '{"overflow": "block", "dialect": "vllm-map-0.33", "buffer_bytes": 5, "bind": true}'
    options = settings.read({"KVEVENTS_VLLM_OPTIONS": text}, pytest.fail).options
    assert options == settings.Options("block", "every_copy", "vllm-map-0.33", 5, True)


def test_the_docs_list_every_name_that_is_used():
    from kvevents.integrations.vllm.names import NAMES

    text = (Path(__file__).resolve().parents[2] / "docs" / "vllm.md").read_text()
    rows = {
        tuple(re.findall(r"`([^`]+)`", line))
        for line in text.splitlines()
        if re.match(r"\| `\w+` \| `vllm", line)
    }
    assert rows == {(part, f"{n.module}.{n.path}") for part, names in NAMES.items() for n in names}
