"""The sequence state machine of one source whose publisher says which life it lives (extended replay).

No sockets, no clock, no randomness: what arrives, and what a driver found out, are arguments; what to do
comes back as actions. Equal inputs give equal actions, which is how the tests can try every interleaving.

The promise: what the actions say, applied to a set, is the publisher's set as it was behind the last number,
in one of its lives, or the user was told that it is not: by :class:`Lose`, by a batch that says so itself, or
by :class:`Wipe`.

Live messages do not say of which life they are. One is delivered at once if its number is expected and
nothing speaks against it: the server was heard since the connection was made, a batch of this life was seen
from the server (so that stamps of earlier lives are known to be old), the stamp does not go back. Everything
else waits for the server, whose answers are true: each says its epoch. Publishers that know nothing of
this are followed by :class:`~kvevents.subscribe.plain.PlainSequence`.
"""

from __future__ import annotations

from kvevents.subscribe.actions import (
    Action,
    Compare,
    Fetch,
    Head,
    Hello,
    Message,
    Range,
    Restore,
    Skip,
)
from kvevents.subscribe.course import Course

__all__ = ["Sequence"]

_CALM = 64
"""So many batches without a doubt, and the next doubt is looked into at once again."""


class Sequence(Course):
    """The state of one source. Not thread-safe; one driver owns it."""

    # ------------------------------------------------------------ inputs: the live stream

    def live(self, m: Message) -> list[Action]:
        """A message of the live stream."""
        out: list[Action] = []
        if m.seq < self.next:
            self._old(m, out)
        elif (
            m.seq == self.next
            and self.trusted
            and not m.poisoned
            and not self._is_stale(m)
            and not self._restoring
        ):
            self.held.pop(m.seq)
            self._accept(m, False, out)
            self._after_delivery(out)
        else:
            self._hold(m, out)
        return out

    def _after_delivery(self, out: list[Action]) -> None:
        self._late_run = 0
        if self._doubts:
            self._calm += 1
            if self._calm >= _CALM:
                self._doubts = self._calm = 0
        if self.held:
            self._drain(out)
        if self.owed and self.job is None:
            self._plan(out)

    def _hold(self, m: Message, out: list[Action]) -> None:
        self.high = max(self.high, m.seq)
        known = self.held.get(m.seq)
        if known is None:
            self.held.add(m)
        elif known.digest == m.digest:
            out.append(Skip(m, "duplicate"))
        elif known.poisoned:
            self.held.pop(m.seq)
            self.held.add(m)
        else:
            # One of them is of another life; the server knows which.
            self.held.pop(m.seq)
            out += [Skip(known, "late"), Skip(m, "late")]
        if self.job is None:
            self._plan(out)

    def _old(self, m: Message, out: list[Action]) -> None:
        """A number that was accounted for."""
        if self._seen.get(m.seq) == m.digest:
            out.append(Skip(m, "duplicate"))
            return
        out.append(Skip(m, "poisoned" if m.poisoned else "late"))
        if m.poisoned:
            return
        known = m.seq in self._seen
        if known:
            self._late_run = self._late_run + 1 if m.seq == self._late_seq + 1 else 1
            self._late_seq = m.seq
        doubtful = known if m.ts is None or self._last_ts is None else m.ts > self._last_ts
        if doubtful or self._late_run >= self.limits.late_run:
            self._late_run = 0
            self._doubt(out)

    def _doubt(self, out: list[Action]) -> None:
        """Something may be of another life: the server is asked before anything else is delivered."""
        self._verified = self._blind = False
        self._calm = 0
        self._doubts += 1
        if self.job is not None:
            self.job.valid = False
        else:
            self._ask(Hello(self._doubts, "doubt"), out)

    # ------------------------------------------------------------ inputs: connection and time

    def connected(self) -> list[Action]:
        """The live connection was made, or made again: something may have been missed, or restarted."""
        self._verified = self._blind = False
        self._tries = 0
        out: list[Action] = []
        self._ask(Hello(1, "connect"), out)
        return out

    def look(self) -> list[Action]:
        """Nothing was heard for a while, or the server was not for long: ask it."""
        out: list[Action] = []
        if self.job is None:
            self._ask(Hello(1, "look"), out)
        return out

    def rested(self) -> list[Action]:
        """Snapshots may be asked for again."""
        self.cooling = self.resting = False
        out: list[Action] = []
        if self.owed and self.job is None:
            self._ask(Hello(1, "heal"), out)
        return out

    def check(self, seq: int, digest: bytes) -> list[Action]:
        """The user's set behind ``seq`` has this digest: compare, if that is where things stand."""
        out: list[Action] = []
        if self.job is None and self.trusted and self.epoch is not None and self.next == seq + 1:
            self._ask(Compare(seq, digest, 1), out)
        return out

    # ------------------------------------------------------------ inputs: answers

    def hello(self, head: Head) -> list[Action]:
        """The answer to :class:`Hello`."""
        out: list[Action] = []
        job = self._answered(head, Hello, out)
        if job is None:
            return out
        if head.next_sequence is not None and job.next > head.next_sequence:
            # More was delivered than was ever sent.
            self._wipe("unsure", out)
            self._new_life()
            self._note(head)
        end = head.next_sequence or 0
        self._holes = tuple((first, min(last, end - 1)) for first, last in head.holes if first < end)
        self._tries = 0
        self._disown(job, head, out)
        self._done(job)
        self._plan(out)
        return out

    def replayed(self, head: Head, m: Message) -> list[Action]:
        """One batch of a :class:`Range`."""
        out: list[Action] = []
        job = self._answered(head, Range, out)
        if job is None:
            return out
        request = job.request
        assert isinstance(request, Range)  # noqa: S101 - what was asked
        if not max(request.first, job.answered + 1) <= m.seq <= request.last:
            return self.failed("malformed")
        job.answered = m.seq
        job.count += 1
        self._anchored = True
        if not request.anchor and not self._pass_to(m.seq, out):
            return out
        if m.seq < self.next or request.anchor:
            seen = self._seen.get(m.seq)
            if seen is None:
                self._remember(m)
            elif seen != m.digest:
                self._drift(out)
        elif m.poisoned:
            self._missing(m.seq, "poisoned", out)
        else:
            self.held.pop(m.seq)
            self._tries = 0
            self._accept(m, True, out)
        return out

    def replay_ended(self, head: Head, count: int) -> list[Action]:
        """The end of a :class:`Range`, of so many batches."""
        out: list[Action] = []
        job = self._answered(head, Range, out)
        if job is None:
            return out
        request = job.request
        assert isinstance(request, Range)  # noqa: S101 - what was asked
        if request.anchor and count == job.count == 0 and self._unkept < request.first == self._newest:
            # It is not lost, it was too large for the log: any other batch of this life does.
            self._unkept = request.first
        elif count != job.count or (request.anchor and not count):
            return self.failed("malformed")
        self._disown(job, head, out)
        self._done(job)
        if request.anchor or self._pass_to(min(request.last, job.sure) + 1, out):
            self._plan(out)
        return out

    def too_old(self, head: Head) -> list[Action]:
        """A :class:`Range` began before the oldest number of the log."""
        out: list[Action] = []
        job = self._answered(head, Range, out)
        if job is not None:
            request = job.request
            assert isinstance(request, Range)  # noqa: S101 - what was asked
            if head.newest is None or head.newest < request.first or _reaches(head.oldest, request.first):
                return self.failed("malformed")
            self._done(job)
            self._plan(out)
        return out

    def restored(self, head: Head, resume_seq: int, content: object) -> list[Action]:
        """A whole snapshot."""
        out: list[Action] = []
        job = self._answered(head, Fetch, out)
        if job is None:
            return out
        request = job.request
        assert isinstance(request, Fetch)  # noqa: S101 - what was asked
        if resume_seq < max(self.next, request.at_least):
            return self.failed("snapshot too old")
        self._done(job)
        out.append(Restore(resume_seq, content))
        self.held.drop_below(resume_seq)
        self.next = resume_seq
        self.high = max(self.high, resume_seq - 1)
        self.heard = self._applied = self.resting = True
        # What is stamped like an earlier batch than the newest is known then: the snapshot has it.
        self._anchored = False
        self._holes = ()
        # Whatever was delivered before does not count any more.
        self._seen = {}
        self._tries = 0
        self.cleared()
        self._plan(out)
        return out

    def digested(self, head: Head, digest: bytes | None) -> list[Action]:
        """The digest that was asked for by :class:`Compare`; ``None``: it is not known (any more)."""
        out: list[Action] = []
        job = self._answered(head, Compare, out)
        if job is None:
            return out
        request = job.request
        assert isinstance(request, Compare)  # noqa: S101 - what was asked
        self._done(job)
        if digest is not None and digest != request.digest:
            self._drift(out)
        else:
            self._plan(out)
        return out

    def failed(self, reason: str, *, retry: bool = True) -> list[Action]:
        """The last request was not answered, or by nonsense. ``retry=False``: asking again is of no use."""
        job, self.job = self.job, None
        out: list[Action] = []
        if job is None:
            return out
        request = job.request
        self._tries += 1
        if retry and self._tries < self.limits.attempts:
            if isinstance(request, Hello):
                self._ask(request._replace(attempt=1 + self._tries), out)
            else:
                self._plan(out)
            return out
        self._tries = 0
        if isinstance(request, Hello):
            if self._blind:
                self._lose_to(self.high, reason, out)
            elif self.held:
                self._unsure(reason, out)
        elif isinstance(request, Range):
            if not request.anchor or self.held:
                self._give_up(max(self.high, min(request.last, job.sure)), reason, out)
        elif isinstance(request, Fetch):
            self.cooling = self.resting = True
            if self.next < request.at_least:
                self._lose_to(request.at_least - 1, reason, out)
            if self._drifted:
                self._flag_drift(out)
            self._plan(out)
        return out


def _reaches(oldest: int | None, first: int) -> bool:
    """Whether a log with this oldest number has ``first``, if it was ever sent."""
    return oldest is not None and oldest <= first
