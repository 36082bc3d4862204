"""Every name of vLLM that the plug-in uses, by part, and whether the running vLLM has them.

This is the only list: the plug-in checks it before it touches anything, ``kvevents doctor --vllm`` prints
from it, and the table in ``docs/vllm.md`` is compared with it by a test.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any, NamedTuple

__all__ = ["NAMES", "VERSIONS", "Name", "problem", "release"]

VERSIONS = {"0.32": "run", "0.33": "tried on its sources"}
"""Releases whose names are known: engines of it were run, or the plug-in was tried on its modules alone."""


class Name(NamedTuple):
    """One name, and what it must look like."""

    module: str
    path: str
    """Attribute of the module, dotted."""
    parameters: tuple[str, ...] = ()
    """Parameters that the callable must have."""
    fields: tuple[str, ...] = ()
    """Annotated fields that the class must have."""
    stores: tuple[str, ...] = ()
    """Attributes that the function itself sets."""


_EVENTS = "vllm.distributed.kv_events"
_OUTPUTS = "vllm.v1.outputs"
_UTILS = "vllm.distributed.kv_transfer.kv_connector.utils"
_MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"

NAMES: dict[str, tuple[Name, ...]] = {
    "publisher": (
        Name(_EVENTS, "EventPublisherFactory._registry"),
        Name(_EVENTS, "EventPublisher.__init__", parameters=("data_parallel_rank",)),
        Name(
            _EVENTS,
            "ZmqEventPublisher.__init__",
            parameters=(
                "data_parallel_rank",
                "endpoint",
                "replay_endpoint",
                "buffer_steps",
                "hwm",
                "max_queue_size",
                "topic",
            ),
        ),
        Name(_EVENTS, "ZmqEventPublisher._is_bind_endpoint", parameters=("endpoint",)),
        Name(
            _EVENTS, "ZmqEventPublisher.offset_endpoint_port", parameters=("endpoint", "data_parallel_rank")
        ),
        Name(_EVENTS, "KVEventBatch"),
        Name(_EVENTS, "get_ip"),
        Name("vllm.config.kv_events", "KVEventsConfig", fields=("endpoint", "replay_endpoint", "publisher")),
    ),
    "aggregator": (
        Name(_UTILS, "KVOutputAggregator.aggregate", parameters=("outputs", "output_rank")),
        Name(_UTILS, "KVOutputAggregator.from_connector", parameters=("connector", "world_size")),
        Name(_OUTPUTS, "KVConnectorOutput", fields=("kv_cache_events",)),
        Name(_EVENTS, "KVEventAggregator.add_events", parameters=("events",)),
        Name(_EVENTS, "KVConnectorKVEvents"),
        Name(_EVENTS, "BlockStored", fields=("block_hashes", "parent_block_hash", "token_ids", "medium")),
        Name(_EVENTS, "BlockRemoved", fields=("block_hashes", "medium")),
        Name(_EVENTS, "AllBlocksCleared"),
    ),
    "multi": (
        Name(_MULTI, "MultiConnector.__init__", stores=("_connectors",)),
        Name(_MULTI, "MultiConnector.update_connector_output", parameters=("connector_output",)),
        Name(_MULTI, "MultiConnector.get_kv_connector_kv_cache_events"),
        Name(_MULTI, "MultiKVConnectorWorkerMetadata", fields=("metadata",)),
        Name(_OUTPUTS, "KVConnectorOutput", fields=("kv_cache_events", "kv_connector_worker_meta")),
        Name(_EVENTS, "KVConnectorKVEvents"),
    ),
}


def release(version: str) -> str:
    """``0.32`` of ``0.32.0+cpu``; the whole text where it is no version."""
    found = re.match(r"\d+\.\d+", version)
    return found.group() if found else version


def problem(part: str, version: str) -> str | None:
    """Why a part must not be plugged into this vLLM; ``None`` if it may be."""
    if part not in NAMES:
        return "this release of kvevents does not have it"
    if release(version) not in VERSIONS:
        return f"vLLM {version} is not known (known are {', '.join(VERSIONS)})"
    for name in NAMES[part]:
        wrong = _wrong(name)
        if wrong is not None:
            return f"vLLM {version}: {wrong}"
    return None


def _wrong(name: Name) -> str | None:
    where = f"{name.module}.{name.path}"
    try:
        found: Any = importlib.import_module(name.module)
    except Exception as e:
        return f"{name.module} cannot be imported ({type(e).__name__}: {e})"
    for part in name.path.split("."):
        found = getattr(found, part, None)
        if found is None:
            return f"there is no {where}"
    if name.parameters:
        missing = set(name.parameters) - set(inspect.signature(found).parameters)
        if missing:
            return f"{where} has no parameter {', '.join(sorted(missing))}"
    if name.fields:
        missing = set(name.fields) - _fields(found)
        if missing:
            return f"{where} has no field {', '.join(sorted(missing))}"
    code = getattr(inspect.unwrap(found), "__code__", None)
    missing = {attribute for attribute in name.stores if code is None or attribute not in code.co_names}
    return f"{where} sets no {', '.join(sorted(missing))}" if missing else None


def _fields(cls: type) -> set[str]:
    return {field for base in cls.__mro__ for field in inspect.get_annotations(base)}
