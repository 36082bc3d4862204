"""Who holds the longest prefix of a prompt.

:class:`PrefixIndex` follows the streams of any number of sources (an engine's data-parallel rank each)
and answers from token ids, or from hashes of a named source. What a block holds is known by a key of the
index's own, so that engines with different hash functions, seeds or block sizes share one index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvevents import _core
from kvevents._core import Matches
from kvevents.errors import EventTypeError, PickleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvevents.subscribe.items import Item, Resume

__all__ = ["Match", "Matches", "PrefixIndex"]


class Match(NamedTuple):
    """How much of a prompt one source holds; lengths count tokens from the start of the prompt."""

    source: str
    """Name of the source; of the owner, for a shared tier."""
    rank: int
    """Data-parallel rank."""
    tokens: int
    """Usable over all tiers together."""
    block_size: int
    """Tokens in a block of the source; 1 where it never said, then lengths count blocks."""
    alone: dict[str, int]
    """By tier: what that tier holds without the others."""
    cumulative: dict[str, int]
    """By tier: usable from it and all nearer tiers together."""
    complete: bool
    """Whether everything that the source said is known; otherwise it may hold more, or less."""
    owner: bool = False
    """Whether this is the owner of a shared tier rather than an engine."""
    expected: int = 0
    """Usable once the blocks that :meth:`PrefixIndex.expect` named have come; at least ``tokens``."""

    @property
    def blocks(self) -> int:
        """Usable blocks over all tiers together."""
        return self.tokens // self.block_size if self.block_size else 0


class PrefixIndex(_core.PrefixIndex):
    """An index over the streams of many sources.

    - ``seed`` enters all content keys; a random one by default, so that nobody can choose prompts that
      collide.
    - ``orphan_blocks``: how many blocks of one source may wait for their parent; ``expected_blocks``: how
      many may be expected.
    - ``digests=False`` saves the digests' time.
    - ``expires_s``: life of the blocks of sources that never announce removals.
    - ``clock``: seconds, of the caller's own; ``data``: see :meth:`load`.

    All methods may be called from any number of threads; each source has a lock of its own, and no question
    holds one for longer than 128 look-ups take. One index is for one model: what the model is, is no part
    of a block's content.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        orphan_blocks: int = 65_536,
        expected_blocks: int = 65_536,
        digests: bool = True,
        expires_s: float = 600.0,
        clock: Callable[[], float] | None = None,
        data: bytes | None = None,
    ) -> None:
        del seed, orphan_blocks, expected_blocks, digests, expires_s, clock  # `__new__` has taken them
        note = _Note() if data is None else _read_note(self.note)
        self._rank_of = note.ranks
        self._points = note.points

    def apply_item(self, item: Item) -> None:
        """Apply what a subscriber yields.

        That is a ``Batch``, ``Snapshot``, ``Reset``, ``Gap``, ``Resumed`` or ``StoreOnly``.

        The rank is the batch's. A snapshot names none: it belongs to the rank that the source was heard with
        (or added, see :meth:`add_source`). What comes before any batch belongs to rank 0, and then so does
        all that follows.

        :raises EventTypeError: it is none of these, or was not decoded; nothing was changed.
        """
        from kvevents.subscribe.items import Batch, Gap, Reset, Resumed, Snapshot, StoreOnly  # noqa: PLC0415 - zmq only where used

        match item:
            case Batch():
                if item.batch is None:
                    raise EventTypeError(
                        f"Batch {item.seq} of {item.source!r} was not decoded: "
                        "use apply(source, rank, seq, item.payload)"
                    )
                rank = self._rank_of.get(item.source)
                if rank is None:
                    rank = _rank_in(item.batch.data_parallel_rank)
                self.apply_events(item.source, rank, item.batch.events, seq=item.seq, checked=False)
                # Behind what was applied: a dump that is written now may hold more than its point says.
                self._points[item.source] = (item.seq, item.epoch, _stamp(item.batch.ts))
            case Snapshot():
                rank = self._rank(item.source, 0)
                if self.apply_snapshot(item.source, rank, item.events, resume_seq=item.resume_seq):
                    self._points[item.source] = (item.resume_seq - 1, item.epoch, None)
            case Reset():
                self._points.pop(item.source, None)
                self.reset(item.source)
            case Resumed():
                self.confirm(item.source)
            case StoreOnly():
                self.add_source(
                    item.source, self._rank(item.source, _rank_in(item.rank)), store_only=item.media
                )
            case Gap():
                if not self.mark_incomplete(item.source, last_seq=item.last):
                    # Nothing was heard of it before: what was missed is all the more missing.
                    rank = self._rank_of.setdefault(item.source, 0)
                    self.add_source(item.source, rank)
                    self.mark_incomplete(item.source, rank, last_seq=item.last)
            case _:
                raise EventTypeError(f"a subscriber's item was expected, saw {type(item).__name__}")

    def _rank(self, source: str, default: int) -> int:
        """The rank with which a source was heard; if it was not, this is it from now on."""
        ranks = {s["rank"] for s in self.stats() if s["source"] == source and not s["owner"]}
        return ranks.pop() if len(ranks) == 1 else self._rank_of.setdefault(source, default)

    def resume_points(self) -> dict[str, Resume]:
        """Where the subscriptions of a loaded index go on: ``Subscriber(..., resume=index.resume_points())``.

        By the name of the source; known of those whose items came through :meth:`apply_item`.
        """
        from kvevents.subscribe.items import Resume  # noqa: PLC0415 - as in apply_item

        there = {s["source"] for s in self.stats() if not s["owner"]}
        return {
            name: Resume(*point) for name, point in self._points.items() if point[0] >= 0 and name in there
        }

    def drop(self, source: str, rank: int | None = None, *, owner: bool = False) -> bool:
        """Forget a source, or the ``owner`` of a shared tier; whether it was known. All ranks for ``None``.

        Its events that arrive later are ignored until it is added again; there is nothing to resume then.
        What it told of shared tiers stays: that belongs to their owner.
        """
        if not owner and rank in {None, self._rank_of.get(source, 0)}:
            self._rank_of.pop(source, None)
            self._points.pop(source, None)
        return super().drop(source, rank, owner=owner)

    def dump(self) -> bytes:
        """Return the index as bytes, for :meth:`load`. Sources may go on changing meanwhile."""
        return self.to_dump(msgspec.msgpack.encode(_Note(dict(self._rank_of), dict(self._points))))

    @property
    def tiers(self) -> list[str]:
        """Names of the tiers: the known ones, nearest first, then unknown media under their own names."""
        return self.to_tiers()

    def stats(self) -> list[dict[str, Any]]:
        """Return every source's state and counters."""
        return self.to_stats()

    @classmethod
    def load(
        cls,
        data: bytes,
        *,
        orphan_blocks: int = 65_536,
        expected_blocks: int = 65_536,
        digests: bool = True,
        expires_s: float = 600.0,
        clock: Callable[[], float] | None = None,
    ) -> PrefixIndex:
        """Make an index from :meth:`dump`; its seed comes with it.

        Answers are ``complete=False``, and there are no digests, until the publisher of a source is known
        to live the same life still: give :meth:`resume_points` to the subscriber, which says ``Resumed`` or
        ``Reset``. With sockets of your own resume each source after its ``last_seq`` (see :meth:`stats`)
        and call :meth:`confirm`, or :meth:`reset`. Applying again what came after ``last_seq`` makes a
        source exact that changed while the dump was written.

        :raises PickleError: bytes that are no dump of this version, or are damaged.
        """
        return cls(
            data=data,
            orphan_blocks=orphan_blocks,
            expected_blocks=expected_blocks,
            digests=digests,
            expires_s=expires_s,
            clock=clock,
        )


class _Note(msgspec.Struct, array_like=True):
    """What a dump says beside the core's data."""

    ranks: dict[str, int] = {}
    points: dict[str, tuple[int, bytes | None, float | None]] = {}


def _read_note(data: bytes) -> _Note:
    try:
        return msgspec.msgpack.decode(data, type=_Note)
    except msgspec.DecodeError as e:
        raise PickleError(f"the dump's note cannot be read: {e}") from e


def _rank_in(rank: int | None) -> int:
    """What a batch says may be any number; what can be no rank counts as none."""
    return rank if rank is not None and 0 <= rank < 2**32 else 0


def _stamp(ts: object) -> float | None:
    return float(ts) if isinstance(ts, int | float) else None
