"""What clients of the replay server are owed, in turns: requests in, messages out.

No socket, no thread, and time is an argument: :class:`~kvevents.publish.replay.ReplayServer` is the one with
both, and a simulation has its own.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from kvevents.publish.base import ReplayStats
from kvevents.publish.jobs import EXTENDED, Answer, Frames, Job, PlainReplay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvevents._core import ReplayLog
    from kvevents.publish.extended import Extended
    from kvevents.publish.snapshots import Snapshots

__all__ = ["ClientGoneError", "ReplayDesk"]

_log_ = logging.getLogger("kvevents.publish")

TURN_BATCHES = 64
"""Batches that one client gets before the next has its turn (fewer if they are large)."""
PATIENCE_S = 30.0
"""A client that takes nothing for so long is given up."""
MAX_CLIENTS = 256
MAX_PENDING = 16
"""Requests that one client may have open at once."""
_WARN_S = 10.0
"""Refusals are told of so often at most: who floods the server does not flood the log too."""


class ClientGoneError(Exception):
    """Nothing can be sent to this client any more."""


class _Client:
    """What one client is owed."""

    __slots__ = ("deadline", "job", "pending", "window")

    def __init__(self, deadline: float) -> None:
        self.pending: deque[Job] = deque()
        self.job: Job | None = None
        self.window = TURN_BATCHES
        self.deadline = deadline


class ReplayDesk(ABC):
    """Requests and answers of one publisher. Clients have their turns; one that is slow costs nobody else."""

    def __init__(
        self, log: ReplayLog, topic: bytes, extended: Extended, snapshots: Snapshots | None, *, rank: int
    ) -> None:
        self._log = log
        self._topic = topic
        self._extended = extended
        self._snapshots = snapshots
        self._rank = rank
        self._clients: dict[bytes, _Client] = {}
        self._requests = self._extended_requests = self._refused = self._batches = 0
        self._completed = self._too_old = self._given_up = 0
        self._warn_at = -math.inf
        self._unsaid = 0

    @abstractmethod
    def _transmit(self, client: bytes, messages: Sequence[Frames]) -> int:
        """Send messages as far as the client takes them now; how many. Never waits.

        :raises ClientGoneError: there is no such client (any more).
        """

    def stats(self) -> ReplayStats:
        """Counts since the start."""
        return ReplayStats(
            requests=self._requests,
            refused=self._refused,
            batches=self._batches,
            completed=self._completed,
            too_old=self._too_old,
            given_up=self._given_up,
            active=len(self._clients),
            extended=self._extended_requests,
            snapshots=0 if self._snapshots is None else self._snapshots.made,
            snapshot_bytes=0 if self._snapshots is None else self._snapshots.kept_bytes,
        )

    # ------------------------------------------------------------ requests

    def request(self, client: bytes, request: list[bytes], now: float) -> None:
        """One request, without the client's identity; the empty first frame may be left out."""
        if request and request[0] == b"":
            del request[0]
        if len(request) == 1 and len(request[0]) == 8:
            self._want(client, int.from_bytes(request[0], "big"), now)
        elif request and request[0] == EXTENDED:
            self._extended_requests += 1
            job = self._extended.job(request[1:])
            self._refused += isinstance(job, Answer) and job.error
            self._owe(client, job, now)
        else:
            self._refuse(
                client,
                "bad_request",
                "a replay request is one frame with the first sequence number in 8 bytes, big endian; "
                f"seen: {len(request)} frame(s) of {[len(frame) for frame in request[:8]]} bytes",
                now,
            )

    def _want(self, client: bytes, start: int, now: float) -> None:
        oldest, newest = self._log.oldest, self._log.newest
        if self._owe(client, PlainReplay(self._log, self._topic, start, newest or 0), now):
            self._requests += 1
            if newest is not None and start <= newest and (oldest is None or start < oldest):
                self._too_old += 1

    def _owe(self, client: bytes, job: Job, now: float) -> bool:
        owed = self._clients.get(client)
        if owed is None:
            if len(self._clients) >= MAX_CLIENTS:
                self._refuse(client, "busy", f"{MAX_CLIENTS} clients are being served; ask again later", now)
                return False
            owed = self._clients[client] = _Client(now + PATIENCE_S)
        elif len(owed.pending) >= MAX_PENDING:
            self._refuse(
                client,
                "busy",
                f"{MAX_PENDING} requests of this client are open; wait for the end marker",
                now,
            )
            return False
        owed.pending.append(job)
        return True

    def _refuse(self, client: bytes, code: str, reason: str, now: float) -> None:
        self._refused += 1
        if now >= self._warn_at:
            more = f" ({self._unsaid} more since the last time)" if self._unsaid else ""
            _log_.warning("rank %d: replay request refused: %s%s", self._rank, reason, more)
            self._warn_at, self._unsaid = now + _WARN_S, 0
        else:
            self._unsaid += 1
        with suppress(ClientGoneError):  # who has left needs no answer
            self._transmit(client, [self._extended.refusal(code, reason)])

    # ------------------------------------------------------------ answers

    def turn(self, now: float) -> bool:
        """One turn of every client and a step of the snapshot that is being made; whether anything moved."""
        moved = self._serve_all(now)
        if self._snapshots is not None:
            moved |= self._snapshots.making
            self._snapshots.step()
        return moved

    @property
    def serving(self) -> bool:
        """Whether any client is owed something."""
        return bool(self._clients)

    def _serve_all(self, now: float) -> bool:
        moved = False
        for client, owed in list(self._clients.items()):
            try:
                progress = self._serve(client, owed)
            except ClientGoneError as e:
                if str(e):
                    _log_.warning("rank %d: a replay client was given up: %s", self._rank, e)
                self._give_up(client)
                continue
            if progress:
                moved = True
                owed.deadline = now + PATIENCE_S
            elif now > owed.deadline:
                self._give_up(client)
        return moved

    def _give_up(self, client: bytes) -> None:
        del self._clients[client]
        self._given_up += 1

    def _serve(self, client: bytes, owed: _Client) -> bool:
        """What the client takes, up to its turn; the end of a request only after all of it."""
        job = owed.job = owed.job or owed.pending.popleft()
        messages = job.messages(owed.window)
        before = job.batches
        done = self._transmit(client, messages)
        # A try against a full pipe should not copy many payloads for nothing.
        owed.window = min(2 * owed.window, TURN_BATCHES) if done == len(messages) else max(1, done)
        job.taken(done)
        self._batches += job.batches - before
        if job.done:
            self._completed += job.replays
            owed.job = None
            if not owed.pending:
                del self._clients[client]
        return done > 0
