"""The request to the replay address that is due or under way: when, what, and for how long."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvevents.subscribe.actions import Ask, Compare, Fetch, Hello, Limits, Range, Request
from kvevents.subscribe.assembly import Assembly, Whole
from kvevents.subscribe.extended import FAR, Answer, request

if TYPE_CHECKING:
    import random

    from kvevents.subscribe.actions import Policy
    from kvevents.subscribe.source import Source
    from kvevents.subscribe.timing import Timing

__all__ = ["Asking", "Pending"]

_DOUBLINGS = 6
"""The wait before another try grows so often."""
_FRUITLESS = 8
"""So many requests one right behind the other that bring nothing, whatever is answered, and the next ones
wait."""
_PAUSE_S = 1.0
"""A request that comes so long after the one before is not right behind it."""


class Pending:
    """One request: due, then under way."""

    __slots__ = ("ask", "deadline", "due", "ends", "last", "outgoing", "probes", "probing", "sent")

    def __init__(self, ask: Request, due: float, *, probing: bool) -> None:
        self.ask = ask
        self.due = due
        self.probing = probing
        self.probes = 0
        self.sent = False
        self.outgoing: list[tuple[bytes, ...]] = []
        self.deadline = math.inf
        self.ends = math.inf
        self.last = -1

    def progress(self, seq: int, deadline: float) -> None:
        """Something came; it is progress if its number is new."""
        if seq > self.last:
            self.last = seq
            self.deadline = deadline


class Asking:
    """Requests of one source, one at a time: their delays, frames and deadlines."""

    def __init__(
        self, source: Source, timing: Timing, limits: Limits, rng: random.Random, policy: Policy
    ) -> None:
        self.request: Pending | None = None
        self.cool_until = -math.inf
        """Nothing is asked before."""
        self.rest_until = math.inf
        """When snapshots may be asked for again; ``inf``: they may."""
        self._there = source.replay_endpoint is not None
        self._timing = timing
        self._limits = limits
        self._rng = rng
        self._keep = policy == "keep_and_flag"
        self._cooldown = timing.cooldown_s
        self._rest = timing.cooldown_s / 2
        self._restored_at = self._snapshot_from = -math.inf
        self._assembly: Assembly | None = None
        self._fruitless = 0
        self._sent_at = -math.inf

    def may_ask(self, now: float) -> bool:
        """Whether there is somebody to ask who is not left alone for a while."""
        return self._there and now >= self.cool_until

    def ask(self, ask: Request, now: float, *, probe: bool) -> None:
        """Replace what is due or under way. ``probe``: find out first what kind of server there is."""
        probing = probe if isinstance(ask, Ask) else _is_probe(ask)
        due = now + self.delay(ask)
        if isinstance(ask, Fetch):
            due = max(due, self._snapshot_from)
        if self._keep and not probing and _wants_batches(ask):
            due = max(due, now + self._timing.reorder_wait_s)
        self.request = Pending(ask, due, probing=probing and self._there)

    def delay(self, ask: Request) -> float:
        """How long to wait before asking; more with each try, and never the same for many readers."""
        t = self._timing
        if not self._there:
            return t.reorder_wait_s if isinstance(ask, Ask) and ask.why == "gap" else 0.0
        tries = max(ask.attempt, self._fruitless - _FRUITLESS)
        if tries > 1:
            doublings = min(tries - 2, _DOUBLINGS)
            return float(t.backoff_s * 2**doublings * self._rng.uniform(0.5, 1.5))
        joins = isinstance(ask, Fetch) or (isinstance(ask, Ask | Hello) and ask.why == "connect")
        return self._rng.uniform(0, t.jitter_s) if joins else 0.0

    def _allowed(self, pending: Pending, now: float) -> bool:
        return self.may_ask(now) and not (self._keep and not pending.probing and _wants_batches(pending.ask))

    def wants(self, now: float) -> bool:
        """Whether there is something to send."""
        r = self.request
        if r is None:
            return False
        return bool(r.outgoing) if r.sent else now >= r.due and self._allowed(r, now)

    def take(self, now: float, epoch: bytes | None) -> tuple[bool, list[tuple[bytes, ...]]]:
        """Whether the request is a new one, and its messages to be sent now.

        ``epoch``: the life of which a snapshot is to be.
        """
        r, t = self.request, self._timing
        assert r is not None  # noqa: S101 - the driver asks because of it
        if r.sent:
            messages, r.outgoing = r.outgoing, []
            return False, messages
        r.sent = True
        self._fruitless = self._fruitless + 1 if now - self._sent_at < _PAUSE_S else 1
        self._sent_at = now
        r.deadline = now + t.replay_timeout_s
        ask = r.ask
        if r.probing:
            r.deadline = now + t.hello_timeout_s
            r.probes = 1
            return True, _probe()
        if isinstance(ask, Ask):
            return True, [_plain(ask.start)]
        if isinstance(ask, Hello):
            return True, [request(op="hello")]
        if isinstance(ask, Range):
            return True, [request(op="replay", first=ask.first, last=ask.last)]
        if isinstance(ask, Compare):
            return True, [request(op="digest", seq=ask.seq)]
        if self._assembly is None or not self._assembly.helps(epoch, ask.at_least):
            self._assembly = Assembly(ask.at_least, self._limits.snapshot_bytes)
        r.deadline, r.ends = now + t.snapshot_timeout_s, now + t.snapshot_total_s
        return True, [self._assembly.request()]

    def deadline(self, now: float) -> float:
        """When :meth:`overdue` is to be asked at the latest."""
        r = self.request
        if r is None:
            return math.inf
        if r.sent:
            return min(r.deadline, r.ends)
        # One that may be sent waits for the driver, not for time.
        return r.due if r.due > now or not self._allowed(r, now) else math.inf

    def overdue(self, now: float) -> str | None:
        """Why the request has failed, if it has."""
        r = self.request
        if r is None:
            return None
        if r.sent:
            return "unreachable" if now >= min(r.deadline, r.ends) else None
        if now < r.due or self._allowed(r, now):
            return None
        if not self._there:
            return "no replay"
        return "unreachable" if now < self.cool_until else "not asked"

    def probe_again(self, now: float) -> bool:
        """The server answered only what any server does: whether to make sure; an answer may be lost."""
        r = self.request
        if r is None or r.probes > 1:
            return False
        r.probes += 1
        r.outgoing = _probe()
        r.deadline = now + self._timing.hello_timeout_s
        return True

    def go_on_plainly(self, now: float) -> None:
        """The server is no extended one: ask it plainly over the same socket."""
        r = self.request
        if r is None or not isinstance(r.ask, Ask):
            return
        r.probing = False
        if self._keep:
            r.sent = False
            return
        r.outgoing = [_plain(r.ask.start)]
        r.deadline = now + self._timing.replay_timeout_s

    def piece(self, a: Answer, payload: bytes, now: float) -> Whole | None:
        """One piece of the snapshot that is under way; the snapshot, when it is whole.

        :raises AnswerError: it cannot be used.
        """
        r, assembly = self.request, self._assembly
        assert r is not None  # noqa: S101 - it is what is answered
        assert assembly is not None  # noqa: S101 - made when it was asked for
        whole = assembly.add(a, payload)
        r.deadline = now + self._timing.snapshot_timeout_s
        if whole is not None:
            self._assembly = None
        elif assembly.wants_more:
            r.outgoing.append(assembly.request())
        return whole

    def forget_pieces(self) -> None:
        """What came of a snapshot is of no use."""
        self._assembly = None

    def bore_fruit(self) -> None:
        """Something was delivered, so asking is of use."""
        self._fruitless = 0

    def succeeded(self) -> None:
        """The request was answered to its end."""
        self.request = None
        self._cooldown = self._timing.cooldown_s
        self.cool_until = -math.inf

    def cool(self, now: float) -> float:
        """The request was given up: ask nothing for a while. Until when."""
        self._assembly = None
        self.cool_until = now + self._cooldown
        self._cooldown = min(self._cooldown * 2, self._timing.cooldown_s * 60)
        return self.cool_until

    def restored(self, now: float) -> float:
        """A snapshot came: how long to wait until the next."""
        if now - self._restored_at >= 10 * self._rest:
            self._rest = self._timing.cooldown_s / 2
        self._restored_at = now
        self.rest(now)
        return self._rest

    def rest(self, now: float) -> None:
        """Ask for no snapshot for a while, which grows while they are needed often or cannot be had."""
        self._rest = min(self._rest * 2, self._timing.cooldown_s * 60)
        self._snapshot_from = self.rest_until = now + self._rest


def _probe() -> list[tuple[bytes, ...]]:
    return [request(op="hello"), FAR]


def _plain(start: int) -> tuple[bytes, ...]:
    return (b"", start.to_bytes(8, "big"))


def _is_probe(ask: Request) -> bool:
    return isinstance(ask, Hello) and ask.why == "connect"


def _wants_batches(ask: Request) -> bool:
    return isinstance(ask, Ask) or (isinstance(ask, Range) and not ask.anchor)
