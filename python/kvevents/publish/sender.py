"""The thread that owns the live socket: takes batches, encodes them, keeps the bytes and sends them."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from kvevents._core import EventList, encode_batch_reporting
from kvevents.errors import KVEventsError
from kvevents.publish.sockets import NOBLOCK, NOBLOCK_MORE

if TYPE_CHECKING:
    import zmq

    from kvevents._core import ReplayLog
    from kvevents.config import KVEventsConfig
    from kvevents.publish.outbox import Outbox
    from kvevents.publish.sockets import SharedContext

__all__ = ["Sender"]

_log = logging.getLogger("kvevents.publish")

LINGER_S = 1.0
"""At most so long the context waits at its end for bytes that a reader has not taken."""


class Sender:
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
        socket: zmq.Socket[bytes],
        context: SharedContext,
    ) -> None:
        self._rank = rank
        self._outbox = outbox
        self._log = log
        self._socket = socket
        self._context = context
        self._topic = config.topic.encode()
        self._dialect = config.dialect
        # An older dialect has no place for newer fields: choosing it says that its readers need none.
        self._lossy = not config.dialect.startswith("vllm-map")
        self._heartbeat_s = config.heartbeat_s
        self._deadline = float("inf")
        self.sent = 0
        self.bytes_sent = 0
        self.failed = 0
        self.events_lost = 0
        self.heartbeats = 0
        self.ended_by: BaseException | None = None
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
            item = outbox.take()
            if item is None:
                if outbox.closed:
                    return
                if not outbox.wait(self._heartbeat_s):
                    self._beat()
                continue
            try:
                self._send_batch(*item)
            except Exception:
                self.failed += 1
                _log.exception("rank %d: batch %d could not be sent", self._rank, item[0])

    def _send_batch(self, seq: int, batch: Any) -> None:
        try:
            payload, losses = encode_batch_reporting(
                batch.events,
                batch.ts,
                batch.data_parallel_rank,
                self._dialect,
                lossy=self._lossy,
                detach=True,
            )
        except (KVEventsError, TypeError, ValueError, OverflowError):
            payload, losses = self._encode_what_can_be(batch)
        self._send(seq, payload)
        if losses:
            self._outbox.skip()
            self.events_lost += len(losses)
            index, field, reason = losses[0]
            _log.warning(
                "rank %d: %d event(s) of batch %d cannot be encoded, number %d is skipped; event %d: %s %s",
                self._rank, len(losses), seq, seq + 1, index, field, reason,
            )  # fmt: skip

    def _encode_what_can_be(self, batch: Any) -> tuple[bytes, list[tuple[int, str, str]]]:
        """The slow way, for a list with something in it that is no event, or a field that cannot be meant."""
        good = []
        bad: list[tuple[int, str, str]] = []
        for index, event in enumerate(batch.events):
            try:
                EventList([event])
            except (KVEventsError, TypeError, ValueError, OverflowError) as e:
                bad.append((index, "", str(e)))
            else:
                good.append(event)
        payload, more = encode_batch_reporting(
            EventList(good), batch.ts, batch.data_parallel_rank, self._dialect, lossy=self._lossy, detach=True
        )
        return payload, bad + list(more)

    def _beat(self) -> None:
        seq = self._outbox.number_if_empty()
        if seq is None:
            return
        payload, _ = encode_batch_reporting(EventList(), time.time(), self._rank, self._dialect)
        self._send(seq, payload)
        self.heartbeats += 1

    def _send(self, seq: int, payload: bytes) -> None:
        # Into the log first: who has seen a number live can ask for all before it.
        self._log.append(seq, payload)
        send = self._socket.send
        send(self._topic, NOBLOCK_MORE)
        send(seq.to_bytes(8, "big"), NOBLOCK_MORE)
        send(payload, NOBLOCK)
        self.sent += 1
        self.bytes_sent += len(payload)
