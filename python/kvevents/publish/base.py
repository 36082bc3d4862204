"""What a publisher is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

import msgspec

if TYPE_CHECKING:
    from kvevents.config import KVEventsConfig
    from kvevents.events import EventBatch

__all__ = ["EventPublisher", "MirrorStats", "PublisherStats", "ReplayStats"]


class ReplayStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay server did, in counts since its start."""

    requests: int = 0
    """Requests for a replay."""
    refused: int = 0
    """Requests that were malformed, unknown or too many; each was answered with an error."""
    batches: int = 0
    """Batches that were handed to a client's pipe."""
    completed: int = 0
    """Replays whose end marker was handed over."""
    too_old: int = 0
    """Replays that were asked from before the oldest batch in the log: the wire cannot say so."""
    given_up: int = 0
    """Replays to clients that left, or took nothing for the time limit."""
    active: int = 0
    """Clients that are being served now."""
    extended: int = 0
    """Extended requests, answered with what was asked for or with an error."""
    snapshots: int = 0
    """Snapshots that were begun; each serves all who ask while it helps."""
    snapshot_bytes: int = 0
    """Payload bytes of the snapshots that are kept now."""


class MirrorStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the stream says is resident."""

    blocks: int = 0
    """Resident keys."""
    nbytes: int = 0
    """Bytes of memory, without snapshots."""
    resume_seq: int = 0
    """The first number that is not in it."""
    digest: bytes | None = None
    """Its digest; ``None`` while it is not known (too many batches were dropped), until the next clear."""
    longest_wait_ns: int = 0
    """The longest time for which a batch waited for the mirror, because a snapshot was being made."""


class PublisherStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a publisher did, in counts since its start; taken while it runs, so sums may be off by one."""

    next_sequence: int = 0
    """Number that the next batch gets."""
    sent: int = 0
    """Batches handed to the socket, heartbeats among them."""
    bytes_sent: int = 0
    """Payload bytes of these."""
    queued: int = 0
    """Batches that wait for the sender."""
    dropped: int = 0
    """Batches dropped because the queue was full: each is a hole in the numbers."""
    failed: int = 0
    """Batches that could not be sent at all: each is a hole in the numbers."""
    events_lost: int = 0
    """Events that could not be encoded; after each such batch one number is skipped."""
    heartbeats: int = 0
    """Empty batches sent in silence."""
    unsent: int = 0
    """Batches that were still queued when ``shutdown()`` ran out of time."""
    log_batches: int = 0
    """Batches that can be replayed."""
    log_bytes: int = 0
    """Their payload bytes."""
    oldest: int | None = None
    """Oldest number that can be replayed."""
    epoch: bytes = b""
    """Sixteen random bytes: this life of the publisher."""
    mirror: MirrorStats | None = None
    """The mirror; ``None`` without one."""
    replay: ReplayStats | None = None
    """The replay server's; ``None`` without one."""


class EventPublisher(ABC):
    """Sends batches of one data-parallel rank. vLLM's interface, and ``stats()``.

    The rank is filled in by the publisher, so that a scheduler need not know of ranks. Subclasses get
    ``data_parallel_rank`` and the fields of the configuration as keyword arguments, as far as they name
    them, and every option of ``KVEventsConfig.extra``.
    """

    def __init__(self, data_parallel_rank: int = 0) -> None:
        self._data_parallel_rank = data_parallel_rank

    @abstractmethod
    def publish(self, events: EventBatch) -> None:
        """Hand over one batch. Numbers grow by one a batch; a hole says that something was lost."""

    @abstractmethod
    def shutdown(self) -> Any:
        """Stop, in bounded time; calling it again does nothing."""

    def stats(self) -> PublisherStats:
        """Counts since the start."""
        return PublisherStats()

    def get_publisher_config(self) -> KVEventsConfig | None:
        """The configuration with the addresses that are really used; ``None`` where there is none."""
        return None

    def __enter__(self) -> Self:
        """The publisher itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Shut down."""
        self.shutdown()
