"""What the replay server owes one client for one request: messages, as many at a time as are taken."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from kvevents.publish.outbox import END_SEQUENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvevents._core import ReplayLog
    from kvevents.publish.snapshots import Snapshot

__all__ = ["EXTENDED", "Answer", "Frames", "Job", "PlainReplay", "RangeReplay", "SendSnapshot"]

Frames: TypeAlias = tuple[bytes, ...]

EXTENDED = b"KVE1"
"""First frame of requests and answers beyond vLLM's."""
END_MARKER = (b"", b"", END_SEQUENCE.to_bytes(8, "big"), b"")

TURN_BYTES = 256 * 1024
"""Payload bytes of batches that one client gets before the next has its turn."""

pack = msgspec.msgpack.Encoder().encode


class Job(ABC):
    """Messages for one client. What was not taken is asked for again."""

    done = False
    replays = False
    """Whether it counts as a replay that was asked for and completed."""
    batches = 0
    """Batches that were taken."""

    @abstractmethod
    def messages(self, limit: int) -> list[Frames]:
        """The next ones, at most ``limit``; none: wait for what the server itself still has to do."""

    @abstractmethod
    def taken(self, count: int) -> None:
        """The first ``count`` of them are on their way."""


class Answer(Job):
    """One message."""

    def __init__(self, frames: Frames, *, error: bool = False) -> None:
        self._frames = frames
        self.error = error

    def messages(self, limit: int) -> list[Frames]:  # noqa: ARG002 - one is within any limit
        """The message."""
        return [self._frames]

    def taken(self, count: int) -> None:
        """Done with it."""
        self.done = count > 0


class _Replay(Job):
    """A place in the log; no copies."""

    replays = True

    def __init__(self, log: ReplayLog, first: int, last: int) -> None:
        self._log = log
        self._next = first
        self._last = last
        self._batches: list[tuple[bytes, bytes]] = []

    def messages(self, limit: int) -> list[Frames]:
        """Batches, then the end."""
        self._batches = self._log.read(self._next, self._last, limit, TURN_BYTES)
        return self._framed(self._batches) if self._batches else [self._end()]

    def taken(self, count: int) -> None:
        """Go on behind them."""
        if not count:
            return
        if self._batches:
            self._next = int.from_bytes(self._batches[count - 1][0], "big") + 1
            self.batches += count
        else:
            self.done = True

    @abstractmethod
    def _framed(self, batches: list[tuple[bytes, bytes]]) -> list[Frames]: ...

    @abstractmethod
    def _end(self) -> Frames: ...


class PlainReplay(_Replay):
    """vLLM's replay; the end marker only after the last batch."""

    def __init__(self, log: ReplayLog, topic: bytes, first: int, last: int) -> None:
        super().__init__(log, first, last)
        self._topic = topic

    def _framed(self, batches: list[tuple[bytes, bytes]]) -> list[Frames]:
        topic = self._topic
        return [(b"", topic, number, payload) for number, payload in batches]

    def _end(self) -> Frames:
        return END_MARKER


class RangeReplay(_Replay):
    """Batches of a range, each with its head; then an ``end`` that says how many there were."""

    def __init__(
        self, log: ReplayLog, first: int, last: int, request: Any, state: Callable[[], dict[str, Any]]
    ) -> None:
        super().__init__(log, first, last)
        self._request = request
        self._state = state

    def _framed(self, batches: list[tuple[bytes, bytes]]) -> list[Frames]:
        head = {"op": "replay", "id": self._request, **self._state(), "seq": 0}
        framed: list[Frames] = []
        for number, payload in batches:
            head["seq"] = int.from_bytes(number, "big")
            framed.append((b"", EXTENDED, pack(head), payload))
        return framed

    def _end(self) -> Frames:
        end = {"op": "end", "id": self._request, **self._state(), "of": "replay", "count": self.batches}
        return (b"", EXTENDED, pack(end))


class SendSnapshot(Job):
    """Pieces of a snapshot, as they are made."""

    def __init__(
        self,
        find: Callable[[], Snapshot | Frames | None],
        first: int,
        count: int,
        head: Callable[[Snapshot], dict[str, Any]],
        gone: Callable[[], Frames],
    ) -> None:
        """``find`` gives the snapshot, a last answer instead of one, or ``None`` to be asked again.

        ``gone`` is the answer to who asks for more pieces than there are.
        """
        self._find = find
        self._snapshot: Snapshot | None = None
        self._next = first
        self._end = first + count
        self._head = head
        self._gone = gone

    def messages(self, limit: int) -> list[Frames]:  # noqa: ARG002 - one piece is a turn
        """The next piece, once it is made."""
        if self._snapshot is None:
            found = self._find()
            if isinstance(found, tuple):
                self._end = self._next + 1
                return [found]
            self._snapshot = found
        snapshot = self._snapshot
        at = self._next
        # That a piece is the last is known only when all are made.
        if snapshot is None or (at + 1 >= len(snapshot.pieces) and not snapshot.done):
            return []
        snapshot.touch()
        more = at + 1 < len(snapshot.pieces)
        if not more:
            self._end = at + 1
        if at >= len(snapshot.pieces):
            return [self._gone()]
        return [
            (b"", EXTENDED, pack(self._head(snapshot) | {"piece": at, "more": more}), snapshot.pieces[at])
        ]

    def taken(self, count: int) -> None:
        """Go on with the next."""
        self._next += count
        self.done = self._next >= self._end
