"""The replay server: hands batches of the log to whoever asks, at the pace of each client.

The wire is vLLM's. A DEALER sends ``["", start]`` (8 bytes, big endian) and gets ``["", topic, number,
payload]`` for every batch in the log from ``start`` to the newest at the time of the request, then the end
marker ``["", "", ff*8, ""]``. A request without the empty frame is understood too. Everything else is
answered with ``["", "KVE1", msgpack {"op": "error", "error": reason}]``.
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

import msgspec
import zmq

from kvevents.publish.base import ReplayStats
from kvevents.publish.outbox import END_SEQUENCE
from kvevents.publish.sockets import NOBLOCK, NOBLOCK_MORE, send_of

if TYPE_CHECKING:
    from kvevents._core import ReplayLog
    from kvevents.publish.sockets import SharedContext

__all__ = ["EXTENDED", "ReplayServer", "router_options"]

_log_ = logging.getLogger("kvevents.publish")

EXTENDED = b"KVE1"
"""First frame of requests and answers beyond vLLM's."""
END_MARKER = (b"", b"", END_SEQUENCE.to_bytes(8, "big"), b"")

PIPE = 512
"""Batches in flight to one client; the rest stays in the log."""
TURN_BATCHES = 64
TURN_BYTES = 256 * 1024
"""What one client gets before the next has its turn."""
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


class _Replay:
    """One client's place in the log; no copies."""

    __slots__ = ("busy", "deadline", "last", "next", "pending", "window")

    def __init__(self) -> None:
        self.pending: deque[tuple[int, int]] = deque()
        self.busy = False
        self.next = 0
        self.last = 0
        self.window = TURN_BATCHES
        self.deadline = 0.0


class ReplayServer:
    """Owns the ROUTER socket and its thread. Clients are served in turns; a full pipe costs nobody else."""

    def __init__(
        self, log: ReplayLog, topic: bytes, socket: zmq.Socket[bytes], context: SharedContext, rank: int
    ) -> None:
        self._log = log
        self._topic = topic
        self._socket = socket
        self._send_frame = send_of(socket)
        self._context = context
        self._rank = rank
        self._clients: dict[bytes, _Replay] = {}
        self._stopping = False
        self._waker, self._wakened = plain_socket.socketpair()
        self._requests = self._refused = self._batches = 0
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
            if moved:
                timeout = 0
            elif self._clients:
                timeout = min(2 * timeout, RETRY_MS[1]) if timeout else RETRY_MS[0]
            else:
                timeout = None

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
                self._refuse(client, "this publisher does not answer extended requests")
            else:
                self._refuse(
                    client,
                    "a replay request is one frame with the first sequence number in 8 bytes, big endian; "
                    f"seen: {len(request)} frame(s) of {[len(frame) for frame in request[:8]]} bytes",
                )

    def _want(self, client: bytes, start: int) -> None:
        replay = self._clients.get(client)
        if replay is None:
            if len(self._clients) >= MAX_CLIENTS:
                self._refuse(client, f"{MAX_CLIENTS} clients are being served; ask again later")
                return
            replay = _Replay()
            replay.deadline = time.monotonic() + PATIENCE_S
            self._clients[client] = replay
        elif len(replay.pending) >= MAX_PENDING:
            self._refuse(client, f"{MAX_PENDING} requests of this client are open; wait for the end marker")
            return
        self._requests += 1
        oldest, newest = self._log.oldest, self._log.newest
        if newest is not None and start <= newest and (oldest is None or start < oldest):
            self._too_old += 1
        replay.pending.append((start, newest or 0))

    def _refuse(self, client: bytes, reason: str) -> None:
        self._refused += 1
        _log_.warning("rank %d: replay request refused: %s", self._rank, reason)
        answer = msgspec.msgpack.encode({"op": "error", "error": reason})
        try:
            self._socket.send_multipart((client, b"", EXTENDED, answer), NOBLOCK)
        except zmq.ZMQError as e:
            if e.errno not in _CANNOT_TAKE:
                raise

    # ------------------------------------------------------------ answers

    def _serve_all(self) -> bool:
        """One turn of every client: whether anything moved."""
        moved = False
        for client, replay in list(self._clients.items()):
            try:
                progress = self._serve(client, replay)
            except zmq.ZMQError as e:
                if e.errno != errno.EHOSTUNREACH:
                    _log_.warning("rank %d: a replay client was given up: %s", self._rank, e)
                self._give_up(client)
                continue
            if progress:
                moved = True
                replay.deadline = time.monotonic() + PATIENCE_S
            elif time.monotonic() > replay.deadline:
                self._give_up(client)
        return moved

    def _give_up(self, client: bytes) -> None:
        del self._clients[client]
        self._given_up += 1

    def _serve(self, client: bytes, replay: _Replay) -> bool:
        """What the client's pipe takes, up to its turn; the end marker only after the last batch."""
        if not replay.busy:
            replay.next, replay.last = replay.pending.popleft()
            replay.busy = True
        batches = self._log.read(replay.next, replay.last, replay.window, TURN_BYTES)
        send = self._send_frame
        topic = self._topic
        done = 0
        try:
            # Only the first frame of a message can be refused: behind it the pipe has room for all of them.
            for number, payload in batches:
                send(client, NOBLOCK_MORE)
                send(b"", NOBLOCK_MORE)
                send(topic, NOBLOCK_MORE)
                send(number, NOBLOCK_MORE)
                send(payload, NOBLOCK)
                done += 1
            if not batches:
                self._socket.send_multipart((client, *END_MARKER), NOBLOCK)
                self._completed += 1
                replay.busy = False
                if not replay.pending:
                    del self._clients[client]
                return True
        except zmq.Again:
            # A try against a full pipe should not copy many payloads for nothing.
            replay.window = max(1, done)
        else:
            replay.window = min(2 * replay.window, TURN_BATCHES)
        if done:
            replay.next = int.from_bytes(batches[done - 1][0], "big") + 1
            self._batches += done
        return done > 0


_CANNOT_TAKE = frozenset({errno.EAGAIN, errno.EHOSTUNREACH})
