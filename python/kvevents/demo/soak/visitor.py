"""The visitor process: clients that come, ask for everything, and go, one after the other."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from kvevents.codec import decode
from kvevents.demo.soak.reader import HWM, TIMING, Seen
from kvevents.demo.soak.verdict import VisitorReport
from kvevents.resident import ResidentSet
from kvevents.subscribe import Source, Subscriber

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["visitor_main"]

_KVE1 = b"KVE1"
_END = (-1).to_bytes(8, "big", signed=True)
_ANSWER_MS = 2000
_STAY_S = 2.0
"""How long a visiting subscriber tries to get in step."""


class _RefusedError(Exception):
    """There is no answer, or it is an error."""


def _ask(socket: zmq.Socket[bytes], **request: Any) -> tuple[dict[str, Any], bytes]:
    socket.send_multipart([b"", _KVE1, msgspec.msgpack.encode(request)])
    _, _, packed, *payload = socket.recv_multipart()
    head = msgspec.msgpack.decode(packed)
    if head["op"] == "error":
        raise _RefusedError(head["code"])
    return head, payload[0] if payload else b""


def _snapshot(socket: zmq.Socket[bytes]) -> None:
    """All pieces of a snapshot; what they hold must have the digest that they claim."""
    held = ResidentSet()
    head, payload = _ask(socket, op="snapshot")
    epoch, claimed, resume_seq, piece = head["epoch"], head["digest"], head["resume_seq"], 0
    held.apply(decode(payload))
    while head["more"]:
        piece += 1
        head, payload = _ask(socket, op="snapshot", resume_seq=resume_seq, piece=piece)
        held.apply(decode(payload))
        if head["epoch"] != epoch:
            raise _RefusedError("another life")
    if held.digest() != claimed:
        raise ValueError(
            f"a snapshot at {resume_seq} has the digest {held.digest().hex()}, not {claimed.hex()}"
        )


def _plain(socket: zmq.Socket[bytes]) -> None:
    """Everything from number 0, by vLLM's protocol; what is there follows without a hole."""
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    while True:
        *_, number, payload = socket.recv_multipart()
        if number == _END:
            return
        decode(payload, strict=True)


def _subscriber(sources: dict[str, tuple[int, str, str]]) -> bool:
    """Whether a subscriber that comes late knows all sources after a while."""
    seen = Seen({name: rank for name, (rank, _, _) in sources.items()})
    listed = [Source(live, replay, name=name) for name, (_, live, replay) in sources.items()]
    end = time.monotonic() + _STAY_S
    with Subscriber(listed, timing=TIMING, hwm=HWM) as subscriber:
        while time.monotonic() < end:
            item = subscriber.poll(timeout=0.05)
            if item is not None:
                seen.take(item)
            if len(seen.next) == len(sources) and all(seen.set.why_invalid(s) is None for s in sources):
                return True
    return False


def visitor_main(pipe: Connection, sources: dict[str, tuple[int, str, str]]) -> None:
    """Says ``ready``, then visits; sends ``visits`` after each, ends when the other end does."""
    logging.getLogger("kvevents").setLevel(logging.ERROR)
    report = VisitorReport()
    pipe.send(("ready", None))
    with zmq.Context() as context:
        while True:
            for _, _, replay in sources.values():
                for visit, field in ((_plain, "plain"), (_snapshot, "snapshots")):
                    with context.socket(zmq.DEALER) as socket:
                        socket.linger = 0
                        socket.rcvtimeo = _ANSWER_MS
                        socket.connect(replay)
                        try:
                            visit(socket)
                        except (zmq.Again, _RefusedError):
                            report.refused += 1
                        else:
                            setattr(report, field, getattr(report, field) + 1)
                    if pipe.poll(0.2):
                        return
            if _subscriber(sources):
                report.subscribers += 1
            else:
                report.refused += 1
            pipe.send(("visits", report))
