"""The numbers under which nothing was sent."""

from __future__ import annotations

from collections import deque

__all__ = ["Holes"]

KEPT = 256
"""Ranges that are remembered; older ones are forgotten first."""


class Holes:
    """Ranges of numbers, the newest :data:`KEPT` of them.

    Changed under the outbox's lock, read anywhere: copying the deque is one step for the interpreter.
    """

    __slots__ = ("_ranges", "complete_from", "last")

    def __init__(self) -> None:
        self._ranges: deque[tuple[int, int]] = deque()
        self.last = -1
        """The highest of them."""
        self.complete_from = 0
        """From this number on none was forgotten."""

    def add(self, first: int, last: int) -> None:
        """Numbers ``first`` to ``last``."""
        ranges = self._ranges
        if ranges and ranges[-1][1] + 1 == first:
            ranges[-1] = (ranges[-1][0], last)
        else:
            ranges.append((first, last))
            if len(ranges) > KEPT:
                self.complete_from = max(self.complete_from, ranges.popleft()[1] + 1)
        self.last = max(self.last, last)

    def ranges(self) -> list[tuple[int, int]]:
        """What is remembered, in order."""
        return sorted(self._ranges.copy())
