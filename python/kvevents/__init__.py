"""KV-cache events for LLM inference engines."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from kvevents import errors
from kvevents._core import BUILD_PROFILE, EventList, __version__
from kvevents.aggregate import Aggregator, AggregatorStats, KVEventAggregator, Quorum
from kvevents.codec import DIALECTS, decode, encode
from kvevents.config import KVEventsConfig
from kvevents.events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ExternalBlockHash,
    KVCacheEvent,
    KVEventBatch,
    Skipped,
    dec_hook,
    enc_hook,
)
from kvevents.pool import BlockIds, BlockPool, EventQueue, KVCacheGroup, PoolStats
from kvevents.resident import ResidentKey, ResidentSet
from kvevents.tokens import BlockHashes, TokenBlocks, hash_blocks, narrow_hash

if TYPE_CHECKING:
    from kvevents.collector import KVEventCollector
    from kvevents.index import Match, Matches, PrefixIndex
    from kvevents.publish import (
        EventPublisher,
        EventPublisherFactory,
        NullEventPublisher,
        PublisherStats,
        ReplayStats,
        ZmqEventPublisher,
    )
    from kvevents.sinks import EventSink, EventSinkFactory
    from kvevents.subscribe import AsyncSubscriber, FileSources, Source, Subscriber

__all__ = [
    "DIALECTS",
    "MEDIUM_CPU",
    "MEDIUM_GPU",
    "MEDIUM_STORAGE",
    "Aggregator",
    "AggregatorStats",
    "AllBlocksCleared",
    "AsyncSubscriber",
    "BlockHashes",
    "BlockIds",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventList",
    "EventPublisher",
    "EventPublisherFactory",
    "EventQueue",
    "EventSink",
    "EventSinkFactory",
    "ExternalBlockHash",
    "FileSources",
    "KVCacheEvent",
    "KVCacheGroup",
    "KVEventAggregator",
    "KVEventBatch",
    "KVEventCollector",
    "KVEventsConfig",
    "Match",
    "Matches",
    "NullEventPublisher",
    "PoolStats",
    "PrefixIndex",
    "PublisherStats",
    "Quorum",
    "ReplayStats",
    "ResidentKey",
    "ResidentSet",
    "Skipped",
    "Source",
    "Subscriber",
    "TokenBlocks",
    "ZmqEventPublisher",
    "__version__",
    "dec_hook",
    "decode",
    "enc_hook",
    "encode",
    "errors",
    "hash_blocks",
    "narrow_hash",
]

if BUILD_PROFILE != "release":
    warnings.warn(
        f"kvevents._core is a {BUILD_PROFILE} build, several times slower than a release build "
        "(`make wheel`, or `make develop`)",
        RuntimeWarning,
        stacklevel=2,
    )

# Names whose modules import pyzmq, or that few programs use: imported when they are first asked for.
_LAZY = {
    "AsyncSubscriber": "kvevents.subscribe",
    "FileSources": "kvevents.subscribe",
    "EventSink": "kvevents.sinks",
    "EventSinkFactory": "kvevents.sinks",
    "KVEventCollector": "kvevents.collector",
    "EventPublisher": "kvevents.publish",
    "EventPublisherFactory": "kvevents.publish",
    "Match": "kvevents.index",
    "Matches": "kvevents.index",
    "NullEventPublisher": "kvevents.publish",
    "PrefixIndex": "kvevents.index",
    "PublisherStats": "kvevents.publish",
    "ReplayStats": "kvevents.publish",
    "ZmqEventPublisher": "kvevents.publish",
    "Source": "kvevents.subscribe",
    "Subscriber": "kvevents.subscribe",
}


def __getattr__(name: str) -> Any:
    """Names of the lazy modules."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'kvevents' has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - on first use, as the modules themselves

    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lazy names too."""
    return sorted(globals().keys() | _LAZY.keys())
