"""One way to measure: thread CPU time, interleaved pairs, medians and minima, answers checked first.

A file `test_bench_<concept>.py` declares rows:

    @compare("one event to bytes", per="event", floor=4, aim=6)
    def one_event() -> Work:
        events = ...                                   # made once, not timed
        return Work(ours=lambda: encode(events), theirs=lambda: msgspec_encode(events), n=256, check=check)

    @value("wheel", unit="MB", floor=1.5, aim=0.8)     # any other figure
    def wheel() -> float: ...

    test_rows = as_tests(__name__)                     # the same rows under pytest-benchmark

`python -m benches` runs the rows of every such file and prints the tables that the docs quote. A competitor
that is not installed is `Absent("why")`: the row says 'not run' and still measures ours.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "ROWS",
    "Absent",
    "Result",
    "Row",
    "Work",
    "as_tests",
    "compare",
    "have",
    "measure",
    "time_pairs",
    "value",
]

Measure = Literal["speedup", "fraction", "difference", "value"]
Clock = Literal["thread", "process", "wall"]

CLOCKS: dict[str, Callable[[], int]] = {
    "thread": time.thread_time_ns,
    "process": time.process_time_ns,
    "wall": time.perf_counter_ns,
}
SAMPLE_NS = 8_000_000
"""How long one sample lasts at least; shorter calls are repeated."""


@dataclass(frozen=True)
class Absent:
    """Why a competitor could not be run here."""

    why: str


def have(module: str) -> bool:
    """Whether a competitor is installed in this environment."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


@dataclass(frozen=True)
class Work:
    """What one row runs. `ours` and `theirs` do the same work of `n` units a call.

    `check` raises where either's answer is wrong; it runs before anything is timed. `before_ours` and
    `before_theirs` run before each sample and are not timed; with one of them a sample is one call.
    """

    ours: Callable[[], object]
    theirs: Callable[[], object] | Absent
    n: int
    check: Callable[[], None]
    before_ours: Callable[[], object] | None = None
    before_theirs: Callable[[], object] | None = None
    n_theirs: int | None = None
    """Units of a call of `theirs`, where they differ."""
    close: Callable[[], object] | None = None
    """Ends what was started for it."""


@dataclass(frozen=True)
class Row:
    """A declared figure. What `floor` and `aim` mean depends on `measure`:

    `speedup`: theirs / ours, at least; `fraction`: ours / theirs, at most; `difference`: ours - theirs in
    nanoseconds a unit, at most; `value`: the figure, at most (or at least, with `more_is_better`).
    """

    name: str
    concept: str
    make: Callable[[], Any]
    measure: Measure
    floor: float | None
    aim: float | None
    unit: str
    per: str
    against: str
    clock: Clock
    pairs: int
    more_is_better: bool


@dataclass
class Result:
    """What was measured. Times are nanoseconds a unit."""

    row: Row
    figure: float | None = None
    """What floor and aim are compared with; `None` where the competitor was not run."""
    figure_of_minima: float | None = None
    ours: float | None = None
    ours_min: float | None = None
    ours_wall: float | None = None
    theirs: float | None = None
    theirs_min: float | None = None
    theirs_wall: float | None = None
    note: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """`aim`, `floor`, `missed`, `not run`, `failed`, or empty where nothing was promised."""
        if self.note.startswith("failed"):
            return "failed"
        if self.figure is None:
            return "not run"
        more = self.row.measure == "speedup" or self.row.more_is_better
        for name, limit in (("aim", self.row.aim), ("floor", self.row.floor)):
            if limit is not None and (self.figure >= limit if more else self.figure <= limit):
                return name
        return "missed" if self.row.floor is not None else ""


ROWS: list[Row] = []


def _concept(module: str) -> str:
    return module.rpartition(".")[2].removeprefix("test_bench_")


def compare(
    name: str,
    *,
    per: str,
    floor: float | None = None,
    aim: float | None = None,
    against: str = "",
    measure: Measure = "speedup",
    clock: Clock = "thread",
    pairs: int = 15,
) -> Callable[[Callable[[], Work]], Callable[[], Work]]:
    """Declares a row that times ours beside theirs."""

    def register(make: Callable[[], Work]) -> Callable[[], Work]:
        unit = "ns" if measure == "difference" else "x"
        ROWS.append(
            Row(
                name,
                _concept(make.__module__),
                make,
                measure,
                floor,
                aim,
                unit,
                per,
                against,
                clock,
                pairs,
                False,
            )
        )
        return make

    return register


def value(
    name: str,
    *,
    unit: str,
    floor: float | None = None,
    aim: float | None = None,
    against: str = "",
    more_is_better: bool = False,
) -> Callable[[Callable[[], float | Absent]], Callable[[], float | Absent]]:
    """Declares a row that is any other figure; the function checks its own answer."""

    def register(make: Callable[[], float | Absent]) -> Callable[[], float | Absent]:
        ROWS.append(
            Row(
                name,
                _concept(make.__module__),
                make,
                "value",
                floor,
                aim,
                unit,
                "",
                against,
                "wall",
                1,
                more_is_better,
            )
        )
        return make

    return register


class _Timer:
    """Times one side: CPU and wall nanoseconds a unit."""

    def __init__(
        self,
        call: Callable[[], object],
        before: Callable[[], object] | None,
        n: int,
        clock: Callable[[], int],
    ) -> None:
        self.call, self.before, self.n, self.clock = call, before, n, clock
        self.loops = 1
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def run(self) -> tuple[float, float]:
        if self.before is not None:
            self.before()
        call, clock, wall_clock, loops = self.call, self.clock, time.perf_counter_ns, range(self.loops)
        wall, cpu = wall_clock(), clock()
        for _ in loops:
            call()
        spent, wall_spent = clock() - cpu, wall_clock() - wall
        units = self.n * self.loops
        return spent / units, wall_spent / units

    def warm_up(self) -> None:
        """Until caches and branch predictors are warm, and a sample is long enough to be timed."""
        deadline = time.perf_counter_ns() + 10 * SAMPLE_NS
        while True:
            _, wall = self.run()
            if self.before is None and wall * self.n * self.loops < SAMPLE_NS:
                self.loops = max(self.loops * 2, int(SAMPLE_NS / max(wall * self.n, 1)))
            elif time.perf_counter_ns() > deadline:
                return

    def sample(self) -> None:
        cpu, wall = self.run()
        self.cpu.append(cpu)
        self.wall.append(wall)


def time_pairs(work: Work, *, clock: Clock = "thread", pairs: int = 15) -> tuple[_Timer, _Timer | None]:
    """Times both sides in turn, so that a change of the machine's speed meets both; the order alternates."""
    ours = _Timer(work.ours, work.before_ours, work.n, CLOCKS[clock])
    theirs = (
        None
        if isinstance(work.theirs, Absent)
        else _Timer(work.theirs, work.before_theirs, work.n_theirs or work.n, CLOCKS[clock])
    )
    sides = [s for s in (ours, theirs) if s is not None]
    gc.collect()
    gc.freeze()
    try:
        for s in sides:
            s.warm_up()
        for _ in range(pairs):
            for s in sides:
                s.sample()
            sides.reverse()
    finally:
        gc.unfreeze()
    return ours, theirs


def measure(row: Row, *, pairs: int | None = None) -> Result:
    """Runs one row. What it raises becomes a failed result, so that one row costs not the others."""
    result = Result(row)
    try:
        made = row.make()
        if isinstance(made, Absent):
            result.note = made.why
        elif isinstance(made, Work):
            _compare(result, made, pairs or row.pairs)
        else:
            result.figure = float(made)
    except Exception as e:
        result.note = f"failed: {type(e).__name__}: {e}"
    return result


def _compare(result: Result, work: Work, pairs: int) -> None:
    try:
        work.check()
        ours, theirs = time_pairs(work, clock=result.row.clock, pairs=pairs)
    finally:
        if work.close is not None:
            work.close()
    result.samples["ours"] = ours.cpu
    result.ours, result.ours_min = statistics.median(ours.cpu), min(ours.cpu)
    result.ours_wall = statistics.median(ours.wall)
    if theirs is None:
        assert isinstance(work.theirs, Absent)
        result.note = work.theirs.why
        return
    result.samples["theirs"] = theirs.cpu
    result.theirs, result.theirs_min = statistics.median(theirs.cpu), min(theirs.cpu)
    result.theirs_wall = statistics.median(theirs.wall)
    figure = {
        "speedup": lambda a, b: b / a,
        "fraction": lambda a, b: a / b,
        "difference": lambda a, b: a - b,
    }[result.row.measure]
    result.figure = figure(result.ours, result.theirs)
    result.figure_of_minima = figure(result.ours_min, result.theirs_min)


def as_tests(module: str) -> Callable[..., None]:
    """The module's rows as tests: each checks its answer, and pytest-benchmark times ours."""
    import pytest

    rows = [r for r in ROWS if r.make.__module__ == module]

    @pytest.mark.parametrize("row", rows, ids=[r.name for r in rows])
    def test(row: Row, benchmark: Any) -> None:
        made = benchmark.pedantic(row.make, rounds=1) if row.measure == "value" else row.make()
        if isinstance(made, Absent):
            pytest.skip(made.why)
        if not isinstance(made, Work):
            return
        try:
            made.check()
            benchmark.group = row.concept
            benchmark.extra_info["units"] = made.n
            if made.before_ours is None:
                benchmark(made.ours)
            else:
                benchmark.pedantic(made.ours, setup=lambda: made.before_ours() and None, rounds=10)
        finally:
            if made.close is not None:
                made.close()

    # pytest looks the function up in the module that asked.
    test.__module__ = module
    return test


def load(names: list[str]) -> list[types.ModuleType]:
    """Imports bench modules; one that cannot be imported ends the run, since its rows would be missing."""
    import importlib

    return [importlib.import_module(name) for name in names]
