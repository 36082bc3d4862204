"""Payloads to columns and back, beside msgspec on Structs of vLLM 0.33's shape (15 fields, tagged maps)."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import msgspec

from benches import workloads
from benches.harness import Work, as_tests, compare, value
from kvevents import BlockStored, EventList, EventQueue, KVEventBatch, decode, encode

TS = 1_700_000_000.25
MSGSPEC = "msgspec on 15-field Structs"


class _Event(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    pass


class Stored(_Event, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[Any] | None = None


class Removed(_Event, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(_Event, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


FIELDS = Stored.__struct_fields__
ENCODE = msgspec.msgpack.Encoder().encode
DECODE = msgspec.msgpack.Decoder(Batch).decode


def batches(events: int, per_event: int, form: str = "int") -> tuple[KVEventBatch, Batch, list[BlockStored]]:
    """The same batch in columns and as prepared Structs, and the events that both were made from."""
    made = workloads.stored_events(events, per_event, form=form)
    structs = [Stored(*(getattr(e, f) for f in FIELDS)) for e in made]
    return KVEventBatch(TS, EventList(made), 0), Batch(TS, structs, 0), made


def encoding(events: int, per_event: int, form: str = "int") -> Work:
    """Columns to bytes."""
    ours, theirs, _ = batches(events, per_event, form)

    def check() -> None:
        assert encode(ours) == ENCODE(theirs)

    return Work(lambda: encode(ours), lambda: ENCODE(theirs), events, check)


def decoding(events: int, per_event: int, form: str = "int") -> Work:
    """Bytes to columns."""
    ours, theirs, _ = batches(events, per_event, form)
    payload = encode(ours)

    def check() -> None:
        assert decode(payload, strict=True) == ours
        assert ENCODE(DECODE(payload)) == ENCODE(theirs) == payload

    return Work(lambda: decode(payload), lambda: DECODE(payload), events, check)


@compare("256 one-block events to vllm-map-0.33", per="event", floor=4, aim=6, against=MSGSPEC)
def encode_small() -> Work:
    """The main figure of the encoder."""
    return encoding(256, 1)


@compare("the same with building the events", per="event", floor=8, aim=15, against=MSGSPEC)
def encode_build() -> Work:
    """Events are made, then written: columns event by event by the queue, Structs by a loop."""
    made = workloads.stored_events(256, 1)
    for event in made:
        event.parent_block_hash = None  # or the queue would join the events to one
    columns = EventList(made)
    digests = [e.block_hashes[0] for e in made]
    ids = [t for e in made for t in e.token_ids]
    queue = EventQueue()

    def ours() -> bytes:
        queue.extend(columns)
        return encode(KVEventBatch(TS, queue.take(), 0))

    def theirs() -> bytes:
        events = [
            Stored(
                block_hashes=[digest],
                parent_block_hash=None,
                token_ids=ids[i * 16 : i * 16 + 16],
                block_size=16,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                extra_keys=[None],
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            )
            for i, digest in enumerate(digests)
        ]
        return ENCODE(Batch(TS, events, 0))

    def check() -> None:
        assert ours() == theirs()

    return Work(ours, theirs, 256, check)


@compare("64 events of 16 hashes and 256 tokens to bytes", per="event", floor=3, aim=6, against=MSGSPEC)
def encode_large() -> Work:
    """Mostly integers."""
    return encoding(64, 16)


@compare("256 one-block events with digests to bytes", per="event", against=MSGSPEC)
def encode_digests() -> Work:
    """Hashes of 32 bytes."""
    return encoding(256, 1, "bytes")


@compare("64 one-block events from bytes", per="event", floor=5, aim=10, against=MSGSPEC)
def decode_small() -> Work:
    """The main figure of the decoder."""
    return decoding(64, 1)


@compare("one event of 64 blocks from bytes", per="event", floor=3, aim=8, against=MSGSPEC)
def decode_large() -> Work:
    """Mostly integers."""
    return decoding(1, 64)


@compare("64 one-block events with digests from bytes", per="event", against=MSGSPEC)
def decode_digests() -> Work:
    """Hashes of 32 bytes."""
    return decoding(64, 1, "bytes")


def held(make: Any) -> int:
    """Bytes of Python memory that the value of `make` holds."""
    make()
    gc.collect()
    tracemalloc.start()
    try:
        kept = make()
        return tracemalloc.get_traced_memory()[0] if kept is not None else 0
    finally:
        tracemalloc.stop()


def memory(events: int, per_event: int) -> float:
    """Bytes of the decoded events: columns / Structs."""
    ours, _, _ = batches(events, per_event)
    payload = encode(ours)
    columns = decode(payload)
    assert columns == ours
    return (columns.events.nbytes + held(lambda: decode(payload))) / held(lambda: DECODE(payload))


@value("memory of 64 decoded one-block events", unit="x", floor=0.2, aim=0.1, against=MSGSPEC)
def memory_small() -> float:
    """The column's rows and hashes weigh most here."""
    return memory(64, 1)


@value("memory of one decoded 64-block event", unit="x", floor=0.2, aim=0.1, against=MSGSPEC)
def memory_large() -> float:
    """Four bytes a token."""
    return memory(1, 64)


test_rows = as_tests(__name__)
