"""``python -m kvevents.testing.system``: simulate, and where it fails print what reproduces it."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

from kvevents.testing.system.plan import FAULTS, KINDS, parse_numbers
from kvevents.testing.system.reproduce import Options, explain, simulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvevents.testing.system.plan import Step
    from kvevents.testing.system.run import Report
    from kvevents.testing.system.world import World

SAY_EVERY_S = 10.0


class _Progress:
    """A line to stderr now and then."""

    def __init__(self, seed: int, steps: int) -> None:
        self._seed = seed
        self._steps = steps
        self._began = self._said = time.monotonic()
        self._done = 0

    def __call__(self, step: Step, world: World) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._said < SAY_EVERY_S:
            return
        self._said = now
        rate = self._done / (now - self._began)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        compared = world.totals()["compared"]
        print(
            f"seed {self._seed}: step {step.number:,} of {self._steps:,}, {rate:,.0f} steps/s, "
            f"{compared:,} digests compared, {memory} MiB at most",
            file=sys.stderr,
            flush=True,
        )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvevents.testing.system",
        description="Whole-system simulation: engines, workers, links, readers and indexes in one process, "
        "deterministic from a seed.",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the first world")
    parser.add_argument("--worlds", type=int, default=1, help="so many, with consecutive seeds")
    parser.add_argument("--steps", type=int, default=10_000, help="of each world")
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"kinds, of: {', '.join(FAULTS)}")
    parser.add_argument("--only", type=parse_numbers, help="the steps to do, as a failure prints them")
    parser.add_argument("--jobs", type=int, default=1, help="processes, a world each")
    parser.add_argument("--no-shrink", action="store_true", help="print a failure as it is")
    return parser.parse_args(argv)


def _run(options: Options) -> tuple[Options, Report]:
    return options, simulate(options, progress=_Progress(options.seed, options.steps))


def _report(results: Iterable[tuple[Options, Report]], *, shrunk: bool) -> int:
    total: Counter[str] = Counter()
    for options, report in results:
        if report.failure is not None:
            print(explain(options, report, shrunk=shrunk))
            return 1
        total.update(report.counts)
        print(
            f"seed {options.seed}: {sum(report.counts.get(kind, 0) for kind in KINDS):,} steps, "
            f"{report.virtual_s:,.0f} virtual seconds, {report.counts.get('compared', 0):,} digests and "
            f"{report.counts.get('answers', 0):,} answers compared, trace {report.trace}",
            flush=True,
        )
    print(
        f"all held: {total['quiet']:,} quiet points, {total['compared']:,} digests equal, "
        f"{total['flagged']:,} batches under a flag, {total['answers']:,} answers equal"
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worlds; 0 if every invariant held, 1 at the first failure, 2 for wrong arguments."""
    a = _arguments(argv)
    faults = tuple(kind for kind in a.faults.split(",") if kind)
    if unknown := set(faults) - set(FAULTS):
        print(f"no such faults: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}", file=sys.stderr)
        return 2
    worlds = [
        Options(seed=seed, steps=a.steps, faults=faults, only=None if a.only is None else tuple(a.only))
        for seed in range(a.seed, a.seed + a.worlds)
    ]
    if a.jobs > 1:
        with ProcessPoolExecutor(a.jobs) as pool:
            return _report(pool.map(_run, worlds), shrunk=not a.no_shrink)
    return _report(map(_run, worlds), shrunk=not a.no_shrink)


if __name__ == "__main__":
    sys.exit(main())
