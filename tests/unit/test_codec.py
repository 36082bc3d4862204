"""The codec on golden bytes, on what no vector holds, and on bytes that mean harm."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import threading
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import kvevents
from kvevents import (
    DIALECTS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventList,
    KVEventBatch,
    codec,
    decode,
    encode,
)
from kvevents.errors import ConfigError, DecodeError, EncodeError, EventError, EventTypeError, TraceError
from kvevents.testing import vectors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pack = msgspec.msgpack.encode
unpack = msgspec.msgpack.decode


def stored(**changed: Any) -> BlockStored:
    fields: dict[str, Any] = {
        "block_hashes": [2**40 + 1],
        "parent_block_hash": None,
        "token_ids": [1, 2, 300, 70000],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return BlockStored(**{**fields, **changed})


def as_map(**changed: Any) -> dict[str, Any]:
    """The map of a store, as vLLM writes it."""
    fields = {
        "type": "BlockStored",
        "block_hashes": [2**40 + 1],
        "parent_block_hash": None,
        "token_ids": [1, 2, 300, 70000],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return {**fields, **changed}


def payload(*events: Any, ts: Any = 1.5, rank: Any = 0) -> bytes:
    return pack([ts, list(events), rank])


def only(data: bytes) -> Any:
    """The one event of a payload, which must be without fault."""
    batch = decode(data, strict=True)
    assert batch.events.skipped == []
    (event,) = batch.events
    return event


# ---------------------------------------------------------------- golden bytes


def test_every_vector_decodes_and_encodes_to_the_byte(golden: Callable[[str], Path]) -> None:
    report = vectors.check_vectors(golden("vectors.jsonl"))
    assert report.ok, report.first_difference
    assert str(report) == "vectors=454 decoded=454 encoded=448"


def test_every_captured_frame_comes_back_to_the_byte(golden: Callable[[str], Path]) -> None:
    frames = 0
    for path in sorted(golden("captures").glob("*.jsonl")):
        report = vectors.check_frames(path)
        assert report.ok, f"{path.name}: {report.first_difference}"
        frames += report.frames
    assert frames == 904


def test_a_vector_that_differs_is_found(tmp_path: Path) -> None:
    event = {"kind": "stored", "hashes": [{"int": "7"}], "parent": None, "tokens": [1], "block_size": 1}
    good = encode(KVEventBatch(1.5, [vectors.event_from_json(event)], 0)).hex()
    line = {"dialect": "vllm-map-0.33", "name": "x", "ts": 1.5, "data_parallel_rank": 0, "hex": good}
    path = tmp_path / "v.jsonl.gz"
    for events, hexed, decoded, encoded in (
        ([event], good, 1, 1),
        ([{**event, "tokens": [2]}], good, 0, 0),
        ([event], good[:-2] + "05", 0, 0),
        ([event], good[:40], 0, 0),
    ):
        path.write_bytes(gzip.compress(json.dumps({**line, "events": events, "hex": hexed}).encode()))
        report = vectors.check_vectors(path)
        assert (report.vectors, report.decoded, report.encoded) == (1, decoded, encoded)
        assert report.ok == (report.first_difference is None) == bool(decoded)
    assert vectors.is_vector_file(path)
    path.write_bytes(gzip.compress(b'{"kind": "meta"}\nnonsense\n'))
    assert not vectors.is_vector_file(path)
    with pytest.raises(TraceError, match=r":2: a JSON object was expected, saw b'nonsense'"):
        vectors.check_frames(path)


def test_header_width_follows_the_declared_fields() -> None:
    batch = KVEventBatch(1.5, [stored(), BlockRemoved([2**40], "GPU"), AllBlocksCleared()], None)
    new, old = encode(batch), encode(batch, dialect="vllm-map-0.32")
    assert new[11:14] == b"\xde\x00\x08"
    assert old[11:12] == b"\x88"
    assert new[14:] == old[12:]
    assert decode(new) == decode(old) == batch


# ---------------------------------------------------------------- shapes


def test_a_batch_as_a_map_is_the_batch_as_an_array() -> None:
    events = [as_map(), {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}]
    want = decode(payload(*events, rank=3), strict=True)
    keys = {"ts": 1.5, "events": events, "data_parallel_rank": 3}
    for shape in (keys, dict(reversed(keys.items())), {**keys, "brand_new": [1, {}]}):
        assert decode(pack(shape), strict=True) == want
    alone = decode(pack({"ts": 1.5, "events": events}), strict=True)
    assert (alone.data_parallel_rank, list(alone.events)) == (None, list(want.events))
    bad_rank = decode(pack({**keys, "data_parallel_rank": "x"}))
    assert [s.reason for s in bad_rank.events.skipped] == ["bad_field"]
    behind = decode(pack(keys) + b"\xc0")
    assert [s.reason for s in behind.events.skipped] == ["trailing_bytes"]
    for other in (
        {"ts": 1.5},
        {"events": []},
        {**keys, "ts": "x"},
        {**keys, "events": 7},
        {1: 2, **keys},
        {},
    ):
        with pytest.raises(DecodeError):
            decode(pack(other))


def test_events_packed_twice_are_stores_by_hash() -> None:
    store = ["BlockStored", [2**63 + 5, 6], 0, [], 0, None, "SHARED_STORAGE"]
    remove = ["BlockRemoved", [6], "SHARED_STORAGE"]
    batch = decode(pack([1.5, [pack(store), pack(remove)]]), strict=True)
    assert batch.data_parallel_rank is None
    first, second = batch.events
    assert first == stored(
        block_hashes=[2**63 + 5, 6],
        parent_block_hash=0,
        token_ids=[],
        block_size=0,
        medium="SHARED_STORAGE",
    )
    assert second == BlockRemoved([6], "SHARED_STORAGE")
    assert batch.events.irregular == 1
    # One that cannot be read costs itself.
    mixed = decode(
        pack([1.5, [pack(store), pack(pack(store)), b"\xc1", pack(store) + b"\xc0", pack(remove)]])
    )
    assert list(mixed.events) == [first, second]
    assert [(s.index, s.reason) for s in mixed.events.skipped] == [(i, "not_an_event") for i in (1, 2, 3)]


def test_one_event_in_five_shapes_is_one_event() -> None:
    fields = as_map()
    tag, *values = fields.values()
    shuffled = dict(sorted(fields.items(), reverse=True))
    want = stored()
    for shape in (
        [tag, *values],
        [tag, *values, None],
        [tag, *values, None, None, None, None],
        fields,
        shuffled,
    ):
        assert only(payload(shape)) == want
    unknown = only(payload({**fields, "brand_new": [1, {"a": None}]}))
    assert unknown.other_fields == {"brand_new": [1, {"a": None}]}
    unknown.other_fields = None
    assert unknown == want


def test_shapes_may_be_mixed_and_batches_may_be_longer_or_shorter() -> None:
    tag, *values = as_map().values()
    events = [as_map(), [tag, *values], ["AllBlocksCleared"], {"type": "AllBlocksCleared"}, as_map()]
    want = [stored(), stored(), AllBlocksCleared(), AllBlocksCleared(), stored()]
    for data in (pack([3, events]), pack([3, events, None]), pack([3, events, None, "later", {"x": 1}])):
        batch = decode(data, strict=True)
        assert list(batch.events) == want
        assert (batch.ts, type(batch.ts), batch.data_parallel_rank) == (3, int, None)


@pytest.mark.parametrize("ts", [0.0, -1.5, 1.7e9, 0, 1_700_000_000_123, -5, 2**64 - 1])
def test_time_stamps_keep_their_form(ts: float) -> None:
    batch = decode(payload(as_map(), ts=ts))
    assert (batch.ts, type(batch.ts)) == (ts, type(ts))
    assert unpack(encode(batch))[0] == ts
    assert encode(batch)[1:2] == pack(ts)[:1]


def test_mooncake_names_are_read_and_its_own_fields_kept() -> None:
    event = {
        "event_id": 7,
        "timestamp": 1_700_000_000_123,
        "event_type": "stored",
        "model_name": None,
        "block_size": None,
        "tenant_id": "default",
        "medium": "disk",
        "object_key": "k",
        "seq_hashes": [2**63 + 5],
        "block_hashes": [5 - 2**63],
        "base_block_idx": 3,
        "parent_hash": 2**63 + 4,
        "token_ids": None,
    }
    got = only(payload(event, ts=1_700_000_000_123))
    assert got.block_hashes == [2**63 + 5]
    assert got.parent_block_hash == 2**63 + 4
    assert (got.token_ids, got.block_size, got.medium) == ([], 0, "disk")
    assert got.other_fields["base_block_idx"] == 3
    assert got.other_fields["tenant_id"] == "default"
    removed = only(payload({"event_type": "removed", "seq_hashes": [9], "medium": "cpu", "block_size": None}))
    assert removed == BlockRemoved([9], "cpu", other_fields={"event_type": "removed", "block_size": None})


def test_a_stream_with_and_without_metadata_map_is_one_type() -> None:
    """SGLang's two arrays under one tag: with a map at index 7, and without."""
    plain = ["BlockStored", [-5], None, [1, 2], 2, None, "GPU"]
    salted = [*plain, {"cache_salt": "tenant", "more": 1}]
    first, second = decode(payload(plain, salted), strict=True).events
    assert first == stored(block_hashes=[-5], token_ids=[1, 2], block_size=2)
    assert (second.cache_salt, second.lora_name, second.other_fields) == ("tenant", None, {"more": 1})
    batch = KVEventBatch(1.5, EventList([first, second]), 0)
    assert decode(encode(batch, dialect="sglang-map"), strict=True) == batch


def test_position_in_the_sequence_survives() -> None:
    """Engines that say where a run begins do it with a key of their own, which is kept and written again."""
    event = as_map(parent_block_hash=2**41, start_block=5)
    got = decode(payload(event), strict=True)
    assert got.events[0].other_fields == {"start_block": 5}
    assert unpack(encode(got))[1][0] == event


@pytest.mark.parametrize("tokens", [[], None])
def test_token_ids_may_be_left_out(tokens: list[int] | None) -> None:
    batch = decode(payload(as_map(token_ids=tokens)), strict=True)
    assert batch.events.irregular == 1
    assert batch.events[0].token_ids == []
    assert batch.events[0].block_hashes == [2**40 + 1]
    small, large = encode(batch), payload(as_map(token_ids=list(range(10_000)), block_size=10_000))
    assert len(small) * 100 < len(large)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    "hashes",
    [
        [0],
        [127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1],
        [-1, -32, -33, -128, -129, -32768, -32769, -(2**31), -(2**31) - 1, -(2**63), 5],
        [-1, 2**64 - 1],
        [b""],
        [b"\x01"],
        [b"a" * 32, b"b" * 32],
        [b"a" * 64, b"b" * 8, 7, -7],
        [],
    ],
)
def test_hashes_of_every_form_come_back(hashes: list[int | bytes]) -> None:
    parent = hashes[0] if hashes else None
    for event in (
        as_map(block_hashes=hashes, parent_block_hash=parent),
        {"type": "BlockRemoved", "block_hashes": hashes, "medium": None},
    ):
        data = payload(event)
        got = decode(data, strict=True)
        assert got.events[0].block_hashes == hashes
        assert encode(got, dialect="vllm-map-0.32") == data


def test_signed_and_unsigned_are_one_key_and_two_forms() -> None:
    """A digest with the top bit set, stored unsigned and removed signed, in one stream."""
    digest = bytes([0xFE]) + bytes(range(31))
    unsigned = int.from_bytes(digest[:8], "big")
    signed = unsigned - 2**64
    data = payload(
        as_map(block_hashes=[unsigned]), {"type": "BlockRemoved", "block_hashes": [signed], "medium": "GPU"}
    )
    batch = decode(data, strict=True)
    assert [e.block_hashes for e in batch.events] == [[unsigned], [signed]]
    assert encode(batch, dialect="vllm-map-0.32") == data
    resident = kvevents.ResidentSet()
    resident.apply(batch.events)
    assert len(resident) == 0


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_integers_beyond_64_bits_are_refused_by_name(value: int) -> None:
    for event, field in (
        (stored(block_hashes=[value]), r"block_hashes\[0\]"),
        (stored(parent_block_hash=value), "parent_block_hash"),
        (stored(token_ids=[1, 2, 3, value]), r"token_ids\[3\]"),
    ):
        with pytest.raises(EventError, match=f"event 1: {field}"):
            encode(KVEventBatch(1.5, [stored(), event], 0))


@pytest.mark.parametrize(
    ("tokens", "block_size"),
    [
        ([[1, 2], [2, 3]], 2),
        ([2**32], 1),
        ([-1], 1),
        (["ab12"], 1),
        ([1, 2, "digest", 2**63, [3, 4]], 5),
        ([2**32 - 1, 0, 127, 128, 255, 256, 65535, 65536], 8),
    ],
)
def test_token_ids_that_are_not_plain_come_back(tokens: list[Any], block_size: int) -> None:
    data = payload(as_map(token_ids=tokens, block_size=block_size))
    got = decode(data, strict=True)
    assert got.events[0].token_ids == tokens
    assert got.events.irregular == 0
    assert encode(got, dialect="vllm-map-0.32") == data


def test_any_kind_of_integer_is_a_token() -> None:
    class Token(int):
        pass

    numpy = pytest.importorskip("numpy")
    for tokens in (
        [Token(1), Token(2)],
        numpy.array([1, 2], dtype="int64"),
        [numpy.int32(1), numpy.uint8(2)],
    ):
        assert encode(KVEventBatch(1.5, [stored(token_ids=tokens, block_size=2)], 0)) == encode(
            KVEventBatch(1.5, [stored(token_ids=[1, 2], block_size=2)], 0)
        )
    with pytest.raises(EventError, match=r"token_ids\[1\]: .* saw float 2.5"):
        encode(KVEventBatch(1.5, [stored(token_ids=[1, 2.5])], 0))


def test_nested_extra_keys_can_be_hashed_after_a_round_trip() -> None:
    event = stored(extra_keys=[(("id", 3), "salt", b"\x00\xff")])
    back = only(encode(KVEventBatch(1.5, [event], 0)))
    assert back == event
    assert len({back, event}) == 1


def test_metadata_goes_out_only_when_asked_for() -> None:
    batch = KVEventBatch(1.5, [stored(metadata={"why": ["x", 1]}), AllBlocksCleared(metadata={})], 0)
    assert encode(batch) == encode(KVEventBatch(1.5, [stored(), AllBlocksCleared()], 0))
    assert decode(encode(batch, metadata=True), strict=True).events == batch.events
    with pytest.raises(EncodeError, match="event 0: metadata"):
        encode(batch, metadata=True, dialect="vllm-array-6")


# ---------------------------------------------------------------- fields without a place


@pytest.mark.parametrize(
    ("dialect", "field", "value"),
    [
        ("vllm-map-0.33", "cache_salt", "s"),
        ("vllm-map-0.32", "lookahead_token_ids", [[1]]),
        ("vllm-array-11", "session_id", "s"),
        ("vllm-array-11", "other_fields", {"x": 1}),
        ("vllm-array-10", "kv_cache_spec_sliding_window", 4),
        ("vllm-array-9", "kv_cache_spec_kind", "k"),
        ("vllm-array-8", "group_idx", 0),
        ("vllm-array-7", "extra_keys", [None]),
        ("vllm-array-6", "lora_name", "l"),
        ("vllm-array-5", "medium", "GPU"),
        ("sglang-map", "extra_keys", [None]),
        ("sglang-map", "group_idx", 0),
        ("sglang-array", "cache_salt", "s"),
        ("vllm-map-0.33", "other_fields", {"medium": "CPU"}),
        ("vllm-map-0.33", "other_fields", {5: 1}),
    ],
)
def test_a_field_without_a_place_is_named_or_left_out(dialect: str, field: str, value: Any) -> None:
    plain = {"medium": None} if dialect in {"vllm-array-5", "sglang-array"} else {}
    good, bad = stored(**plain), stored(**{**plain, field: value})
    batch = KVEventBatch(1.5, [good, bad, good], 0)
    with pytest.raises(EncodeError, match=f"event 1: {field}: .*{dialect}") as e:
        encode(batch, dialect=dialect)
    assert (e.value.event, e.value.field) == (1, field)
    three = encode(KVEventBatch(1.5, [good, good, good], 0), dialect=dialect)
    assert encode(batch, dialect=dialect, lossy=True) == three
    data, lost = codec.encode_reporting(EventList(batch.events), 1.5, 0, dialect=dialect)
    assert data == encode(KVEventBatch(1.5, [good, good], 0), dialect=dialect)
    assert [(i, f) for i, f, _ in lost] == [(1, field)]


def test_unknown_dialects_and_odd_arguments_are_refused() -> None:
    batch = KVEventBatch(1.5, [stored()], 0)
    with pytest.raises(ConfigError, match=r'"vllm-map" is not known; known are vllm-map-0\.33, '):
        encode(batch, dialect="vllm-map")
    with pytest.raises(EventTypeError, match="ts: .* saw str 'x'"):
        encode(KVEventBatch("x", [], 0))
    with pytest.raises(EventTypeError, match="ts: .* saw int 18446744073709551616"):
        encode(KVEventBatch(2**64, [], 0))
    assert len(set(DIALECTS)) == 11


def test_an_engines_own_structs_are_encoded() -> None:
    class BlockRemoved(msgspec.Struct, tag=True):
        block_hashes: list[int]
        medium: str | None = None

    ours = encode(KVEventBatch(1.5, [kvevents.BlockRemoved([2**40], "CPU")], 3))
    assert encode(KVEventBatch(1.5, [BlockRemoved([2**40], "CPU")], 3)) == ours


def test_empty_batches() -> None:
    for dialect in DIALECTS:
        assert encode(KVEventBatch(1.5, [], None), dialect=dialect) == pack([1.5, [], None])
    assert len(decode(pack([1.5, [], None])).events) == 0


def test_large_batches_are_encoded_like_small_ones() -> None:
    """Headers of every width, and the path without the interpreter lock."""
    for n in (15, 16, 65_535, 65_536):
        events = EventList([BlockRemoved([2**40 + 1], "GPU")]) if n < 2 else None
        data = payload(
            *[{"type": "BlockRemoved", "block_hashes": [2**40 + i], "medium": None} for i in range(n)]
        )
        events = decode(data, strict=True).events
        assert len(events) == n
        assert encode(KVEventBatch(1.5, events, 0)) == data
    tokens = list(range(70_000))
    for count in (15, 16, 65_535, 65_536, 70_000):
        data = payload(as_map(token_ids=tokens[:count], block_size=1, block_hashes=[2**40] * count))
        assert encode(decode(data, strict=True), dialect="vllm-map-0.32") == data


def test_eight_threads_encode_and_decode_at_once() -> None:
    batch = KVEventBatch(1.5, [stored(block_hashes=[2**40 + i]) for i in range(50)], 0)
    want = encode(batch)
    bad: list[object] = []

    def run() -> None:
        bad.extend("x" for _ in range(100) if encode(batch) != want or decode(want) != batch)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert bad == []


# ---------------------------------------------------------------- bad input

FAULTS = [
    (["Unknown", 1], "unknown_tag", "type"),
    ({"type": "BlockUpdated"}, "unknown_tag", "type"),
    ({"type": 5}, "bad_field", "type"),
    ({"block_hashes": [1]}, "missing_field", "type"),
    (None, "not_an_event", "event"),
    (7, "not_an_event", "event"),
    ([], "not_an_event", "event"),
    (b"\x93\x01\x02\x03", "bad_field", "type"),
    (b"\x93\x01\x02", "not_an_event", "event"),
    (["BlockStored", [1]], "missing_field", "block_size"),
    ({"type": "BlockRemoved", "medium": None}, "missing_field", "block_hashes"),
    (as_map(block_hashes=[1, 1.5]), "bad_field", "block_hashes[1]"),
    (as_map(block_hashes=["x"]), "bad_field", "block_hashes[0]"),
    (as_map(block_hashes=[b"a" * 65]), "bad_field", "block_hashes[0]"),
    (as_map(block_hashes=7), "bad_field", "block_hashes"),
    (as_map(parent_block_hash=1.0), "bad_field", "parent_block_hash"),
    (as_map(token_ids=[1, None]), "bad_field", "token_ids[1]"),
    (as_map(token_ids=[1, 2, 3, 4.0]), "bad_field", "token_ids[3]"),
    (as_map(token_ids="abc"), "bad_field", "token_ids"),
    (as_map(block_size=0), "bad_field", "block_size"),
    (as_map(block_size=None), "bad_field", "block_size"),
    (as_map(block_size=-1), "bad_field", "block_size"),
    (as_map(block_size=2**32), "bad_field", "block_size"),
    (as_map(lora_id="3"), "bad_field", "lora_id"),
    (as_map(lora_id=2**63), "bad_field", "lora_id"),
    (as_map(medium=5), "bad_field", "medium"),
    (as_map(extra_keys=5), "bad_field", "extra_keys"),
    (as_map(metadata=[1]), "bad_field", "metadata"),
    (as_map(group_idx=True), "bad_field", "group_idx"),
    ({5: 1, "type": "AllBlocksCleared"}, "bad_field", "key"),
    ({"type": "AllBlocksCleared", **{f"k{i}": i for i in range(300)}}, "bad_field", "event"),
]


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


@pytest.mark.parametrize(("event", "reason", "field"), FAULTS)
def test_a_bad_event_costs_itself_and_says_why(event: Any, reason: str, field: str) -> None:
    data = payload(as_map(), event, as_map(), rank=3)
    batch = decode(data)
    assert list(batch.events) == [stored(), stored()]
    assert batch.data_parallel_rank == 3
    (skipped,) = batch.events.skipped
    assert (skipped.index, skipped.reason) == (1, reason)
    assert skipped.detail.startswith(f"{field}: ")
    assert " at byte " in skipped.detail
    with pytest.raises(DecodeError, match="^event 1: ") as e:
        decode(data, strict=True)
    assert (e.value.event, e.value.field, e.value.reason) == (1, field, reason)
    assert e.value.offset is not None
    assert str(e.value.offset) in str(e.value)


def test_the_offset_points_at_the_value() -> None:
    data = payload(as_map(), as_map(block_hashes=[7, 1.5]))
    with pytest.raises(DecodeError, match=r"event 1: block_hashes\[1\]: .* at byte \d+, saw float 1.5") as e:
        decode(data, strict=True)
    assert data[e.value.offset] == 0xCB


def test_deep_nesting_costs_the_event() -> None:
    deep = pack(as_map(x="?")).replace(b"\xa1?", nested(200_000))
    data = b"\x93\x01\x93" + pack(as_map()) + deep + pack(as_map()) + b"\x00"
    batch = decode(data)
    assert len(batch.events) == 2
    assert [(s.index, s.reason) for s in batch.events.skipped] == [(1, "too_deep")]


def test_text_that_is_not_utf8_costs_the_event() -> None:
    for event in (as_map(medium="????"), as_map(other="????"), as_map(extra_keys=["????"])):
        data = payload(event, as_map()).replace(b"????", b"\xff\xfe\xfd\xfc")
        batch = decode(data)
        assert list(batch.events) == [stored()]
        assert batch.events.skipped[0].reason == "bad_field"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\xc1",
        pack({"ts": 1.5, "data_parallel_rank": 0}),
        pack([1.5]),
        pack(["x", [], 0]),
        pack([None, [], 0]),
        pack([1.5, None, 0]),
        pack([1.5, {}, 0]),
        pack([{"worker_id": 1, "event": {}}, {}]),
        b"\x93\xcb\x3f\xf8",
        b"\x93\xcb" + bytes(8),
        b"\x93\x01\xdd\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"not msgpack at all",
    ],
)
def test_what_is_no_batch_is_an_error_in_both_modes(data: bytes) -> None:
    for strict in (False, True):
        with pytest.raises(DecodeError, match="not a batch of KV events: .* at byte ") as e:
            decode(data, strict=strict)
        assert e.value.event is None


def test_a_truncated_batch_gives_what_stands_before_the_cut() -> None:
    events = [stored(block_hashes=[2**40 + i]) for i in range(4)]
    data = encode(KVEventBatch(1.5, events, 0))
    sizes = set()
    for cut in range(16, len(data)):
        batch = decode(data[:cut])
        n = len(batch.events)
        sizes.add(n)
        assert list(batch.events) == events[:n]
        assert [(s.index, s.reason) for s in batch.events.skipped] == [(n, "truncated")]
        with pytest.raises(DecodeError, match=f"event {n}: "):
            decode(data[:cut], strict=True)
    assert sizes == {0, 1, 2, 3, 4}


def test_bytes_behind_the_batch_are_told() -> None:
    data = payload(as_map()) + b"\x00\x01"
    batch = decode(data)
    assert [(s.index, s.reason) for s in batch.events.skipped] == [(1, "trailing_bytes")]
    with pytest.raises(DecodeError, match="2 bytes stand behind the batch"):
        decode(data, strict=True)


def test_a_rank_of_the_wrong_type_costs_the_rank() -> None:
    batch = decode(payload(as_map(), rank="0"))
    assert batch.data_parallel_rank is None
    assert len(batch.events) == 1
    assert batch.events.skipped[0].detail.startswith("data_parallel_rank: ")
    assert decode(payload(rank=-1)).data_parallel_rank == -1


def test_absurd_lengths_are_quick_and_small() -> None:
    absurd = b"\xdd\xff\xff\xff\xff" * (64 * 1024 * 1024 // 5)
    inside = pack([1.5])[1:] + b"\x91\x82\xa4type\xabBlockStored\xacblock_hashes" + absurd
    for data in (absurd, b"\x93" + inside):
        tracemalloc.start()
        began = time.perf_counter()
        with contextlib.suppress(DecodeError):
            decode(data)
        took = time.perf_counter() - began
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert took < 2
        assert peak < 1 << 20


def test_a_number_is_no_payload() -> None:
    for value in (5, 10**12, "text", None):
        with pytest.raises(TypeError):
            decode(value)  # type: ignore[arg-type]


def test_one_bad_message_does_not_end_the_reader() -> None:
    """Random bytes, damaged batches and good ones in turn: an answer or a typed error for each."""
    rng = random.Random(20261129)
    good = encode(KVEventBatch(1.5, [stored(), BlockRemoved([2**40], "CPU"), AllBlocksCleared()], 0))
    read = refused = 0
    for i in range(3000):
        if i % 3 == 0:
            data = rng.randbytes(rng.randrange(120))
        else:
            damaged = bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            data = bytes(damaged)
        try:
            batch = decode(data)
        except DecodeError:
            refused += 1
        else:
            read += 1
            list(batch.events)
            encode(batch, lossy=True)
        assert len(decode(good).events) == 3
    assert min(read, refused) > 500


def test_any_buffer_is_read() -> None:
    data = payload(as_map())
    for form in (bytearray(data), memoryview(data), memoryview(bytearray(data))):
        assert decode(form) == decode(data)
