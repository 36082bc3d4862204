"""From a failure to the command that shows it again, with as few steps as possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvevents.subscribe.session import Session
from kvevents.testing.system.config import SystemConfig
from kvevents.testing.system.plan import FAULTS, OF_ENGINES, draw_plan, say_numbers
from kvevents.testing.system.run import Report, run_plan
from kvevents.testing.system.shrink import shrink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvevents.testing.system.plan import Step
    from kvevents.testing.system.world import World

__all__ = ["Options", "explain", "simulate"]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a simulation, and is all of it: the same options give the same run."""

    seed: int = 1
    steps: int = 10_000
    faults: tuple[str, ...] = FAULTS
    only: tuple[int, ...] | None = None
    """Numbers of the steps that are done; the others are left out."""

    def plan(self) -> list[Step]:
        """The steps."""
        drawn = draw_plan(self.seed, self.steps, self.faults)
        if self.only is None:
            return drawn
        wanted = set(self.only)
        return [step for step in drawn if step.number in wanted]

    def command(self) -> str:
        """What to type to run it."""
        words = [f"python -m kvevents.testing.system --seed {self.seed} --steps {self.steps}"]
        if self.faults != FAULTS:
            words.append(f"--faults {','.join(self.faults)}")
        if self.only is not None:
            words.append(f"--only {say_numbers(self.only)}")
        return " ".join(words)


def simulate(
    options: Options,
    *,
    session: Callable[..., Session] = Session,
    progress: Callable[[Step, World], None] | None = None,
) -> Report:
    """Run a simulation. ``session`` makes the readers' sessions, for readers that are broken on purpose."""
    return run_plan(SystemConfig.draw(options.seed), options.plan(), session=session, progress=progress)


def explain(
    options: Options, report: Report, *, session: Callable[..., Session] = Session, shrunk: bool = True
) -> str:
    """Several lines on a failure: what failed, how to see it again, and the steps that suffice for it.

    :raises ValueError: the report is of no failure.
    """
    failure = report.failure
    if failure is None:
        raise ValueError("nothing failed")
    lines = [
        f"seed {options.seed}, step {failure.step}: {failure.invariant}: {failure.what}",
        f"  again:  {options.command()}",
    ]
    if shrunk:
        config = SystemConfig.draw(options.seed)
        plan = [step for step in options.plan() if step.number <= failure.step]

        def fails(candidate: Sequence[Step]) -> bool:
            found = run_plan(config, candidate, session=session).failure
            return found is not None and found.invariant == failure.invariant

        left = shrink(plan, fails)
        small = msgspec.structs.replace(options, only=tuple(step.number for step in left))
        again = simulate(small, session=session).failure
        what = "it does not fail alone" if again is None else again.what
        lines += [
            f"  shrunk: {small.command()}",
            f"  which is {len(left)} of {len(plan)} steps: {failure.invariant}: {what}",
            *(f"  {step}{_whose(config, step)}" for step in left),
        ]
    return "\n".join(lines)


def _whose(config: SystemConfig, step: Step) -> str:
    """Which engine it is about; readers come and go, so theirs is known only while it runs."""
    return f" ({config.engines[step.who % len(config.engines)].name})" if step.kind in OF_ENGINES else ""
