"""What ``kvevents demo --chaos`` shows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from kvevents.cli.exits import EXIT_DIFFERENT
from kvevents.demo.chaos import ChaosOptions, ChaosResult, run_chaos

if TYPE_CHECKING:
    from rich.status import Status

__all__ = ["chaos_demo"]


class _Line:
    """One line: what is being done, and how much was applied."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._what = ""

    def doing(self, what: str) -> None:
        """Something begins."""
        self._what = what
        self._status.update(what)

    def applied(self, sequences: int) -> None:
        """Batches that were applied by all readers together."""
        self._status.update(f"{self._what} ({sequences:,} batches applied)")


def chaos_demo(options: ChaosOptions, *, as_json: bool) -> None:
    """Run, show, and exit with 1 where anything differed."""
    with Console(stderr=True).status("starting") as status:
        result = run_chaos(options, _Line(status))
    if as_json:
        sys.stdout.write(result.to_json().decode() + "\n")
    else:
        _show(result)
    if result.verdict != "identical":
        raise typer.Exit(EXIT_DIFFERENT)


def _show(result: ChaosResult) -> None:
    console = Console()
    readers = Table(title="kvevents demo, chaos", title_justify="left")
    columns = ("reader", "source", "digests equal", "replayed", "gaps", "snapshots", "resets")
    for i, column in enumerate(columns):
        readers.add_column(column, justify="left" if i < 2 else "right")
    for life in result.readers:
        who = f"{life.reader + 1} {'again' if life.life else life.role}"
        for source, r in life.sources.items():
            states = r.identical + r.different + r.uncompared
            counts = f"{r.identical:,}/{states:,}"
            readers.add_row(who, source, counts, *map(str, (r.repaired, r.gaps, r.snapshots, r.resets)))
            who = ""
        readers.add_section()
    console.print(readers)
    quiet = Table(show_header=True)
    for i, column in enumerate(("quiet point", "reader", "answers equal to the pools'", "not 0")):
        quiet.add_column(column, justify="left" if i < 2 else "right")
    for q in result.quiet:
        quiet.add_row(f"{q.point}", f"{q.reader + 1}", f"{q.equal:,} of {q.answers:,}", f"{q.hits:,}")
    console.print(quiet)
    faults = ", ".join(f"{n:,} {fault}" for fault, n in result.link.items())
    console.print(f"the links: {faults}", highlight=False)
    console.print(
        f"{result.restarts} engines restarted, {result.outages} outages longer than the replay log, "
        f"{result.dropped:,} batches dropped by a full queue; {result.seconds:.0f} s",
        highlight=False,
    )
    for reason in result.reasons:
        console.print(reason, highlight=False)
    console.print(
        f"{result.verdict}: {result.identical:,} of {result.compared:,} digests, "
        f"{result.answers_equal:,} of {result.answers:,} answers",
        highlight=False,
    )
