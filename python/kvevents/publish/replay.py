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
from contextlib import suppress
from typing import TYPE_CHECKING

import zmq

from kvevents.publish.desk import ClientGoneError, ReplayDesk
from kvevents.publish.jobs import EXTENDED
from kvevents.publish.sockets import NOBLOCK, NOBLOCK_MORE, send_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvevents._core import ReplayLog
    from kvevents.publish.extended import Extended
    from kvevents.publish.jobs import Frames
    from kvevents.publish.snapshots import Snapshots
    from kvevents.publish.sockets import AwaitedAddress, SharedContext

__all__ = ["EXTENDED", "ReplayServer", "router_options"]

_log_ = logging.getLogger("kvevents.publish")

PIPE = 512
"""Batches in flight to one client; the rest stays in the log."""
MAX_REQUEST = 64 * 1024
"""Bytes of a request; who sends more is disconnected."""
STRIDE = 8
"""Messages after which the other threads have their turn, while the engine publishes."""
LIVE_S = 0.1
"""So long after its last batch an engine counts as one that publishes."""
BREATH_S = 20e-6
"""A real pause: a thread that lets the interpreter lock go and takes it at once keeps all others from it."""
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


class ReplayServer(ReplayDesk):
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
        super().__init__(log, topic, extended, snapshots, rank=rank)
        self._socket = socket
        self._send_frame = send_of(socket)
        self._context = context
        self._newest: int | None = None
        self._live_until = 0.0
        self._stopping = False
        self.awaited: AwaitedAddress | None = None
        """While the socket's address is somebody else's."""
        self._waker, self._wakened = plain_socket.socketpair()
        context.use()
        self.thread = threading.Thread(target=self._run, name=f"kvevents-replay-{rank}", daemon=True)

    def stop(self) -> None:
        """End soon, also in the middle of a replay. From any thread, any number of times."""
        self._stopping = True
        with suppress(OSError):  # it has ended already
            self._waker.send(b"x")

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
        while self.awaited is not None and not self._stopping:
            if self.awaited.bound():
                self.awaited = None
            else:
                poller.poll(int(self.awaited.RETRY_S * 1000))
        while not self._stopping:
            if poller.poll(timeout):
                try:
                    self._receive()
                except zmq.Again:
                    pass
                except Exception:
                    _log_.exception("rank %d: a replay request", self._rank)
            moved = self.turn(time.monotonic())
            idle = None if self._snapshots is None else self._snapshots.drop_idle()
            if moved:
                timeout = 0
            elif self.serving:
                timeout = min(2 * timeout, RETRY_MS[1]) if timeout else RETRY_MS[0]
            else:
                timeout = None if idle is None else int(idle * 1000)

    def _receive(self) -> None:
        """Some requests, so that a flood of them does not hold up the clients being served."""
        for _ in range(64):
            client, *request = self._socket.recv_multipart(NOBLOCK)
            self.request(client, request, time.monotonic())

    def _transmit(self, client: bytes, messages: Sequence[Frames]) -> int:
        send = self._send_frame
        done = 0
        try:
            # Only the first frame of a message can be refused: behind it the pipe has room for all of them.
            for *frames, last in messages:
                send(client, NOBLOCK_MORE)
                for frame in frames:
                    send(frame, NOBLOCK_MORE)
                send(last, NOBLOCK)
                done += 1
                if done % STRIDE == 0 and self._is_live():
                    time.sleep(BREATH_S)
        except zmq.Again:
            pass
        except zmq.ZMQError as e:
            # Who has left is nothing to tell of.
            raise ClientGoneError("" if e.errno == errno.EHOSTUNREACH else str(e)) from e
        return done

    def _is_live(self) -> bool:
        """Whether the engine has published just now, and may do so again at once."""
        newest, now = self._log.newest, time.monotonic()
        if newest != self._newest:
            self._newest, self._live_until = newest, now + LIVE_S
        return now < self._live_until
