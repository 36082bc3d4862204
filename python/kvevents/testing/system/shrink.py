"""Cutting a failing plan down to the steps that matter (delta debugging, Zeller's ddmin)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvevents.testing.system.plan import Step

__all__ = ["shrink"]


def shrink(
    plan: Sequence[Step], fails: Callable[[Sequence[Step]], bool], *, most_runs: int = 400
) -> list[Step]:
    """The shortest plan found that still fails: no single step can be left out, or ``most_runs`` were tried.

    ``fails`` runs a plan and says whether it fails in the same way; ``plan`` does.
    """
    left = list(plan)
    runs = 0

    def still_fails(candidate: list[Step]) -> bool:
        nonlocal runs
        runs += 1
        return fails(candidate)

    # Mostly only the end matters: far fewer runs than halving from the start.
    tail = 1
    while tail < len(left) and runs < most_runs:
        if still_fails(left[-tail:]):
            left = left[-tail:]
            break
        tail *= 2
    size = max(1, len(left) // 2)
    while left:
        start, cut = 0, False
        while start < len(left) and runs < most_runs:
            candidate = left[:start] + left[start + size :]
            if candidate and still_fails(candidate):
                left, cut = candidate, True
            else:
                start += size
        if runs >= most_runs or (size == 1 and not cut):
            break
        size = size if size == 1 else size // 2
    return left
