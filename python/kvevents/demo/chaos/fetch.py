"""A snapshot over extended replay (``docs/wire.md``), whole and with the stamps that tell lives apart."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import zmq

from kvevents.codec import decode
from kvevents.events import EventList

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Fetched", "fetch_snapshot"]

_KVE1 = b"KVE1"


class Fetched(NamedTuple):
    """A source's resident set."""

    epoch: bytes
    resume_seq: int
    """The first number that it does not contain."""
    made_at: float
    """The publisher's time: what it contains is not stamped later."""
    life_from: float
    """The stamp of a batch of this life; those of earlier lives are older. 0 where no batch can be had."""
    digest: bytes
    events: EventList


class _RefusedError(Exception):
    """An answer that is an error, or comes from another life than the first."""


def fetch_snapshot(endpoint: str, at_least: int, timeout_s: float) -> Fetched | None:
    """Ask until there is a snapshot; ``None`` after ``timeout_s``. Opens its own socket for each try."""
    end = time.monotonic() + timeout_s
    with zmq.Context() as context:
        while (left := end - time.monotonic()) > 0:
            with context.socket(zmq.DEALER) as socket:
                socket.linger = 0
                socket.rcvtimeo = int(1000 * min(left, 1.0)) + 1
                socket.connect(endpoint)
                try:
                    return _fetch(socket, at_least)
                except zmq.Again:
                    continue
                except _RefusedError:
                    time.sleep(0.05)
    return None


def _fetch(socket: zmq.Socket[bytes], at_least: int) -> Fetched:
    head, payload = next(_ask(socket, op="snapshot", at_least=at_least))
    epoch, resume_seq, digest = head["epoch"], head["resume_seq"], head["digest"]
    made_at = float(decode(payload).ts)
    pieces = [EventList(decode(payload).events)]
    while head["more"]:
        head, payload = next(_ask(socket, op="snapshot", resume_seq=resume_seq, piece=len(pieces)))
        pieces.append(EventList(decode(payload).events))
    life_from = 0.0
    if head["oldest"] is not None:
        head, payload = next(_ask(socket, op="replay", first=head["oldest"]))
        life_from = float(decode(payload).ts) if payload else 0.0
    if head["epoch"] != epoch:
        raise _RefusedError(f"life {head['epoch'].hex()} after {epoch.hex()}")
    events = pieces[0]
    for piece in pieces[1:]:
        events += piece
    return Fetched(epoch, resume_seq, made_at, life_from, digest, events)


def _ask(socket: zmq.Socket[bytes], **request: Any) -> Iterator[tuple[dict[str, Any], bytes]]:
    socket.send_multipart([b"", _KVE1, msgspec.msgpack.encode(request)])
    while True:
        _, _, packed, *payload = socket.recv_multipart()
        head = msgspec.msgpack.decode(packed)
        if head["op"] == "error":
            raise _RefusedError(f"{head['code']}: {head['error']}")
        yield head, payload[0] if payload else b""
