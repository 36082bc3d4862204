"""Payloads to batches and back, in the engines' own formats.

A payload is the third frame of a message: a msgpack array ``[ts, events, rank]``. :func:`decode` tells by
shape what wrote it; :func:`encode` writes the dialect that it is given, to the byte as the engine does.
Both work in columns: no Python object is made per event.
"""

from __future__ import annotations

from typing import Final

from kvevents._core import EventList, decode_batch, dialects, encode_batch, encode_batch_reporting
from kvevents.events import EventBatch, KVEventBatch

__all__ = ["DIALECTS", "decode", "encode", "encode_reporting"]

DIALECTS: Final[tuple[str, ...]] = tuple(dialects())
"""The dialects that can be written, newest first."""


def decode(payload: bytes | bytearray | memoryview, *, strict: bool = False) -> KVEventBatch:
    """Read one payload.

    ``ts`` stays an integer where it was one. ``events`` is an :class:`EventList`. An event that cannot be
    read costs that event: it is left out and stands in ``batch.events.skipped`` with a one-word reason
    (``truncated``, ``unknown_tag``, ``bad_field``, ``missing_field``, ``not_an_event``, ``too_deep``,
    ``trailing_bytes``). With ``strict`` it is a :class:`~kvevents.errors.DecodeError` that says event,
    field, byte offset and what was seen. A payload that is no batch at all is a ``DecodeError`` in both
    modes. Safe on bytes from anywhere: memory is bounded by the size of the payload, nesting is bounded.

    Any thread may call this; payloads of 256 KiB and more are read without the interpreter lock.
    """
    # Only `bytes` may be read while other threads run. A number would become as many zero bytes.
    data = payload if isinstance(payload, bytes) else bytes(memoryview(payload))
    ts, rank, events = decode_batch(data, strict)
    return KVEventBatch(ts, events, rank)


def encode(
    batch: EventBatch,
    *,
    dialect: str = "vllm-map-0.33",
    lossy: bool = False,
    metadata: bool = False,
) -> bytes:
    """Write one batch as the engine of ``dialect`` (one of :data:`DIALECTS`) would.

    ``batch.events`` is an :class:`EventList` or an iterable of events, ours or an engine's own Structs.
    A field that is set and has no place in the dialect is an :class:`~kvevents.errors.EncodeError` that
    names event and field; ``lossy`` leaves such fields out instead. ``metadata`` writes the events'
    ``metadata`` under that name (maps only): strict readers refuse it, so it is asked for. Unknown fields
    that a decoder kept (``other_fields``) follow the known ones in map dialects.
    """
    return encode_batch(
        batch.events, batch.ts, batch.data_parallel_rank, dialect, lossy=lossy, metadata=metadata
    )


def encode_reporting(
    events: EventList,
    ts: float,
    rank: int | None,
    *,
    dialect: str = "vllm-map-0.33",
    lossy: bool = False,
    metadata: bool = False,
    detach: bool | None = None,
) -> tuple[bytes, list[tuple[int, str, str]]]:
    """Write what can be written: the payload, and ``(index, field, reason)`` of each event left out.

    The form for a sender, where one event must not cost the others. ``detach`` says whether the
    interpreter lock is released meanwhile; ``None`` releases it for large batches only.
    """
    return encode_batch_reporting(events, ts, rank, dialect, lossy=lossy, metadata=metadata, detach=detach)
