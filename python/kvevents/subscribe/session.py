"""One source between its sockets and its sequence state: frames and time in, items and requests out.

Opens nothing and asks no clock, so that the threaded, the asyncio and the simulated driver are the same.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvevents.codec import decode
from kvevents.errors import DecodeError
from kvevents.events import EventList
from kvevents.subscribe.items import Batch, Gap, Item, Reset
from kvevents.subscribe.sequence import Apply, Ask, Limits, Lose, Message, Sequence, Skip

if TYPE_CHECKING:
    import random

    from kvevents.events import KVEventBatch
    from kvevents.subscribe.log import RateLimitedLog
    from kvevents.subscribe.sequence import Action
    from kvevents.subscribe.source import Source

__all__ = ["Session", "SourceStats", "Timing"]

END_MARKER = b"\xff" * 8


class Timing(NamedTuple):
    """How long to wait for what, in seconds."""

    reorder_wait_s: float = 0.05
    """Without a replay endpoint: a missing batch may be so late before it is a gap."""
    replay_timeout_s: float = 2.0
    """A replay that brings nothing new for so long has failed."""
    backoff_s: float = 0.1
    """Wait before the second try; doubles with each, and is drawn from half to one and a half of that."""
    jitter_s: float = 0.05
    """After a connection, replay is asked for within this time, so that many readers do not ask at once."""
    silence_s: float = 2.0
    """After so long without a message the replay socket is asked; doubles up to 30 times while silence
    lasts."""
    cooldown_s: float = 1.0
    """After a replay failed for good, gaps are not asked for during this time; doubles up to 60 times."""


class SourceStats(msgspec.Struct, kw_only=True):
    """What is known of one source, and what was counted since the subscriber was made."""

    name: str
    connected: bool = False
    """Whether the live connection stands."""
    state: str = "waiting"
    """``waiting`` (nothing heard in this life), ``live`` or ``repairing``."""
    complete: bool = False
    """Whether every batch of the present life was delivered, from the first on."""
    last_seq: int | None = None
    """The last number that was delivered or declared lost."""
    last_message_age_s: float | None = None
    """Since the last live message; ``None``: there was none."""
    held: int = 0
    """Batches that wait for the end of a repair."""
    batches: int = 0
    """Batches delivered."""
    replayed: int = 0
    """Those of them that came from the replay socket."""
    duplicates: int = 0
    late: int = 0
    """Messages of an earlier life, or of a number that was given up."""
    gaps: int = 0
    lost: int = 0
    """Numbers inside gaps."""
    resets: int = 0
    poisoned: int = 0
    """Payloads that are no batch."""
    skipped_events: int = 0
    """Events inside batches that could not be decoded."""
    malformed: int = 0
    """Messages of another shape than three frames with eight bytes of number."""
    other_topics: int = 0
    """Messages of another topic than the source's."""
    connects: int = 0
    replays: int = 0
    """Requests to the replay socket."""
    replays_failed: int = 0
    """Requests that were not answered to their end."""


class _Request:
    """A request to the replay socket: due, then under way."""

    __slots__ = ("ask", "deadline", "due", "last", "sent")

    def __init__(self, ask: Ask, due: float) -> None:
        self.ask = ask
        self.due = due
        self.sent = False
        self.deadline = math.inf
        self.last = -1


class Session:
    """The state of one source. A driver feeds it and does what :attr:`request` wants."""

    def __init__(
        self,
        source: Source,
        *,
        timing: Timing,
        limits: Limits,
        rng: random.Random,
        log: RateLimitedLog,
        decode_batches: bool = True,
        keep_payload: bool = False,
    ) -> None:
        self.source = source
        self.name = source.label
        self.stats = SourceStats(name=self.name)
        self.sequence = Sequence(source.first_seq, limits)
        self.request: _Request | None = None
        """The request that is due or under way; when it changes, what was under way is void."""
        self._timing = timing
        self._rng = rng
        self._log = log
        self._decode = decode_batches
        self._keep = keep_payload or not decode_batches
        self._topic: bytes | None = source.topic.encode() if source.topic else None
        self.topic = source.topic.encode()
        """The topic that was heard last, live or in a replay; empty before any."""
        self._gap_in_life = False
        self._heard_at: float | None = None
        self._silent_at = math.inf
        # In doubt about the life the log is asked on a busy stream too.
        self._verify_at = math.inf
        self._silence = timing.silence_s
        self._cool_until = -math.inf
        self._cooldown = timing.cooldown_s

    # ------------------------------------------------------------ inputs

    def connected(self, now: float) -> list[Item]:
        """The live connection stands (again)."""
        self.stats.connected = True
        self.stats.connects += 1
        if not self.source.topic:
            self._topic = None
        self._silent_at = now + self._silence
        self._verify_at = now + min(0.25, self._timing.silence_s)
        return self._do(self.sequence.connected(), now)

    def disconnected(self) -> None:
        """The live connection broke."""
        self.stats.connected = False

    def live(self, frames: list[bytes], now: float) -> list[Item]:
        """One message of the live socket."""
        self._heard_at = now
        self._silence = self._timing.silence_s
        self._silent_at = now + self._silence
        if len(frames) != 3 or len(frames[1]) != 8 or frames[1] == END_MARKER:
            self._malformed("live", frames)
            return []
        if frames[0] != self._topic and not self._take_topic(frames[0]):
            return []
        m = self._message(int.from_bytes(frames[1], "big"), frames[2])
        return self._do(self.sequence.live(m), now)

    def answer(self, frames: list[bytes], now: float) -> list[Item]:
        """One answer of the replay socket, in either layout; they are told apart by the number of frames."""
        request = self.request
        if request is None or not request.sent:
            return []
        if len(frames) not in {3, 4} or frames[0] or len(frames[-2]) != 8:
            self._malformed("replay", frames)
            return []
        if frames[-2] == END_MARKER:
            self.request = None
            self._cooldown = self._timing.cooldown_s
            self._cool_until = -math.inf
            return self._do(self.sequence.replay_ended(), now)
        if len(frames) == 4:
            if self._topic is not None and frames[1] != self._topic:
                self.stats.other_topics += 1
                self._log.warning(self.name, "topic", "replay of topic %r, not %r", frames[1], self._topic)
                return []
            self.topic = frames[1]
        seq = int.from_bytes(frames[-2], "big")
        if seq > request.last:
            request.last = seq
            request.deadline = now + self._timing.replay_timeout_s
        return self._do(self.sequence.replayed(self._message(seq, frames[-1])), now)

    def tick(self, now: float) -> list[Item]:
        """Time passed."""
        request = self.request
        if request is not None:
            if request.sent:
                if now >= request.deadline:
                    self.stats.replays_failed += 1
                    self._log.warning(
                        self.name,
                        "replay",
                        "%s brought nothing new for %s s (asked from %d, try %d)",
                        self.source.replay_endpoint,
                        self._timing.replay_timeout_s,
                        request.ask.start,
                        request.ask.attempt,
                    )
                    return self._failed("unreachable", now)
            elif now >= request.due and not self._may_ask(now):
                if self.source.replay_endpoint is None:
                    return self._failed("no replay", now, retry=False)
                return self._failed("unreachable", now, retry=False)
            return []
        if now >= self._silent_at or (self.sequence.doubtful and now >= self._verify_at):
            self._verify_at = now + self._timing.silence_s
            self._silence = min(self._silence * 2, self._timing.silence_s * 30)
            self._silent_at = now + self._silence
            if self._may_ask(now):
                return self._do(self.sequence.silence(), now)
        return []

    # ------------------------------------------------------------ what the driver asks

    def wants(self, now: float) -> int | None:
        """The number from which to ask the replay socket now, or ``None``."""
        request = self.request
        if request is None or request.sent or now < request.due or not self._may_ask(now):
            return None
        return request.ask.start

    def asked(self, now: float) -> None:
        """The request was sent."""
        assert self.request is not None  # noqa: S101 - the driver asks because of it
        self.request.sent = True
        self.request.deadline = now + self._timing.replay_timeout_s
        self.stats.replays += 1

    def deadline(self, now: float) -> float:
        """When :meth:`tick` is to be called at the latest; ``inf`` for never."""
        request = self.request
        if request is None:
            if self.source.replay_endpoint is None:
                return math.inf
            return min(self._silent_at, self._verify_at) if self.sequence.doubtful else self._silent_at
        if request.sent:
            return request.deadline
        # One that may be sent waits for the driver, not for time.
        return request.due if request.due > now or not self._may_ask(now) else math.inf

    def snapshot(self, now: float) -> SourceStats:
        """A copy of the statistics."""
        s, q = self.stats, self.sequence
        s.last_seq = q.last_seq
        s.held = q.held
        s.state = "repairing" if q.held else "live" if q.heard else "waiting"
        s.complete = q.heard and not q.held and not self._gap_in_life
        s.last_message_age_s = None if self._heard_at is None else max(0.0, now - self._heard_at)
        return msgspec.structs.replace(s)

    # ------------------------------------------------------------ inside

    def _may_ask(self, now: float) -> bool:
        return self.source.replay_endpoint is not None and now >= self._cool_until

    def _failed(self, reason: str, now: float, *, retry: bool = True) -> list[Item]:
        self.request = None
        items = self._do(self.sequence.replay_failed(reason, retry=retry), now)
        if self.request is None and retry:
            # Given up. The next gap need not wait for the same silence.
            self._cool_until = now + self._cooldown
            self._cooldown = min(self._cooldown * 2, self._timing.cooldown_s * 60)
            self._silent_at = self._cool_until
        return items

    def _do(self, actions: list[Action], now: float) -> list[Item]:
        items: list[Item] = []
        stats = self.stats
        for a in actions:
            if isinstance(a, Apply):
                stats.batches += 1
                stats.replayed += a.replayed
                batch, payload = a.message.content
                items.append(Batch(self.name, a.message.seq, batch, a.replayed, payload))
            elif isinstance(a, Skip):
                if a.why == "duplicate":
                    stats.duplicates += 1
                elif a.why == "late":
                    stats.late += 1
            elif isinstance(a, Ask):
                self.request = _Request(a, now + self._delay(a))
            elif isinstance(a, Lose):
                stats.gaps += 1
                stats.lost += a.last - a.first + 1
                self._gap_in_life = True
                self._log.warning(
                    self.name, "gap", "batches %d to %d are lost: %s", a.first, a.last, a.reason
                )
                items.append(Gap(self.name, a.first, a.last, a.reason))
            else:
                stats.resets += 1
                self._gap_in_life = False
                self._log.warning(self.name, "reset", "a new life of the publisher: %s", a.reason)
                items.append(Reset(self.name, a.reason))
        if self.request is not None and not self.sequence.repairing:
            self.request = None
        return items

    def _delay(self, ask: Ask) -> float:
        t = self._timing
        if self.source.replay_endpoint is None:
            return t.reorder_wait_s if ask.why == "gap" else 0.0
        if ask.attempt > 1:
            return float(t.backoff_s * 2 ** (ask.attempt - 2) * self._rng.uniform(0.5, 1.5))
        return self._rng.uniform(0, t.jitter_s) if ask.why == "connect" else 0.0

    def _message(self, seq: int, payload: bytes) -> Message:
        batch: KVEventBatch | None = None
        if self._decode:
            try:
                batch = decode(payload)
            except DecodeError as e:
                return self._poisoned(seq, payload, str(e))
            skipped = batch.events.skipped if isinstance(batch.events, EventList) else []
            if skipped:
                self.stats.skipped_events += len(skipped)
                first = skipped[0]
                self._log.warning(
                    self.name, "events", "batch %d: %d events left out: %s", seq, len(skipped), first.detail
                )
            ts = _stamp(batch.ts)
        else:
            ts = peek_ts(payload)
        content = (batch, payload if self._keep else None)
        return Message(seq, hash(payload), ts, len(payload), content)

    def _poisoned(self, seq: int, payload: bytes, why: str) -> Message:
        self.stats.poisoned += 1
        self._log.warning(self.name, "poisoned", "batch %d cannot be decoded: %s", seq, why)
        return Message(seq, hash(payload), None, 0, None, poisoned=True)

    def _malformed(self, where: str, frames: list[bytes]) -> None:
        self.stats.malformed += 1
        sizes = [len(f) for f in frames[:8]]
        self._log.warning(
            self.name, "malformed", "a %s message of %d frames of %s bytes", where, len(frames), sizes
        )

    def _take_topic(self, topic: bytes) -> bool:
        if self._topic is None:
            self._topic = self.topic = topic
            return True
        self.stats.other_topics += 1
        if self.source.topic:
            # A filter of ZeroMQ lets through what only begins with the topic; that is nothing to warn of.
            return False
        self._log.warning(
            self.name,
            "topic",
            "two streams on one address, topics %r and %r: give each a Source with its topic",
            self._topic,
            topic,
        )
        return False


def _stamp(ts: object) -> float | None:
    return float(ts) if isinstance(ts, (int, float)) and math.isfinite(ts) else None


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
        code = {0xCB: ">d", 0xCA: ">f", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD3: ">q"}.get(tag)
        return None if code is None else _stamp(struct.unpack_from(code, payload, at + 1)[0])
    except (IndexError, struct.error):
        return None
