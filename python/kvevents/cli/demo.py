"""``kvevents demo``: the main job end to end, and the verdict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvevents.cli.demo_chaos import chaos_demo
from kvevents.cli.exits import EXIT_DIFFERENT
from kvevents.demo import DemoOptions, DemoResult, run_demo
from kvevents.demo.chaos import ChaosOptions
from kvevents.demo.options import LinkRates, WorkerOptions
from kvevents.errors import ConfigError
from kvevents.simulate import read_trace

if TYPE_CHECKING:
    from rich.progress import TaskID

__all__ = ["demo"]

GENERATED, RECORDED, WITH_WORKERS = 4000, 2000, 1500
"""Requests of a run, where nobody says: well under a minute."""

RATE, CHAOS_RATE = 800.0, 100.0
"""Batches a second, where nobody says: what one reader, and twelve links, keep up with anywhere."""

_RATE = {"min": 0.0, "max": 1.0}


class _Bars:
    """Two bars: requests that the engine has served, sequences that the reader has applied."""

    def __init__(self, bars: Progress, requests: int) -> None:
        self._bars = bars
        self._engine: TaskID = bars.add_task("engine: requests", total=requests)
        self._reader: TaskID = bars.add_task("reader: sequences", total=None)

    def served(self, requests: int, batches: int) -> None:
        """Requests that were served, and batches that were published."""
        self._bars.update(self._engine, completed=requests)
        self._bars.update(self._reader, total=batches)

    def applied(self, sequences: int) -> None:
        """Sequences that were applied."""
        self._bars.update(self._reader, completed=sequences)


def demo(
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Requests that the engine serves. [default: {GENERATED:,}; {RECORDED:,} of a trace]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the traffic and of the faults.")] = 0,
    trace: Annotated[
        Path | None, typer.Option(help="Serve recorded traffic: a file in the Mooncake trace format.")
    ] = None,
    drop: Annotated[float, typer.Option(**_RATE, help="Share of live messages that the link loses.")] = 0.02,
    duplicate: Annotated[float, typer.Option(**_RATE, help="Share that it sends twice.")] = 0.02,
    delay: Annotated[float, typer.Option(**_RATE, help="Share that it holds back for some time.")] = 0.01,
    reorder: Annotated[
        float, typer.Option(**_RATE, help="Share that lets up to three later ones pass.")
    ] = 0.02,
    cut_every: Annotated[
        int, typer.Option(min=0, help="The link is cut once in about so many messages; 0: never.")
    ] = 400,
    blocks: Annotated[
        int | None, typer.Option(min=2, help="Blocks of the pool; by default fewer than the requests need.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    rate: Annotated[
        float | None,
        typer.Option(min=1.0, help="Batches a second of an engine at most. [default: 800; 100 with readers]"),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Worker processes behind the engine. [default: none; 4 with connectors]"),
    ] = None,
    connectors: Annotated[
        int | None,
        typer.Option(min=1, help="Connectors in every worker: tiers CPU, STORAGE. [default: 1 with workers]"),
    ] = None,
    same_medium: Annotated[
        bool,
        typer.Option("--same-medium", help="All connectors' tiers are CPU: any of them may hold a block."),
    ] = False,
    rule: Annotated[
        str, typer.Option(help="How many workers must hold a block: all, any or a number.")
    ] = "all",
    readers: Annotated[
        int | None,
        typer.Option(min=1, max=16, help="Readers of three engines at once. [default: none; 3 with chaos]"),
    ] = None,
    chaos: Annotated[
        bool,
        typer.Option(
            "--chaos",
            help="Three engines; they and readers are killed and restarted, links break, a queue overflows.",
        ),
    ] = False,
    break_reader: Annotated[
        bool,
        typer.Option("--break-reader", help="Leave one removal out in the reader: the verdict must notice."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """The main job on this machine: an engine, a faulty link and a reader, each in its own process.

    The engine serves more requests than its pool can hold and publishes what its pool does; the link loses,
    repeats, delays and reorders messages and cuts the connection; the reader repairs what it missed and must
    hold exactly the engine's set of blocks after every sequence number. Exit code 0 when it did, 1 when not.

    With workers, each is a process that stores the pool's blocks in its connectors' tiers: late, in pieces of
    its own, sometimes in vain, and one is killed on the way. The truth then comes from the workers' books.

    With readers or chaos there are three engines, one of them with two data-parallel ranks, and readers that
    are there from the start, join late, or are killed and started again. Their digests are compared with the
    engines' pools at every sequence number, and the answers of their indexes at quiet points.
    """
    link = LinkRates(drop=drop, duplicate=duplicate, delay=delay, reorder=reorder, cut_every=cut_every)
    if chaos or readers is not None:
        others = {
            "--requests": requests, "--trace": trace, "--blocks": blocks, "--workers": workers,
            "--connectors": connectors,
        }  # fmt: skip
        if given := [name for name, value in others.items() if value is not None]:
            raise ConfigError(f"{', '.join(given)}: not together with --readers or --chaos")
        chaos_demo(
            ChaosOptions(
                readers=readers or 3,
                faults=chaos,
                seed=seed,
                rate=rate or CHAOS_RATE,
                link=link,
                break_reader=break_reader,
            ),
            as_json=as_json,
        )
        return
    behind = None
    if workers is not None or connectors is not None:
        behind = WorkerOptions(
            workers=workers or 4, connectors=connectors or 1, same_medium=same_medium, rule=rule
        )
    elif same_medium or rule != "all":
        raise ConfigError("--same-medium and --rule are about workers and connectors: give --workers")
    if trace is None:
        requests = requests or (GENERATED if behind is None else WITH_WORKERS)
    else:
        # A broken file is told before anything starts; a short one decides how many requests there are.
        requests = min(requests or RECORDED, sum(1 for _ in read_trace(trace)))
    options = DemoOptions(
        requests=requests,
        seed=seed,
        trace=None if trace is None else str(trace),
        blocks=blocks,
        block_size=block_size,
        rate=rate or RATE,
        link=link,
        break_reader=break_reader,
        behind=behind,
    )
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Away from a terminal even an invisible bar would leave an empty line.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        result = run_demo(options, _Bars(bars, requests))
    if as_json:
        sys.stdout.write(result.to_json().decode() + "\n")
    else:
        _show(result)
    if result.verdict != "identical":
        raise typer.Exit(EXIT_DIFFERENT)


def _show(result: DemoResult) -> None:
    table = Table(show_header=False, title="kvevents demo", title_justify="left")
    rows = {
        "requests served": f"{result.requests:,}",
        "prompt tokens found in the cache": f"{result.hit_rate:.1%}",
        "blocks stored, removed": f"{result.blocks_stored:,}, {result.blocks_removed:,}",
        "blocks a second": f"{result.blocks_per_s:,.0f}",
        "batches published": f"{result.sequences:,}",
        "publish(), p50 and p99": f"{result.publish_p50_us:,.1f} us, {result.publish_p99_us:,.1f} us",
        "the link": ", ".join(f"{n:,} {fault}" for fault, n in result.link.items()),
        "batches repaired by replay": f"{result.repaired:,}",
    }
    work = result.connector_work
    if work is not None:
        rows |= {
            "workers, connectors in each": f"{result.workers}, {result.connectors}",
            "from workers to scheduler": f"{work['pickle_bytes_per_step']:,.0f} bytes a step",
            "the workers": f"{work['late_stores']:,.0f} stores late, {work['failed_stores']:,.0f} failed, "
            f"{work['evicted']:,.0f} blocks evicted, {work['restarts']:.0f} restarted",
            "announced again after the reset": f"{work['reannounced']:,.0f} blocks",
        }
    for name, value in rows.items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    for reason in result.reasons:
        console.print(reason)
    console.print(verdict_line(result), highlight=False)


def verdict_line(result: DemoResult) -> str:
    """The verdict in a line; where the sets differ it says from which sequence on."""
    counts = f"identical at {result.identical:,} of {result.sequences:,} sequence numbers"
    if result.verdict == "identical":
        return counts
    if result.first_difference is None:
        return f"different: {counts}"
    return f"different from sequence {result.first_difference['seq']} on: {counts}"
