"""``kvevents tail``: what a stream says, live."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import msgspec
import typer

from kvevents.cli.exits import Failure
from kvevents.events import BlockRemoved, BlockStored, EventList, ExternalBlockHash, KVCacheEvent
from kvevents.subscribe import (
    Batch,
    Gap,
    Item,
    Reset,
    Resumed,
    Snapshot,
    Source,
    StoreOnly,
    Subscriber,
)

__all__ = ["tail"]


def tail(
    endpoint: Annotated[
        str, typer.Argument(help="Where the engine publishes, for example tcp://127.0.0.1:5557.")
    ],
    replay_endpoint: Annotated[
        str | None, typer.Option(help="Where to ask for what was missed; without it gaps are only reported.")
    ] = None,
    topic: Annotated[str, typer.Option(help="Only messages of exactly this topic.")] = "",
    events: Annotated[bool, typer.Option("--events", help="Print every event, not only counts.")] = False,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many batches.")] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.0, help="Give up, with exit code 3, after so many seconds of silence."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line, for programs.")
    ] = False,
) -> None:
    """What a stream says, live: a line a batch; gaps, restarts and snapshots are lines of their own."""
    batches = 0
    heard = time.monotonic()
    with Subscriber([Source(endpoint, replay_endpoint, topic=topic)]) as subscriber:
        while count is None or batches < count:
            item = subscriber.poll(timeout=0.2)
            if item is None:
                if timeout is not None and time.monotonic() - heard > timeout:
                    raise Failure(f"nothing was heard from {endpoint} for {timeout:g} s")
                continue
            heard = time.monotonic()
            batches += isinstance(item, Batch)
            if as_json:
                typer.echo(json.dumps(as_object(item)))
            else:
                for line in as_lines(item, events=events):
                    typer.echo(line)


def as_object(item: Item) -> dict[str, Any]:
    """An item for programs: integers stay numbers, bytes become hexadecimal."""
    head: dict[str, Any] = {"type": type(item).__name__.lower(), "source": item.source}
    if isinstance(item, Batch):
        head |= {"seq": item.seq, "replayed": item.replayed}
        if item.batch is not None:
            head |= {
                "ts": item.batch.ts,
                "data_parallel_rank": item.batch.data_parallel_rank,
                "events": [_event_object(e) for e in item.batch.events],
            }
        return head
    if isinstance(item, Snapshot):
        return head | {"resume_seq": item.resume_seq, "events": [_event_object(e) for e in item.events]}
    if isinstance(item, Gap):
        return head | {"first": item.first, "last": item.last, "reason": item.reason}
    if isinstance(item, StoreOnly):
        return head | {"media": list(item.media), "rank": item.rank}
    if isinstance(item, Resumed):
        return head | {"last_seq": item.last_seq}
    return head | {"reason": item.reason}


def _event_object(event: KVCacheEvent) -> dict[str, Any]:
    fields = {k: _plain(v) for k, v in msgspec.structs.asdict(event).items() if v is not None}
    return {"type": type(event).__name__, **fields}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(_plain(k)): _plain(v) for k, v in value.items()}
    return value


def as_lines(item: Item, *, events: bool) -> list[str]:
    """An item for people."""
    if isinstance(item, Gap):
        return [f"{item.source}: GAP, sequences {item.first} to {item.last} are lost ({item.reason})"]
    if isinstance(item, Snapshot):
        stored, _ = item.events.num_blocks
        return [f"{item.source}: SNAPSHOT of {stored} blocks, goes on at sequence {item.resume_seq}"]
    if isinstance(item, StoreOnly):
        return [f"{item.source}: what leaves {', '.join(item.media) or 'no medium'} is never announced"]
    if isinstance(item, Resumed):
        return [f"{item.source}: RESUMED behind sequence {item.last_seq}"]
    if isinstance(item, Reset):
        return [f"{item.source}: RESET ({item.reason})"]
    batch = item.batch
    if batch is None:
        return [f"{item.source}: sequence {item.seq}"]
    at = time.strftime("%H:%M:%S", time.localtime(batch.ts))
    rank = "" if batch.data_parallel_rank is None else f" rank {batch.data_parallel_rank}"
    columns = EventList(batch.events)
    stored, removed = columns.num_blocks
    line = f"{at} #{item.seq}{rank}  +{stored} -{removed} blocks in {len(columns)} events"
    if item.replayed:
        line += "  (replayed)"
    if columns.skipped:
        line += f"  ({len(columns.skipped)} could not be read)"
    return [line, *(f"    {_event_line(e)}" for e in columns)] if events else [line]


def _event_line(event: KVCacheEvent) -> str:
    if isinstance(event, BlockStored):
        parent = "the root" if event.parent_block_hash is None else _short(event.parent_block_hash)
        line = f"+ {_hashes(event.block_hashes)} after {parent}, {len(event.token_ids)} tokens"
    elif isinstance(event, BlockRemoved):
        line = f"- {_hashes(event.block_hashes)}"
    else:
        return "cleared"
    scope = {
        name: getattr(event, name, None)
        for name in ("medium", "group_idx", "lora_name", "cache_salt", "locality", "ownership")
    }
    return line + "".join(f" {name}={value}" for name, value in scope.items() if value is not None)


def _hashes(hashes: list[ExternalBlockHash]) -> str:
    shown = " ".join(_short(h) for h in hashes[:4])
    return shown if len(hashes) <= 4 else f"{shown} and {len(hashes) - 4} more"


def _short(block_hash: ExternalBlockHash) -> str:
    return (
        block_hash.hex()[:12] if isinstance(block_hash, bytes) else f"{block_hash & (1 << 64) - 1:016x}"[:12]
    )
