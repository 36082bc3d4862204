"""``kvevents replay``: a recorded stream, published again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
import zmq

from kvevents._core import EventList
from kvevents.cli.exits import EXIT_USAGE, Failure, say
from kvevents.codec import encode
from kvevents.errors import EncodeError, RecordingError
from kvevents.events import AllBlocksCleared, KVEventBatch
from kvevents.publish.endpoints import parse
from kvevents.publish.sockets import SharedContext, open_socket
from kvevents.recording import Mark, Message, read_recording
from kvevents.subscribe.messages import peek_ts

__all__ = ["replay"]

_LINGER_S = 10.0
"""How long the end waits until what was sent is with the system."""


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `kvevents record` wrote.")],
    endpoint: Annotated[str, typer.Option(help="Where to publish.")] = "tcp://127.0.0.1:5557",
    speed: Annotated[float, typer.Option(min=0.0, help="Times faster than recorded; 0: as --fast.")] = 1.0,
    fast: Annotated[bool, typer.Option("--fast", help="As fast as the readers take it.")] = False,
    readers: Annotated[
        int, typer.Option(min=0, help="Wait for so many readers before the first message; 0: for none.")
    ] = 1,
    timeout: Annotated[
        float | None, typer.Option(min=0.0, help="Give up, with exit code 3, when they do not come so soon.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as one JSON object.")] = False,
) -> None:
    """A recorded stream, published again byte for byte: topics, numbers and payloads as they were.

    In the order of the file, at the recorded pace or faster. Nothing is lost to a slow reader: it is waited
    for. Marks of gaps and restarts are not sent; the numbers show them. A snapshot goes out as one batch, a
    clear and its stores, under the last number that it stands for: that is what was not received.
    """
    where = parse(endpoint)
    if where.scheme == "tcp" and not where.port:
        raise Failure(f"{endpoint}: name a port, so that readers can find it", EXIT_USAGE)
    if fast:
        speed = 0.0
    with file.open("rb"):
        pass  # an unreadable file is told before anything starts
    context = SharedContext(shared=False)
    context.use()
    options: dict[int, int] = {
        zmq.SNDHWM: 10_000,
        zmq.XPUB_NODROP: 1,
        zmq.XPUB_VERBOSER: 1,
        zmq.LINGER: int(_LINGER_S * 1000),
    }
    try:
        socket, _ = open_socket(context, zmq.XPUB, where, bind=True, rank=0, options=options)
        counts = {"batches": 0, "bytes": 0, "gaps": 0, "snapshots": 0}
        try:
            _wait_for(socket, readers, endpoint, timeout)
            _send(socket, file, speed, counts)
        except BaseException:
            socket.close(linger=0)
            raise
        socket.close()
    finally:
        context.leave()
    if as_json:
        typer.echo(json.dumps({"file": str(file), **counts}))
    else:
        typer.echo(
            f"{file}: {counts['batches']:,} batches, {counts['bytes']:,} bytes published on {endpoint}"
        )


def _wait_for(socket: zmq.Socket[bytes], readers: int, endpoint: str, timeout: float | None) -> None:
    if readers:
        typer.echo(f"waiting for {readers} reader(s) on {endpoint}; Ctrl-C stops", err=True)
    end = None if timeout is None else time.monotonic() + timeout
    here = 0
    while here < readers:
        if not socket.poll(100):
            if end is not None and time.monotonic() > end:
                raise Failure(f"{here} of {readers} readers came to {endpoint} within {timeout:g} s")
            continue
        here += 1 if socket.recv()[:1] == b"\x01" else -1


def _send(socket: zmq.Socket[bytes], file: Path, speed: float, counts: dict[str, int]) -> None:
    def cut(offset: int, size: int) -> None:
        say(f"{file} ends inside a record: {size} bytes from byte {offset} on were left out")

    started = first = None
    last = -1
    snapshot: Mark | None = None
    for record in read_recording(file, cut):
        if isinstance(record, Mark):
            counts["gaps"] += record.kind == "gap"
            if record.kind == "reset":
                last = -1
                snapshot = None
            elif record.kind == "snapshot":
                snapshot = record
            continue
        if not isinstance(record, Message):
            # A recorder that went on later: the time between is nobody's, and it knew nothing of before.
            first, last = None, -1
            continue
        if speed:
            if first is None or started is None:
                first, started = record.time, time.monotonic()
            wait = (record.time - first) / speed - (time.monotonic() - started)
            if wait > 0:
                time.sleep(wait)
        if snapshot is not None:
            _send_snapshot(socket, snapshot, last, record.topic, peek_ts(record.payload), counts)
            snapshot = None
        socket.send_multipart([record.topic, record.seq.to_bytes(8, "big"), record.payload])
        last = record.seq
        counts["batches"] += 1
        counts["bytes"] += len(record.payload)
    if snapshot is not None:
        _send_snapshot(socket, snapshot, last, b"", None, counts)


def _send_snapshot(
    socket: zmq.Socket[bytes], mark: Mark, last: int, topic: bytes, ts: float | None, counts: dict[str, int]
) -> None:
    """What the recorder got instead of batches, with the time stamp of the batch that follows it."""
    if mark.first is None or mark.payload is None:
        raise RecordingError("a mark of a snapshot without number or content")
    seq = mark.first - 1
    if seq <= last:
        say(f"a snapshot behind batch {seq}, which was sent: nothing was missing there, and it is left out")
        return
    # Everything that there was before the snapshot is void.
    events = EventList([AllBlocksCleared()]) + EventList.from_bytes(mark.payload)
    payload = _encode(KVEventBatch(mark.time if ts is None else ts, events))
    socket.send_multipart([topic, seq.to_bytes(8, "big"), payload])
    counts["snapshots"] += 1
    counts["bytes"] += len(payload)


def _encode(batch: KVEventBatch) -> bytes:
    """In the first dialect that has a place for everything: salts are a field of SGLang's only."""
    try:
        return encode(batch)
    except EncodeError:
        return encode(batch, dialect="sglang-map")
