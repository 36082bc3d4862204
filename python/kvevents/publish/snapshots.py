"""Snapshots of the mirror: made piece by piece, kept for as long as they help, shared by all who ask."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvevents._core import EventList, encode_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvevents._core import Mirror, ReplayLog
    from kvevents.publish.holes import Holes

__all__ = ["Snapshot", "Snapshots"]

PIECE_BYTES = 1024 * 1024
"""About the largest payload of a piece."""
STEP_BLOCKS = 32 * 1024
"""Blocks that are walked over before the other clients have their turn."""
IDLE_S = 30.0
"""A snapshot for which nobody asked for so long is dropped."""
KEPT = 2
"""So many, so that a client may finish an older one while a newer one is being made."""


class Snapshot:
    """One snapshot: the payloads of its pieces as far as they are made."""

    __slots__ = ("_clock", "blocks", "digest", "done", "pieces", "resume_seq", "used")

    def __init__(self, resume_seq: int, digest: bytes, blocks: int, clock: Callable[[], float]) -> None:
        self.resume_seq = resume_seq
        self.digest = digest
        self.blocks = blocks
        self.pieces: list[bytes] = []
        self.done = False
        self._clock = clock
        self.used = clock()

    def touch(self) -> None:
        """Somebody still wants it."""
        self.used = self._clock()


class Snapshots:
    """Belongs to the replay server's thread.

    ``wall`` stamps the pieces, ``clock`` measures idleness; ``piece_bytes`` in place of :data:`PIECE_BYTES`.
    """

    def __init__(
        self,
        mirror: Mirror,
        log: ReplayLog,
        holes: Holes,
        dialect: str,
        rank: int,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        piece_bytes: int | None = None,
    ) -> None:
        self._mirror = mirror
        self._log = log
        self._holes = holes
        self._dialect = dialect
        self._rank = rank
        self._wall = wall
        self._clock = clock
        self._piece_bytes = piece_bytes
        self._kept: list[Snapshot] = []
        self._making: Snapshot | None = None
        self.made = 0

    @property
    def making(self) -> bool:
        """Whether there is something to :meth:`step`."""
        return self._making is not None

    @property
    def kept_bytes(self) -> int:
        """Payload bytes of what is kept."""
        return sum(len(piece) for snapshot in list(self._kept) for piece in list(snapshot.pieces))

    def get(self, resume_seq: int) -> Snapshot | None:
        """The snapshot that is exact at this number, if it is kept (still)."""
        for snapshot in self._kept:
            if snapshot.resume_seq == resume_seq:
                snapshot.touch()
                return snapshot
        return None

    def current(self, at_least: int) -> Snapshot | None:
        """One from which a reader can go on; a new one is begun where there is none.

        ``None``: one is being made that does not help any more; ask again when it is done.
        """
        if self._kept:
            newest = self._kept[-1]
            if newest.resume_seq >= min(at_least, self._mirror.resume_seq) and self._helps(newest.resume_seq):
                newest.touch()
                return newest
        return None if self._making is not None else self._begin()

    def _helps(self, resume_seq: int) -> bool:
        """Whether everything behind it can be replayed."""
        if self._holes.last >= resume_seq:
            return False
        oldest, newest = self._log.oldest, self._log.newest
        return newest is None or resume_seq > newest or (oldest is not None and oldest <= resume_seq)

    def _begin(self) -> Snapshot | None:
        head = self._mirror.begin_snapshot(self._piece_bytes or PIECE_BYTES)
        if head is None:
            return None
        snapshot = Snapshot(*head, self._clock)
        self._kept = [s for s in self._kept if s.resume_seq != snapshot.resume_seq][1 - KEPT :]
        self._kept.append(snapshot)
        self._making = snapshot
        self.made += 1
        return snapshot

    def step(self) -> None:
        """Make some of the one that is being made."""
        snapshot = self._making
        if snapshot is None:
            return
        now = self._wall()
        piece, more = self._mirror.next_piece(now, self._rank, self._dialect, STEP_BLOCKS)
        if piece is not None:
            snapshot.pieces.append(piece)
        if not more:
            if not snapshot.pieces:  # nothing is resident: that, too, is said by a batch
                snapshot.pieces.append(encode_batch(EventList(), now, self._rank, self._dialect))
            snapshot.done = True
            self._making = None

    def drop_idle(self) -> float | None:
        """Drop what nobody asked for; the seconds until there may be more to drop."""
        if not self._kept:
            return None
        now = self._clock()
        self._kept = [s for s in self._kept if s is self._making or now - s.used < IDLE_S]
        return IDLE_S if self._kept else None
