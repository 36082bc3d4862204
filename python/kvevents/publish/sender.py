"""The thread that owns the live socket: takes batches, encodes them, keeps the bytes and sends them."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from kvevents._core import EventList
from kvevents.publish.outbox import LOST
from kvevents.publish.sockets import NOBLOCK, NOBLOCK_MORE, send_of

if TYPE_CHECKING:
    import zmq

    from kvevents._core import Mirror, ReplayLog
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
        mirror: Mirror | None,
        socket: zmq.Socket[bytes],
        context: SharedContext,
    ) -> None:
        self._rank = rank
        self._outbox = outbox
        self._log = log
        self._mirror = mirror
        self._socket = socket
        self._send_frame = send_of(socket)
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
            seq, batch, send = item
            try:
                if send:
                    self._send_batch(seq, batch)
                else:
                    self._mirror_batch(seq, batch)
            except Exception:
                self.failed += 1
                _log.exception("rank %d: batch %d could not be sent", self._rank, seq)
                outbox.note_hole(seq)
                self._mirror_failed(seq, batch)

    def _send_batch(self, seq: int, batch: Any) -> None:
        events, ts, rank = _events_of(batch), batch.ts, batch.data_parallel_rank
        bad: list[tuple[int, str, str]] = []
        try:
            payload, losses = self._encode(seq, events, ts, rank)
        except Exception:  # whatever an event raised when it was looked at
            good, bad = _sort_out(events)
            payload, losses = self._encode(seq, good, ts, rank)
        self._send(seq, payload)
        losses = bad + losses
        if losses:
            self._outbox.skip()
            self.events_lost += len(losses)
            index, field, reason = losses[0]
            _log.warning(
                "rank %d: %d event(s) of batch %d cannot be encoded, number %d is skipped; event %d: %s %s",
                self._rank, len(losses), seq, seq + 1, index, field, reason,
            )  # fmt: skip

    def _mirror_batch(self, seq: int, batch: Any) -> None:
        """A batch that is not sent happened all the same: a snapshot heals its hole."""
        mirror = self._mirror
        if mirror is None:
            return
        if batch is None:
            mirror.advance(seq)
        elif batch is LOST:
            mirror.lose()
            mirror.advance(seq)
            _log.warning("rank %d: too many batches were dropped for the mirror up to %d", self._rank, seq)
        else:
            events = _events_of(batch)
            try:
                mirror.record(seq, events)
            except Exception:
                good, bad = _sort_out(events)
                mirror.record(seq, good)
                self.events_lost += len(bad)

    def _mirror_failed(self, seq: int, batch: Any) -> None:
        try:
            self._mirror_batch(seq, batch)
        except Exception:  # what it holds cannot be known
            if self._mirror is not None:
                self._mirror.lose()
                self._mirror.advance(seq)

    def _beat(self) -> None:
        seq = self._outbox.number_if_empty()
        if seq is None:
            return
        payload, _ = self._encode(seq, EventList(), time.time(), self._rank)
        self._send(seq, payload)
        self.heartbeats += 1

    def _encode(
        self, seq: int, events: Any, ts: float, rank: int | None
    ) -> tuple[bytes, list[tuple[int, str, str]]]:
        """The payload, which is in log and mirror from now on: who sees a number can ask for all before."""
        return self._log.append_encoded(
            seq, events, ts, rank, self._dialect, lossy=self._lossy, mirror=self._mirror
        )

    def _send(self, seq: int, payload: bytes) -> None:
        send = self._send_frame
        send(self._topic, NOBLOCK_MORE)
        send(seq.to_bytes(8, "big"), NOBLOCK_MORE)
        send(payload, NOBLOCK)
        self.sent += 1
        self.bytes_sent += len(payload)


def _events_of(batch: Any) -> Any:
    """The events, in a form that can be looked at twice."""
    events = batch.events
    if not isinstance(events, (EventList, list, tuple)):
        events = batch.events = list(events)
    return events


def _sort_out(events: Any) -> tuple[EventList, list[tuple[int, str, str]]]:
    """What can be put into columns, and the rest: something that is no event, or a value nobody can mean."""
    good = []
    bad = []
    for index, event in enumerate(events):
        try:
            EventList([event])
        except Exception as e:
            bad.append((index, "", str(e)))
        else:
            good.append(event)
    return EventList(good), bad
