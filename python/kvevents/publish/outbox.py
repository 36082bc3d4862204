"""The queue between ``publish()`` and the sender: where batches wait, get their numbers, or are dropped.

Appending takes no lock. A number is given when a batch leaves the queue, by whoever takes it out (the
sender, or ``publish()`` that drops the oldest), under one lock: so a number stands for a place in the
order of ``publish()`` calls, and what was dropped leaves a hole at its place. With a mirror, what was dropped
waits beside the queue, with its number, for the sender to put it into the mirror.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from kvevents.errors import PublisherClosedError
from kvevents.publish.holes import Holes

if TYPE_CHECKING:
    from kvevents.config import Overflow

__all__ = ["END_SEQUENCE", "LOST", "Outbox"]

END_SEQUENCE = 2**64 - 1
"""The number that ends a replay on the wire; no batch gets it."""


ASIDE = 10_000
"""Dropped batches that may wait for the mirror, or as many as the queue takes if that is more."""


class _Lost:
    """Stands for dropped batches that were too many to wait: the mirror does not know them."""


LOST = _Lost()


class _Hole:
    """Newest batches that were dropped, one after the other: their numbers are skipped in their turn."""

    __slots__ = ("batches", "count")

    def __init__(self) -> None:
        self.count = 0
        self.batches: list[Any] = []


class Outbox:
    """A bounded queue of batches that numbers them. One taker, any number of putters."""

    def __init__(self, limit: int, overflow: Overflow, first: int = 0, *, keep_dropped: bool = False) -> None:
        self._queue: deque[Any] = deque()
        self._limit = limit
        self._overflow = overflow
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock) if overflow == "block" else None
        self._token = threading.Lock()
        self._token.acquire()
        self._asleep = False
        self._aside: deque[tuple[int, Any]] | None = deque() if keep_dropped else None
        self._aside_limit = max(limit, ASIDE)
        self.holes = Holes()
        self.closed = False
        self.next_sequence = first
        self.dropped = 0

    def __len__(self) -> int:
        """Batches that wait."""
        return len(self._queue)

    def put(self, batch: Any) -> None:
        """Append a batch. Waits only with ``overflow="block"``; else it costs the same at any length."""
        if len(self._queue) < self._limit:
            self._queue.append(batch)
        else:
            self._put_full(batch)
        if self._asleep:
            self.rouse()

    def _put_full(self, batch: Any) -> None:
        with self._lock:
            queue = self._queue
            if self._room is not None:
                while len(queue) >= self._limit and not self.closed:
                    self._room.wait()
                if self.closed:
                    raise PublisherClosedError("the publisher was shut down while publish() waited for room")
            elif self._overflow == "drop_newest" and len(queue) >= self._limit:
                self.dropped += 1
                if not isinstance(queue[-1], _Hole):
                    queue.append(_Hole())
                self._widen(queue[-1], batch)
                return
            while len(queue) >= self._limit:
                oldest = queue.popleft()
                self.dropped += 1
                self._set_aside(self._number(hole=True), oldest)
            queue.append(batch)

    def _widen(self, hole: _Hole, batch: Any) -> None:
        hole.count += 1
        if self._aside is None:
            return
        if len(hole.batches) < self._aside_limit:
            hole.batches.append(batch)
        else:
            hole.batches[:] = [LOST]

    def _set_aside(self, number: int, batch: Any) -> None:
        if self._aside is None:
            return
        if len(self._aside) >= self._aside_limit:
            self._aside.clear()
            batch = LOST
        self._aside.append((number, batch))

    def take(self) -> tuple[int, Any, bool] | None:
        """The oldest batch, its number, and whether it is to be sent; ``None`` if none waits.

        Not to be sent, but to be put into a mirror: a batch that was dropped; ``None`` for a number that was
        left out; :data:`LOST`.
        """
        with self._lock:
            while self._queue or self._aside:
                if self._aside:
                    return *self._aside.popleft(), False
                batch = self._queue.popleft()
                if isinstance(batch, _Hole):
                    self._step_over(batch)
                    continue
                if self._room is not None:
                    self._room.notify()
                if self.next_sequence == END_SEQUENCE:
                    self.dropped += 1
                    continue
                return self._number(), batch, True
        return None

    def _step_over(self, hole: _Hole) -> None:
        first = self.next_sequence
        self.next_sequence = min(first + hole.count, END_SEQUENCE)
        if self.next_sequence > first:
            self.holes.add(first, self.next_sequence - 1)
        # Where some were too many to be kept, the last ones stand for all.
        start = self.next_sequence - len(hole.batches)
        for number, batch in enumerate(hole.batches, start):
            self._set_aside(number, batch)

    def number_if_empty(self) -> int | None:
        """A number for a message of the sender's own, unless batches wait or no number is left."""
        with self._lock:
            waiting = self._queue or self._aside
            return None if waiting or self.next_sequence == END_SEQUENCE else self._number()

    def skip(self) -> None:
        """Leave the next number out: readers see that something is missing."""
        with self._lock:
            self._set_aside(self._number(hole=True), None)

    def note_hole(self, number: int) -> None:
        """A number was given, but nothing was sent under it."""
        with self._lock:
            self.holes.add(number, number)

    def _number(self, *, hole: bool = False) -> int:
        number = self.next_sequence
        self.next_sequence = min(number + 1, END_SEQUENCE)
        if hole:
            self.holes.add(number, number)
        return number

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until a batch waits or the queue is closed; ``False`` if time is up. May wake early."""
        self._asleep = True
        # Looked at after the flag is up: whoever appends later sees the flag.
        if self._queue or self._aside or self.closed:
            self._asleep = False
            return True
        woken = self._token.acquire(timeout=-1 if timeout is None else timeout)
        self._asleep = False
        return woken

    def rouse(self) -> None:
        """Wake the taker."""
        self._asleep = False
        try:  # noqa: SIM105 - suppress() costs more than all the rest, and publish() pays it
            self._token.release()
        except RuntimeError:
            pass  # two putters at once: it is awake already

    def close(self) -> None:
        """Let nobody wait any more, neither here nor for room. What is queued can still be taken."""
        self.closed = True
        if self._room is not None:
            with self._room:
                self._room.notify_all()
        self.rouse()
