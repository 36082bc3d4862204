"""The plug-in in a vLLM: the real one inside an engine's environment, else a small fake."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FAKE = Path(__file__).resolve().parent / "fake"
_spec = importlib.util.find_spec("vllm")
OURS = tuple(
    f"kvevents.integrations.vllm.{name}"
    for name in ("plugin", "publisher", "aggregator", "multi", "votes", "containers")
)
DEFER = "ft_defer_kv_connector_outputs"  # 0.33 has it
REAL = _spec is not None and _spec.origin is not None


def forget(*prefixes):
    for name in list(sys.modules):
        if name.startswith(prefixes):
            del sys.modules[name]


@pytest.fixture
def engine(monkeypatch):
    """vLLM's modules, unpatched and patched again for each test; `engine.register(...)` plugs in."""
    fake = not REAL
    if fake:
        monkeypatch.syspath_prepend(str(FAKE))
        forget("vllm")
    forget(*OURS)
    where = "vllm.distributed.kv_transfer.kv_connector."
    modules = SimpleNamespace(
        fake=fake,
        vllm=importlib.import_module("vllm"),
        events=importlib.import_module("vllm.distributed.kv_events"),
        config=importlib.import_module("vllm.config.kv_events"),
        outputs=importlib.import_module("vllm.v1.outputs"),
        utils=importlib.import_module(where + "utils"),
        multi=importlib.import_module(where + "v1.multi_connector"),
    )
    for owner, name in (
        (modules.utils.KVOutputAggregator, "aggregate"),
        (modules.utils.KVOutputAggregator, "from_connector"),
        (modules.multi.MultiConnector, "update_connector_output"),
        (modules.events, "KVEventAggregator"),
        (modules.events.EventPublisherFactory, "_registry"),
    ):
        value = vars(owner)[name]
        monkeypatch.setattr(owner, name, dict(value) if isinstance(value, dict) else value)
    if hasattr(modules.utils.KVOutputAggregator, DEFER):
        value = vars(modules.utils.KVOutputAggregator)[DEFER]
        monkeypatch.setattr(modules.utils.KVOutputAggregator, DEFER, value)
    package = logging.getLogger("kvevents")
    for name in ("parent", "level"):
        monkeypatch.setattr(package, name, getattr(package, name))

    def register(parts=None, **options):
        import json

        for variable, value in (("KVEVENTS_VLLM", parts), ("KVEVENTS_VLLM_OPTIONS", json.dumps(options))):
            if value is None:
                monkeypatch.delenv(variable, raising=False)
            else:
                monkeypatch.setenv(variable, value)
        plugin = importlib.import_module("kvevents.integrations.vllm.plugin")
        plugin.register()
        return plugin.report()

    modules.register = register
    yield modules
    if "get_kv_connector_kv_cache_events" in vars(modules.multi.MultiConnector):
        del modules.multi.MultiConnector.get_kv_connector_kv_cache_events  # it has none of its own
    forget(*OURS)
    if fake:
        forget("vllm")
