"""The thread that owns the live socket: takes batches, encodes them, keeps the bytes and sends them."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from kvevents.publish.sockets import NOBLOCK, NOBLOCK_MORE, send_of
from kvevents.publish.writer import BatchWriter

if TYPE_CHECKING:
    import zmq

    from kvevents._core import Mirror, ReplayLog
    from kvevents.config import KVEventsConfig
    from kvevents.publish.outbox import Outbox
    from kvevents.publish.sockets import AwaitedAddress, SharedContext

__all__ = ["Sender"]

_log = logging.getLogger("kvevents.publish")

LINGER_S = 1.0
"""At most so long the context waits at its end for bytes that a reader has not taken."""


class Sender(BatchWriter):
    """Runs until the outbox is closed and empty, or the deadline of the shutdown has passed.

    Per batch it holds the interpreter lock for some microseconds; encoding runs without it. One batch's
    failure costs that batch (its number is a visible hole), never the thread.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        rank: int,
        *,
        outbox: Outbox,
        log: ReplayLog,
        mirror: Mirror | None,
        socket: zmq.Socket[bytes],
        context: SharedContext,
    ) -> None:
        super().__init__(config, rank, outbox=outbox, log=log, mirror=mirror)
        self._socket = socket
        self._send_frame = send_of(socket)
        self._context = context
        self._topic = config.topic.encode()
        self._heartbeat_s = config.heartbeat_s
        self._deadline = float("inf")
        self.ended_by: BaseException | None = None
        self.awaited: AwaitedAddress | None = None
        """While the socket's address is somebody else's."""
        context.use()
        self.thread = threading.Thread(target=self._run, name=f"kvevents-sender-{rank}", daemon=True)

    def stop(self, deadline: float) -> None:
        """Send what is queued, but no longer than until ``deadline`` (of ``time.monotonic``)."""
        self._deadline = deadline
        self._outbox.close()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as e:  # the thread is over: say so instead of queueing for nobody
            self.ended_by = e
            _log.exception("rank %d: the sender ended", self._rank)
            self._outbox.close()
        finally:
            linger = min(LINGER_S, max(0.0, self._deadline - time.monotonic()))
            self._socket.close(linger=int(linger * 1000))
            self._context.leave()

    def _loop(self) -> None:
        outbox = self._outbox
        while time.monotonic() < self._deadline:
            if self.awaited is not None and self.awaited.bound():
                self.awaited = None
            if self.step():
                continue
            if outbox.closed:
                return
            if self.awaited is not None:
                outbox.wait(self.awaited.RETRY_S)
            elif not outbox.wait(self._heartbeat_s):
                self.beat()

    def _transmit(self, number: bytes, payload: bytes) -> None:
        send = self._send_frame
        send(self._topic, NOBLOCK_MORE)
        send(number, NOBLOCK_MORE)
        send(payload, NOBLOCK)
