"""Events are read from Structs of any class, and from lists of any integers, as their attributes say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvevents import AllBlocksCleared, BlockRemoved, EventList
from kvevents import BlockStored as Ours
from kvevents.errors import EventError, EventTypeError


class BlockStored(msgspec.Struct):
    """An engine's, with fields in another order and some missing."""

    token_ids: Any
    block_hashes: Any
    block_size: Any = 2
    parent_block_hash: Any = None
    medium: Any = "GPU"
    lora_id: Any = None
    lora_name: Any = None
    group_idx: Any = None


def stored(**fields: Any) -> BlockStored:
    return BlockStored(**{"token_ids": [1, 2], "block_hashes": [7], **fields})


def read(event: Any) -> Any:
    return EventList([event])[0]


BORDERS = sorted({n for bits in (0, 15, 29, 30, 31, 32) for n in ((1 << bits) - 1, 1 << bits) if n < 1 << 32})


@pytest.mark.parametrize("value", BORDERS)
def test_token_ids_of_every_length(value: int) -> None:
    assert read(stored(token_ids=[value, 3])).token_ids == [value, 3]
    assert read(stored(token_ids=[3, value])).token_ids == [3, value]


@pytest.mark.parametrize(
    "value",
    [0, 1, 2**30 - 1, 2**30, 2**60 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**30), -(2**60), -(2**63)],
)
def test_hashes_of_every_length_and_sign(value: int) -> None:
    event = read(stored(block_hashes=[value, 5], token_ids=[1, 2, 3, 4]))
    assert [h % 2**64 for h in event.block_hashes] == [value % 2**64, 5]
    assert EventList([stored(block_hashes=[value])]) == [Ours([value], None, [1, 2], 2, None, "GPU", None)]


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 1.0, "x", None])
def test_what_is_no_hash_is_refused_wherever_it_stands(value: object) -> None:
    for hashes in ([value], [1, value], [1, 2, 3, value]):
        with pytest.raises(EventError, match=rf"event 0: block_hashes\[{len(hashes) - 1}\]"):
            EventList([stored(block_hashes=hashes)])


class Number(int):
    """No exact integer, but one."""


class Index:
    """Something that is an integer when asked."""

    def __index__(self) -> int:
        return 9


def test_what_counts_as_an_integer() -> None:
    assert read(stored(token_ids=[Number(4), True])).token_ids == [4, 1]
    assert read(stored(token_ids=[4, Index()])).token_ids == [4, 9]
    assert read(stored(block_hashes=[Number(4)])).block_hashes == [4]


def test_a_list_that_shrinks_while_it_is_read_is_read_as_it_is_then() -> None:
    tokens: list[Any] = [1, 2, 3]

    class Shrinks:
        def __index__(self) -> int:
            tokens.clear()
            return 5

    tokens.insert(1, Shrinks())
    assert EventList([stored(token_ids=tokens)]).irregular == 1
    assert tokens == []


def test_fields_of_another_order_and_class() -> None:
    event = read(stored(medium="CPU", group_idx=3, parent_block_hash=b"p", block_hashes=[b"h"]))
    assert event == Ours([b"h"], b"p", [1, 2], 2, None, "CPU", None, group_idx=3)


def test_what_events_share_is_not_taken_from_another_kind_or_class() -> None:
    events = [
        stored(medium="GPU", group_idx=1),
        BlockRemoved([7], "GPU", 1),
        stored(medium="CPU", group_idx=1),
        BlockRemoved([7], "CPU"),
        Ours([7], None, [1, 2], 2, None, "CPU", "lora", group_idx=1),
        stored(medium="CPU", group_idx=1),
        AllBlocksCleared(),
        BlockRemoved([7], None, 1, locality="REMOTE"),
        BlockRemoved([7], None, 1),
        stored(medium=None, block_size=1, token_ids=[1]),
    ]
    got = list(EventList(events))
    assert [type(e).__name__ for e in got] == [type(e).__name__ for e in events]
    for event, mine in zip(events, got, strict=True):
        for name in ("medium", "group_idx", "lora_name", "locality", "block_size"):
            if hasattr(mine, name):
                assert getattr(mine, name) == getattr(event, name, None), (event, name)


def test_attributes_that_are_no_fields_of_a_struct() -> None:
    class BlockStored(msgspec.Struct):
        block_hashes: list[int]

        @property
        def medium(self) -> str:
            return "STORAGE"

    assert read(BlockStored([1])).medium == "STORAGE"

    class WithDict(BlockStored, dict=True):
        pass

    event = WithDict([1])
    event.group_idx = 4  # type: ignore[attr-defined]
    WithDict.__name__ = "BlockStored"
    assert (read(event).medium, read(event).group_idx) == ("STORAGE", 4)


def test_objects_that_are_no_structs() -> None:
    class BlockStored(SimpleNamespace):
        pass

    event = BlockStored(
        block_hashes=[1], token_ids=[4, 5], block_size=2, medium="GPU", parent_block_hash=None
    )
    assert read(event) == Ours([1], None, [4, 5], 2, None, "GPU", None)


def test_a_struct_whose_field_was_deleted_is_read_without_it() -> None:
    event = stored()
    del event.lora_name
    assert read(event) == Ours([7], None, [1, 2], 2, None, "GPU", None)
    del event.block_hashes
    with pytest.raises(EventTypeError, match="block_hashes"):
        EventList([event])


def test_more_classes_than_are_remembered() -> None:
    for n in range(100):
        cls = msgspec.defstruct(
            "BlockStored", [("block_hashes", list), (f"other_{n}", int, 0), ("medium", str, "GPU")]
        )
        assert read(cls([n])).block_hashes == [n]


@pytest.mark.parametrize(
    ("keys", "kept"),
    [([None], [None]), ([("a", 1)], [("a", 1)]), (None, None), ([], []), ([None, None], [None, None])],
)
def test_extra_keys(keys: Any, kept: Any) -> None:
    assert read(Ours([7], None, [1, 2], 2, None, "GPU", None, extra_keys=keys)).extra_keys == kept


def test_the_reader_stands_for_its_events_again() -> None:
    mine = [stored(block_hashes=[n], token_ids=[n, n]) for n in range(4)]
    columns = EventList(mine)
    some = EventList([mine[2], mine[0], stored(block_hashes=[9])])
    again = some.to_originals(columns, mine)
    assert again[0] is mine[2]
    assert again[1] is mine[0]
    assert again[2] == Ours([9], None, [1, 2], 2, None, "GPU", None)


def test_cuts_do_not_count_for_the_same_blocks() -> None:
    whole = EventList([Ours([1, 2], None, [1, 2, 3, 4], 2, None, "GPU", None)])
    halves = EventList(
        [Ours([1], None, [1, 2], 2, None, "GPU", None), Ours([2], 1, [3, 4], 2, None, "GPU", None)]
    )
    assert whole.same_blocks(halves)
    assert halves.same_blocks(whole)
    other = EventList(
        [Ours([1], None, [1, 2], 2, None, "GPU", None), Ours([2], 1, [3, 5], 2, None, "GPU", None)]
    )
    assert not whole.same_blocks(other)
