"""What a subscriber yields. All of them are immutable and know their source."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from kvevents.events import EventList, KVEventBatch

__all__ = ["Batch", "Gap", "Item", "Reset", "Resume", "Resumed", "Snapshot", "StoreOnly"]


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
    epoch: bytes | None = None
    """The life of the publisher, where it says one (the extended replay)."""


class Gap(NamedTuple):
    """Batches ``first`` to ``last`` (both included) will not come: what they did is not known."""

    source: str
    first: int
    last: int
    reason: str
    """``too old`` (no longer in the replay log), ``missing`` (asked for and not there), ``no replay``
    (there is no replay endpoint), ``unreachable`` (it did not answer), ``poisoned`` (its bytes are no batch),
    ``not asked`` (the policy is ``keep_and_flag``), ``drift`` (the batch was yielded, but what it led to is
    not what the publisher has), or why a snapshot could not be had (``mirror_lost``, ``malformed``, ...)."""


class Reset(NamedTuple):
    """Everything known of the source is void. What is known after it is what follows."""

    source: str
    reason: str
    """``restart`` (the publisher lives a new life), ``unsure`` (nobody can tell of which life it was),
    ``gap`` (the policy is ``wipe``, and a gap follows) or ``drift`` (what was yielded led to another
    set than the publisher's)."""


class Snapshot(NamedTuple):
    """The whole resident set of a source; replaces what was known."""

    source: str
    resume_seq: int
    """The first sequence number that the snapshot does not contain."""
    events: EventList
    """Stores, parents first."""
    epoch: bytes | None = None
    """The life of the publisher that it is of."""
    digest: bytes | None = None
    """The digest of the set, which was compared with the events."""


class Resumed(NamedTuple):
    """A source goes on where an earlier reader stopped; see :class:`Resume`.

    What was kept of it holds as of ``last_seq``, since its publisher lives the same life. What cannot be
    resumed is told by :class:`Reset` instead.
    """

    source: str
    last_seq: int
    """The last number of the earlier reader."""


class StoreOnly(NamedTuple):
    """What leaves these media is never announced, so a reader lets their blocks expire.

    Comes where a publisher says so, and again where it says something else than before.
    """

    source: str
    media: tuple[str, ...]
    rank: int = 0
    """The publisher's data-parallel rank."""


class Resume(NamedTuple):
    """Where a reader stopped, for the next one: what it takes to know the same life again."""

    last_seq: int
    """The last number that was applied."""
    epoch: bytes | None = None
    """The life of the publisher, where it says one."""
    ts: float | None = None
    """The time stamp of that batch: without an epoch a life is known by it."""


Item: TypeAlias = Batch | Gap | Reset | Resumed | Snapshot | StoreOnly
