"""Where a reader stands in one life of a publisher: what was delivered, what waits, what is not known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvevents.subscribe.actions import Action, Apply, Lose, Message, Skip, Wipe
from kvevents.subscribe.held import Held

if TYPE_CHECKING:
    from kvevents.subscribe.actions import Limits, Policy

__all__ = ["Position"]


class Position:
    """The state that :class:`~kvevents.subscribe.sequence.Sequence` decides about."""

    def __init__(self, first_seq: int, limits: Limits, policy: Policy) -> None:
        self.first_seq = first_seq
        self.limits = limits
        self.policy = policy
        self._begin()

    def _begin(self) -> None:
        """Nothing is known of this life."""
        self.next = self.first_seq
        """The number that is expected."""
        self.heard = False
        """Whether anything of this life was delivered, or declared lost."""
        self.incomplete = False
        """Whether what was delivered is not all: the user was told."""
        self.owed = False
        """Whether a snapshot is to be had as soon as there can be one."""
        self.high = self.first_seq - 1
        """The highest number that was heard."""
        self.held = Held(self.limits)
        # Whether there is anything that a hole makes doubtful.
        self._applied = False
        # What was delivered differs from the publisher's set, and the user does not know yet.
        self._drifted = False
        self._seen: dict[int, int] = {}
        self._last_ts: float | None = None

    @property
    def last_seq(self) -> int | None:
        """The last number that was accounted for, ``None`` at the start of a life."""
        return self.next - 1 if self.heard else None

    def cleared(self) -> None:
        """What was delivered last emptied the cache: what was missing before does not matter any more."""
        self.incomplete = self.owed = self._drifted = False

    def _is_stale(self, m: Message) -> bool:
        """Whether the stamp of a message with a new number may be one of an earlier life."""
        return m.ts is not None and self._last_ts is not None and m.ts < self._last_ts

    def _remember(self, m: Message) -> None:
        seen = self._seen
        seen[m.seq] = m.digest
        if len(seen) > self.limits.remember:
            del seen[next(iter(seen))]
        if m.ts is not None and not self._is_stale(m):
            self._last_ts = m.ts

    def _accept(self, m: Message, replayed: bool, out: list[Action]) -> None:
        """Deliver the message that is expected."""
        self._remember(m)
        if m.partial and self.policy == "wipe":
            self._lose(m.seq, "poisoned", out)
            return
        out.append(Apply(m, replayed))
        self.next = m.seq + 1
        self.high = max(self.high, m.seq)
        self.heard = self._applied = True
        if m.partial:
            self._flag()

    def _flag(self) -> None:
        self.incomplete = True
        self.owed = self.policy == "snapshot"

    def _drain(self, out: list[Action]) -> None:
        """Deliver what waits and is expected."""
        while (m := self.held.get(self.next)) is not None and not m.poisoned and not self._is_stale(m):
            self.held.pop(m.seq)
            self._accept(m, False, out)

    def _lose(self, last: int, reason: str, out: list[Action]) -> None:
        """Give up everything from the expected number to ``last``."""
        if self.policy == "wipe" and self._applied:
            out.append(Wipe("gap"))
            self._applied = False
        out.append(Lose(self.next, last, reason))
        self.held.drop_below(last + 1)
        self.next = last + 1
        self.high = max(self.high, last)
        self.heard = True
        self._flag()

    def _lose_to(self, top: int, reason: str, out: list[Action]) -> None:
        """Account for everything up to ``top``: by what waits, and else as lost."""
        self._drain(out)
        while self.next <= top:
            self._discard_expected(out)
            low = self.held.lowest
            self._lose(top if low is None else min(top, low - 1), reason, out)
            self._drain(out)

    def _discard_expected(self, out: list[Action]) -> None:
        """Let go of a message that waits for its turn, has it, and cannot be delivered."""
        m = self.held.pop(self.next)
        if m is not None:
            out.append(Skip(m, "poisoned" if m.poisoned else "late"))

    def _flag_drift(self, out: list[Action]) -> None:
        """Say that what was delivered is not what the publisher has, though no number is missing."""
        self._drifted = False
        if not self.incomplete and self.heard:
            out.append(Lose(self.next - 1, self.next - 1, "drift"))
            self._flag()

    def _wipe(self, reason: Literal["restart", "unsure", "drift"], out: list[Action]) -> None:
        """Begin anew; the user is told if anything was delivered."""
        if self.heard:
            out.append(Wipe(reason))
        self._begin()
