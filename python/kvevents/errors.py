"""Exceptions. Each inherits from :class:`KVEventsError` and from the builtin that fits."""

from __future__ import annotations

from typing import Any

__all__ = [
    "AggregatorError",
    "AggregatorTypeError",
    "BlockError",
    "BlockTypeError",
    "ConfigError",
    "ConnectorError",
    "DecodeError",
    "EncodeError",
    "EndpointInUseError",
    "EventError",
    "EventTypeError",
    "ForkError",
    "KVEventsError",
    "NoFreeBlocksError",
    "PickleError",
    "PublisherClosedError",
    "PublisherError",
    "RecordError",
    "RecordingError",
    "SequenceError",
    "TokenError",
    "TokenTypeError",
    "TraceError",
    "WorkerIndexError",
]


class KVEventsError(Exception):
    """Base of everything that this package raises on purpose."""


class EventError(KVEventsError, ValueError):
    """An event's field holds a value that no engine can mean; says which event, field and value."""


class EventTypeError(KVEventsError, TypeError):
    """Something that is not an event, or a field of the wrong type."""


class ConnectorError(KVEventsError, RuntimeError):
    """A connector that failed, or was used against its contract; names the child.

    ``events`` holds what the other children gave in the same call, so that it is not lost with the failure.
    """

    events: Any = None


class RecordError(KVEventsError, ValueError):
    """A ticket or blocks that a recorder does not have: nothing was changed."""


class PickleError(KVEventsError, ValueError):
    """Bytes that are not a pickle of this package, are damaged, or are of another version."""


class TokenError(KVEventsError, ValueError):
    """A token id outside of 32 bits; says its position. The request is as it was."""


class TokenTypeError(KVEventsError, TypeError):
    """A token id that is no integer, or something that holds no token ids. The request is as it was."""


class DecodeError(KVEventsError, ValueError):
    """A payload that is no batch of events, or (``strict=True``) a bad event in one."""

    event: int | None = None
    """Position of the event in the batch; ``None`` where the payload is no batch."""
    field: str | None = None
    """The field, by its name on the wire."""
    reason: str | None = None
    """The word that lenient decoding counts it under (see ``Skipped.reason``)."""
    offset: int | None = None
    """Where the value stands, in bytes from the start of the payload."""


class EncodeError(KVEventsError, ValueError):
    """An event that the dialect has no place for; says which event and field."""

    event: int | None = None
    """Position of the event in the batch."""
    field: str | None = None
    """The field, by vLLM's name."""


class BlockError(KVEventsError, ValueError):
    """A call to the pool that cannot be meant: nothing was changed."""


class BlockTypeError(KVEventsError, TypeError):
    """An argument of the pool that is of another type than what is asked for: nothing was changed."""


class NoFreeBlocksError(BlockError):
    """More blocks were asked for than are free: nothing was changed."""


class ConfigError(KVEventsError, ValueError):
    """A setting that cannot work; says which and why."""


class PublisherError(KVEventsError, RuntimeError):
    """A publisher that cannot do what was asked."""


class PublisherClosedError(PublisherError):
    """Publishing after ``shutdown()``."""


class ForkError(PublisherError):
    """A publisher or subscriber used in a process that was forked from its owner."""


class EndpointInUseError(PublisherError, OSError):
    """The address cannot be bound: another process, or another rank, has it."""


class SequenceError(KVEventsError, ValueError):
    """A sequence number that cannot follow those before it, or the reserved one (2^64-1)."""


class TraceError(KVEventsError, ValueError):
    """A trace or capture file with a broken line; says the line number and what was seen."""


class RecordingError(KVEventsError, ValueError):
    """A recording of a stream that is none, or is damaged in its middle; says at which byte."""


class AggregatorError(KVEventsError, ValueError):
    """A rule, or a number of workers, that cannot work: nothing was changed."""


class AggregatorTypeError(AggregatorError, TypeError):
    """Something that is no rule, or events that do not say which worker they came from."""


class WorkerIndexError(AggregatorError, IndexError):
    """A worker that does not exist: nothing was changed."""
