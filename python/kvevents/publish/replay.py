"""The replay server: hands batches of the log, and snapshots, to whoever asks, at the pace of each client.

The plain wire is vLLM's. A DEALER sends ``["", start]`` (8 bytes, big endian) and gets ``["", topic, number,
payload]`` for every batch in the log from ``start`` to the newest at the time of the request, then the end
marker ``["", "", ff*8, ""]``. Extended requests are ``["", "KVE1", map]``, see ``docs/wire.md``. A request
without the empty frame is understood too. Everything else is answered with an error of the extended form.
"""

from __future__ import annotations

import errno
import logging
import socket as plain_socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import zmq

from kvevents.publish.base import ReplayStats
from kvevents.publish.jobs import EXTENDED, Answer, Job, PlainReplay
from kvevents.publish.sockets import NOBLOCK, NOBLOCK_MORE, send_of

if TYPE_CHECKING:
    from kvevents._core import ReplayLog
    from kvevents.publish.extended import Extended
    from kvevents.publish.snapshots import Snapshots
    from kvevents.publish.sockets import SharedContext

__all__ = ["EXTENDED", "ReplayServer", "router_options"]

_log_ = logging.getLogger("kvevents.publish")

PIPE = 512
"""Batches in flight to one client; the rest stays in the log."""
TURN_BATCHES = 64
"""Batches that one client gets before the next has its turn (fewer if they are large)."""
PATIENCE_S = 30.0
"""A client that takes nothing for so long is given up."""
MAX_CLIENTS = 256
MAX_PENDING = 16
"""Requests that one client may have open at once."""
MAX_REQUEST = 64 * 1024
"""Bytes of a request; who sends more is disconnected."""
RETRY_MS = (1, 20)
"""How soon full pipes are tried again, while nothing moves: from, to."""


def router_options() -> dict[int, int]:
    """Options of the socket, to be set before it is bound."""
    return {
        # Without it a ROUTER drops what it accepted once a client's pipe is full, without an error.
        zmq.ROUTER_MANDATORY: 1,
        zmq.SNDHWM: PIPE,
        zmq.MAXMSGSIZE: MAX_REQUEST,
    }


class _Client:
    """What one client is owed."""

    __slots__ = ("deadline", "job", "pending", "window")

    def __init__(self) -> None:
        self.pending: deque[Job] = deque()
        self.job: Job | None = None
        self.window = TURN_BATCHES
        self.deadline = time.monotonic() + PATIENCE_S


class ReplayServer:
    """Owns the ROUTER socket and its thread. Clients are served in turns; a full pipe costs nobody else."""

    def __init__(
        self,
        log: ReplayLog,
        topic: bytes,
        extended: Extended,
        snapshots: Snapshots | None,
        *,
        socket: zmq.Socket[bytes],
        context: SharedContext,
        rank: int,
    ) -> None:
        self._log = log
        self._topic = topic
        self._extended = extended
        self._snapshots = snapshots
        self._socket = socket
        self._send_frame = send_of(socket)
        self._context = context
        self._rank = rank
        self._clients: dict[bytes, _Client] = {}
        self._stopping = False
        self._waker, self._wakened = plain_socket.socketpair()
        self._requests = self._extended_requests = self._refused = self._batches = 0
        self._completed = self._too_old = self._given_up = 0
        context.use()
        self.thread = threading.Thread(target=self._run, name=f"kvevents-replay-{rank}", daemon=True)

    def stop(self) -> None:
        """End soon, also in the middle of a replay. From any thread, any number of times."""
        self._stopping = True
        with suppress(OSError):  # it has ended already
            self._waker.send(b"x")

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

    def _run(self) -> None:
        try:
            self._loop()
        except Exception:
            if not self._stopping:
                _log_.exception("rank %d: the replay server ended", self._rank)
        finally:
            self._socket.close(linger=0)
            self._waker.close()
            self._wakened.close()
            self._context.leave()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakened, zmq.POLLIN)
        timeout: int | None = None
        while not self._stopping:
            if poller.poll(timeout):
                try:
                    self._receive()
                except zmq.Again:
                    pass
                except Exception:
                    _log_.exception("rank %d: a replay request", self._rank)
            moved = self._serve_all()
            idle = None
            if self._snapshots is not None:
                moved |= self._snapshots.making
                self._snapshots.step()
                idle = self._snapshots.drop_idle()
            if moved:
                timeout = 0
            elif self._clients:
                timeout = min(2 * timeout, RETRY_MS[1]) if timeout else RETRY_MS[0]
            else:
                timeout = None if idle is None else int(idle * 1000)

    # ------------------------------------------------------------ requests

    def _receive(self) -> None:
        """Some requests, so that a flood of them does not hold up the clients being served."""
        for _ in range(64):
            client, *request = self._socket.recv_multipart(NOBLOCK)
            if request and request[0] == b"":
                del request[0]
            if len(request) == 1 and len(request[0]) == 8:
                self._want(client, int.from_bytes(request[0], "big"))
            elif request and request[0] == EXTENDED:
                self._extended_requests += 1
                job = self._extended.job(request[1:])
                self._refused += isinstance(job, Answer) and job.error
                self._owe(client, job)
            else:
                self._refuse(
                    client,
                    "bad_request",
                    "a replay request is one frame with the first sequence number in 8 bytes, big endian; "
                    f"seen: {len(request)} frame(s) of {[len(frame) for frame in request[:8]]} bytes",
                )

    def _want(self, client: bytes, start: int) -> None:
        oldest, newest = self._log.oldest, self._log.newest
        if self._owe(client, PlainReplay(self._log, self._topic, start, newest or 0)):
            self._requests += 1
            if newest is not None and start <= newest and (oldest is None or start < oldest):
                self._too_old += 1

    def _owe(self, client: bytes, job: Job) -> bool:
        owed = self._clients.get(client)
        if owed is None:
            if len(self._clients) >= MAX_CLIENTS:
                self._refuse(client, "busy", f"{MAX_CLIENTS} clients are being served; ask again later")
                return False
            owed = self._clients[client] = _Client()
        elif len(owed.pending) >= MAX_PENDING:
            self._refuse(
                client, "busy", f"{MAX_PENDING} requests of this client are open; wait for the end marker"
            )
            return False
        owed.pending.append(job)
        return True

    def _refuse(self, client: bytes, code: str, reason: str) -> None:
        self._refused += 1
        _log_.warning("rank %d: replay request refused: %s", self._rank, reason)
        try:
            self._socket.send_multipart((client, *self._extended.refusal(code, reason)), NOBLOCK)
        except zmq.ZMQError as e:
            if e.errno not in _CANNOT_TAKE:
                raise

    # ------------------------------------------------------------ answers

    def _serve_all(self) -> bool:
        """One turn of every client: whether anything moved."""
        moved = False
        for client, owed in list(self._clients.items()):
            try:
                progress = self._serve(client, owed)
            except zmq.ZMQError as e:
                if e.errno != errno.EHOSTUNREACH:
                    _log_.warning("rank %d: a replay client was given up: %s", self._rank, e)
                self._give_up(client)
                continue
            if progress:
                moved = True
                owed.deadline = time.monotonic() + PATIENCE_S
            elif time.monotonic() > owed.deadline:
                self._give_up(client)
        return moved

    def _give_up(self, client: bytes) -> None:
        del self._clients[client]
        self._given_up += 1

    def _serve(self, client: bytes, owed: _Client) -> bool:
        """What the client's pipe takes, up to its turn; the end of a request only after all of it."""
        job = owed.job = owed.job or owed.pending.popleft()
        messages = job.messages(owed.window)
        send = self._send_frame
        before = job.batches
        done = 0
        try:
            # Only the first frame of a message can be refused: behind it the pipe has room for all of them.
            for *frames, last in messages:
                send(client, NOBLOCK_MORE)
                for frame in frames:
                    send(frame, NOBLOCK_MORE)
                send(last, NOBLOCK)
                done += 1
        except zmq.Again:
            # A try against a full pipe should not copy many payloads for nothing.
            owed.window = max(1, done)
        else:
            owed.window = min(2 * owed.window, TURN_BATCHES)
        job.taken(done)
        self._batches += job.batches - before
        if job.done:
            self._completed += job.replays
            owed.job = None
            if not owed.pending:
                del self._clients[client]
        return done > 0


_CANNOT_TAKE = frozenset({errno.EAGAIN, errno.EHOSTUNREACH})
