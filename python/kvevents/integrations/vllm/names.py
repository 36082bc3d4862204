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
    no_others: bool = False
    """Whether any other parameter makes it another function."""
    methods: tuple[str, ...] = ()
    """Names that the class itself defines."""
    order: tuple[str, ...] = ()
    """The first fields of the Struct, in this order."""


_EVENTS = "vllm.distributed.kv_events"
_OUTPUTS = "vllm.v1.outputs"
_UTILS = "vllm.distributed.kv_transfer.kv_connector.utils"
_CORE = "vllm.v1.core"
_MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"

_POOL_METHODS = (
    "get_cached_block",
    "cache_full_blocks",
    "emit_cached_block_events",
    "cache_partial_block",
    "_insert_block_hash",
    "move_block_hashes",
    "get_new_blocks",
    "unpin_blocks",
    "_maybe_evict_cached_block",
    "touch",
    "is_block_writable",
    "free_blocks",
    "evict_blocks",
    "reset_prefix_cache",
    "get_num_free_blocks",
    "get_usage",
    "take_events",
)
_BLOCK_FIELDS = (
    "block_id",
    "ref_cnt",
    "pool",
    "_block_hash",
    "_block_hash_num_tokens",
    "prev_free_block",
    "next_free_block",
    "is_null",
)
_REQUEST_FIELDS = (
    "block_hashes",
    "all_token_ids",
    "lora_request",
    "session_id",
    "mm_features",
    "cache_salt",
    "prompt_embeds",
)
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
)

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
    "pool": (
        Name(f"{_CORE}.block_pool", "BlockPool", methods=_POOL_METHODS),
        Name(
            f"{_CORE}.block_pool",
            "BlockPool.__init__",
            parameters=(
                "num_gpu_blocks",
                "enable_caching",
                "hash_block_size",
                "enable_kv_cache_events",
                "metrics_collector",
                "medium",
            ),
            no_others=True,
            stores=(
                "blocks",
                "free_block_queue",
                "cached_block_hash_to_block",
                "cached_block_hashes_by_block",
                "null_block",
                "kv_event_queue",
                "_reuse_watchers",
            ),
        ),
        Name(
            f"{_CORE}.block_pool",
            "BlockPool.cache_full_blocks",
            parameters=(
                "request",
                "blocks",
                "num_cached_blocks",
                "num_full_blocks",
                "block_size",
                "kv_cache_group_id",
                "block_mask",
            ),
            no_others=True,
        ),
        Name(
            f"{_CORE}.block_pool",
            "BlockPool.cache_partial_block",
            parameters=(
                "request",
                "block",
                "num_tokens",
                "kv_cache_group_id",
                "block_size",
                "replace_existing_hashes",
            ),
            no_others=True,
        ),
        Name(
            f"{_CORE}.block_pool",
            "BlockPool.emit_cached_block_events",
            parameters=("request", "num_cached_blocks", "block_size", "kv_cache_group_id"),
            no_others=True,
        ),
        Name(
            f"{_CORE}.block_pool",
            "BlockHashToBlockMap",
            methods=("get_one_block", "contain", "insert", "pop"),
        ),
        Name(f"{_CORE}.kv_cache_utils", "KVCacheBlock", fields=_BLOCK_FIELDS),
        Name(
            f"{_CORE}.kv_cache_utils",
            "FreeKVCacheBlockQueue",
            methods=("get_all_free_blocks", "iter_blocks_after"),
        ),
        Name(
            f"{_CORE}.kv_cache_utils",
            "generate_block_hash_extra_keys",
            parameters=("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
            no_others=True,
        ),
        Name(f"{_CORE}.kv_cache_utils", "to_event_extra_keys", parameters=("extra_keys",), no_others=True),
        Name(f"{_CORE}.kv_cache_coordinator", "BlockPool"),
        Name(f"{_CORE}.single_type_kv_cache_manager", "SharedEventQueueBlockPool"),
        Name("vllm.v1.hisparse.block_pool", "SharedEventQueueBlockPool", methods=("kv_event_queue",)),
        Name(f"{_CORE}.kv_cache_manager", "KVCacheManager.take_events"),
        Name(
            f"{_CORE}.kv_cache_manager",
            "KVCacheManager.__init__",
            stores=("block_pool", "kv_cache_event_metadata"),
        ),
        Name(
            f"{_CORE}.sched.scheduler",
            "Scheduler.__init__",
            stores=("kv_cache_manager", "kv_event_publisher"),
        ),
        Name("vllm.v1.utils", "ConstantList.__init__", stores=("_x",)),
        Name("vllm.v1.request", "Request.__init__", stores=_REQUEST_FIELDS),
        Name("vllm.envs", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"),
        Name(_EVENTS, "BlockStored", order=_STORED_FIELDS),
        Name(_EVENTS, "BlockRemoved", order=("block_hashes", "medium", "group_idx")),
        Name(_EVENTS, "AllBlocksCleared"),
        Name(_EVENTS, "MEDIUM_GPU"),
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
        others = set(inspect.signature(found).parameters) - set(name.parameters) - {"self"}
        if name.no_others and others:
            return f"{where} has another parameter: {', '.join(sorted(others))}"
    missing = set(name.methods) - set(vars(found) if name.methods else ())
    if missing:
        return f"{where} defines no {', '.join(sorted(missing))}"
    if name.order and getattr(found, "__struct_fields__", ())[: len(name.order)] != name.order:
        return f"the fields of {where} are not {', '.join(name.order)}"
    if name.fields:
        missing = set(name.fields) - _fields(found)
        if missing:
            return f"{where} has no field {', '.join(sorted(missing))}"
    code = getattr(inspect.unwrap(found), "__code__", None)
    missing = {attribute for attribute in name.stores if code is None or attribute not in code.co_names}
    return f"{where} sets no {', '.join(sorted(missing))}" if missing else None


def _fields(cls: type) -> set[str]:
    return {field for base in cls.__mro__ for field in inspect.get_annotations(base)}
