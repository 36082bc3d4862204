"""Who holds the longest prefix of a prompt.

:class:`PrefixIndex` follows the streams of any number of sources (an engine's data-parallel rank each)
and answers from token ids, or from hashes of a named source. What a block holds is known by a key of the
index's own, so that engines with different hash functions, seeds or block sizes share one index.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from kvevents import _core
from kvevents._core import EventList, Matches
from kvevents.errors import EventTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Buffer

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
    """Tokens in a block of the source."""
    alone: dict[str, int]
    """By tier: what that tier holds without the others."""
    cumulative: dict[str, int]
    """By tier: usable from it and all nearer tiers together."""
    complete: bool
    """Whether everything that the source said is known; otherwise it may hold more, or less."""
    owner: bool
    """Whether this is the owner of a shared tier rather than an engine."""

    @property
    def blocks(self) -> int:
        """Usable blocks over all tiers together."""
        return self.tokens // self.block_size if self.block_size else 0


class _Source:
    __slots__ = ("expires_s", "number")

    def __init__(self, number: int, expires_s: float | None) -> None:
        self.number = number
        self.expires_s = expires_s


class PrefixIndex:
    """An index over the streams of many sources.

    - ``seed`` enters all content keys; a random one by default, so that nobody can choose prompts that
      collide.
    - ``orphan_blocks``: how many blocks of one source may wait for their parent.
    - ``expires_s``: life of blocks of sources that never announce removals (``emits_removals=False``).

    All methods may be called from any number of threads; each source has a lock of its own.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        orphan_blocks: int = 65_536,
        digests: bool = True,
        expires_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "big")
        self._core = _core.PrefixIndex(seed=seed, orphan_blocks=orphan_blocks, digests=digests)
        self._orphan_blocks = orphan_blocks
        self._digests = digests
        self._expires_s = expires_s
        self._clock = clock
        # Seconds since the index was made, so that they fit 32 bits whatever the clock.
        self._epoch = clock()
        self._sources: dict[tuple[str, int], _Source] = {}

    def _now(self) -> int:
        return max(0, int(self._clock() - self._epoch))

    def add_source(self, source: str, rank: int = 0, *, emits_removals: bool = True) -> None:
        """Make a source known; one that never announces removals has its blocks expire.

        Sources that are not added are made at their first event, and are taken to announce removals.
        """
        number = self._core.source(source, rank)
        self._sources[source, rank] = _Source(number, None if emits_removals else self._expires_s)

    def _number(self, source: str, rank: int) -> int:
        known = self._sources.get((source, rank))
        if known is None:
            known = self._sources.setdefault((source, rank), _Source(self._core.source(source, rank), None))
        return known.number

    # ---------------------------------------------------------------- events in

    def apply(self, source: str, rank: int, seq: int | None, payload: bytes) -> int:
        """Apply one message's payload; returns its number of events.

        ``seq`` is its sequence number: one that does not follow the last marks the source as not complete.
        No Python object is made per block. Raises :class:`kvevents.errors.DecodeError` for a payload that
        is no batch; the source is then not complete.
        """
        return self._core.apply(self._number(source, rank), seq, payload, now=self._now())

    def apply_events(
        self, source: str, rank: int, events: EventList | Iterable[Any], *, seq: int | None = None
    ) -> None:
        """Apply events that are decoded already."""
        columns = events if isinstance(events, EventList) else EventList(events)
        self._core.apply_events(self._number(source, rank), seq, columns, now=self._now())

    def apply_snapshot(
        self, source: str, rank: int, events: EventList, *, resume_seq: int | None = None
    ) -> None:
        """Replace all that is known of a source by a snapshot that is exact at ``resume_seq``."""
        last = None if resume_seq is None else resume_seq - 1
        self._core.apply_events(self._number(source, rank), last, events, now=self._now(), snapshot=True)

    def apply_item(self, item: Any) -> None:
        """Apply what a subscriber yields: ``Batch``, ``Snapshot``, ``Reset`` or ``Gap``."""
        from kvevents.subscribe.items import Batch, Gap, Reset, Snapshot  # noqa: PLC0415 - zmq only where used

        source = str(item.source)
        if isinstance(item, Batch):
            if item.batch is None:
                how = "use apply(source, rank, seq, item.payload)"
                msg = f"batch {item.seq} of {source!r} was not decoded: {how}"
                raise EventTypeError(msg)
            rank = item.batch.data_parallel_rank or 0
            self.apply_events(source, rank, item.batch.events, seq=item.seq)
        elif isinstance(item, Snapshot):
            self.apply_snapshot(source, 0, item.events, resume_seq=item.resume_seq)
        elif isinstance(item, Reset):
            for number in self._numbers(source):
                self._core.reset(number)
        elif isinstance(item, Gap):
            for number in self._numbers(source):
                self._core.mark_incomplete(number)

    def _numbers(self, source: str) -> list[int]:
        return [known.number for (name, _), known in self._sources.items() if name == source]

    # ---------------------------------------------------------------- answers out

    def find(
        self,
        token_ids: Sequence[int] | Buffer | None = None,
        *,
        block_hashes: Sequence[bytes | int] | None = None,
        source: str | None = None,
        rank: int = 0,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        mm: Sequence[tuple[str, int, int]] = (),
    ) -> Matches:
        """Return who holds a prefix, longest first; ties in the order in which sources came.

        From ``token_ids`` (any integer buffer or sequence; with ``lora_name``, ``cache_salt`` and the
        multimodal features ``(identifier, offset, length)``) over all sources, or from ``block_hashes``
        of the named ``source``, which need not be known by their tokens.
        """
        if block_hashes is not None and token_ids is None:
            if source is None:
                msg = "find(block_hashes=...) needs source=: hashes mean something to their own engine only"
                raise TypeError(msg)
            return self._core.find_hashes(self._number(source, rank), block_hashes)
        if token_ids is None or block_hashes is not None:
            msg = "find() takes either token_ids or block_hashes with source="
            raise TypeError(msg)
        return self._core.find(token_ids, lora_name=lora_name, cache_salt=cache_salt, mm=mm or None)

    def find_many(
        self,
        prompts: Sequence[Sequence[int] | Buffer],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> list[Matches]:
        """Return the answers for many prompts in one call, which lets other threads run."""
        return self._core.to_find_many(prompts, lora_name=lora_name, cache_salt=cache_salt)

    def digest(self, source: str, rank: int = 0) -> bytes | None:
        """Return the digest of what a source holds, as its publisher computes it.

        ``None`` where it is not valid: something could not be applied, expired, or was dropped.
        """
        return self._core.digest(self._number(source, rank))

    # ---------------------------------------------------------------- upkeep

    def mark_incomplete(self, source: str, rank: int = 0) -> None:
        """Say that something of a source is missing."""
        self._core.mark_incomplete(self._number(source, rank))

    def reset(self, source: str, rank: int = 0) -> None:
        """Forget what a source holds, as after its restart."""
        self._core.reset(self._number(source, rank))

    def drop(self, source: str, rank: int | None = None) -> bool:
        """Forget a source (one rank or all). Its events that arrive later make a new one.

        Blocks of shared tiers that it told of stay: they belong to their owner. Returns whether it was known.
        """
        keys = [k for k in self._sources if k[0] == source and rank in (None, k[1])]
        dropped = [self._core.drop_source(self._sources.pop(k).number) for k in keys]
        return any(dropped)

    def clear_tier(self, source: str, tier: str, rank: int = 0) -> int:
        """Forget what a source holds in one tier (``GPU``, ``CPU``, ``STORAGE``, ...). Returns the blocks."""
        return self._core.clear_tier(self._number(source, rank), tier)

    def expire(self) -> int:
        """Forget blocks of store-only sources past their time. Call it now and then; returns the blocks."""
        now, gone = self._now(), 0
        for known in list(self._sources.values()):
            if known.expires_s is not None and now > known.expires_s:
                gone += self._core.expire(known.number, int(now - known.expires_s))
        return gone

    @property
    def tiers(self) -> list[str]:
        """Names of the tiers: the known ones, then unknown media under their own names."""
        return self._core.tiers

    def stats(self) -> list[dict[str, Any]]:
        """Return every source's state and counters; ``last_seen`` counts seconds since the index was made."""
        return self._core.to_stats()

    def dump(self) -> bytes:
        """Return the index as bytes, for a restart without a cold start."""
        return self._core.dump()

    @classmethod
    def load(
        cls,
        data: bytes,
        *,
        orphan_blocks: int = 65_536,
        digests: bool = True,
        expires_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> PrefixIndex:
        """Make an index from :meth:`dump`. Raises :class:`kvevents.errors.PickleError` for other bytes.

        Sources keep their sequence numbers: resume each subscription after its ``last_seq``.
        """
        self = cls(seed=0, orphan_blocks=orphan_blocks, digests=digests, expires_s=expires_s, clock=clock)
        self._core = _core.PrefixIndex.load(data, orphan_blocks=orphan_blocks, digests=digests)
        for s in self._core.to_stats():
            if not s["owner"]:
                self._sources[s["name"], s["rank"]] = _Source(s["source"], None)
        return self
