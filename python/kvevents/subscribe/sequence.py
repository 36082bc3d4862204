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

from typing import TYPE_CHECKING

from kvevents.subscribe.actions import Compare, Fetch, Head, Hello, Limits, Message, Range, Restore, Skip
from kvevents.subscribe.position import Position

if TYPE_CHECKING:
    from kvevents.subscribe.actions import Action, Policy, Request

__all__ = ["Sequence"]

_CALM = 64
"""So many batches without a doubt, and the next doubt is looked into at once again."""
_LIVES = 8
"""Epochs that are remembered."""


class _Job:
    """One request under way."""

    __slots__ = ("answered", "count", "high", "next", "request", "sure", "valid")

    def __init__(self, request: Request, expected: int, high: int, newest: int) -> None:
        self.request = request
        self.next = expected
        # What was heard before it was asked: the server knows it, or it is not its own.
        self.high = high
        # What the server had for sure when it was asked.
        self.sure = newest
        self.answered = -1
        self.count = 0
        # No doubt arose since.
        self.valid = True


class Sequence(Position):
    """The state of one source. Not thread-safe; one driver owns it."""

    def __init__(self, first_seq: int = 0, limits: Limits | None = None, policy: Policy = "snapshot") -> None:
        super().__init__(first_seq, limits or Limits(), policy)
        self.epoch: bytes | None = None
        """The life that is followed."""
        self.returned = 0
        """How often an epoch came back: two publishers answer at one address."""
        self.cooling = False
        """Whether no snapshot may be waited for now."""
        self.resting = False
        """Whether no snapshot is to be asked for that nothing waits for."""
        self.job: _Job | None = None
        self._before: list[bytes] = []
        self._verified = False
        self._blind = False
        self._tries = self._flips = self._doubts = self._calm = 0
        self._late_run, self._late_seq = 0, -2
        self._new_life()

    def _new_life(self) -> None:
        # Whether a batch of this life was seen from the server.
        self._anchored = False
        self._mirror = False
        self._newest = -1
        self._oldest: int | None = None
        self._holes: tuple[tuple[int, int], ...] = ()

    # ------------------------------------------------------------ what the driver asks

    @property
    def request(self) -> Request | None:
        """What an answer is awaited for."""
        return None if self.job is None else self.job.request

    @property
    def repairing(self) -> bool:
        """Whether an answer is awaited."""
        return self.job is not None

    @property
    def trusted(self) -> bool:
        """Whether the expected message is delivered as soon as it comes."""
        return self._blind or (self._verified and self._anchored)

    @property
    def _restoring(self) -> bool:
        return self.job is not None and isinstance(self.job.request, Fetch)

    def resume(self, epoch: bytes, last_seq: int) -> None:
        """Begin behind what an earlier reader applied of this life."""
        self.epoch = epoch
        self.next = last_seq + 1
        self.high = last_seq
        self.heard = self._applied = True

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
        if count != job.count or (request.anchor and not count):
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
            if head.oldest is not None and head.oldest <= request.first:
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

    # ------------------------------------------------------------ lives

    def _answered(self, head: Head, kind: type[Request], out: list[Action]) -> _Job | None:
        """The job of an answer; ``None`` where there is none, or the answer is of another life."""
        job = self.job
        if job is None or not isinstance(job.request, kind):
            return None
        if head.epoch != self.epoch:
            if self.epoch is not None:
                self._flips += 1
                self.returned += head.epoch in self._before
                self._before = [*self._before, self.epoch][-_LIVES:]
            kept = self.held if self.epoch is None and not self.heard else None
            high = self.high
            self._wipe("unsure" if self.epoch is None else "restart", out)
            if kept is not None:
                # Nothing is known yet, so they may be of this life; the server will tell.
                self.held, self.high = kept, high
            self._new_life()
            self.epoch = head.epoch
            job.next, job.sure = self.next, self._newest
            if kind is not Hello:
                self._note(head)
                self._done(job)
                self._plan(out)
                return None
        else:
            self._flips = 0
        self._note(head)
        return job

    def _note(self, head: Head) -> None:
        self._oldest = head.oldest
        if head.newest is not None:
            self._newest = max(self._newest, head.newest)
        self._mirror = head.resume_seq is not None

    def _done(self, job: _Job) -> None:
        """An answer is complete."""
        self.job = None
        self._blind = False
        self._verified = self._verified or job.valid

    def _unsure(self, reason: str, out: list[Action]) -> None:
        """The server cannot be asked, and messages wait: go on without knowing, and say so."""
        held, high = self.held, self.high
        if self.policy != "keep_and_flag":
            self._wipe("unsure", out)
            self._new_life()
            self.held, self.high, self.epoch = held, high, None
        self._anchored = False
        self._blind = True
        self._give_up(self.high, reason, out)

    def _give_up(self, top: int, reason: str, out: list[Action]) -> None:
        """The server does not give what is missing up to ``top``, or what is needed to trust the rest."""
        if not self._anchored:
            # Whether what waits is of this life is not known, so it is not complete either.
            self._anchored = True
            self._discard_expected(out)
            self._lose(self.next, reason, out)
        self._lose_to(top, reason, out)

    def _disown(self, job: _Job, head: Head, out: list[Action]) -> None:
        """Let go of what was heard before the server was asked, and it has never sent."""
        newest = -1 if head.newest is None else head.newest
        for m in self.held:
            if newest < m.seq <= job.high:
                self.held.pop(m.seq)
                out.append(Skip(m, "late"))
        if job.high > newest and self.high <= job.high:
            highest = self.held.highest
            self.high = max(self.next - 1, newest, -1 if highest is None else highest)

    def _drift(self, out: list[Action]) -> None:
        """What was delivered is not what the publisher has."""
        self.job = None
        if self.policy == "snapshot":
            self._drifted = self.owed = True
            if not self._mirror or self.resting:
                self._flag_drift(out)
        elif self.policy == "keep_and_flag":
            self._flag_drift(out)
        else:
            held, high = self.held, self.high
            self._wipe("drift", out)
            self.held, self.high = held, high
        self._plan(out)

    # ------------------------------------------------------------ what to ask next

    def _ask(self, request: Request, out: list[Action]) -> None:
        self.job = _Job(request, self.next, self.high, self._newest)
        out.append(request)

    def _plan(self, out: list[Action]) -> None:
        """Ask for what is needed next; nothing is under way."""
        while self.job is None:
            if not self._verified:
                if self._blind:
                    self._drain(out)
                    if self.next > self.high:
                        return
                self._ask(Hello(max(1, self._doubts), "doubt"), out)
                return
            if not self._anchored and self.policy == "keep_and_flag":
                if self._oldest is not None:
                    self._ask(Range(self._oldest, self._oldest, 1 + self._tries, anchor=True), out)
                elif self.held:
                    self._ask(Hello(1, "look"), out)
                return
            if self._anchored:
                self._drain(out)
            attempt = 1 + self._tries + self._flips
            top = max(self.high, self._newest)
            hole = next((last for first, last in self._holes if first <= self.next <= last), None)
            if hole is not None:
                self._missing(hole, "missing", out)
            elif self.next <= self._newest and (self._oldest is None or self.next < self._oldest):
                self._missing(self._newest if self._oldest is None else self._oldest - 1, "too old", out)
            elif self.next <= top:
                self._ask(Range(self.next, top, attempt), out)
            elif not self._anchored and self._oldest is not None and self._newest >= 0:
                self._ask(Range(self._newest, self._newest, attempt, anchor=True), out)
            else:
                if self.owed and self._mirror and not self.resting:
                    self._ask(Fetch(self.next, attempt), out)
                else:
                    self._tries = 0
                return

    def _pass_to(self, seq: int, out: list[Action]) -> bool:
        """No replay has anything from the expected number to ``seq``. Whether things went on without."""
        while self.next < seq:
            gone = self._oldest is None or self.next < self._oldest
            if gone and self._anchored:
                # What was heard before it left the log counts.
                self._drain(out)
                if self.next >= seq:
                    break
            if not self._missing(seq - 1, "too old" if gone else "missing", out):
                return False
        return True

    def _missing(self, last: int, reason: str, out: list[Action]) -> bool:
        """No replay has the numbers from the expected one to ``last``. Whether things went on without."""
        self._discard_expected(out)
        low = self.held.lowest
        if low is not None:
            last = min(last, low - 1)
        if self.policy == "snapshot" and self._mirror and not self.cooling:
            self._ask(Fetch(last + 1, 1 + self._tries + self._flips), out)
            return False
        self._lose(last, reason, out)
        return True
