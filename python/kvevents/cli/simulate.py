"""``kvevents simulate``: a mock engine that publishes until it is stopped."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvevents.cli.exits import EXIT_USAGE, Failure, say
from kvevents.codec import DIALECTS
from kvevents.config import KVEventsConfig
from kvevents.publish import EventPublisher, EventPublisherFactory
from kvevents.simulate import (
    WORKLOADS,
    EngineConfig,
    EngineStats,
    MockEngine,
    Request,
    read_trace,
    trace_requests,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["simulate"]

_STEP_S = 0.02
"""Time of a scheduler step at speed 1."""


class Report(str, Enum):  # noqa: UP042 - the command line library reads the values of a str Enum
    """How the pool reports; see :class:`kvevents.BlockPool`."""

    residency = "residency"
    every_copy = "every_copy"


class HashForm(str, Enum):  # noqa: UP042
    """How hashes stand in events; see :class:`kvevents.BlockPool`."""

    bytes = "bytes"
    int = "int"


def requests_of(
    trace: Path | None, workload: str, *, seed: int, block_size: int, rate: float, skip_bad: bool
) -> Iterator[Request]:
    """The traffic that the options ask for."""
    if trace is not None:
        with trace.open("rb"):
            pass  # an unreadable file is told before anything starts
        records = read_trace(trace, skip_bad=skip_bad, on_skip=lambda e: say(f"skipped: {e}"))
        return trace_requests(records, seed=seed)
    if workload not in WORKLOADS:
        raise Failure(f"no workload {workload!r}; there are: {', '.join(WORKLOADS)}", EXIT_USAGE)
    return WORKLOADS[workload](seed=seed, block_size=block_size, rate=rate)


def simulate(
    trace: Annotated[
        Path | None, typer.Option(help="Serve recorded traffic: a file in the Mooncake trace format.")
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave broken lines of the trace out instead of stopping.")
    ] = False,
    workload: Annotated[
        str, typer.Option(help=f"Generated traffic, where no trace is given: {', '.join(WORKLOADS)}.")
    ] = "mixed",
    requests: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many requests; without it, run until stopped.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same tokens.")] = 0,
    rate: Annotated[float, typer.Option(min=0.001, help="Generated requests a second, at speed 1.")] = 20.0,
    speed: Annotated[
        float,
        typer.Option(min=0.0, help="Times faster than the recorded arrivals; 0 is as fast as possible."),
    ] = 1.0,
    blocks: Annotated[
        int, typer.Option(min=2, help="Blocks of each rank's pool (one is the null block).")
    ] = 8192,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    max_running: Annotated[int, typer.Option(min=1, help="Requests that a rank decodes at a time.")] = 16,
    dp: Annotated[
        int, typer.Option(min=1, help="Data-parallel ranks, each with a pool and its own ports.")
    ] = 1,
    dialect: Annotated[str, typer.Option(help=f"What goes over the wire: {', '.join(DIALECTS)}.")] = DIALECTS[
        0
    ],
    report: Annotated[
        Report, typer.Option(help="Announce whether a hash is resident, or every physical copy as vLLM does.")
    ] = Report.residency,
    hash_form: Annotated[
        HashForm, typer.Option(help="Hashes in events: digests, or 64 bits.")
    ] = HashForm.bytes,
    endpoint: Annotated[
        str, typer.Option(help="Where to publish; rank r adds r to the port.")
    ] = "tcp://127.0.0.1:5557",
    replay_endpoint: Annotated[
        str, typer.Option(help="Where readers ask for what they missed; empty for none.")
    ] = "tcp://127.0.0.1:5657",
    topic: Annotated[str, typer.Option(help="Topic of every message.")] = "",
    buffer_steps: Annotated[int, typer.Option(min=1, help="Batches that can be replayed.")] = 10_000,
    linger: Annotated[
        float, typer.Option(min=0.0, help="Seconds to go on answering replay after the last request.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as one JSON object.")] = False,
) -> None:
    """A mock engine without a GPU: real or generated traffic through the pool, published.

    Runs until it is stopped, or until --requests are served or the trace ends; then prints what it did.
    """
    if dialect not in DIALECTS:
        raise Failure(f"no dialect {dialect!r}; there are: {', '.join(DIALECTS)}", EXIT_USAGE)
    traffic = requests_of(trace, workload, seed=seed, block_size=block_size, rate=rate, skip_bad=skip_bad)
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=endpoint,
        replay_endpoint=replay_endpoint or None,
        topic=topic,
        buffer_steps=buffer_steps,
        data_parallel_size=dp,
        dialect=dialect,
    )
    publishers: list[EventPublisher] = []
    engines: list[MockEngine] = []
    started = time.monotonic()
    try:
        for rank in range(dp):
            publishers.append(EventPublisherFactory.create(config, rank))
            engine = EngineConfig(
                num_blocks=blocks,
                block_size=block_size,
                max_running=max_running,
                report=report.value,
                hash_form=hash_form.value,
                data_parallel_rank=rank,
            )
            engines.append(MockEngine(engine, publisher=publishers[-1]))
        if not as_json:
            where = f"{endpoint} (replay {replay_endpoint})" if replay_endpoint else endpoint
            typer.echo(f"publishing {dialect} on {where}, {dp} rank(s); Ctrl-C stops", err=True)
        serve(engines, islice(traffic, requests), speed)
        if linger:
            time.sleep(linger)
    except KeyboardInterrupt:
        # Being stopped is how this command usually ends: what it did is told all the same.
        _print_counts(engines, time.monotonic() - started, as_json=as_json)
        raise
    finally:
        for publisher in publishers:
            publisher.shutdown()
    _print_counts(engines, time.monotonic() - started, as_json=as_json)


def serve(engines: list[MockEngine], traffic: Iterator[Request], speed: float) -> None:
    """Serve ``traffic``, requests in turn to each engine, until all is done.

    At speed 0 the engines always have something to admit, whatever the arrivals say.
    """
    started = time.monotonic()
    coming = next(traffic, None)
    turn = 0
    next_step = started
    while coming is not None or not all(e.idle for e in engines):
        now = time.monotonic()
        while coming is not None and (
            (now - started) * speed >= coming.arrival_s
            if speed
            else engines[turn].num_waiting < engines[turn].config.max_running
        ):
            engines[turn].submit(coming)
            turn = (turn + 1) % len(engines)
            coming = next(traffic, None)
        for engine in engines:
            if not engine.idle:
                engine.step()
        if speed:
            if coming is not None and all(e.idle for e in engines):
                next_step = started + coming.arrival_s / speed
            else:
                next_step = max(next_step + _STEP_S / speed, now)
            time.sleep(max(0.0, next_step - time.monotonic()))


def _print_counts(engines: list[MockEngine], seconds: float, *, as_json: bool) -> None:
    total: dict[str, Any] = asdict(EngineStats())
    for engine in engines:
        for name, value in asdict(engine.stats).items():
            total[name] += value
    total["hit_rate"] = (
        round(total["hit_tokens"] / total["prompt_tokens"], 4) if total["prompt_tokens"] else 0.0
    )
    total["seconds"] = round(seconds, 3)
    if as_json:
        json.dump(total, sys.stdout)
        sys.stdout.write("\n")
        return
    for name, value in total.items():
        typer.echo(f"{name:<16}{value:>14,}" if isinstance(value, int) else f"{name:<16}{value:>14}")
