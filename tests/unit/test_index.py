"""What only the real index has: items, dumps, counters, hostile streams, streams of real engines."""

from __future__ import annotations

import gc
import time
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventList,
    KVEventBatch,
    PrefixIndex,
    ResidentSet,
    decode,
    encode,
)
from kvevents.errors import ConfigError, DecodeError, EventTypeError, PickleError, TokenError
from kvevents.subscribe.items import Batch, Gap, Reset, Resume, Resumed, Snapshot, StoreOnly
from kvevents.testing import NaivePrefixIndex, read_capture

SIZE = 4
CAPTURES = sorted((Path(__file__).parent.parent / "golden" / "conformance" / "captures").glob("*.jsonl"))


def stored(
    hashes: list[Any], tokens: list[int] | None = None, parent: Any = None, **fields: Any
) -> BlockStored:
    ids = list(range(len(hashes) * SIZE)) if tokens is None else tokens
    given: dict[str, Any] = {
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "block_size": SIZE,
        **fields,
    }
    return BlockStored(hashes, parent, ids, **given)


def batch(source: str, seq: int, *events: Any, rank: int | None = 0) -> Batch:
    return Batch(source, seq, KVEventBatch(1.0, list(events), rank), replayed=False)


def stats(index: PrefixIndex, source: str = "a") -> dict[str, Any]:
    return next(s for s in index.stats() if s["source"] == source)


# ------------------------------------------------------------------ items of a subscriber


def test_items_of_a_subscriber_are_applied() -> None:
    index = PrefixIndex()
    tokens = list(range(12))
    index.apply_item(batch("a", 0, stored([1, 2]), rank=3))
    assert [(m.source, m.rank, m.tokens, m.complete) for m in index.find(tokens)] == [("a", 3, 8, True)]
    index.apply_item(Gap("a", 1, 4, "too old"))
    assert not index.find(tokens)[0].complete
    index.apply_item(Snapshot("a", 9, EventList([stored([1, 2, 3])])))
    assert (index.find(tokens)[0].rank, index.find(tokens)[0].complete) == (3, True)
    assert stats(index)["last_seq"] == 8
    index.apply_item(Snapshot("a", 7, EventList()))
    assert index.find(tokens)[0].tokens == 12
    index.apply_item(batch("a", 9, BlockRemoved([3], "GPU"), rank=3))
    assert (index.find(tokens)[0].tokens, index.find(tokens)[0].complete) == (8, True)
    index.apply_item(Reset("a", "restart"))
    assert len(index.find(tokens)) == 0
    index.apply_item(batch("a", 0, stored([1]), rank=3))
    assert index.find(tokens)[0].complete


def test_what_comes_before_the_first_batch_is_not_forgotten() -> None:
    index = PrefixIndex()
    index.apply_item(Snapshot("a", 5, EventList([stored([1])])))
    index.apply_item(batch("a", 5, stored([2], [4, 5, 6, 7], 1), rank=1))
    assert [(m.rank, m.tokens) for m in index.find(range(8))] == [(0, 8)]
    index.apply_item(Gap("b", 0, 4, "no replay"))
    index.apply_item(batch("b", 5, stored([1]), rank=1))
    assert {m.source: m.complete for m in index.find(range(8))} == {"a": True, "b": False}
    index.add_source("c", 2)
    index.apply_item(Snapshot("c", 0, EventList([stored([1])])))
    assert ("c", 2) in index.find(range(4)).to_dict()


def test_an_item_that_cannot_be_applied_is_refused() -> None:
    index = PrefixIndex()
    with pytest.raises(EventTypeError, match="not decoded"):
        index.apply_item(Batch("a", 0, None, replayed=False, payload=b""))
    with pytest.raises(EventTypeError, match="item was expected"):
        index.apply_item(7)  # type: ignore[arg-type]
    assert index.stats() == []


# ------------------------------------------------------------------ bad input


def test_a_payload_that_is_no_batch_is_an_error_and_the_view_incomplete() -> None:
    index = PrefixIndex()
    index.apply("a", 0, 0, encode(KVEventBatch(1.0, [stored([1])])))
    with pytest.raises(DecodeError):
        index.apply("a", 0, 1, b"\xdd\xff\xff\xff\xff")
    assert index.digest("a") is None
    assert (stats(index)["last_seq"], stats(index)["complete"]) == (1, False)
    index.apply("a", 0, 2, encode(KVEventBatch(1.0, [AllBlocksCleared()])))
    assert stats(index)["complete"]


def test_bad_arguments_are_typed_errors() -> None:
    index = PrefixIndex()
    with pytest.raises(EventTypeError, match="source="):
        index.find([1], block_hashes=[1], source="a")
    with pytest.raises(EventTypeError, match="source="):
        index.find(block_hashes=[1])
    with pytest.raises(TokenError, match=r"token_ids\[1\]"):
        index.find([1, 2**32])
    with pytest.raises(ConfigError, match="GPU, CPU"):
        index.clear_tier("a", "gpu")
    with pytest.raises(ConfigError, match="expires_s"):
        PrefixIndex(expires_s=0)
    with pytest.raises(ConfigError, match=r"mm\[0\]"):
        index.find([1], mm=[("x", -1, 2)])
    with pytest.raises(OverflowError):
        index.apply_events("a", -1, [])


def test_numbers_of_any_size_cost_no_time_and_no_memory() -> None:
    """Groups without number, blocks and windows of 2^32: every answer stays quick."""
    index = PrefixIndex()
    events = [
        stored([i], [i], block_size=1, group_idx=i, kv_cache_spec_kind="sliding_window",
               kv_cache_spec_sliding_window=2**31 + i)
        for i in range(200)
    ]  # fmt: skip
    events += [stored([10_000 + i], list(range(i)), block_size=i) for i in range(1, 100)]
    events += [
        stored([20_000 + i], medium=f"tier{i}", locality="REMOTE", ownership=f"o{i % 50}")
        for i in range(3000)
    ]
    events += [stored([7], block_size=2**32 - 1), stored([8], [], block_size=2**32 - 1)]
    index.apply_events("a", 0, events)
    s = stats(index)
    assert s["scopes_dropped"] > 0
    assert not s["complete"]
    assert index.digest("a") is None
    assert len(index.tiers) <= 16
    began = time.perf_counter()
    index.find(array("I", bytes(4 * 200_000)))
    index.find(block_hashes=list(range(10_000)), source="a")
    assert time.perf_counter() - began < 5
    index.apply_events("a", 0, [AllBlocksCleared(), stored([1])])
    assert index.find(range(4))[0].complete
    assert index.digest("a") == ResidentSet([stored([1])]).digest()


def test_many_orphans_of_one_parent_and_long_chains_of_them_are_quick() -> None:
    began = time.perf_counter()
    index = PrefixIndex(orphan_blocks=1000)
    one_parent = [stored([i], [0, 0, 0, i], 2**40) for i in range(1, 20_000)]
    index.apply_events("a", 0, one_parent)
    assert stats(index)["waiting"] == 1000
    # Backwards, so that the last one frees all the others.
    backwards = [stored([i + 1], [0, 0, 0, i % 2**20], i) for i in range(20_000, 0, -1)]
    other = PrefixIndex()
    other.apply_events("a", 0, backwards)
    other.apply_events("a", 0, [stored([1])])
    assert stats(other)["waiting"] == 0
    assert stats(other)["adopted"] == 20_000
    assert time.perf_counter() - began < 20


def test_an_orphan_keeps_only_itself_in_memory() -> None:
    index = PrefixIndex()
    big = stored(list(range(1, 50_001)), list(range(200_000)))
    for i in range(20):
        index.apply_events(
            "a", 0, [AllBlocksCleared()] if i == 0 else [big, stored([10**6 + i], [i] * 4, 10**7 + i)]
        )
    del big
    gc.collect()
    assert stats(index)["waiting"] == 19
    assert stats(index)["nbytes"] < 50_000 * 60


def test_everything_is_counted() -> None:
    index = PrefixIndex()
    index.apply_events(
        "a",
        0,
        [
            stored([1, 2]),
            stored([1]),
            BlockRemoved([2, 9], "GPU"),
            stored([5], [], block_size=0, medium="CXL"),
            stored([6], [1], block_size=4),
            stored([7], [9, 9, 9, 9], 99),
        ],
    )
    s = stats(index)
    wanted = {
        "events": 6, "stored": 5, "removed": 1, "unknown_removed": 1, "duplicate_stored": 1, "hash_only": 1,
        "irregular": 1, "orphaned": 1, "waiting": 1, "unknown_media": 1, "blocks": 4, "conflicts": 0,
    }  # fmt: skip
    assert {k: s[k] for k in wanted} == wanted


# ------------------------------------------------------------------ dumps


def test_a_dump_is_the_same_index() -> None:
    index = PrefixIndex()
    index.apply("a", 0, 0, encode(KVEventBatch(1.0, [stored([1, 2, 3]), stored([1], medium="CXL")])))
    index.apply_events("b", 1, [stored([b"x" * 32, b"y" * 32], group_idx=0), stored([5], ownership="o")])
    loaded = PrefixIndex.load(index.dump())
    # Whether the publishers live still is not known yet.
    assert [m._replace(complete=True) for m in loaded.find(range(12))] == list(index.find(range(12)))
    assert not any(m.complete for m in loaded.find(range(12)))
    assert loaded.digest("a") is loaded.digest("o", owner=True) is None
    loaded.confirm("a")
    assert [m.complete for m in loaded.find(range(12))] == [True, False, False]
    loaded.confirm("b")
    assert list(loaded.find(range(12))) == list(index.find(range(12)))
    for who in (("a", 0), ("b", 1)):
        assert loaded.digest(*who) == index.digest(*who) is not None
    assert loaded.digest("o", owner=True) == index.digest("o", owner=True)
    assert stats(loaded)["last_seq"] == 0
    loaded.apply("a", 0, 1, encode(KVEventBatch(1.0, [BlockRemoved([2], "GPU")])))
    assert (loaded.find(range(12))[0].source, loaded.find(range(12))[1].tokens) == ("b", 4)
    assert stats(loaded)["complete"]


def test_time_goes_on_where_a_dump_left_it() -> None:
    now = 50.0
    index = PrefixIndex(clock=lambda: now, expires_s=60)
    index.add_source("a", emits_removals=False)
    index.apply_events("a", 0, [stored([1])])
    now += 50
    dump = index.dump()
    loaded = PrefixIndex.load(dump, clock=lambda: now, expires_s=60)
    now += 5
    assert loaded.find(range(4))[0].tokens == 4
    now += 10
    assert len(loaded.find(range(4))) == 0
    assert loaded.expire() == 1
    assert stats(loaded)["blocks"] == 0


def test_a_dump_with_waiting_orphans_says_that_it_is_not_complete() -> None:
    index = PrefixIndex()
    index.apply_events("a", 0, [stored([1]), stored([3], [9, 9, 9, 9], 2)])
    loaded = PrefixIndex.load(index.dump())
    loaded.confirm("a")
    assert not loaded.find(range(4))[0].complete
    assert loaded.digest("a") is None


def test_a_dump_knows_where_its_subscriptions_go_on() -> None:
    index = PrefixIndex()
    index.apply_item(Batch("a", 0, KVEventBatch(1.5, [stored([1])], 2), replayed=False, epoch=b"e" * 16))
    index.apply_item(Batch("b", 7, KVEventBatch(2.5, [stored([2])]), replayed=False))
    index.apply_item(Snapshot("c", 4, EventList([stored([3])]), b"f" * 16))
    index.apply_item(batch("d", 0, stored([4])))
    index.apply_item(Reset("d", "restart"))
    loaded = PrefixIndex.load(index.dump())
    assert loaded.resume_points() == {
        "a": Resume(0, b"e" * 16, 1.5), "b": Resume(7, None, 2.5), "c": Resume(3, b"f" * 16, None),
    }  # fmt: skip
    loaded.apply_item(Resumed("a", 0))
    loaded.apply_item(Snapshot("c", 9, EventList([stored([5])])))
    complete = {s["source"]: s["complete"] for s in loaded.stats()}
    assert complete == {"a": True, "b": False, "c": True, "d": False}
    assert loaded.resume_points()["c"].last_seq == 8


def test_a_rank_that_none_can_be_counts_as_none() -> None:
    index = PrefixIndex()
    for i, rank in enumerate((2**32, 2**63 - 1, -1)):
        index.apply_item(Batch(str(i), 0, KVEventBatch(1.5, [stored([1])], rank), replayed=False))
    index.apply_item(StoreOnly("s", ("STORAGE",), 2**64))
    assert {(s["source"], s["rank"]) for s in index.stats()} == {("0", 0), ("1", 0), ("2", 0), ("s", 0)}


def test_what_was_dropped_is_not_resumed() -> None:
    index = PrefixIndex()
    for name in ("a", "b"):
        index.apply_item(batch(name, 0, stored([1])))
    index.drop("a")
    index.apply_item(batch("a", 1, stored([2])))
    assert index.resume_points().keys() == {"b"}
    assert PrefixIndex.load(index.dump()).resume_points().keys() == {"b"}


def test_what_was_lost_meanwhile_is_never_confirmed() -> None:
    index = PrefixIndex()
    for name in ("a", "b"):
        index.apply_item(batch(name, 0, stored([1]), stored([2], ownership="pool", medium="EXTERNAL")))
    dump = index.dump()
    loaded = PrefixIndex.load(dump)
    loaded.apply_item(Gap("a", 1, 5, "too old"))
    loaded.apply_item(Resumed("a", 0))
    assert not any(m.complete for m in loaded.find(range(4)))
    loaded.apply_item(batch("a", 6, AllBlocksCleared(), stored([1])))
    assert {m.source: m.complete for m in loaded.find(range(4))} == {"a": True, "b": False, "pool": False}

    # One engine lives a new life: what the old one told of the shared tier since is not known.
    loaded = PrefixIndex.load(dump)
    loaded.apply_item(Reset("a", "restart"))
    loaded.apply_item(Resumed("b", 0))
    assert {m.source: m.complete for m in loaded.find(range(4))} == {"b": True, "pool": False}
    loaded = PrefixIndex.load(dump)
    loaded.apply_item(Resumed("a", 0))
    loaded.apply_item(Resumed("b", 0))
    assert {m.source: m.complete for m in loaded.find(range(4))} == {"a": True, "b": True, "pool": True}


def test_a_publisher_says_of_which_media_nothing_is_removed() -> None:
    now = 0.0
    index = PrefixIndex(clock=lambda: now, expires_s=60)
    index.apply_item(batch("a", 0, stored([1, 2]), stored([1, 2], medium="STORAGE"), rank=3))
    index.apply_item(StoreOnly("a", ("STORAGE",), 3))
    assert index.find(range(8))[0].alone == {"GPU": 8, "STORAGE": 8}
    now += 61
    assert index.find(range(8))[0].alone == {"GPU": 8, "STORAGE": 0}
    assert index.expire() == 2
    index.apply_item(StoreOnly("new", ("CPU",), 1))
    index.apply_item(batch("new", 0, stored([1], medium="CPU"), rank=1))
    now += 61
    assert [m.source for m in index.find(range(4))] == ["a"]


def test_bytes_that_are_no_dump_are_refused() -> None:
    index = PrefixIndex()
    index.apply_events("a", 0, [stored([1])])
    dump = index.dump()
    for bad in (b"", b"KVINDEX1", dump[:-1], dump + b"x", dump[:20] + b"\xff" + dump[21:]):
        with pytest.raises(PickleError):
            PrefixIndex.load(bad)


# ------------------------------------------------------------------ answers


def test_an_answer_is_a_sequence_that_reads_well() -> None:
    index = PrefixIndex()
    index.apply_events("a", 0, [stored([1, 2])])
    index.apply_events("b", 0, [stored([1])], seq=9)
    found = index.find(range(8))
    assert (len(found), bool(found), bool(index.find([9]))) == (2, True, False)
    assert found[-1] == found[1] == found.to_list()[1]
    assert found.to_dict() == {("a", 0): 8, ("b", 0): 4}
    assert repr(found) == "Matches(2: a/0: 8 tokens, b/0: 4 tokens (incomplete))"
    with pytest.raises(IndexError, match="match 2 of 2"):
        found[2]
    index.drop("a")
    assert found[0].source == "a"


@pytest.mark.parametrize("path", CAPTURES, ids=lambda p: p.stem)
def test_streams_of_real_engines_give_the_digest_and_the_naive_answers(path: Path) -> None:
    """From the frames' bytes; hybrid models, adapters, salts, offloading and resets among them."""
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    frames = [bytes.fromhex(f["frames"][-1]) for f in lines if f.get("kind") == "frame" and "frames" in f]
    capture = read_capture(path)
    real, naive, resident = PrefixIndex(), NaivePrefixIndex(), ResidentSet()
    payloads = frames or [encode(KVEventBatch(1.0, [e])) for e in capture.events]
    for payload in payloads:
        real.apply("a", 0, None, payload)
        events = decode(payload).events
        naive.apply_events("a", 0, events)
        resident.apply(events)
    assert real.digest("a") == resident.digest()
    asked = 0
    for call in capture.calls:
        for request in call if isinstance(call, list) else ():
            options = {"lora_name": request.lora_name, "cache_salt": request.cache_salt}
            tokens = [*request.prompt, *request.output]
            assert list(real.find(tokens, **options)) == naive.find(tokens, **options)
            asked += 1
    assert asked
