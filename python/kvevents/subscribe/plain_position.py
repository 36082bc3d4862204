"""Where a reader without epochs stands: what was delivered, what waits, what is not known."""

from __future__ import annotations

import math
from typing import Literal

from kvevents.subscribe.actions import Action, Apply, Ask, Limits, Lose, Message, Skip

__all__ = ["PlainPosition", "Repair"]


class Repair:
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


class PlainPosition:
    """The state that :class:`~kvevents.subscribe.plain.PlainSequence` decides about."""

    def __init__(self, first_seq: int = 0, limits: Limits | None = None) -> None:
        self.first_seq = first_seq
        self.limits = limits or Limits()
        self.lives = 0
        """How many lives ended."""
        self.heard = False
        """Whether any message of this life was applied or lost."""
        self._replay_known = False
        self._repair: Repair | None = None
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

    def _is_stale(self, m: Message) -> bool:
        """Whether the stamp of a message with a new number is one of an earlier life."""
        if m.ts is None:
            return False
        last = self._last_ts
        if last is not None and m.ts < last - self.limits.slack_s:
            return True
        return self._life_ts is not None and m.ts <= self._life_ts

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
        self._repair = Repair(ask, self._high, self.next)
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
