"""The sequence state machine of one source.

No sockets, no clock, no randomness: what arrives, and what a driver found out, are arguments; what to do
comes back as actions. Equal inputs give equal actions, which is how the tests can try every interleaving.

The promise: within one life of a publisher every number, from the first on, is accounted for exactly once
and in order, by :class:`Apply` or inside one :class:`Lose`. :class:`Wipe` starts a new life.

How a number that was seen before is judged: same bytes, a duplicate; other bytes and a newer time stamp than
the remembered one, a restart; an older one, a late message of an earlier life; anything else is decided by
what the publisher's replay log holds, and if that cannot decide either, by ``Wipe("unsure")``. Whatever the
replay log says is the truth of the present life: it is asked from the last applied number on, not from the
one after, so that a publisher that restarted and counted past the old number is found out.
"""

from __future__ import annotations

import math
from typing import Literal

from kvevents.subscribe.actions import Action, Apply, Ask, Limits, Lose, Message, Skip, Wipe

__all__ = ["Action", "Apply", "Ask", "Limits", "Lose", "Message", "PlainSequence", "Skip", "Wipe"]


class _Repair:
    """One request to the replay socket."""

    __slots__ = (
        "attempt",
        "first_answer",
        "high",
        "newest",
        "next",
        "other_life",
        "start",
        "verified",
        "why",
    )

    def __init__(self, ask: Ask, high: int, expected: int) -> None:
        self.start = ask.start
        self.attempt = ask.attempt
        self.why = ask.why
        # The highest number that was known to exist: the log must have had it, if it ever will.
        self.high = high
        # What was expected when it was made.
        self.next = expected
        # The highest number that was answered.
        self.newest = -1
        self.first_answer = True
        # The log has nothing from the last applied number on: whatever it has is of another life.
        self.other_life = False
        # Whether an answer had the bytes that are remembered for its number: the life is the same.
        self.verified = False


class PlainSequence:
    """The state of one source. Not thread-safe; one driver owns it."""

    def __init__(self, first_seq: int = 0, limits: Limits | None = None) -> None:
        self.first_seq = first_seq
        self.limits = limits or Limits()
        self.lives = 0
        """How many lives ended."""
        self.heard = False
        """Whether any message of this life was applied or lost."""
        self._replay_known = False
        self._repair: _Repair | None = None
        # Whether live messages wait until the replay log has shown that the life is the same.
        self._unverified = False
        # Whether anything that was applied is known to be of the life that this connection is to.
        self._confirmed = True
        self._begin(None)

    def _begin(self, life_ts: float | None) -> None:
        self.next = self.first_seq
        """The number that is expected."""
        self.heard = False
        self._high = self.first_seq - 1
        self._seen: dict[int, tuple[int | None, float | None]] = {}
        self._lost: list[tuple[int, int]] = []
        self._held: dict[int, tuple[Message, bool]] = {}
        self.held_bytes = 0
        self._condemned: set[int] = set()
        self._suspect: Message | None = None
        # The first number that tells, once the log shows it, whether what was applied is of this life.
        self._doubt_from: int | None = None
        # Time stamps up to this one belong to earlier lives.
        self._life_ts = life_ts
        self._last_ts: float | None = None
        self._late_run = 0
        self._late_seq = -2

    def resume(self, last_seq: int, ts: float | None) -> None:
        """Begin behind a batch that an earlier reader applied, of which no more than its stamp is known."""
        self._seen[last_seq] = (None, ts)
        self._last_ts = ts
        self._high = last_seq
        self.next = last_seq + 1
        self.heard = True

    def recognise(self, m: Message) -> None:
        """Know the batch behind which :meth:`resume` began."""
        self._seen[m.seq] = (m.digest, m.ts)

    # ------------------------------------------------------------ what the driver asks

    @property
    def last_seq(self) -> int | None:
        """The last number that was accounted for, ``None`` at the start of a life."""
        return self.next - 1 if self.heard else None

    @property
    def repairing(self) -> bool:
        """Whether an answer of the replay socket is awaited."""
        return self._repair is not None

    @property
    def doubtful(self) -> bool:
        """Whether a new connection's life is not verified yet: call :meth:`look` soon."""
        return self._doubt_from is not None and not self._confirmed

    @property
    def held(self) -> list[Message]:
        """Messages that wait for the end of a repair, in the order of their numbers."""
        return [m for _, (m, _) in sorted(self._held.items())]

    # ------------------------------------------------------------ inputs

    def live(self, m: Message) -> list[Action]:
        """A message of the live stream."""
        calm = self._repair is None and not self._unverified
        if m.seq == self.next and calm and not m.poisoned and not self._is_stale(m):
            out: list[Action] = []
            self._accept(m, False, out)
            if self._held:
                self._drain(out)
            return out
        out = []
        self._live(m, out)
        return out

    def connected(self) -> list[Action]:
        """The live connection was made, or made again: something may have been missed, or restarted.

        Live messages are held until the replay socket has said whether it is still the same life.
        """
        self._unverified = True
        self._confirmed = False
        if self._doubt_from is None and self.next - 1 in self._seen:
            self._doubt_from = self.next - 1
        return self._ask(self._from(verify=True), "connect")

    def look(self) -> list[Action]:
        """Nothing was heard for a while: the last message may be lost."""
        return [] if self._repair is not None else self._ask(self._from(verify=True), "tail")

    def replayed(self, m: Message) -> list[Action]:
        """An answer to the last :class:`Ask`."""
        rep = self._repair
        out: list[Action] = []
        if rep is None:
            return out
        first_answer, rep.first_answer = rep.first_answer, False
        rep.newest = max(rep.newest, m.seq)
        self._replay_known = True
        if rep.other_life and first_answer:
            self._meet(m, rep, out)
        elif m.seq < self.next:
            self._check_life(m, rep, out)
        elif m.seq == self.next:
            self._take_replayed(m, rep, out)
        elif first_answer:
            # Everything from the start on was asked for, so nothing older is left.
            self._lose_before(m.seq, "too old", out)
            if m.seq == self.next:
                self._take_replayed(m, rep, out)
        else:
            self._hold(m, True)
            if m.poisoned and m.seq in self._held:
                self._condemned.add(m.seq)
        return out

    def replay_ended(self) -> list[Action]:
        """The end marker of the last :class:`Ask`."""
        rep, self._repair = self._repair, None
        out: list[Action] = []
        if rep is None:
            return out
        if rep.newest < 0 and not self._empty_answer(rep, out):
            return out
        suspect = self._suspect
        if not rep.verified and 0 <= rep.newest < rep.next - 1 and suspect is None:
            # The log ends before what was applied, and nothing in it is known again.
            self._wipe("unsure", None, out)
            out.extend(self._ask(self.first_seq, "gap"))
            return out
        if suspect is not None:
            self._suspect = None
            if rep.verified:
                out.append(Skip(suspect, "late"))
            elif rep.start > suspect.seq:
                self._suspect = suspect
                out.extend(self._ask(suspect.seq, "probe"))
                return out
            else:
                self._wipe("unsure", suspect, out)
                return out
        if self._verifying() and rep.newest < 0 and rep.high < rep.next:
            # An empty log, and nothing is known that should be in it: the next message will tell.
            if self._high >= self.next:
                out.extend(self._ask(self._from(verify=True), "connect"))
            return out
        if rep.newest >= 0 and self._doubt_from is not None and rep.start <= self._doubt_from:
            # The log no longer has what could have told.
            self._confirm()
        self._unverified = False
        self._drain(out)
        if self._held:
            # The log itself has shown later numbers: what is missing before them is a gap, heard live or not.
            self._high = max(self._high, rep.newest)
        self._after(rep, out)
        return out

    def replay_failed(self, reason: str, *, retry: bool = True) -> list[Action]:
        """The last :class:`Ask` was not answered to its end. ``retry=False``: asking again is of no use."""
        rep, self._repair = self._repair, None
        out: list[Action] = []
        if rep is None:
            return out
        self._unverified = False
        self._drain(out)
        waiting = bool(self._held) or self._high >= self.next or self._suspect is not None
        if retry and waiting and rep.attempt < self.limits.attempts:
            out.extend(self._ask(self._from(verify=rep.why != "gap"), rep.why, rep.attempt + 1))
            return out
        suspect, self._suspect = self._suspect, None
        if suspect is not None:
            self._wipe("unsure", suspect, out)
            return out
        self._drop_stale(out)
        self._lose_before(self._high + 1, reason, out, known=True)
        return out

    def snapshot(self, resume_seq: int) -> bool:
        """A snapshot that holds everything below ``resume_seq`` was received.

        Returns whether it is to be used: one that is older than what was applied is not, and the cursor never
        goes back.
        """
        if resume_seq < self.next:
            return False
        for seq in [s for s in self._held if s < resume_seq]:
            self._unhold(seq)
        self.next = resume_seq
        self._high = max(self._high, resume_seq - 1)
        self.heard = True
        return True

    # ------------------------------------------------------------ live messages

    def _is_stale(self, m: Message) -> bool:
        """Whether the stamp of a message with a new number is one of an earlier life."""
        if m.ts is None:
            return False
        last = self._last_ts
        if last is not None and m.ts < last - self.limits.slack_s:
            return True
        return self._life_ts is not None and m.ts <= self._life_ts

    def _live(self, m: Message, out: list[Action]) -> None:
        if self._life_ts is not None and m.ts is not None and m.ts <= self._life_ts:
            self._late(m, out)
        elif m.seq >= self.next:
            self._live_new(m, out)
        else:
            self._live_old(m, out)

    def _live_new(self, m: Message, out: list[Action]) -> None:
        if self._is_stale(m):
            self._late(m, out)
            return
        prior = self._held.get(m.seq)
        if prior is not None and not prior[1] and self._is_stale(prior[0]):
            self._drop_stale(out)
            prior = None
        if prior is not None and not prior[0].poisoned:
            known = prior[0]
            if known.digest == m.digest:
                out.append(Skip(m, "duplicate"))
            else:
                self._judge(m, known.ts, out)
            return
        self._high = max(self._high, m.seq)
        if m.seq == self.next and not m.poisoned and not self._verifying():
            self._unhold(m.seq)
            self._accept(m, False, out)
            self._drain(out)
            return
        self._hold(m, False)
        if self._repair is None:
            verify = self._verifying()
            out.extend(self._ask(self._from(verify=verify), "connect" if verify else "gap"))

    def _live_old(self, m: Message, out: list[Action]) -> None:
        seen = self._seen.get(m.seq)
        if seen is not None and seen[0] == m.digest:
            out.append(Skip(m, "duplicate"))
        elif m.poisoned:
            out.append(Skip(m, "poisoned"))
        elif seen is not None and seen[1] is not None:
            self._judge(m, seen[1], out)
        elif m.ts is None or self._last_ts is None:
            self._doubt(m, out)
        elif m.ts > self._last_ts:
            # Stamps of one life grow with its numbers, so this one is not of the life that was applied.
            self._wipe("restart", m, out)
        elif seen is not None or any(first <= m.seq <= last for first, last in self._lost):
            self._late(m, out)
        elif m.ts < next((ts for _, ts in self._seen.values() if ts is not None), m.ts):
            # Older than anything that is remembered, and so is its number.
            self._late(m, out)
        else:
            self._doubt(m, out)

    def _judge(self, m: Message, known_ts: float | None, out: list[Action]) -> None:
        """A number that is known, with other bytes."""
        if m.poisoned:
            out.append(Skip(m, "poisoned"))
        elif m.ts is None or known_ts is None or m.ts == known_ts:
            self._doubt(m, out)
        elif m.ts > known_ts:
            self._wipe("restart", m, out)
        else:
            self._late(m, out)

    def _late(self, m: Message, out: list[Action]) -> None:
        self._late_run = self._late_run + 1 if m.seq == self._late_seq + 1 else 1
        self._late_seq = m.seq
        if self._late_run < self.limits.late_run:
            out.append(Skip(m, "late"))
        else:
            # A stream, not stragglers: the clock of a restarted publisher may have gone back.
            self._late_run = 0
            self._doubt(m, out)

    def _doubt(self, m: Message, out: list[Action]) -> None:
        if self._suspect is not None:
            out.append(Skip(self._suspect, "late"))
        self._suspect = m
        if self._repair is None:
            out.extend(self._ask(self._from(verify=True), "probe"))

    # ------------------------------------------------------------ answers

    def _take_replayed(self, m: Message, rep: _Repair, out: list[Action]) -> None:
        self._unhold(m.seq)
        if m.poisoned:
            self._condemn(m, out)
        else:
            self._accept(m, True, out)
        rep.attempt = 1
        self._drain(out)

    def _check_life(self, m: Message, rep: _Repair, out: list[Action]) -> None:
        """Whether an answer with a number that was accounted for is what was seen there."""
        seen = self._seen.get(m.seq)
        if seen is None:
            newer = m.ts is not None and self._last_ts is not None and m.ts > self._last_ts
            if not newer:
                return
        elif seen[0] == m.digest:
            rep.verified = True
            if self._doubt_from is None or m.seq <= self._doubt_from:
                self._confirm()
            return
        elif m.poisoned or seen[1] is None:
            return
        self._meet(m, rep, out)

    def _meet(self, m: Message, rep: _Repair, out: list[Action]) -> None:
        """An answer of another life than what was applied."""
        covers = rep.start <= self.first_seq and m.seq == self.first_seq
        self._wipe("restart", None, out, truth=m)
        if covers:
            self._repair = rep
            rep.verified = True
            rep.attempt = 1
            self._take_replayed(m, rep, out)
        else:
            out.extend(self._ask(self.first_seq, "gap"))

    def _empty_answer(self, rep: _Repair, out: list[Action]) -> bool:
        """The log has nothing from ``rep.start`` on. Returns whether the repair is to be concluded."""
        if rep.start >= rep.next:
            return True
        if rep.start > self.first_seq or rep.why != "probe":
            # It should at least have had what was applied: look at all that it has.
            self._unverified = True
            out.extend(self._ask(self.first_seq, "probe"))
            assert self._repair is not None  # noqa: S101 - it was just made
            self._repair.other_life = True
            return False
        if self._replay_known and self._suspect is None:
            # A log that held something never becomes empty, but by a restart.
            missed = self._high >= self.next
            self._wipe("restart", None, out)
            if missed:
                out.extend(self._ask(self.first_seq, "gap"))
                return False
        return True

    def _after(self, rep: _Repair, out: list[Action]) -> None:
        """What is left to do when an answer is complete."""
        if self._drop_stale(out):
            rep.high = max(rep.newest, self.next - 1)
        while self._repair is None and self._high >= self.next:
            if self.next > rep.high:
                # This was not known to exist when the request was made.
                out.extend(self._ask(self._from(), "gap"))
            elif rep.attempt < min(2, self.limits.attempts):
                out.extend(self._ask(self._from(), "gap", rep.attempt + 1))
            else:
                if self._replay_known:
                    # The log was asked after these were heard, and ends before them: they are not its own.
                    held = [m for m, _ in self._held.values() if rep.newest < m.seq <= rep.high]
                    if self._disown(held, out):
                        rep.high = max(rep.newest, self.next - 1)
                        continue
                self._lose_before(rep.high + 1, "missing", out, known=True)

    # ------------------------------------------------------------ state changes

    def _confirm(self) -> None:
        """The replay log has shown that the life is the same."""
        self._confirmed = True
        self._unverified = False
        self._doubt_from = None

    def _verifying(self) -> bool:
        return self._unverified and self.heard

    def _from(self, *, verify: bool = False) -> int:
        """Where to ask from: the last number that was applied, or one that is in doubt."""
        start = self.next - 1 if self.next - 1 in self._seen else self.next
        if verify and self._doubt_from is not None:
            if self._doubt_from in self._seen:
                start = min(start, self._doubt_from)
            else:
                self._doubt_from = None
        return start if self._suspect is None else min(start, self._suspect.seq)

    def _ask(
        self, start: int, why: Literal["connect", "gap", "tail", "probe"], attempt: int = 1
    ) -> list[Action]:
        ask = Ask(start, attempt, why)
        self._repair = _Repair(ask, self._high, self.next)
        return [ask]

    def _accept(self, m: Message, replayed: bool, out: list[Action]) -> None:
        out.append(Apply(m, replayed))
        self._remember(m.seq, m.digest, m.ts)
        if not self._confirmed and self._doubt_from is None:
            if replayed:
                self._confirm()
            else:
                self._doubt_from = m.seq
        self._late_run = 0
        if self._life_ts is not None and m.ts is not None:
            self._narrow(m.seq, m.ts, out)

    def _narrow(self, seq: int, ts: float, out: list[Action]) -> None:
        """Learn from what is applied which time stamps are of earlier lives."""
        assert self._life_ts is not None  # noqa: S101 - the caller's condition
        if ts <= self._life_ts:
            # The clock went back, so stamps tell nothing about lives.
            self._life_ts = None
        elif seq == self.first_seq:
            self._life_ts = max(self._life_ts, ts - self.limits.slack_s)
            self._drop_stale(out)

    def _drop_stale(self, out: list[Action]) -> bool:
        """Let go of held messages that turned out to be of an earlier life."""
        newest = max((t for t in (self._last_ts, self._life_ts) if t is not None), default=-math.inf)
        stale = []
        for _, (m, replayed) in sorted(self._held.items()):
            if m.ts is not None:
                if m.ts < newest - self.limits.slack_s and not replayed:
                    stale.append(m)
                newest = max(newest, m.ts)
        return self._disown(stale, out)

    def _disown(self, strangers: list[Message], out: list[Action]) -> bool:
        if not strangers:
            return False
        for m in strangers:
            self._unhold(m.seq)
            out.append(Skip(m, "late"))
        self._high = max([self.next - 1, *self._held])
        if self._repair is not None:
            # What was known to exist when it was made may have been of another life.
            self._repair.high = self.next - 1
        return True

    def _remember(self, seq: int, digest: int, ts: float | None) -> None:
        seen = self._seen
        seen[seq] = (digest, ts)
        if len(seen) > self.limits.remember:
            del seen[next(iter(seen))]
        if ts is not None:
            self._last_ts = ts
        self.next = seq + 1
        self.heard = True
        self._high = max(self._high, seq)

    def _condemn(self, m: Message, out: list[Action]) -> None:
        self._note_lost(m.seq, m.seq, "poisoned", out)
        self._remember(m.seq, m.digest, None)

    def _hold(self, m: Message, replayed: bool) -> None:
        known = self._held.get(m.seq)
        if known is not None and not known[0].poisoned and not replayed:
            return
        self._unhold(m.seq)
        limits = self.limits
        while self._held and (
            len(self._held) >= limits.hold_batches or self.held_bytes + m.nbytes > limits.hold_bytes
        ):
            # The highest number goes: the log has it for longest, and it is asked for again.
            top = max(self._held)
            if top < m.seq:
                return
            self._unhold(top)
        self._held[m.seq] = (m, replayed)
        self.held_bytes += m.nbytes

    def _unhold(self, seq: int) -> None:
        known = self._held.pop(seq, None)
        if known is not None:
            self.held_bytes -= known[0].nbytes
            self._condemned.discard(seq)

    def _drain(self, out: list[Action]) -> None:
        while (known := self._held.get(self.next)) is not None:
            m, replayed = known
            if m.poisoned and m.seq not in self._condemned:
                return
            if not replayed and self._is_stale(m):
                self._drop_stale(out)
                return
            self._unhold(m.seq)
            if m.poisoned:
                self._condemn(m, out)
            else:
                self._accept(m, replayed, out)

    def _note_lost(self, first: int, last: int, reason: str, out: list[Action]) -> None:
        out.append(Lose(first, last, reason))
        self._lost.append((first, last))
        del self._lost[:-64]
        self.heard = True

    def _lose_before(self, seq: int, reason: str, out: list[Action], *, known: bool = False) -> None:
        """Account for everything below ``seq``: by what is held, and else as lost.

        ``known``: only for what still is known to exist.
        """
        while self.next < seq and (not known or self.next <= self._high):
            there = min((s for s in self._held if s < seq), default=seq)
            if known:
                there = min(there, self._high + 1)
            if there > self.next:
                self._note_lost(self.next, there - 1, reason, out)
                self.next = there
                self._high = max(self._high, there - 1)
            elif self._held[there][0].poisoned:
                self._condemned.add(there)
            self._drain(out)

    def _wipe(
        self,
        reason: Literal["restart", "unsure"],
        first: Message | None,
        out: list[Action],
        truth: Message | None = None,
    ) -> None:
        """Begin a new life, with ``first`` as its first live message if there is one."""
        witness = first or truth
        old = self._life_ts if self._last_ts is None else self._last_ts
        known = old is not None and witness is not None and witness.ts is not None and witness.ts > old
        kept = [h for h in self._held.values() if known and _same_life(h[0], witness, old)]
        out.append(Wipe(reason))
        self._unverified = False
        self._confirmed = self._confirmed or truth is not None
        self.lives += 1
        self._repair = None
        self._begin(old if known or witness is None else None)
        for m, replayed in kept:
            self._hold(m, replayed)
            self._high = max(self._high, m.seq)
        if first is not None:
            self._live(first, out)


def _same_life(m: Message, witness: Message | None, old: float | None) -> bool:
    """Whether stamps say that a held message is of the life of which ``witness`` is, after ``old``."""
    if m.ts is None or witness is None or witness.ts is None or old is None or m.seq == witness.seq:
        return False
    return m.ts > old and (m.seq < witness.seq) == (m.ts < witness.ts)
