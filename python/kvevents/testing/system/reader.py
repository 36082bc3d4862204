"""A simulated reader: a session for every engine, a resident set and an index, compared at every number."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from kvevents.events import EventList
from kvevents.index import PrefixIndex
from kvevents.resident import ResidentSet
from kvevents.subscribe.actions import Limits
from kvevents.subscribe.items import Batch, Gap, Item, Reset, Snapshot
from kvevents.subscribe.log import RateLimitedLog
from kvevents.subscribe.session import Session
from kvevents.subscribe.source import Source
from kvevents.subscribe.timing import Timing
from kvevents.testing.index import NaivePrefixIndex
from kvevents.testing.system.failure import check
from kvevents.testing.system.link import Dealer, Link
from kvevents.testing.system.port import Port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvevents.testing.system.config import ReaderSpec
    from kvevents.testing.system.engine import Engine
    from kvevents.testing.system.schedule import Schedule

__all__ = ["LIMITS", "TIMING", "Reader"]

TIMING = Timing(replay_timeout_s=1.0, check_s=5.0)
LIMITS = Limits(remember=256, hold_batches=24, hold_bytes=20_000)


class Reader:
    """Reads every engine, from when it joins to when it leaves."""

    def __init__(
        self,
        spec: ReaderSpec,
        engines: dict[str, Engine],
        schedule: Schedule,
        *,
        seed: int,
        session: Callable[..., Session] = Session,
        note: Callable[..., None],
    ) -> None:
        self.spec = spec
        self.identity = f"{spec.name}.{seed}"
        self.resident = ResidentSet()
        self.index = PrefixIndex(seed=1)
        self.naive = NaivePrefixIndex() if spec.naive else None
        self.counts: Counter[str] = Counter()
        self.ports: dict[str, Port] = {}
        self._engines = engines
        self._schedule = schedule
        self._note = note
        self._slow_until = 0.0
        self._inbox: deque[tuple[Port, str, list[bytes], Dealer | None]] = deque()
        self._live_waiting: Counter[str] = Counter()
        log = RateLimitedLog("kvevents.subscribe", schedule.clock)
        rng = random.Random(f"reader {self.identity}")
        for name, engine in engines.items():
            replay = None if engine.spec.server == "none" else f"inproc://{name}.replay"
            source = Source(f"inproc://{name}", replay, name=name)
            made = session(source, timing=TIMING, limits=LIMITS, rng=rng, log=log, policy=spec.policy)
            port = self.ports[name] = Port(self, made, schedule)
            port.link = Link(schedule, engine, port, spec.pipe)
            self.index.add_source(name, engine.spec.rank)
            if self.naive is not None:
                self.naive.add_source(name, engine.spec.rank)
            engine.links.append(port.link)
            port.link.connect()

    # ------------------------------------------------------------ time

    @property
    def slow(self) -> bool:
        """Whether it takes nothing now."""
        return self._schedule.now < self._slow_until

    def slow_down(self, seconds: float) -> None:
        """Take nothing for some time."""
        self._slow_until = max(self._slow_until, self._schedule.now + seconds)
        self._schedule.at(self._slow_until, self.catch_up)

    def hurry(self) -> None:
        """Be slow no longer."""
        self._slow_until = 0.0
        self.catch_up()

    def catch_up(self) -> None:
        """Take what waits."""
        if self.slow:
            return
        while self._inbox:
            port, what, frames, dealer = self._inbox.popleft()
            if what == "live":
                self._live_waiting[port.session.name] -= 1
            port.process(what, frames, dealer)
        for port in self.ports.values():
            port.look()

    def deliver(self, port: Port, what: str, frames: list[bytes], dealer: Dealer | None = None) -> None:
        """What the sockets have: taken now, or later, or lost where too much waits."""
        if not self.slow:
            port.process(what, frames, dealer)
            return
        if what == "live":
            if self._live_waiting[port.session.name] >= self.spec.inbox:
                self.counts["overrun"] += 1
                return
            self._live_waiting[port.session.name] += 1
        self._inbox.append((port, what, frames, dealer))

    def leave(self) -> None:
        """Close everything."""
        for name, port in self.ports.items():
            port.close()
            self._engines[name].links.remove(port.link)

    # ------------------------------------------------------------ items

    def take(self, port: Port, items: Iterable[Item]) -> None:
        """Apply what a session says, and compare."""
        name = port.session.name
        engine = self._engines[name]
        for item in items:
            self.resident.apply(item)
            self.index.apply_item(item)
            if self.naive is not None:
                _apply_naive(self.naive, engine.spec.rank, item)
            kind = type(item).__name__
            self.counts[kind] += 1
            true: bytes | None = None
            seq = -1
            if isinstance(item, Batch):
                assert item.batch is not None  # noqa: S101 - sessions decode here
                seq = item.seq
                true = engine.truth.at(seq, float(item.batch.ts))
                check(
                    "known",
                    true is not None,
                    "{} applied {} of {}, which nobody sent",
                    self.spec.name,
                    seq,
                    name,
                )
                self._compare(name, engine.spec.rank, seq, true)
            elif isinstance(item, Snapshot):
                seq = item.resume_seq - 1
                true = None if item.epoch is None else engine.truth.of_epoch(item.epoch, seq)
                check(
                    "known", true is not None, "{} has a snapshot of {} that never was", self.spec.name, name
                )
                self._compare(name, engine.spec.rank, seq, true)
            elif isinstance(item, Gap):
                seq = item.last
            self._note(self._schedule.now, self.spec.name, name, kind, seq, true)

    def _compare(self, name: str, rank: int, seq: int, true: bytes | None) -> None:
        flaw = self.resident.why_invalid(name)
        held = self.index.digest(name, rank)
        check(
            "flagged",
            (flaw is None) == (held is not None),
            "{}: of {} at {} the set says {!r}, the index's digest is {}",
            self.spec.name, name, seq, flaw, held,
        )  # fmt: skip
        if flaw is not None:
            self.counts["flagged"] += 1
            return
        mine = self.resident.digest(name)
        self.counts["compared"] += 1
        check("digest", mine == true, "{}: the set of {} differs at {}", self.spec.name, name, seq)
        check("digest", held == true, "{}: the index of {} differs at {}", self.spec.name, name, seq)


def _apply_naive(naive: NaivePrefixIndex, rank: int, item: Any) -> None:
    if isinstance(item, Batch):
        assert item.batch is not None  # noqa: S101 - sessions decode here
        naive.apply_events(item.source, rank, EventList(item.batch.events), seq=item.seq, checked=False)
    elif isinstance(item, Snapshot):
        naive.apply_snapshot(item.source, rank, item.events, resume_seq=item.resume_seq)
    elif isinstance(item, Reset):
        naive.reset(item.source)
    elif isinstance(item, Gap):
        naive.mark_incomplete(item.source, last_seq=item.last)
