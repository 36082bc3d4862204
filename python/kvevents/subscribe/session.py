"""One source between its sockets and its sequence state: frames and time in, items and requests out.

Opens nothing and asks no clock, so that the threaded, the asyncio and the simulated driver are the same.
A driver feeds it what the sockets bring (:meth:`Session.live`, :meth:`Session.answer`), tells it of time
(:meth:`Session.tick`, not later than :meth:`Session.deadline`), and sends what :meth:`Session.take` gives
whenever :meth:`Session.wants` says so: over a new DEALER socket when :attr:`Session.request` is another
object than before, and over the same one else. What an old socket still brings is not to be fed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from kvevents.events import EventList
from kvevents.subscribe.actions import (
    Apply,
    Ask,
    Compare,
    Fetch,
    Limits,
    Lose,
    Range,
    Restore,
    Skip,
    Wipe,
)
from kvevents.subscribe.asking import Asking
from kvevents.subscribe.extended import CODES, AnswerError, is_extended, read_answer
from kvevents.subscribe.held import Held
from kvevents.subscribe.items import Batch, Gap, Item, Reset, Resumed, Snapshot, StoreOnly
from kvevents.subscribe.messages import END_MARKER, Reading
from kvevents.subscribe.plain import PlainSequence
from kvevents.subscribe.sequence import Sequence
from kvevents.subscribe.stats import SourceStats
from kvevents.subscribe.timing import Timing

if TYPE_CHECKING:
    import random

    from kvevents.events import KVEventBatch
    from kvevents.subscribe.actions import Action, Message, Policy
    from kvevents.subscribe.extended import Answer
    from kvevents.subscribe.items import Resume
    from kvevents.subscribe.log import RateLimitedLog
    from kvevents.subscribe.source import Source

__all__ = ["Session", "SourceStats", "Timing"]

_PROBE_S, _PROBE_MOST_S = 2.0, 3600.0
"""When a server that is taken for a plain one is asked again: at first, and at most (four times as long each
time)."""
_LONG_S = 5.0
"""Live batches are not held for longer than so until a snapshot may be asked for again."""


class Session:
    """The state of one source. A driver feeds it and sends what it wants."""

    def __init__(
        self,
        source: Source,
        *,
        timing: Timing,
        limits: Limits,
        rng: random.Random,
        log: RateLimitedLog,
        policy: Policy = "snapshot",
        decode_batches: bool = True,
        keep_payload: bool = False,
        resume: Resume | None = None,
    ) -> None:
        self.source = source
        self.name = source.label
        self.stats = SourceStats(name=self.name)
        plain = PlainSequence(source.first_seq, limits)
        self.sequence: PlainSequence | Sequence = plain
        # Where an earlier reader stopped, until it is known whether this is still the same life.
        self._resume = resume if resume is not None and resume.last_seq >= source.first_seq else None
        if self._resume is not None:
            plain.resume(self._resume.last_seq, self._resume.ts)
        self._policy: Policy = policy
        self._limits = limits
        self._timing = timing
        self._log = log
        self._reading = Reading(source, self.stats, log, decode_batches=decode_batches, keep=keep_payload)
        self._early = Held(limits)
        self._asking = Asking(source, timing, limits, rng, policy)
        if source.replay_endpoint is None:
            self.stats.protocol = "none"
        self._gap_in_life = False
        self._heard_at: float | None = None
        self._silent_at = math.inf
        # In doubt about the life the log is asked on a busy stream too; extended servers always are.
        self._look_at = math.inf
        self._silence = timing.silence_s
        self._check_at = math.inf
        # A server that seemed to be plain is asked again: an answer may have been lost.
        self._probe_at, self._probe_wait = math.inf, _PROBE_S
        self._said_plain = False

    # ------------------------------------------------------------ what the driver asks

    @property
    def request(self) -> object:
        """The request that is due or under way; when it changes, what was under way is void."""
        return self._asking.request

    @property
    def topic(self) -> bytes:
        """The topic that was heard last, live or in a replay; empty before any."""
        return self._reading.topic

    def wants(self, now: float) -> bool:
        """Whether something is to be sent to the replay address now."""
        return self._asking.wants(now)

    def take(self, now: float) -> list[tuple[bytes, ...]]:
        """The messages to send, each with its frames; they count as sent."""
        epoch = self.sequence.epoch if isinstance(self.sequence, Sequence) else None
        new, messages = self._asking.take(now, epoch)
        self.stats.replays += new
        return messages

    def deadline(self, now: float) -> float:
        """When :meth:`tick` is to be called at the latest; ``inf`` for never."""
        if self._asking.request is not None:
            return min(self._asking.deadline(now), self._asking.rest_until)
        if self.source.replay_endpoint is None:
            return math.inf
        return min(self._silent_at, self._looks_at(), self._asking.rest_until)

    def check_due(self, now: float) -> bool:
        """Whether the user's digest should be compared: :meth:`check` it when all items were applied."""
        return now >= self._check_at and isinstance(self.sequence, Sequence) and self.sequence.job is None

    def statistics(self, now: float) -> SourceStats:
        """A copy of the statistics."""
        s, q = self.stats, self.sequence
        held = len(q.held) + len(self._early)
        s.last_seq = q.last_seq
        s.held = held
        s.state = "repairing" if held else "live" if q.heard else "waiting"
        incomplete = q.incomplete if isinstance(q, Sequence) else self._gap_in_life
        s.complete = q.heard and not held and not incomplete
        s.last_message_age_s = None if self._heard_at is None else max(0.0, now - self._heard_at)
        return msgspec.structs.replace(s)

    # ------------------------------------------------------------ inputs

    def connected(self, now: float) -> list[Item]:
        """The live connection stands (again)."""
        self.stats.connected = True
        self.stats.connects += 1
        self._reading.connected()
        # What waits was heard on another connection, perhaps of another life; the server has what matters.
        self.stats.late += len(self._early)
        self._early = Held(self._limits)
        self._silent_at = now + self._silence
        self._look_at = now + min(0.25, self._timing.silence_s)
        self._check_at = now + self._timing.check_s
        if isinstance(self.sequence, Sequence):
            # Until the server has answered nothing is delivered, so it is asked whatever it did before.
            self._asking.cool_until = -math.inf
        elif self.source.replay_endpoint is not None:
            self.stats.protocol = "unknown"
            self._probe_at, self._probe_wait = now + _PROBE_S, _PROBE_S
        return self._do(self.sequence.connected(), now)

    def disconnected(self) -> None:
        """The live connection broke."""
        self.stats.connected = False

    def live(self, frames: list[bytes], now: float) -> list[Item]:
        """One message of the live socket."""
        self._heard_at = now
        self._silence = self._timing.silence_s
        self._silent_at = now + self._silence
        m = self._reading.live(frames)
        if m is None:
            return []
        if self._waits():
            self._early.add(m)
            return []
        return self._do(self.sequence.live(m), now)

    def answer(self, frames: list[bytes], now: float) -> list[Item]:
        """One message of the replay socket."""
        request = self._asking.request
        if request is None or not request.sent:
            return []
        if is_extended(frames):
            try:
                answer = read_answer(frames)
                return self._extended(answer, frames, now)
            except AnswerError as e:
                return self._nonsense(str(e), now)
        if len(frames) not in {3, 4} or frames[0] or len(frames[-2]) != 8:
            self._reading.malformed("replay", frames)
            return []
        if request.probing:
            return [] if self._asking.probe_again(now) else self._plain_server(now)
        if not isinstance(request.ask, Ask) or not isinstance(self.sequence, PlainSequence):
            return []
        if frames[-2] == END_MARKER:
            self._asking.succeeded()
            return self._do(self.sequence.replay_ended(), now)
        m = self._reading.replayed(frames)
        if m is None:
            return []
        request.progress(m.seq, now + self._timing.replay_timeout_s)
        items = self._resumed_plainly(m, now)
        if self._asking.request is not request:
            return items
        return items + self._do(self.sequence.replayed(m), now)

    def broken_off(self, now: float) -> list[Item]:
        """An exception (Ctrl-C, say) ended an input before its items were out: begin anew, and say so."""
        self._asking.forget_pieces()
        self._asking.request = None
        self._early = Held(self._limits)
        self.stats.epoch, self.stats.store_only = None, ()
        self.sequence = PlainSequence(self.source.first_seq, self._limits)
        if self.source.replay_endpoint is not None:
            self.stats.protocol = "unknown"
        return self._do([Wipe("unsure"), *self.sequence.connected()], now)

    def check(self, seq: int, digest: bytes, now: float) -> bool:
        """Compare the digest of the user's set behind ``seq`` with the publisher's, if both stand there."""
        self._check_at = now + self._timing.check_s
        if not isinstance(self.sequence, Sequence):
            return False
        actions = self.sequence.check(seq, digest)
        self._do(actions, now)
        return bool(actions)

    def tick(self, now: float) -> list[Item]:
        """Time passed."""
        items: list[Item] = []
        asking, sequence = self._asking, self.sequence
        if now >= asking.rest_until:
            asking.rest_until = math.inf
            if isinstance(sequence, Sequence):
                items += self._do(sequence.rested(), now)
        request = asking.request
        if request is not None:
            reason = asking.overdue(now)
            if reason is not None:
                items += self._failed(reason, now, retry=request.sent)
        elif now >= min(self._silent_at, self._looks_at()):
            self._silence = min(self._silence * 2, self._timing.silence_s * 30)
            self._silent_at = now + self._silence
            extended = isinstance(sequence, Sequence)
            self._look_at = now + (self._timing.look_s if extended else self._timing.silence_s)
            if asking.may_ask(now):
                items += self._do(sequence.look(), now)
            if now >= self._probe_at:
                self._probe_at = now + self._probe_wait
        return items

    # ------------------------------------------------------------ answers

    def _extended(self, a: Answer, frames: list[bytes], now: float) -> list[Item]:
        request, sequence = self._asking.request, self.sequence
        assert request is not None  # noqa: S101 - the caller's condition
        if a.op == "error":
            return self._refused(a, now)
        if a.op == "hello":
            if a.topic is not None and not self._reading.served(a.topic):
                return self._failed("other topic", now)
            self.stats.rank, self.stats.exact_for = a.rank, a.exact_for
            self._look_at = now + self._timing.look_s
            items = self._store_only(a)
            if isinstance(sequence, PlainSequence):
                return items + self._extended_server(a, now)
            return items + self._do(sequence.hello(a.head), now)
        if not isinstance(sequence, Sequence):
            raise AnswerError(f"{a.op} without a hello")
        payload = frames[3] if len(frames) == 4 else b""
        ask = request.ask
        if a.op == "replay" and isinstance(ask, Range):
            if a.seq is None or not payload:
                raise AnswerError("a batch without number or payload")
            request.progress(a.seq, now + self._timing.replay_timeout_s)
            m = self._reading.message(a.seq, payload)
            return self._do(sequence.replayed(a.head, m), now)
        if a.op == "end" and isinstance(ask, Range):
            return self._do(sequence.replay_ended(a.head, -1 if a.count is None else a.count), now)
        if a.op == "snapshot" and isinstance(ask, Fetch):
            whole = self._asking.piece(a, payload, now)
            if whole is None:
                return []
            return self._do(sequence.restored(a.head, whole.resume_seq, whole), now)
        if a.op == "digest" and isinstance(ask, Compare):
            differs = a.digest != ask.digest and a.seq == ask.seq
            self.stats.checks += 1
            self.stats.drifts += differs
            if differs:
                self._log.warning(self.name, "drift", "behind %d the set is not the publisher's", ask.seq)
            return self._do(sequence.digested(a.head, a.digest if a.seq == ask.seq else None), now)
        raise AnswerError(f"{a.op} is no answer to what was asked")

    def _refused(self, a: Answer, now: float) -> list[Item]:
        request, sequence = self._asking.request, self.sequence
        assert request is not None  # noqa: S101 - the caller's condition
        if request.probing and a.code != "busy":
            return self._plain_server(now)
        if len(a.epoch) == 16 and isinstance(sequence, Sequence):
            if a.code == "too_old" and isinstance(request.ask, Range):
                return self._do(sequence.too_old(a.head), now)
            if isinstance(request.ask, Compare):
                return self._do(sequence.digested(a.head, None), now)
        if a.code == "gone":
            self._asking.forget_pieces()
        # What it says goes into items and logs, so it is one of the words that there are.
        code = a.code if a.code in CODES else "refused"
        return self._failed(code, now, retry=a.code not in {"no_mirror", "mirror_lost"})

    def _nonsense(self, what: str, now: float) -> list[Item]:
        self.stats.malformed += 1
        self._log.warning(self.name, "answer", "an answer that cannot be: %s", what)
        self._asking.forget_pieces()
        return self._failed("malformed", now)

    def _plain_server(self, now: float) -> list[Item]:
        """The server knows plain replay only."""
        self.stats.protocol = "plain"
        self._probe_at, self._probe_wait = now + self._probe_wait, min(self._probe_wait * 4, _PROBE_MOST_S)
        if not self._said_plain:
            self._said_plain = True
            self._log.warning(
                self.name,
                "plain",
                "%s knows no extended replay: what its log has lost is a gap, some restarts cannot be told",
                self.source.replay_endpoint,
            )
        sequence = self.sequence
        if isinstance(sequence, PlainSequence):
            self._asking.go_on_plainly(now)
            return self._do([], now)
        # Another kind of server is another process.
        self.stats.epoch = None
        self.sequence = PlainSequence(self.source.first_seq, self._limits)
        actions: list[Action] = [Wipe("restart")] if sequence.heard else []
        return self._do(actions + self.sequence.connected(), now)

    def _extended_server(self, a: Answer, now: float) -> list[Item]:
        """The server says which life it lives: from now on that decides."""
        plain = self.sequence
        assert isinstance(plain, PlainSequence)  # noqa: S101 - the caller's condition
        self.stats.protocol = "extended"
        self._said_plain = False
        sequence = Sequence(self.source.first_seq, self._limits, self._policy)
        actions: list[Action] = []
        items: list[Item] = []
        resume, self._resume = self._resume, None
        if resume is not None and resume.epoch == a.epoch:
            sequence.resume(a.epoch, resume.last_seq)
            items.append(Resumed(self.name, resume.last_seq))
        elif plain.heard:
            # Of which life that was, what was delivered so far, nobody knows.
            actions.append(Wipe("unsure" if resume is None or resume.epoch is None else "restart"))
        sequence.connected()
        for m in [*plain.held, *self._early]:
            sequence.live(m)
        self._early = Held(self._limits)
        self.sequence = sequence
        return items + self._do(actions + sequence.hello(a.head), now)

    def _resumed_plainly(self, m: Message, now: float) -> list[Item]:
        """What the first answer of a plain replay says of the life in which an earlier reader stopped."""
        resume, sequence = self._resume, self.sequence
        if resume is None or not isinstance(sequence, PlainSequence) or m.seq < resume.last_seq:
            return []
        self._resume = None
        if m.seq == resume.last_seq:
            if m.ts is None or m.ts != resume.ts:
                # The machine sees what that means.
                return []
            sequence.recognise(m)
            return [Resumed(self.name, m.seq)]
        # The log has lost the only thing that could tell.
        self.sequence = PlainSequence(self.source.first_seq, self._limits)
        return self._do([Wipe("unsure"), *self.sequence.connected()], now)

    def _store_only(self, a: Answer) -> list[Item]:
        media = tuple(a.store_only)
        if media == self.stats.store_only:
            return []
        self.stats.store_only = media
        return [StoreOnly(self.name, media, a.rank or 0)]

    # ------------------------------------------------------------ inside

    def _waits(self) -> bool:
        """Whether what is heard first waits until it is known who can say of which life it is."""
        request, q = self._asking.request, self.sequence
        return isinstance(q, PlainSequence) and not q.heard and request is not None and request.probing

    def _looks_at(self) -> float:
        q = self.sequence
        if isinstance(q, Sequence):
            return self._look_at
        return min(self._probe_at, self._look_at if q.doubtful else math.inf)

    def _failed(self, reason: str, now: float, *, retry: bool = True) -> list[Item]:
        request, sequence = self._asking.request, self.sequence
        assert request is not None  # noqa: S101 - there is one to fail
        if request.sent:
            self.stats.replays_failed += 1
            self._log.warning(
                self.name, "replay", "%s: %s (%s)", self.source.replay_endpoint, reason, request.ask
            )
        self._asking.request = None
        if isinstance(sequence, Sequence):
            items = self._do(sequence.failed(reason, retry=retry), now)
        else:
            items = self._do(sequence.replay_failed(reason, retry=retry), now)
        if self._asking.request is None and request.sent:
            # Given up. The next gap need not wait for the same silence.
            self._silent_at = self._asking.cool(now)
        return items

    def _do(self, actions: list[Action], now: float) -> list[Item]:
        items: list[Item] = []
        stats = self.stats
        # Whether what was missing does not matter any more.
        clear = False
        for a in actions:
            if isinstance(a, Apply):
                stats.batches += 1
                self._asking.bore_fruit()
                stats.replayed += a.replayed
                batch, payload = a.message.content
                epoch = self.sequence.epoch if isinstance(self.sequence, Sequence) else None
                items.append(Batch(self.name, a.message.seq, batch, a.replayed, payload, epoch))
                if isinstance(self.sequence, Sequence) and self.sequence.incomplete:
                    clear = not a.message.partial and (clear or _has_clear(batch))
            elif isinstance(a, Skip):
                if a.why == "duplicate":
                    stats.duplicates += 1
                elif a.why == "late":
                    stats.late += 1
            elif isinstance(a, Lose):
                clear = False
                items += self._lost(a)
            elif isinstance(a, Wipe):
                items.append(self._reset(a))
            elif isinstance(a, Restore):
                stats.snapshots += 1
                self._asking.bore_fruit()
                self._gap_in_life = False
                whole = a.content
                items.append(Snapshot(self.name, a.resume_seq, whole.events, whole.epoch, whole.digest))
                rest_s = self._asking.restored(now)
                if isinstance(self.sequence, Sequence):
                    self.sequence.cooling = rest_s > _LONG_S
            else:
                probe = stats.protocol == "unknown" or now >= self._probe_at
                self._asking.ask(a, now, probe=probe)
        if isinstance(self.sequence, Sequence):
            if clear:
                self.sequence.cleared()
            if self.sequence.resting and self._asking.rest_until == math.inf:
                self._asking.rest(now)
            self._follow(self.sequence)
        if self._asking.request is not None and not self.sequence.repairing:
            self._asking.succeeded()
        while self._early and not self._waits():
            m = next(iter(self._early))
            self._early.pop(m.seq)
            items += self._do(self.sequence.live(m), now)
        return items

    def _follow(self, q: Sequence) -> None:
        self.stats.epoch = q.epoch
        if q.returned > self.stats.returned_epochs:
            self.stats.returned_epochs = q.returned
            self._log.warning(
                self.name,
                "identity",
                "life %s is back at %s: do two publishers share the address?",
                None if q.epoch is None else q.epoch.hex(),
                self.source.replay_endpoint,
            )

    def _lost(self, a: Lose) -> list[Item]:
        items: list[Item]
        self.stats.gaps += 1
        if a.reason != "drift":
            self.stats.lost += a.last - a.first + 1
        gap = Gap(self.name, a.first, a.last, a.reason)
        self._log.warning(self.name, "gap", "batches %d to %d are lost: %s", a.first, a.last, a.reason)
        if self._policy == "wipe" and isinstance(self.sequence, PlainSequence):
            # The other machine says so itself.
            items = [self._reset(Wipe("gap")), gap] if self.stats.batches else [gap]
        else:
            items = [gap]
        self._gap_in_life = True
        return items

    def _reset(self, a: Wipe) -> Reset:
        self.stats.resets += 1
        self._resume = None
        self._gap_in_life = False
        self._log.warning(self.name, "reset", "everything known is void: %s", a.reason)
        return Reset(self.name, a.reason)


def _has_clear(batch: KVEventBatch | None) -> bool:
    events = None if batch is None else batch.events
    return isinstance(events, EventList) and len(events.split_at_clears()) > 1
