"""Stock and plug-in in turn: medians of interleaved pairs, with the range of the pairs' ratios.

A file `rows_<concept>.py` declares figures:

    @row("publish() in the engine core, p50", unit="us", floor=1.05, aim=0.5)
    def publish() -> Pair:
        return Pair(stock=lambda: ..., ours=lambda: ...)  # each call measures once, returns the figure

Each call checks its own answer. Several rows may come of one measurement: `@rows(Row(...), Row(...))`, and
the calls return as many figures. A `more` row wants a large `stock / ours` (times, so that more is faster),
any other a small `ours / stock`. `@value` is a figure without a competitor.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["DECLARED", "HEAD", "Declared", "Pair", "Row", "measure", "row", "rows", "value"]


@dataclass(frozen=True)
class Row:
    """What one figure is, and what it is compared with."""

    name: str
    unit: str
    floor: float | None = None
    aim: float | None = None
    more: bool = False
    """The figure is stock / ours and should be large; else ours / stock, and small."""
    digits: int = 2


@dataclass(frozen=True)
class Pair:
    """Two ways to do the same; each call measures once. `close` runs at the end."""

    stock: Callable[[], Any]
    ours: Callable[[], Any]
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Declared:
    """A function that makes a :class:`Pair` (or, of a value, gives the figure), and its rows."""

    rows: tuple[Row, ...]
    make: Callable[[], Any]
    single: bool = False


DECLARED: list[Declared] = []


def rows(*declared: Row) -> Callable[[Callable[[], Pair]], Callable[[], Pair]]:
    """Declares the rows that come of one measurement."""

    def register(make: Callable[[], Pair]) -> Callable[[], Pair]:
        DECLARED.append(Declared(declared, make))
        return make

    return register


def row(name: str, **spec: Any) -> Callable[[Callable[[], Pair]], Callable[[], Pair]]:
    """Declares one row."""
    return rows(Row(name, **spec))


def value(name: str, **spec: Any) -> Callable[[Callable[[], float]], Callable[[], float]]:
    """Declares a figure that stands alone; floor and aim are what it may be at most."""

    def register(make: Callable[[], float]) -> Callable[[], float]:
        DECLARED.append(Declared((Row(name, **spec),), make, single=True))
        return make

    return register


def measure(declared: Declared, pairs: int) -> list[str]:
    """Runs the pairs, in turn first; a line a row: both medians, the ratio, its range, the verdict."""
    if declared.single:
        figures = sorted(float(declared.make()) for _ in range(pairs))
        return [_line_of_value(declared.rows[0], figures)]
    pair = declared.make()
    stock: list[Sequence[float]] = []
    ours: list[Sequence[float]] = []
    gc.collect()
    gc.freeze()
    try:
        for i in range(pairs):
            for call, into in ((pair.stock, stock), (pair.ours, ours))[:: 1 if i % 2 else -1]:
                gc.collect()
                got = call()
                into.append(got if isinstance(got, tuple) else (got,))
    finally:
        gc.unfreeze()
        pair.close()
    return [_line(r, [s[n] for s in stock], [o[n] for o in ours]) for n, r in enumerate(declared.rows)]


HEAD = (
    "| work | stock | plug-in | ratio (range of the pairs) | floor | aim | |\n|---|---|---|---|---|---|---|"
)


def _verdict(r: Row, figure: float) -> str:
    for name, limit in (("aim", r.aim), ("floor", r.floor)):
        if limit is not None and (figure >= limit if r.more else figure <= limit):
            return name
    return "missed" if r.floor is not None else ""


def _limit(r: Row, limit: float | None) -> str:
    return "-" if limit is None else f"{'≥' if r.more else '≤'} {limit:g}"


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _line(r: Row, stock: Sequence[float], ours: Sequence[float]) -> str:
    ratios = sorted(s / o if r.more else o / s for s, o in zip(stock, ours, strict=True))
    figure = statistics.median(ratios)
    return _cells(
        r.name,
        f"{statistics.median(stock):.{r.digits}f} {r.unit}",
        f"{statistics.median(ours):.{r.digits}f} {r.unit}",
        f"{figure:.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        _limit(r, r.floor),
        _limit(r, r.aim),
        _verdict(r, figure),
    )


def _line_of_value(r: Row, figures: Sequence[float]) -> str:
    figure = statistics.median(figures)
    span = f"{figures[0]:.{r.digits}f} to {figures[-1]:.{r.digits}f}"
    limits = (_limit(r, r.floor), _limit(r, r.aim))
    return _cells(r.name, "-", f"{figure:.{r.digits}f} {r.unit} ({span})", "-", *limits, _verdict(r, figure))
