"""Runs the processes of a chaos demo, does things to them, and collects what they say."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from kvevents.demo.chaos.engine import engine_main
from kvevents.demo.chaos.ledger import LedgerReader, ledger_path
from kvevents.demo.chaos.link import link_main
from kvevents.demo.chaos.options import ENGINES, role
from kvevents.demo.chaos.prompts import choose_prompts
from kvevents.demo.chaos.reader import reader_main
from kvevents.demo.chaos.verdict import ChaosResult, QuietPoint, ReaderLife, judge
from kvevents.demo.children import ChildError, ChildGroup

if TYPE_CHECKING:
    from array import array

    from kvevents.demo.chaos.options import ChaosOptions, EngineSpec
    from kvevents.demo.chaos.verdict import FollowReport, SourceReport

__all__ = ["Teller", "run_chaos"]

_SLOW_S = 0.004
"""What a slow reader waits before each item; there come more."""


class Teller(Protocol):
    """Who is told what is being done."""

    def doing(self, what: str) -> None:
        """Something begins."""

    def applied(self, sequences: int) -> None:
        """The readers have applied that many batches, together."""


def run_chaos(options: ChaosOptions, teller: Teller | None = None) -> ChaosResult:
    """One run, all processes on this machine; leaves no process, socket or file behind.

    :raises ChildError: where a process failed, died uninvited, or nothing moved for ``silence_s`` seconds.
    """
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="kvevents-") as folder,
        ChildGroup(options.silence_s) as group,
    ):
        run = _Run(options, group, folder, teller)
        run.all_of_it()
        sequences = 0
        for source in run.rank_of:
            with LedgerReader(ledger_path(folder, source)) as ledger:
                sequences += len(ledger)
    return judge(
        options,
        seconds=time.monotonic() - start,
        sequences=sequences,
        dropped=run.dropped,
        restarts=run.restarts,
        outages=run.outages,
        link=run.link,
        readers=run.readers(),
        quiet=run.quiet,
    )


class _Run:
    """The processes of one run by name: ``engine a``, ``link 0``, ``reader 0``."""

    def __init__(self, options: ChaosOptions, group: ChildGroup, folder: str, teller: Teller | None) -> None:
        self.options = options
        self.group = group
        self.folder = folder
        self.teller = teller
        self.rank_of = {s: rank for spec in ENGINES for rank, s in enumerate(spec.sources())}
        self.upstream: dict[str, tuple[str, str]] = {}
        self.engine_lives: Counter[str] = Counter()
        self.reader_lives: Counter[int] = Counter()
        self.followed: dict[tuple[int, int], dict[str, FollowReport]] = {}
        self.addresses: dict[int, dict[str, tuple[str, str]]] = {}
        self.running: set[int] = set()
        self.dropped = self.restarts = self.outages = 0
        self.link: Counter[str] = Counter()
        self.quiet: list[QuietPoint] = []
        self.caught: dict[int, tuple[list[str], dict[str, array[int]]]] = {}

    def all_of_it(self) -> None:
        """The whole story."""
        options, group = self.options, self.group
        roles = {reader: role(reader) for reader in range(options.readers)}
        early = [r for r, what in roles.items() if what != "late" or not options.faults]
        self._tell("starting")
        for source in self.rank_of:
            ledger_path(self.folder, source).touch()
        for spec in ENGINES:
            self._start_engine(spec)
        for reader in early:
            self._start_reader(reader)
        self._go()
        self._pass("serving")
        if options.faults:
            self._before_first_quiet_point(early)
        self._quiet_point()
        self._pass("serving")
        if options.faults:
            self._before_second_quiet_point(roles)
            self._quiet_point()
            self._pass("serving")
            self._quiet_point()
        for spec in ENGINES:
            self._end_engine(spec)
        for reader in self.running:
            group.send(f"link {reader}", "stop")
            self.link.update(group.expect(f"link {reader}", "done", self._said))

    # ------------------------------------------------------------ what is done

    def _before_first_quiet_point(self, early: list[int]) -> None:
        slow = early[-1]
        self.group.send(f"reader {slow}", "slow", _SLOW_S)
        self.group.send("engine b", "overflow")
        self.group.expect("engine b", "overflowed", self._said)
        self._pass(f"engine b's queue overflowed; reader {slow + 1} is slow")
        self.group.send(f"reader {slow}", "slow", 0.0)

    def _before_second_quiet_point(self, roles: dict[int, str]) -> None:
        options, group = self.options, self.group
        for reader in sorted(self.running):
            if roles[reader] == "first":
                for source in ("a", "c/dp1"):
                    group.send(f"link {reader}", "outage", (source, options.outage_s))
                    self.outages += 1
            elif roles[reader] == "killed":
                group.end(f"reader {reader}", kill=True)
        self._pass("links broken, readers killed", options.outage_s)
        for reader, what in roles.items():
            if what == "late":
                self._start_reader(reader)
        self._pass("late readers joined")
        a, _, c = ENGINES
        group.end("engine a", kill=True)
        self._end_engine(c)
        self._pass("engine a killed, engine c stopped", 0.5)
        for spec in (a, c):
            self._start_engine(spec)
            group.send(f"engine {spec.name}", "go")
            self.restarts += 1
        for reader, what in roles.items():
            if what == "killed":
                self._start_reader(reader)
        self._pass("engines and readers started again")

    def _quiet_point(self) -> None:
        """Everybody stands still; readers catch up; all are asked the same."""
        group, point = self.group, len({q.point for q in self.quiet}) + 1
        self._tell(f"quiet point {point}")
        at: dict[str, SourceReport] = {}
        for spec in ENGINES:
            group.send(f"engine {spec.name}", "pause")
            at |= group.expect(f"engine {spec.name}", "paused", self._said)
        recent = []
        for spec in ENGINES:
            group.send(f"engine {spec.name}", "recent")
            recent += group.expect(f"engine {spec.name}", "recent", self._said)
        prompts = choose_prompts(recent, self.options.prompts, self.options.seed + point)
        truth: dict[str, array[int]] = {}
        for spec in ENGINES:
            group.send(f"engine {spec.name}", "ask", prompts)
            truth |= group.expect(f"engine {spec.name}", "answers", self._said)
        ends = {source: (report.epoch, report.batches) for source, report in at.items()}
        for reader in self.running:
            group.send(f"reader {reader}", "quiet", (ends, prompts))
        for reader, (behind, answers) in self._all_caught().items():
            pairs = [pair for s in truth for pair in zip(truth[s], answers[s], strict=True)]
            self.quiet.append(
                QuietPoint(
                    point=point,
                    reader=reader,
                    behind=behind,
                    answers=len(pairs),
                    equal=sum(true == held for true, held in pairs),
                    hits=sum(held > 0 for _, held in pairs),
                )
            )
        self._go()

    def _all_caught(self) -> dict[int, tuple[list[str], dict[str, array[int]]]]:
        """What each reader says at a quiet point, in whichever order they get there."""
        deadline = time.monotonic() + 3 * self.options.silence_s
        while missing := self.running - self.caught.keys():
            if time.monotonic() > deadline:
                who = ", ".join(f"reader {reader + 1}" for reader in sorted(missing))
                raise ChildError(f"{who}: no answers at a quiet point")
            self.group.listen(0.05, self._said)
        caught, self.caught = self.caught, {}
        return dict(sorted(caught.items()))

    # ------------------------------------------------------------ parts

    def _start_engine(self, spec: EngineSpec) -> None:
        name = f"engine {spec.name}"
        self.group.start(name, engine_main, self.options, spec, self.engine_lives[spec.name], self.folder)
        self.engine_lives[spec.name] += 1
        addresses = self.group.expect(name, "ready", self._said)
        self.upstream |= dict(zip(spec.sources(), addresses, strict=True))

    def _end_engine(self, spec: EngineSpec) -> None:
        name = f"engine {spec.name}"
        self.group.send(name, "stop")
        last: dict[str, SourceReport] = self.group.expect(name, "stopped", self._said)
        self.dropped += sum(report.dropped for report in last.values())
        self.group.end(name)

    def _start_reader(self, reader: int) -> None:
        if reader not in self.addresses:
            self.group.start(f"link {reader}", link_main, self.options, reader, self.upstream)
            self.addresses[reader] = self.group.expect(f"link {reader}", "ready", self._said)
        sources = {s: (self.rank_of[s], *pair) for s, pair in self.addresses[reader].items()}
        self.group.start(f"reader {reader}", reader_main, self.options, reader, sources, self.folder)
        self.reader_lives[reader] += 1
        self.group.expect(f"reader {reader}", "ready", self._said)
        self.running.add(reader)

    def _go(self) -> None:
        for spec in ENGINES:
            self.group.send(f"engine {spec.name}", "go")

    def _pass(self, what: str, seconds: float | None = None) -> None:
        self._tell(what)
        self.group.listen(self.options.stretch_s if seconds is None else seconds, self._said)

    def _said(self, who: str, word: str, value: Any) -> None:
        if word not in {"progress", "caught"}:
            return
        reader = int(who.removeprefix("reader "))
        if word == "caught":
            behind, value, answers = value
            self.caught[reader] = (behind, answers)
        self.followed[reader, self.reader_lives[reader] - 1] = value
        if self.teller is not None:
            self.teller.applied(sum(r.applied for life in self.followed.values() for r in life.values()))

    def _tell(self, what: str) -> None:
        if self.teller is not None:
            self.teller.doing(what)

    def readers(self) -> list[ReaderLife]:
        """All lives of all readers."""
        return [
            ReaderLife(reader=reader, role=role(reader), life=life, sources=reports)
            for (reader, life), reports in sorted(self.followed.items())
        ]
