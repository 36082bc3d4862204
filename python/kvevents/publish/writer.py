"""What becomes of each batch on its way out: numbered, encoded, kept in log and mirror, sent.

No socket, no thread: :class:`~kvevents.publish.sender.Sender` is the one with both, and a simulation has its
own.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from kvevents._core import EventList
from kvevents.publish.outbox import LOST

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvevents._core import Mirror, ReplayLog
    from kvevents.config import KVEventsConfig
    from kvevents.publish.outbox import Outbox

__all__ = ["BatchWriter"]

_log = logging.getLogger("kvevents.publish")


class BatchWriter(ABC):
    """Takes batches out of the outbox, one a :meth:`step`. One batch's failure costs that batch.

    Whoever calls it is the one taker of the outbox. ``clock`` stamps the batches of its own (heartbeats).
    """

    def __init__(
        self,
        config: KVEventsConfig,
        rank: int,
        *,
        outbox: Outbox,
        log: ReplayLog,
        mirror: Mirror | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rank = rank
        self._outbox = outbox
        self._log = log
        self._mirror = mirror
        self._clock = clock
        self._dialect = config.dialect
        # An older dialect has no place for newer fields: choosing it says that its readers need none.
        self._lossy = not config.dialect.startswith("vllm-map")
        self.sent = 0
        self.bytes_sent = 0
        self.failed = 0
        self.events_lost = 0
        self.heartbeats = 0

    @abstractmethod
    def _transmit(self, number: bytes, payload: bytes) -> None:
        """Send a message: its number in 8 bytes, big endian, and its payload. May lose it, never waits."""

    def step(self) -> bool:
        """Deal with the oldest batch that waits; ``False`` if none does."""
        item = self._outbox.take()
        if item is None:
            return False
        seq, batch, send = item
        try:
            if send:
                self._send_batch(seq, batch)
            else:
                self._mirror_batch(seq, batch)
        except Exception:
            self.failed += 1
            _log.exception("rank %d: batch %d could not be sent", self._rank, seq)
            self._outbox.note_hole(seq)
            self._mirror_failed(seq, batch)
        return True

    def beat(self) -> None:
        """Send an empty batch, unless others wait: readers see what they missed before it."""
        seq = self._outbox.number_if_empty()
        if seq is None:
            return
        payload, _ = self._encode(seq, EventList(), self._clock(), self._rank)
        self._send(seq, payload)
        self.heartbeats += 1

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

    def _encode(
        self, seq: int, events: Any, ts: float, rank: int | None
    ) -> tuple[bytes, list[tuple[int, str, str]]]:
        """The payload, which is in log and mirror from now on: who sees a number can ask for all before."""
        return self._log.append_encoded(
            seq, events, ts, rank, self._dialect, lossy=self._lossy, mirror=self._mirror
        )

    def _send(self, seq: int, payload: bytes) -> None:
        self._transmit(seq.to_bytes(8, "big"), payload)
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
