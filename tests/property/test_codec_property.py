"""The codec beside msgspec: random events in Structs of vLLM's shape, in both directions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, EventList, KVEventBatch, decode, encode
from kvevents.errors import DecodeError

pytestmark = pytest.mark.timeout(900)

MISSING = object()


def family(array: bool, stored_fields: int, removed_fields: int) -> type[msgspec.Struct]:
    """A batch type as an engine declares it: so many fields of a store and of a removal."""

    class Event(msgspec.Struct, array_like=array, omit_defaults=True, gc=False, tag=True):
        pass

    def struct(name: str, fields: list[tuple[str, Any, Any]]) -> Any:
        declared = [(n, t) if d is MISSING else (n, t, d) for n, t, d in fields]
        return msgspec.defstruct(
            name, declared, bases=(Event,), array_like=array, omit_defaults=True, gc=False, tag=name
        )

    stored = struct("BlockStored", STORED[:stored_fields])
    removed = struct("BlockRemoved", REMOVED[:removed_fields])
    cleared = struct("AllBlocksCleared", [])
    return msgspec.defstruct(
        "Batch",
        [("ts", float), ("events", list[stored | removed | cleared]), ("rank", int | None, None)],
        array_like=True,
        omit_defaults=True,
        gc=False,
        namespace={"classes": (stored, removed, cleared)},
    )


HASH = bytes | int
STORED: list[tuple[str, Any, Any]] = [
    ("block_hashes", list[HASH], MISSING),
    ("parent_block_hash", HASH | None, MISSING),
    ("token_ids", list[Any], MISSING),
    ("block_size", int, MISSING),
    ("lora_id", int | None, MISSING),
    ("medium", str | None, MISSING),
    ("lora_name", str | None, MISSING),
    ("extra_keys", list[Any] | None, None),
    ("group_idx", int | None, None),
    ("kv_cache_spec_kind", str | None, None),
    ("kv_cache_spec_sliding_window", int | None, None),
    ("locality", str | None, None),
    ("ownership", str | None, None),
    ("session_id", str | None, None),
    ("lookahead_token_ids", list[Any] | None, None),
]
REMOVED: list[tuple[str, Any, Any]] = [
    ("block_hashes", list[HASH], MISSING),
    ("medium", str | None, MISSING),
    ("group_idx", int | None, None),
    ("locality", str | None, None),
    ("ownership", str | None, None),
]
FAMILIES = {
    "vllm-map-0.33": family(False, 15, 5),
    "vllm-map-0.32": family(False, 14, 5),
    "vllm-array-11": family(True, 11, 3),
    "vllm-array-10": family(True, 10, 3),
    "vllm-array-9": family(True, 9, 3),
    "vllm-array-8": family(True, 8, 2),
    "vllm-array-7": family(True, 7, 2),
}

uint64 = st.integers(0, 2**64 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
text = st.text(max_size=40)
hashes = st.one_of(
    st.lists(uint64, max_size=20),
    st.lists(st.integers(2**32, 2**64 - 1), min_size=1, max_size=20),
    st.lists(int64, max_size=20),
    st.lists(st.binary(min_size=32, max_size=32), max_size=20),
    st.lists(st.one_of(uint64, int64, st.binary(max_size=64)), max_size=5),
)
one_hash = st.one_of(uint64, int64, st.binary(max_size=64))
tokens = st.one_of(
    st.lists(st.integers(0, 2**32 - 1), max_size=70),
    st.lists(st.integers(0, 128_000), max_size=70),
    st.lists(st.one_of(int64, uint64, text, st.tuples(int64, uint64)), max_size=6),
)
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), int64, st.floats(allow_nan=False), text, st.binary(max_size=20)),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)
extra_keys = st.one_of(
    st.none(),
    st.lists(st.none(), max_size=20),
    st.lists(st.one_of(st.none(), st.lists(plain, max_size=3)), max_size=4),
)
VALUES = {
    "block_hashes": hashes,
    "parent_block_hash": st.none() | one_hash,
    "token_ids": tokens,
    "block_size": st.integers(1, 2**32 - 1) | st.sampled_from([1, 4, 16]),
    "lora_id": st.none() | int64,
    "medium": st.sampled_from(["GPU", "CPU", None]) | text,
    "lora_name": st.none() | text,
    "extra_keys": extra_keys,
    "group_idx": st.none() | int64,
    "kv_cache_spec_kind": st.none() | text,
    "kv_cache_spec_sliding_window": st.none() | int64,
    "locality": st.none() | text,
    "ownership": st.none() | text,
    "session_id": st.none() | text,
    "lookahead_token_ids": st.none() | st.lists(st.lists(int64, max_size=3), max_size=4),
}


@st.composite
def batches(draw: st.DrawFn) -> tuple[str, msgspec.Struct, KVEventBatch]:
    """A dialect, a batch in the engine's Structs, and the same in ours."""
    dialect = draw(st.sampled_from(sorted(FAMILIES)))
    stored, removed, cleared = FAMILIES[dialect].classes
    theirs: list[Any] = []
    ours: list[Any] = []
    for kind in draw(st.lists(st.sampled_from("ssssrrc"), max_size=6)):
        # Half of the events repeat the attributes of the one before, as real streams do.
        if kind == "c":
            theirs.append(cleared())
            ours.append(AllBlocksCleared())
            continue
        struct, event = (stored, BlockStored) if kind == "s" else (removed, BlockRemoved)
        names = struct.__struct_fields__
        before = theirs[-1] if theirs and type(theirs[-1]) is struct and draw(st.booleans()) else None
        fresh = {"block_hashes", "parent_block_hash", "token_ids"}
        fields = {
            n: getattr(before, n) if before is not None and n not in fresh else draw(VALUES[n]) for n in names
        }
        theirs.append(struct(**fields))
        ours.append(event(**fields))
    ts = draw(st.floats(allow_nan=False))
    rank = draw(st.none() | int64)
    return dialect, FAMILIES[dialect](ts, theirs, rank), KVEventBatch(ts, EventList(ours), rank)


@given(batches())
def test_bytes_are_msgspecs_and_come_back(case: tuple[str, msgspec.Struct, KVEventBatch]) -> None:
    dialect, theirs, ours = case
    want = msgspec.msgpack.encode(theirs)
    assert encode(ours, dialect=dialect) == want
    back = decode(want, strict=True)
    assert back == ours
    assert back.events.irregular == ours.events.irregular
    assert encode(back, dialect=dialect) == want
    assert list(back.events) == list(ours.events)


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_give_a_batch_or_a_typed_error(data: bytes, strict: bool) -> None:
    try:
        batch = decode(data, strict=strict)
    except DecodeError:
        return
    list(batch.events)
    assert decode(encode(batch, lossy=True), strict=True).events is not None


@given(batches(), st.data())
def test_damage_costs_events_never_the_reader(
    case: tuple[str, msgspec.Struct, KVEventBatch], data: st.DataObject
) -> None:
    payload = bytearray(msgspec.msgpack.encode(case[1]))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        batch = decode(bytes(payload))
    except DecodeError:
        return
    events = list(batch.events)
    assert EventList(events) == batch.events
    encode(batch, lossy=True)
