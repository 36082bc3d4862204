"""Readers of golden vectors and of captures, and what this build makes of them.

A vector file and a capture are JSON objects, one a line (plain or ``.gz``). A vector says which bytes an
engine's own encoder writes for which events; a capture is what a real engine sent, frame by frame.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvevents.codec import DIALECTS, decode, encode
from kvevents.errors import KVEventsError, TraceError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvevents.events import ExternalBlockHash, KVCacheEvent

__all__ = [
    "FrameReport",
    "VectorReport",
    "check_frames",
    "check_vectors",
    "event_from_json",
    "is_vector_file",
    "read_json_lines",
]

END_OF_REPLAY = -1
"""The sequence number that ends a replay; such a frame holds no batch."""

CAPTURE_DIALECT = "vllm-map-0.32"
"""What the captured engine writes."""


def read_json_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, one a line; ``TraceError`` names the line that is none."""
    path = Path(path)
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as e:
            raise TraceError(f"{path}:{number}: a JSON object was expected, saw {line[:60]!r} ({e})") from e
        if not isinstance(value, dict):
            raise TraceError(f"{path}:{number}: a JSON object was expected, saw {line[:60]!r}")
        yield value


def is_vector_file(path: str | Path) -> bool:
    """Whether a file holds vectors (its first object has ``hex``), not a capture."""
    return any("hex" in value for value in _first(path))


def _first(path: str | Path) -> Iterator[dict[str, Any]]:
    for value in read_json_lines(path):
        yield value
        return


def _hash(value: dict[str, str]) -> ExternalBlockHash:
    return int(value["int"]) if "int" in value else bytes.fromhex(value["bytes"])


def _plain(value: Any) -> Any:
    """Undo JSON's spelling of hashes and byte strings, at any depth."""
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in {"int", "bytes"}:
        return _hash(value)
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value


def event_from_json(value: dict[str, Any]) -> KVCacheEvent:
    """Build an event from the form that vector files hold."""
    fields = {k: v for k, v in value.items() if k not in {"kind", "hashes", "parent", "tokens"}}
    fields = {k: _plain(v) for k, v in fields.items()}
    match value["kind"]:
        case "stored":
            parent = value.get("parent")
            for name in ("lora_id", "medium", "lora_name"):
                fields.setdefault(name, None)
            return BlockStored(
                block_hashes=[_hash(h) for h in value["hashes"]],
                parent_block_hash=None if parent is None else _hash(parent),
                token_ids=value["tokens"],
                **fields,
            )
        case "removed":
            fields.setdefault("medium", None)
            return BlockRemoved(block_hashes=[_hash(h) for h in value["hashes"]], **fields)
        case "cleared":
            return AllBlocksCleared(**fields)
        case kind:
            raise TraceError(f"a vector has an event of kind {kind!r}")


@dataclass(frozen=True)
class VectorReport:
    """What became of a file of vectors."""

    vectors: int
    decoded: int
    """Vectors whose bytes gave their events, time stamp and rank."""
    writable: int
    """Vectors of a dialect that can be written."""
    encoded: int
    """Of these, those whose events gave their bytes."""
    first_difference: str | None

    @property
    def ok(self) -> bool:
        """Whether every vector decodes, and encodes where its dialect can be written."""
        return self.decoded == self.vectors and self.encoded == self.writable

    def __str__(self) -> str:
        return f"vectors={self.vectors} decoded={self.decoded} encoded={self.encoded}"


@dataclass(frozen=True)
class FrameReport:
    """What became of the frames of a capture."""

    frames: int
    reencoded: int
    """Frames that decoded strictly and encoded to the same bytes."""
    first_difference: str | None

    @property
    def ok(self) -> bool:
        """Whether every frame came back to the byte."""
        return self.reencoded == self.frames

    def __str__(self) -> str:
        return f"frames={self.frames} reencoded={self.reencoded}"


def _without_unknown(event: KVCacheEvent) -> KVCacheEvent:
    """Readers keep what they do not know; vectors do not list it."""
    event.other_fields = None
    return event


def _decode_difference(want: KVEventBatch, hexed: str) -> str | None:
    got = decode(bytes.fromhex(hexed), strict=True)
    if (got.ts, type(got.ts), got.data_parallel_rank) != (want.ts, type(want.ts), want.data_parallel_rank):
        return f"ts and rank {want.ts!r} {want.data_parallel_rank}, saw {got.ts!r} {got.data_parallel_rank}"
    events = [_without_unknown(e) for e in got.events]
    if len(events) != len(want.events):
        return f"{len(want.events)} events, saw {len(events)}"
    for i, (a, b) in enumerate(zip(want.events, events, strict=True)):
        if a != b:
            return f"event {i}: {a!r}, saw {b!r}"
    return None


def _bytes_difference(want: bytes, got: bytes) -> str | None:
    if want == got:
        return None
    at = next(
        (i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got))
    )
    return f"byte {at} of {len(want)}: {want[at : at + 16].hex()}, wrote {got[at : at + 16].hex()}"


def _cut(text: str) -> str:
    return text if len(text) <= 400 else text[:397] + "..."


def check_vectors(path: str | Path) -> VectorReport:
    """Decode every vector of a file, and encode those whose dialect can be written."""
    vectors = decoded = writable = encoded = 0
    first: str | None = None
    for v in read_json_lines(path):
        vectors += 1
        name = f"{v.get('dialect')}: {v.get('name')}"
        try:
            events = [event_from_json(e) for e in v["events"]]
            batch = KVEventBatch(v["ts"], events, v["data_parallel_rank"])
            difference = _decode_difference(batch, v["hex"])
        except (KVEventsError, KeyError, TypeError, ValueError) as e:
            difference = f"{type(e).__name__}: {e}"
        if difference is None:
            decoded += 1
        first = first or (difference and f"{name}: decode: {_cut(difference)}")
        if v.get("dialect") not in DIALECTS:
            continue
        writable += 1
        try:
            difference = _bytes_difference(bytes.fromhex(v["hex"]), encode(batch, dialect=v["dialect"]))
        except (KVEventsError, NameError, ValueError) as e:
            difference = f"{type(e).__name__}: {e}"
        if difference is None:
            encoded += 1
        first = first or (difference and f"{name}: encode: {_cut(difference)}")
    return VectorReport(vectors, decoded, writable, encoded, first)


def check_frames(path: str | Path, *, dialect: str = CAPTURE_DIALECT) -> FrameReport:
    """Decode every frame of a capture strictly and encode it again."""
    frames = reencoded = 0
    first: str | None = None
    for v in read_json_lines(path):
        if v.get("kind") != "frame" or v.get("seq") == END_OF_REPLAY:
            continue
        frames += 1
        payload = bytes.fromhex(v["payload"])
        try:
            difference = _bytes_difference(payload, encode(decode(payload, strict=True), dialect=dialect))
        except KVEventsError as e:
            difference = f"{type(e).__name__}: {e}"
        if difference is None:
            reencoded += 1
        first = first or (difference and f"frame {v.get('src')} {v.get('seq')}: {_cut(difference)}")
    return FrameReport(frames, reencoded, first)
