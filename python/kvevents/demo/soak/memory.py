"""Resident memory of processes over time, and how fast it grows."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Growth", "MemoryLog", "resident_bytes", "slope"]

_MB = 1e6
_PROC = "/proc"
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process; ``None`` where it has gone.

    From ``/proc`` on Linux, elsewhere from ``ps``.
    """
    if Path(_PROC, "self", "statm").exists():
        try:
            return int(Path(_PROC, str(pid), "statm").read_text().split()[1]) * _PAGE
        except (FileNotFoundError, ProcessLookupError):
            return None
    ps = ["ps", "-o", "rss=", "-p", str(pid)]
    said = subprocess.run(ps, capture_output=True, text=True, check=False).stdout  # noqa: S603
    return int(said) * 1024 if said.strip() else None


def slope(points: list[tuple[float, float]]) -> float:
    """The slope of the straight line that fits best (least squares); 0 for fewer than two different times."""
    n = len(points)
    mean_x = sum(x for x, _ in points) / max(n, 1)
    mean_y = sum(y for _, y in points) / max(n, 1)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread > 0 else 0.0


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """One process from its start to its end."""

    process: str
    life: int
    """0 for the first process of this name."""
    seconds: float
    """How long it was sampled after its warm-up; 0: it ended before."""
    first_mb: float
    """The first sample after the warm-up, or the last before it."""
    last_mb: float
    mb_per_minute: float | None
    """``None`` where it was sampled too shortly to say."""


class MemoryLog:
    """Samples by process, and what they say. Its own memory is a few bytes a second."""

    def __init__(self, warm_up_s: float) -> None:
        self._warm_up_s = warm_up_s
        self._samples: dict[tuple[str, int], list[tuple[float, float]]] = {}
        self.latest: dict[str, float] = {}

    def take(self, now: float, pids: Mapping[str, int]) -> None:
        """Sample these processes, by name; one that has just ended is passed over."""
        for name, pid in pids.items():
            size = resident_bytes(pid)
            # One that has ended and was not waited for has no memory.
            if size:
                self._samples.setdefault((name, pid), []).append((now, size / _MB))
                self.latest[name] = size / _MB

    def growth(self) -> list[Growth]:
        """Every process in the order in which they came.

        The slope is told where the samples after the warm-up span at least as long as the warm-up.
        """
        found: list[Growth] = []
        for (name, _), points in self._samples.items():
            start = points[0][0] + self._warm_up_s
            late = [p for p in points if p[0] >= start]
            seconds = late[-1][0] - late[0][0] if late else 0.0
            long_enough = len(late) > 1 and seconds >= self._warm_up_s
            found.append(
                Growth(
                    process=name,
                    life=sum(g.process == name for g in found),
                    seconds=round(seconds, 1),
                    first_mb=round((late or points[-1:])[0][1], 2),
                    last_mb=round(points[-1][1], 2),
                    mb_per_minute=round(60 * slope(late), 3) if long_enough else None,
                )
            )
        return found
