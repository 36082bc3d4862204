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

from typing import Literal

from kvevents.subscribe.actions import Action, Message, Skip, Wipe
from kvevents.subscribe.plain_position import PlainPosition, Repair

__all__ = ["PlainSequence"]


class PlainSequence(PlainPosition):
    """The state of one source. Not thread-safe; one driver owns it."""

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
        out: list[Action] = []
        # What waits may be of the life before; if it is not, the log has it.
        self._disown([m for m, replayed in self._held.values() if not replayed], out)
        return out + self._ask(self._from(verify=True), "connect")

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

    # ------------------------------------------------------------ live messages

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

    def _take_replayed(self, m: Message, rep: Repair, out: list[Action]) -> None:
        self._unhold(m.seq)
        if m.poisoned:
            self._condemn(m, out)
        else:
            self._accept(m, True, out)
        rep.attempt = 1
        self._drain(out)

    def _check_life(self, m: Message, rep: Repair, out: list[Action]) -> None:
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

    def _meet(self, m: Message, rep: Repair, out: list[Action]) -> None:
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

    def _empty_answer(self, rep: Repair, out: list[Action]) -> bool:
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

    def _after(self, rep: Repair, out: list[Action]) -> None:
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

    # ------------------------------------------------------------ lives

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
