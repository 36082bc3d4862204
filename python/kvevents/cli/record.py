"""``kvevents record``: a stream into a file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from kvevents.cli.exits import EXIT_USAGE, Failure, say
from kvevents.recording import RecordingWriter
from kvevents.subscribe import Batch, Gap, Source, Subscriber

__all__ = ["record"]

_FLUSH_S = 1.0


def record(
    endpoint: Annotated[
        str, typer.Argument(help="Where the engine publishes, for example tcp://127.0.0.1:5557.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write; must not be there.")],
    replay_endpoint: Annotated[
        str | None, typer.Option(help="Where to ask for what was missed; without it gaps are only marked.")
    ] = None,
    topic: Annotated[str, typer.Option(help="Only messages of exactly this topic.")] = "",
    append: Annotated[bool, typer.Option("--append", help="Go on in a file that is there.")] = False,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many batches.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="Stop after so many seconds.")] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.0, help="Give up, with exit code 3, after so many seconds of silence."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as one JSON object.")] = False,
) -> None:
    """A stream into a file, byte for byte: topic, number, payload, when it came and whether by replay.

    Batches are in order and repaired as `tail` shows them; gaps and restarts are marks between them.
    Runs until it is stopped, or until --count or --seconds.
    """
    if file.exists() and not append:
        raise Failure(f"{file} is there; --append goes on in it", EXIT_USAGE)
    counts = {"batches": 0, "replayed": 0, "gaps": 0, "bytes": 0}
    with (
        Subscriber([Source(endpoint, replay_endpoint, topic=topic, name=endpoint)], decode=False) as stream,
        RecordingWriter(file, endpoint, append=append) as out,
    ):
        if out.removed:
            say(f"{file} ended inside a record: {out.removed} bytes were taken off its end")
        try:
            _copy(stream, out, endpoint, counts, count=count, seconds=seconds, timeout=timeout)
        except KeyboardInterrupt:
            # Being stopped is how this command usually ends: what it did is told all the same.
            _print_counts(counts, file, as_json=as_json)
            raise
    _print_counts(counts, file, as_json=as_json)


def _copy(
    stream: Subscriber,
    out: RecordingWriter,
    name: str,
    counts: dict[str, int],
    *,
    count: int | None,
    seconds: float | None,
    timeout: float | None,
) -> None:
    now = heard = flushed = time.monotonic()
    end = None if seconds is None else now + seconds
    while (count is None or counts["batches"] < count) and (end is None or now < end):
        item = stream.poll(0.2)
        now = time.monotonic()
        if now - flushed >= _FLUSH_S:
            out.flush()
            flushed = now
        if item is None:
            if timeout is not None and now - heard > timeout:
                raise Failure(f"nothing was heard from {name} for {timeout:g} s")
            continue
        heard = now
        out.write_item(item, stream.topic(name))
        if isinstance(item, Batch) and item.payload is not None:
            counts["batches"] += 1
            counts["replayed"] += item.replayed
            counts["bytes"] += len(item.payload)
        counts["gaps"] += isinstance(item, Gap)


def _print_counts(counts: dict[str, int], file: Path, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"file": str(file), **counts}))
        return
    typer.echo(
        f"{file}: {counts['batches']:,} batches ({counts['replayed']:,} by replay), "
        f"{counts['bytes']:,} bytes, {counts['gaps']:,} gaps"
    )
