"""What was true at every number of an engine's stream: the yardstick of all readers."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

__all__ = ["EMPTY", "Truth"]

EMPTY = bytes(16)
"""The digest of nothing."""
KEPT = 4_096
"""Numbers of a life that are remembered; far more than any log, queue or link holds."""
LIVES = 16


class _Life:
    def __init__(self, epoch: bytes, began: float) -> None:
        self.epoch = epoch
        self.began = began
        self.pending: deque[bytes] = deque()
        """Digests of what was published and has no number yet."""
        self.numbered: deque[bytes] = deque(maxlen=KEPT)
        self.first = 0
        """The number of the oldest that is remembered."""
        self.newest = EMPTY


class Truth:
    """All lives of one engine. Numbers are learned from the outbox, in the order of ``publish()``."""

    def __init__(self) -> None:
        self._lives: list[_Life] = []

    def began(self, epoch: bytes, now: float) -> None:
        """A new life, of which nothing is published yet."""
        self._lives.append(_Life(epoch, now))
        del self._lives[:-LIVES]

    def published(self, digest: bytes) -> None:
        """What is true with the batch that is published now."""
        self._lives[-1].pending.append(digest)

    def numbered(self, count: int, own: int = 0) -> None:
        """The oldest ``count`` batches got numbers, and then ``own`` numbers went to no batch."""
        life = self._lives[-1]
        for i in range(count + own):
            if i < count:
                life.newest = life.pending.popleft()
            if len(life.numbered) == KEPT:
                life.first += 1
            life.numbered.append(life.newest)

    def at(self, seq: int, stamp: float) -> bytes | None:
        """The digest behind number ``seq`` of the life in which something was stamped so."""
        starts = [life.began for life in self._lives]
        index = bisect_right(starts, stamp) - 1
        return self._of(self._lives[index], seq) if index >= 0 else None

    def of_epoch(self, epoch: bytes, seq: int) -> bytes | None:
        """The digest behind number ``seq`` of a life; -1 is before the first."""
        return next((self._of(life, seq) for life in self._lives if life.epoch == epoch), None)

    @property
    def newest(self) -> tuple[int, bytes]:
        """The number that comes next, and what is true before it."""
        life = self._lives[-1]
        return life.first + len(life.numbered), life.newest

    @property
    def waiting(self) -> int:
        """Published, without a number yet."""
        return len(self._lives[-1].pending)

    @staticmethod
    def _of(life: _Life, seq: int) -> bytes | None:
        if seq == -1:
            return EMPTY
        index = seq - life.first
        return life.numbered[index] if 0 <= index < len(life.numbered) else None
