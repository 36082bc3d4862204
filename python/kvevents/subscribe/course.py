"""Which life is followed, and what to ask its server for next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvevents.subscribe.actions import Fetch, Head, Hello, Limits, Range, Skip
from kvevents.subscribe.position import Position

if TYPE_CHECKING:
    from kvevents.subscribe.actions import Action, Policy, Request

__all__ = ["Course", "Job"]

_LIVES = 8
"""Epochs that are remembered."""


class Job:
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


class Course(Position):
    """Lives, trust, and the one request that is under way; what comes of messages is its subclass's."""

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
        self.job: Job | None = None
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
        # The newest number, where the log has not kept it: a batch that alone is over its bound.
        self._unkept = -1
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

    # ------------------------------------------------------------ lives

    def resume(self, epoch: bytes, last_seq: int) -> None:
        """Begin behind what an earlier reader applied of this life."""
        self.epoch = epoch
        self.next = last_seq + 1
        self.high = last_seq
        self.heard = self._applied = True

    def _answered(self, head: Head, kind: type[Request], out: list[Action]) -> Job | None:
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

    def _done(self, job: Job) -> None:
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

    def _disown(self, job: Job, head: Head, out: list[Action]) -> None:
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
        self.job = Job(request, self.next, self.high, self._newest)
        out.append(request)

    @property
    def _attempt(self) -> int:
        return 1 + self._tries + max(0, self._flips - 1)

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
            attempt = self._attempt
            top = max(self.high, self._newest)
            hole = next((last for first, last in self._holes if first <= self.next <= last), None)
            if hole is not None:
                self._missing(hole, "missing", out)
            elif self.next <= self._newest and (self._oldest is None or self.next < self._oldest):
                self._missing(self._newest if self._oldest is None else self._oldest - 1, "too old", out)
            elif self.next <= top:
                self._ask(Range(self.next, top, attempt), out)
            elif not self._anchored and self._oldest is not None and self._newest >= 0:
                at = self._oldest if self._newest == self._unkept else self._newest
                self._ask(Range(at, at, attempt, anchor=True), out)
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
            self._ask(Fetch(last + 1, self._attempt), out)
            return False
        self._lose(last, reason, out)
        return True
