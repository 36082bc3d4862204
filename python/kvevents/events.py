"""The events that engines publish, as vLLM names them.

Hot paths pass :class:`EventList` around: events in columns, no object per event. The Structs here are
made only when somebody iterates or indexes one, or are built by engines that make their own events.

Names, fields and order follow ``vllm.distributed.kv_events`` of vLLM 0.33. Added, keyword-only:
``metadata`` (free, travels between processes and through sinks, on the wire only when asked for),
``cache_salt`` (SGLang's key) and ``other_fields`` (what a decoded event carried that is not known).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from kvevents._core import EventList
from kvevents.errors import PickleError

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_GPU",
    "MEDIUM_STORAGE",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventList",
    "ExternalBlockHash",
    "KVCacheEvent",
    "KVEventBatch",
    "Skipped",
    "dec_hook",
    "enc_hook",
]

Sequence.register(EventList)

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"

ExternalBlockHash: TypeAlias = bytes | int
"""A block hash: an integer of 64 bits, or up to 64 bytes. Opaque."""


def _freeze(value: Any) -> Any:
    """Lists inside a list become tuples, so that the entries can be hashed and compared."""
    if isinstance(value, list):
        return [_tuples(v) for v in value]
    return value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, (list, tuple)) else value


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True, kw_only=True):
    """Base of the three events.

    Two events are equal when all fields are; ``hash`` leaves ``metadata`` and ``other_fields`` out.
    """

    metadata: dict[str, Any] | None = None
    other_fields: dict[str, Any] | None = None


class BlockStored(KVCacheEvent):
    """Blocks became resident: a run of a sequence, in order.

    Fields are vLLM's. ``token_ids`` holds ``len(block_hashes) * block_size`` ids; ``extra_keys`` and
    ``lookahead_token_ids``, where set, one entry per block. ``parent_block_hash`` is the hash of the
    block before the first, ``None`` at the root of a sequence. Lists inside ``extra_keys`` become
    tuples, as they are in the engine's process, so that an event can be hashed after any round trip.
    """

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[Any] | None = None
    cache_salt: str | None = msgspec.field(default=None)

    def __post_init__(self) -> None:
        """Normalise what a decoder gives as lists."""
        if self.extra_keys is not None:
            self.extra_keys = _freeze(self.extra_keys)

    def __hash__(self) -> int:
        """Hash of the content; ``metadata`` and ``other_fields`` are left out."""
        return hash(
            (
                tuple(self.block_hashes),
                self.parent_block_hash,
                _tuples(self.token_ids),
                self.block_size,
                self.lora_id,
                self.medium,
                self.lora_name,
                None if self.extra_keys is None else tuple(self.extra_keys),
                self.group_idx,
                self.kv_cache_spec_kind,
                self.kv_cache_spec_sliding_window,
                self.locality,
                self.ownership,
                self.session_id,
                _tuples(self.lookahead_token_ids),
                self.cache_salt,
            )
        )


class BlockRemoved(KVCacheEvent):
    """Blocks are no longer resident in this tier."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None

    def __hash__(self) -> int:
        """Hash of the content; ``metadata`` and ``other_fields`` are left out."""
        return hash((tuple(self.block_hashes), self.medium, self.group_idx, self.locality, self.ownership))


class AllBlocksCleared(KVCacheEvent):
    """Nothing is resident any more, in any tier of this rank."""

    def __hash__(self) -> int:
        """All clears are alike."""
        return hash(AllBlocksCleared)


if TYPE_CHECKING:
    Events: TypeAlias = EventList | list[KVCacheEvent]
else:
    # msgspec decodes this field by `dec_hook`, which takes columns as well as a list of events.
    Events = EventList


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Base of what one message carries, as in vLLM."""

    ts: float
    events: Any
    data_parallel_rank: int | None = None


class KVEventBatch(EventBatch):
    """What one message carries: a time stamp (seconds), events, and the data-parallel rank.

    ``events`` is an :class:`EventList` or a list of events. Inside somebody else's msgspec Struct, encode
    with ``enc_hook=kvevents.enc_hook`` and decode with ``dec_hook=kvevents.dec_hook``.
    """

    events: Events


class Skipped(msgspec.Struct, frozen=True):
    """An event of a decoded batch that was left out."""

    index: int
    """Position in the batch as it was on the wire."""
    reason: str
    """One word: the counter that it goes into."""
    detail: str
    """What was seen, and where."""


def enc_hook(obj: Any) -> Any:
    """For msgspec encoders: an :class:`EventList` travels as one ``bytes`` of columns."""
    if isinstance(obj, EventList):
        return obj.to_bytes()
    msg = f"objects of type {type(obj).__name__} are not supported"
    raise NotImplementedError(msg)


def dec_hook(expected: type, obj: Any) -> Any:
    """For msgspec decoders of any format: the inverse of :func:`enc_hook`; also takes event maps."""
    if expected is EventList:
        if isinstance(obj, (bytes, bytearray, memoryview)):
            return EventList.from_bytes(bytes(obj))
        if isinstance(obj, str):  # what the text formats make of bytes
            try:
                return EventList.from_bytes(base64.b64decode(obj, validate=True))
            except binascii.Error as e:
                raise PickleError(f"not a valid pickled EventList: {e}") from e
        return EventList(msgspec.convert(obj, list[BlockStored | BlockRemoved | AllBlocksCleared]))
    msg = f"objects of type {expected.__name__} are not supported"
    raise NotImplementedError(msg)
