"""Virtual time: what is to happen when, in one order that depends on nothing else."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Schedule"]

_Entry: TypeAlias = "tuple[float, int, Callable[[], object]]"


class Schedule:
    """A heap of calls. What is due at the same time happens in the order in which it was asked for."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self.now = start
        """Virtual seconds; the only clock of a simulation, monotonic and wall at once."""
        self._heap: list[_Entry] = []
        self._order = count()
        self.ran = 0

    def __len__(self) -> int:
        """Calls that wait for their time."""
        return len(self._heap)

    def clock(self) -> float:
        """What parts of the package get for a clock."""
        return self.now

    def at(self, when: float, call: Callable[[], object]) -> None:
        """Have something called at a time; the past means as soon as possible."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), call))

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """Have something called so many seconds from now."""
        self.at(self.now + seconds, call)

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        end = self.now + seconds
        heap = self._heap
        while heap and heap[0][0] <= end:
            when, _, call = heapq.heappop(heap)
            self.now = when
            self.ran += 1
            call()
        self.now = end
