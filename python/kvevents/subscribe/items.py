"""What a subscriber yields. All of them are immutable and know their source."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from kvevents.events import EventList, KVEventBatch

__all__ = ["Batch", "Gap", "Item", "Reset", "Snapshot"]


class Batch(NamedTuple):
    """One batch, in order: every sequence number of a life comes once, as a batch or inside a gap."""

    source: str
    """Name of the source."""
    seq: int
    """Its sequence number."""
    batch: KVEventBatch | None
    """What was decoded; ``None`` when the subscriber was told not to decode."""
    replayed: bool
    """Whether it came from the replay socket."""
    payload: bytes | None = None
    """The bytes as received, when the subscriber was told to keep them."""


class Gap(NamedTuple):
    """Batches ``first`` to ``last`` (both included) will not come: what they did is not known."""

    source: str
    first: int
    last: int
    reason: str
    """``too old`` (no longer in the replay log), ``missing`` (asked for and not there), ``no replay``
    (there is no replay endpoint), ``unreachable`` (it did not answer) or ``poisoned`` (its bytes are
    no batch)."""


class Reset(NamedTuple):
    """Everything known of the source is void: the publisher lives a new life and counts from its start."""

    source: str
    reason: str
    """``restart``, or ``unsure``: the same number came with other contents and nothing could decide."""


class Snapshot(NamedTuple):
    """The whole resident set of a source; replaces what was known."""

    source: str
    resume_seq: int
    """The first sequence number that the snapshot does not contain."""
    events: EventList
    """Stores, parents first."""


Item: TypeAlias = Batch | Gap | Reset | Snapshot
