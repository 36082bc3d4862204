"""``python -m kvevents.demo.soak``: prints progress, a table and a verdict; the exit code tells."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from kvevents.demo.children import ChildError
from kvevents.demo.soak import SoakOptions, SoakResult, run_soak
from kvevents.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


def _parser() -> argparse.ArgumentParser:
    of = SoakOptions()
    parser = argparse.ArgumentParser(prog="python -m kvevents.demo.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=of.seconds, help="how long it runs (%(default)s)")
    parser.add_argument("--seed", type=int, default=of.seed, help="of traffic and faults (%(default)s)")
    parser.add_argument(
        "--rate", type=float, default=of.rate, help="batches a second of each rank (%(default)s)"
    )
    parser.add_argument(
        "--limit", type=float, default=of.limit_mb, help="MB a minute that nobody may grow by (%(default)s)"
    )
    parser.add_argument("--warm-up", type=float, help="seconds of each process that are not judged")
    parser.add_argument("--no-memory", action="store_true", help="judge only what the reader holds")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    return parser


def main(args: list[str] | None = None) -> int:
    """0: sound; 1: not; 2: wrong arguments."""
    given = _parser().parse_args(args)
    try:
        options = SoakOptions(
            seconds=given.seconds,
            seed=given.seed,
            rate=given.rate,
            limit_mb=given.limit,
            warm_up_s=given.warm_up,
            memory=not given.no_memory,
        )
    except ConfigError as e:
        sys.stderr.write(f"soak: {e}\n")
        return 2
    try:
        result = run_soak(options, lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201 - progress
    except ChildError as e:
        sys.stderr.write(f"soak: {e}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    lines = [result.to_json().decode()] if given.json else _lines(result)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0 if result.verdict == "sound" else 1


def _lines(result: SoakResult) -> Iterator[str]:
    yield "process      life  seconds  first MB   last MB  MB a minute"
    for g in result.memory:
        slope = "-" if g.mb_per_minute is None else f"{g.mb_per_minute:.3f}"
        who = f"{g.process:<11} {g.life:>5} {g.seconds:>8.0f}"
        yield f"{who} {g.first_mb:>9.1f} {g.last_mb:>9.1f} {slope:>12}"
    reader, visitor = result.reader, result.visitor
    yield (
        f"reader: {reader.batches:,} batches ({reader.repaired:,} by replay), {reader.gaps} gaps, "
        f"{reader.snapshots} snapshots, {reader.resets} resets"
    )
    yield (
        f"visitors: {visitor.plain} whole replays, {visitor.snapshots} whole snapshots, "
        f"{visitor.subscribers} subscribers in step, {visitor.refused} turned away"
    )
    yield "link: " + ", ".join(f"{n:,} {fault}" for fault, n in result.link.items())
    yield (
        f"{result.restarts} restarts, {result.outages} outages longer than the replay log, "
        f"{result.dropped:,} batches dropped by a full queue; {len(result.quiet)} quiet points"
    )
    yield from result.reasons
    yield f"{result.verdict} after {result.seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
