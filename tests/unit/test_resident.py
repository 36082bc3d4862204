"""The resident set: keys, digest, differences, and what a subscriber's items do to it."""

from __future__ import annotations

import copy
import struct

import pytest
import xxhash

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventList,
    KVEventBatch,
    ResidentKey,
    ResidentSet,
)
from kvevents.errors import EventTypeError
from kvevents.subscribe import Batch, Gap, Reset, Snapshot


def stored(*hashes: int | bytes, medium: str | None = "GPU", group: int | None = None) -> BlockStored:
    return BlockStored(list(hashes), None, [], 0, None, medium, None, group_idx=group)


def removed(*hashes: int | bytes, medium: str | None = "GPU", group: int | None = None) -> BlockRemoved:
    return BlockRemoved(list(hashes), medium, group)


def batch(seq: int, *events: object, source: str = "a") -> Batch:
    return Batch(source, seq, KVEventBatch(1.0, EventList(events)), replayed=False)


def test_a_key_is_hash_tier_and_group() -> None:
    s = ResidentSet([stored(1, 2), stored(1, medium="CPU"), stored(b"x" * 32, group=3)])
    assert len(s) == 4
    assert 1 in s
    assert (1, "CPU") in s
    assert (2, "CPU") not in s
    assert (b"x" * 32, "GPU", 3) in s
    assert (b"x" * 32, "GPU") not in s
    s.apply([removed(1)])
    assert (1, "GPU") not in s
    assert 1 in s


def test_storing_twice_and_removing_once_leaves_nothing() -> None:
    s = ResidentSet([stored(1), stored(1), removed(1)])
    assert len(s) == 0
    assert s.digest() == bytes(16)
    assert s.duplicate_stores == 1
    s.apply([removed(1)])
    assert s.unknown_removals == 1


def test_minus_one_and_all_ones_are_one_block() -> None:
    s = ResidentSet([stored(-1)])
    assert 2**64 - 1 in s
    assert s == ResidentSet([stored(2**64 - 1)])
    s.apply([removed(2**64 - 1)])
    assert len(s) == 0


def test_the_digest_is_the_sum_of_xxh3_128_over_packed_keys() -> None:
    key = b"\x95" + b"\xcf" + struct.pack(">Q", 2**40 + 5) + b"\xa3GPU" + b"\x00" + b"\xc0\xc0"
    one = ResidentSet([stored(2**40 + 5, group=0)])
    assert one.digest() == xxhash.xxh3_128_digest(key)
    wide = b"\x95" + b"\xc4\x20" + b"h" * 32 + b"\xa3CPU" + b"\xc0" + b"\xc0\xc0"
    both = ResidentSet([stored(b"h" * 32, medium="CPU"), stored(2**40 + 5, group=0)])
    total = (xxhash.xxh3_128_intdigest(key) + xxhash.xxh3_128_intdigest(wide)) % 2**128
    assert both.digest() == total.to_bytes(16, "big")


def test_a_clear_empties_every_tier() -> None:
    s = ResidentSet([stored(1), stored(2, medium="CPU"), AllBlocksCleared(), stored(3)])
    assert s.keys() == {ResidentKey(3, "GPU")}


def test_differences_name_what_is_missing_and_what_is_extra() -> None:
    truth = ResidentSet([stored(1, 2), stored(b"y" * 20, medium="CPU")])
    mine = ResidentSet([stored(2, -3)])
    assert mine.missing(truth) == {ResidentKey(1, "GPU"), ResidentKey(b"y" * 20, "CPU")}
    assert mine.extra(truth) == {ResidentKey(2**64 - 3, "GPU")}


def test_a_copy_is_independent() -> None:
    a = ResidentSet([stored(1)])
    b, c = a.copy(), copy.deepcopy(a._sets[None])
    b.apply([stored(2)])
    assert (len(a), len(b), len(c)) == (1, 2, 1)
    assert a != b
    assert a == ResidentSet([stored(1)])


def test_items_of_several_sources_stay_apart() -> None:
    s = ResidentSet()
    s.apply(batch(0, stored(1), source="a"))
    s.apply(batch(0, stored(1, 2), source="b"))
    assert s.sources == ["a", "b"]
    assert s.digest("a") == ResidentSet([stored(1)]).digest()
    s.apply(Reset("b", "restart"))
    assert (len(s), len(s.keys("a")), len(s.keys("b"))) == (1, 1, 0)
    with pytest.raises(EventTypeError, match="'a', 'b'"):
        s.digest()
    # Bare events are a source too, and are no longer meant by a name that was left out.
    s.apply([stored(1, 2, 3)])
    with pytest.raises(EventTypeError, match="'a', 'b', None"):
        s.digest()
    assert s.digest(None) == ResidentSet([stored(1, 2, 3)]).digest() != s.digest("a")
    s.drop("b")
    s.drop(None)
    assert s.digest() == s.digest("a")
    with pytest.raises(EventTypeError, match="None is none of 'a'"):
        s.digest(None)


def test_a_gap_is_remembered_until_something_makes_the_set_known_again() -> None:
    s = ResidentSet()
    s.apply(batch(0, stored(1)))
    assert s.why_invalid() is None
    s.apply(Gap("a", 1, 3, "too old"))
    assert s.why_invalid() == "gap 1 to 3: too old"
    s.apply(batch(4, stored(2)))
    assert s.why_invalid() is not None
    assert len(s) == 2
    s.apply(batch(5, AllBlocksCleared(), stored(3)))
    assert s.why_invalid() is None


def test_a_snapshot_replaces_but_never_takes_the_set_back() -> None:
    s = ResidentSet()
    s.apply(batch(0, stored(1)))
    s.apply(Gap("a", 1, 9, "too old"))
    s.apply(Snapshot("a", 10, EventList([stored(7, 8)])))
    assert s.keys() == {ResidentKey(7, "GPU"), ResidentKey(8, "GPU")}
    assert s.why_invalid() is None
    s.apply(Snapshot("a", 3, EventList([stored(1)])))
    assert s.keys() == {ResidentKey(7, "GPU"), ResidentKey(8, "GPU")}


def test_what_cannot_be_applied_is_an_error_and_changes_nothing() -> None:
    s = ResidentSet([stored(1)])
    with pytest.raises(EventTypeError, match="saw None"):
        s.apply(None)  # type: ignore[arg-type]
    with pytest.raises(EventTypeError, match="saw int"):
        s.apply(7)  # type: ignore[arg-type]
    with pytest.raises(EventTypeError, match="event 1"):
        s.apply([stored(2), "no event"])  # type: ignore[list-item]
    with pytest.raises(EventTypeError, match="not decoded"):
        s.apply(Batch("a", 0, None, replayed=False, payload=b""))
    assert s.keys() == {ResidentKey(1, "GPU")}
    assert None not in s
    assert "text" not in s


def test_memory_is_a_small_multiple_of_the_keys() -> None:
    s = ResidentSet()
    n = 7 << 13
    s.apply([stored(*range(2**40, 2**40 + n))])
    core = s._sets[None]
    assert len(core) == n
    assert core.nbytes < 24 * n
