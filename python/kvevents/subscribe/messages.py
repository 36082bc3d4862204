"""From the frames of a message to what the sequence machines judge."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

from kvevents.codec import decode
from kvevents.errors import DecodeError
from kvevents.events import EventList
from kvevents.subscribe.actions import Message

if TYPE_CHECKING:
    from kvevents.events import KVEventBatch
    from kvevents.subscribe.log import RateLimitedLog
    from kvevents.subscribe.source import Source
    from kvevents.subscribe.stats import SourceStats

__all__ = ["END_MARKER", "Reading", "peek_ts"]

END_MARKER = b"\xff" * 8


class Reading:
    """Decodes the messages of one source, leaves out those of others, and counts what is odd."""

    def __init__(
        self, source: Source, stats: SourceStats, log: RateLimitedLog, *, decode_batches: bool, keep: bool
    ) -> None:
        self._source = source
        self._name = source.label
        self._stats = stats
        self._log = log
        self._decode = decode_batches
        self._keep = keep or not decode_batches
        self._topic: bytes | None = source.topic.encode() if source.topic else None
        self.topic = source.topic.encode()
        """The topic that was heard last, live or in a replay; empty before any."""

    def connected(self) -> None:
        """Behind a new connection there may be a stream of another topic."""
        if not self._source.topic:
            self._topic = None

    def served(self, topic: str) -> bool:
        """The replay address is that of a publisher with this topic: whether it is this source's."""
        if self._topic is None:
            self._topic = self.topic = topic.encode()
        if topic.encode() == self._topic:
            self.topic = self._topic
            return True
        self._stats.other_topics += 1
        self._log.warning(self._name, "topic", "replay of topic %r, not %r", topic, self._topic)
        return False

    def live(self, frames: list[bytes]) -> Message | None:
        """One message of the live socket; ``None``: it is none of this source's."""
        if len(frames) != 3 or len(frames[1]) != 8 or frames[1] == END_MARKER:
            self.malformed("live", frames)
            return None
        if frames[0] != self._topic and not self._take_topic(frames[0]):
            return None
        return self.message(int.from_bytes(frames[1], "big"), frames[2])

    def replayed(self, frames: list[bytes]) -> Message | None:
        """One batch of a plain replay, in either layout; they are told apart by the number of frames."""
        if len(frames) == 4:
            if self._topic is not None and frames[1] != self._topic:
                self._stats.other_topics += 1
                self._log.warning(self._name, "topic", "replay of topic %r, not %r", frames[1], self._topic)
                return None
            self.topic = frames[1]
        return self.message(int.from_bytes(frames[-2], "big"), frames[-1])

    def message(self, seq: int, payload: bytes) -> Message:
        """A batch of bytes that are a source's."""
        batch: KVEventBatch | None = None
        partial = False
        if self._decode:
            try:
                batch = decode(payload)
            except DecodeError as e:
                return self._poisoned(seq, payload, str(e))
            skipped = batch.events.skipped if isinstance(batch.events, EventList) else []
            partial = bool(skipped)
            if partial:
                self._stats.skipped_events += len(skipped)
                first = skipped[0]
                self._log.warning(
                    self._name, "events", "batch %d: %d events left out: %s", seq, len(skipped), first.detail
                )
            ts = _stamp(batch.ts)
        else:
            ts = peek_ts(payload)
        content = (batch, payload if self._keep else None)
        return Message(seq, hash(payload), ts, len(payload), content, partial=partial)

    def _poisoned(self, seq: int, payload: bytes, why: str) -> Message:
        self._stats.poisoned += 1
        self._log.warning(self._name, "poisoned", "batch %d cannot be decoded: %s", seq, why)
        return Message(seq, hash(payload), None, 0, None, poisoned=True)

    def malformed(self, where: str, frames: list[bytes]) -> None:
        """Count a message of another shape."""
        self._stats.malformed += 1
        sizes = [len(f) for f in frames[:8]]
        self._log.warning(
            self._name, "malformed", "a %s message of %d frames of %s bytes", where, len(frames), sizes
        )

    def _take_topic(self, topic: bytes) -> bool:
        if self._topic is None:
            self._topic = self.topic = topic
            return True
        self._stats.other_topics += 1
        if self._source.topic:
            # A filter of ZeroMQ lets through what only begins with the topic; that is nothing to warn of.
            return False
        self._log.warning(
            self._name,
            "topic",
            "two streams on one address, topics %r and %r: give each a Source with its topic",
            self._topic,
            topic,
        )
        return False


def _stamp(ts: object) -> float | None:
    return float(ts) if isinstance(ts, (int, float)) and math.isfinite(ts) else None


_NUMBERS = {0xCB: ">d", 0xCA: ">f", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD3: ">q"}
"""Numbers of msgpack by their first byte."""


def peek_ts(payload: bytes) -> float | None:
    """The time stamp of a payload, without decoding the rest: what comes first in the array or the map."""
    if payload[:4] == b"\x83\xa2ts":
        at = 4
    elif payload and (0x90 <= payload[0] <= 0x9F or payload[0] in {0xDC, 0xDD}):
        at = {0xDC: 3, 0xDD: 5}.get(payload[0], 1)
    else:
        return None
    try:
        tag = payload[at]
        if tag < 0x80:
            return float(tag)
        code = _NUMBERS.get(tag)
        return None if code is None else _stamp(struct.unpack_from(code, payload, at + 1)[0])
    except (IndexError, struct.error):
        return None
