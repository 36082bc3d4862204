"""Running a plan: what happened, or the first invariant that did not hold."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from kvevents.subscribe.session import Session
from kvevents.testing.system.failure import SimulationError
from kvevents.testing.system.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvevents.testing.system.config import SystemConfig
    from kvevents.testing.system.plan import Step

__all__ = ["Failure", "Report", "run_plan"]


class Failure(msgspec.Struct, frozen=True):
    """An invariant that did not hold, or a part that raised what it must not."""

    invariant: str
    what: str
    step: int
    """The number of the step in which it was seen."""


class Report(msgspec.Struct, frozen=True):
    """What a run did."""

    failure: Failure | None
    trace: str
    """A digest of all that any reader was told, and when; equal for equal runs."""
    counts: dict[str, int]
    """By kind of step, and by what readers applied and compared."""
    virtual_s: float


def run_plan(
    config: SystemConfig,
    plan: Iterable[Step],
    *,
    session: Callable[..., Session] = Session,
    progress: Callable[[Step, World], None] | None = None,
) -> Report:
    """Run a plan to its end or its first failure. A function of its arguments: no clock, no threads."""
    logger = logging.getLogger("kvevents")
    level = logger.level
    # Faults are the point; their warnings would be all that is read.
    logger.setLevel(logging.CRITICAL + 1)
    failure = None
    world = World(config, session)
    start = world.schedule.now
    try:
        for step in plan:
            try:
                world.perform(step)
            except SimulationError as e:
                failure = Failure(e.invariant, e.what, step.number)
                break
            except Exception as e:
                failure = Failure(f"raised {type(e).__name__}", str(e), step.number)
                break
            if progress is not None:
                progress(step, world)
    finally:
        logger.setLevel(level)
    counts = dict(sorted(world.totals().items()))
    return Report(failure, world.trace, counts, world.schedule.now - start)
