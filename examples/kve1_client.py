"""Extended replay with pyzmq, msgpack and xxhash only (docs/wire.md): ``kve1_client.py REPLAY_ENDPOINT``.

Takes a snapshot, replays what came after it, and compares digests with the publisher.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import msgpack  # type: ignore[import-untyped]
import xxhash
import zmq


def ask(**request: Any) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Send one request; give (head, payload) for each answer. The caller knows which is the last."""
    socket.send_multipart([b"", b"KVE1", msgpack.packb(request)])
    while True:
        _, _, packed, *payload = socket.recv_multipart()
        head = msgpack.unpackb(packed)
        if head["op"] == "error":
            raise SystemExit(f"{head['code']}: {head['error']}")
        yield head, payload[0] if payload else b""


def apply(resident: set[Any], payload: bytes) -> None:
    """Apply one batch of a vllm-map dialect to a set of keys."""
    for event in msgpack.unpackb(payload)[1]:
        scope = [event.get(name) for name in ("medium", "group_idx", "locality", "ownership")]
        keys = {(h if isinstance(h, bytes) else h % 2**64, *scope) for h in event.get("block_hashes", [])}
        if event["type"] == "BlockStored":
            resident |= keys
        else:
            resident -= keys if event["type"] == "BlockRemoved" else resident.copy()


def digest(resident: set[Any]) -> bytes:
    """The sum of XXH3-128 over the keys: 16 bytes, big endian."""
    total = sum(xxhash.xxh3_128_intdigest(msgpack.packb(key)) for key in resident)
    return (total % 2**128).to_bytes(16, "big")


socket: Any = zmq.Context.instance().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.rcvtimeo = 10_000
keys: set[Any] = set()
head: dict[str, Any] = {"more": True, "resume_seq": None, "piece": -1}
while head["more"]:
    head, payload = next(ask(op="snapshot", resume_seq=head["resume_seq"], piece=head["piece"] + 1))
    apply(keys, payload)
same, seq = digest(keys) == head["digest"], head["resume_seq"] - 1
for head, payload in ask(op="replay", first=seq + 1):
    if head["op"] == "replay":
        apply(keys, payload)
        seq = head["seq"]
    else:
        break
same &= seq < 0 or next(ask(op="digest", seq=seq))[0]["digest"] == digest(keys)
print(json.dumps({"same": same, "seq": seq, "blocks": len(keys), "epoch": head["epoch"].hex()}))
