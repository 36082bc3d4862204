"""Runs the processes of a soak, does things to them in turn, and samples their memory."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from itertools import cycle
from typing import TYPE_CHECKING, Any

from kvevents.demo.chaos.engine import engine_main
from kvevents.demo.chaos.ledger import ledger_path
from kvevents.demo.chaos.link import link_main
from kvevents.demo.chaos.options import ENGINES
from kvevents.demo.chaos.prompts import choose_prompts
from kvevents.demo.children import ChildGroup
from kvevents.demo.soak.memory import MemoryLog
from kvevents.demo.soak.reader import End, reader_main
from kvevents.demo.soak.verdict import QuietReport, ReaderReport, SoakResult, VisitorReport, judge
from kvevents.demo.soak.visitor import visitor_main

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from kvevents.demo.chaos.options import EngineSpec
    from kvevents.demo.chaos.verdict import SourceReport
    from kvevents.demo.soak.options import SoakOptions

__all__ = ["run_soak"]

_SAMPLE_S = 1.0
_TELL_S = 10.0
_FAULTS = ("dropped", "duplicated", "delayed", "reordered", "reconnects")


def run_soak(options: SoakOptions, tell: Callable[[str], object] = lambda _: None) -> SoakResult:
    """One run, all processes on this machine; leaves no process, socket or file behind.

    ``tell`` is given a line every ten seconds.

    :raises ChildError: where a process failed, died uninvited, or nothing moved for ``silence_s`` seconds.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kvevents-") as folder,
        ChildGroup(options.silence_s) as group,
    ):
        return _Run(options, group, folder, tell).all_of_it()


class _Run:
    """Engines ``a``, ``b`` and ``c``, a link, a reader, a visitor."""

    def __init__(
        self, options: SoakOptions, group: ChildGroup, folder: str, tell: Callable[[str], object]
    ) -> None:
        self.options = options
        self.parts = options.parts()
        self.group = group
        self.folder = folder
        self.tell = tell
        self.start = time.monotonic()
        self.memory = MemoryLog(options.warm_up)
        self.lives: Counter[str] = Counter()
        self.happened: Counter[str] = Counter(restarts=0, outages=0, dropped=0)
        self.reader = ReaderReport()
        self.visitor = VisitorReport()
        self.quiet: list[QuietReport] = []
        self.sample_due = self.tell_due = 0.0

    def all_of_it(self) -> SoakResult:
        """The whole run."""
        options, group = self.options, self.group
        upstream: dict[str, tuple[str, str]] = {}
        rank_of = {s: rank for spec in ENGINES for rank, s in enumerate(spec.sources())}
        for source in rank_of:
            ledger_path(self.folder, source).touch()
        for spec in ENGINES:
            upstream |= self._start_engine(spec)
        group.start("link", link_main, self.parts, 0, upstream)
        ends = group.expect("link", "ready", self._said)
        sources = {s: (rank_of[s], *pair) for s, pair in ends.items()}
        group.start("reader", reader_main, sources, options.silence_s / 2)
        group.expect("reader", "ready", self._said)
        group.start("visitor", visitor_main, sources)
        group.expect("visitor", "ready", self._said)
        self._go()

        self.start = now = time.monotonic()
        end, next_quiet = now + options.seconds, now + options.quiet_s
        things = cycle((self._cut, self._overflow, self._cut, self._restart))
        while (now := time.monotonic()) < end:
            self._pass(min(options.every_s, end - now))
            if now >= next_quiet:
                self._quiet_point()
                next_quiet = time.monotonic() + options.quiet_s
            elif end - now > options.every_s:
                next(things)()
        self._quiet_point()
        return self._result()

    def _result(self) -> SoakResult:
        group, seconds = self.group, time.monotonic() - self.start
        memory = self.memory.growth()
        for spec in ENGINES:
            self._end_engine(spec)
        group.send("link", "stop")
        link = group.expect("link", "done", self._said)
        return judge(
            self.options,
            seconds=seconds,
            happened=dict(self.happened),
            link={fault: link[fault] for fault in _FAULTS},
            reader=self.reader,
            visitor=self.visitor,
            quiet=self.quiet,
            memory=memory,
        )

    # ------------------------------------------------------------ what is done

    def _cut(self) -> None:
        """Everything to one source of engine a or c is lost for longer than the replay log lasts."""
        source = ("a", "c/dp1")[self.happened["outages"] % 2]
        self.group.send("link", "outage", (source, self.parts.outage_s))
        self.happened["outages"] += 1

    def _overflow(self) -> None:
        """Engine b's queue overflows; what was dropped is counted when it ends."""
        self.group.send("engine b", "overflow")
        self.group.expect("engine b", "overflowed", self._said)

    def _restart(self) -> None:
        """Engine a is ended, by force or in peace in turn, and started again."""
        a = ENGINES[0]
        if self.happened["restarts"] % 2:
            self._end_engine(a)
        else:
            self.group.end("engine a", kill=True)
        self._start_engine(a)
        self.group.send("engine a", "go")
        self.happened["restarts"] += 1

    def _quiet_point(self) -> None:
        """Everybody stands still, the reader catches up, and all is compared."""
        group, at, recent = self.group, dict[str, "SourceReport"](), []
        for spec in ENGINES:
            group.send(f"engine {spec.name}", "pause")
            at |= group.expect(f"engine {spec.name}", "paused", self._said)
            group.send(f"engine {spec.name}", "recent")
            recent += group.expect(f"engine {spec.name}", "recent", self._said)
        prompts = choose_prompts(recent, self.options.prompts, self.options.seed + len(self.quiet))
        truth: dict[str, array[int]] = {}
        for spec in ENGINES:
            group.send(f"engine {spec.name}", "ask", prompts)
            truth |= group.expect(f"engine {spec.name}", "answers", self._said)
        ends = {source: End(report.batches - 1, report.digest) for source, report in at.items()}
        group.send("reader", "quiet", (ends, prompts))
        behind, different, held = group.expect("reader", "caught", self._said)
        pairs = [pair for s in truth for pair in zip(truth[s], held[s], strict=True)]
        equal = sum(a == b for a, b in pairs)
        self.quiet.append(
            QuietReport(
                sources=len(ends), behind=behind, different=different, answers=len(pairs), equal=equal
            )
        )
        self._go()

    # ------------------------------------------------------------ parts

    def _start_engine(self, spec: EngineSpec) -> dict[str, tuple[str, str]]:
        name = f"engine {spec.name}"
        self.group.start(name, engine_main, self.parts, spec, self.lives[spec.name], self.folder)
        self.lives[spec.name] += 1
        addresses = self.group.expect(name, "ready", self._said)
        return dict(zip(spec.sources(), addresses, strict=True))

    def _end_engine(self, spec: EngineSpec) -> None:
        name = f"engine {spec.name}"
        self.group.send(name, "stop")
        last: dict[str, SourceReport] = self.group.expect(name, "stopped", self._said)
        self.happened["dropped"] += sum(report.dropped for report in last.values())
        self.group.end(name)

    def _go(self) -> None:
        for spec in ENGINES:
            self.group.send(f"engine {spec.name}", "go")

    def _pass(self, seconds: float) -> None:
        """Let time pass; sample and tell meanwhile."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            if now >= self.sample_due:
                self.sample_due = now + _SAMPLE_S
                self.memory.take(now - self.start, {"parent": os.getpid()} | self.group.pids())
            if now >= self.tell_due:
                self.tell_due = now + _TELL_S
                self.tell(self._line(now - self.start))
            self.group.listen(min(_SAMPLE_S / 2, end - now), self._said)

    def _line(self, seconds: float) -> str:
        sizes = ", ".join(f"{name} {mb:.0f}" for name, mb in self.memory.latest.items())
        good = sum(not q.behind and not q.different and q.equal == q.answers for q in self.quiet)
        return (
            f"{seconds:4.0f} s: {self.reader.batches:,} batches, {self.happened['restarts']} restarts, "
            f"{self.happened['outages']} outages, {good} of {len(self.quiet)} quiet points equal; MB: {sizes}"
        )

    def _said(self, _who: str, word: str, value: Any) -> None:
        if word == "progress":
            self.reader = value
        elif word == "visits":
            self.visitor = value
