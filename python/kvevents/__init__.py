"""KV-cache events for LLM inference engines."""

from __future__ import annotations

import warnings

from kvevents import errors
from kvevents._core import BUILD_PROFILE, EventList, __version__
from kvevents.codec import DIALECTS, decode, encode
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
from kvevents.resident import ResidentKey, ResidentSet
from kvevents.tokens import BlockHashes, TokenBlocks, hash_blocks, narrow_hash

__all__ = [
    "DIALECTS",
    "MEDIUM_CPU",
    "MEDIUM_GPU",
    "MEDIUM_STORAGE",
    "AllBlocksCleared",
    "BlockHashes",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventList",
    "ExternalBlockHash",
    "KVCacheEvent",
    "KVEventBatch",
    "ResidentKey",
    "ResidentSet",
    "Skipped",
    "TokenBlocks",
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
