"""`EnginePool` without an engine: the same calls as on `BlockPool`, with a request of the engine's shape."""

from __future__ import annotations

import random
import weakref
from typing import Any, Self

import pytest

from kvevents import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStored,
    EventList,
    KVCacheGroup,
    hash_blocks,
)
from kvevents._core import EnginePool

SIZE = 4


class Request:
    """What is read of an engine's request."""

    def __init__(self, tokens: list[int], **more: Any) -> None:
        self.block_hashes = [bytes(h) for h in hash_blocks(tokens, SIZE)]
        self.all_token_ids = tokens
        self.lora_request = self.session_id = self.mm_features = self.prompt_embeds = self.cache_salt = None
        vars(self).update(more)


class HandedOver(Exception):
    """The engine's own code would go on."""


class Pool(EnginePool):
    """As an engine's plug-in makes one."""

    def __new__(cls, blocks: int = 16, report: str = "every_copy") -> Self:
        """Any class will do for blocks; events are this package's."""
        return super().__new__(
            cls, blocks, SIZE, enable_caching=True, enable_kv_cache_events=True, medium="GPU", report=report,
            narrow=False, block_class=Request, event_classes=(BlockStored, BlockRemoved, AllBlocksCleared),
            extra_keys=lambda _request, first, _size, holes: [None if h else ("salt", first) for h in holes],
        )  # fmt: skip

    def __init__(self, blocks: int = 16, report: str = "every_copy") -> None:
        """Blocks find their pool."""
        self._bind(weakref.ref(self))

    def _hand_over(self, why: str) -> None:
        raise HandedOver(why)

    def _free_mixed(self, blocks: Any, why: str) -> None:
        raise HandedOver(why)


def ids(blocks: Any) -> list[int]:
    return [b.block_id for b in blocks]


@pytest.mark.parametrize("report", ["every_copy", "residency"])
def test_does_what_the_pool_of_the_package_does(report: str) -> None:
    rnd = random.Random(3)
    pool = Pool(16, report)
    pool._set_group(0, "full_attention", None)
    other = BlockPool(16, SIZE, report=report, groups=[KVCacheGroup(SIZE)])
    running: list[Any] = []
    for _ in range(400):
        if running and (rnd.random() < 0.5 or pool.get_num_free_blocks() < 5):
            held = running.pop(rnd.randrange(len(running)))
            pool.free_blocks(reversed(held))
            other.free_blocks(ids(held)[::-1])
        else:
            tokens = [rnd.randrange(2) for _ in range(rnd.randrange(1, 20))]
            request = Request(tokens, session_id=rnd.choice((None, "s")))
            held = []
            for h in request.block_hashes:
                hit = pool.get_cached_block(h, [0])
                found = other.get_cached_block(h)
                assert (hit is None) == (found is None)
                if hit is None:
                    break
                held += hit
            cached = len(held)
            pool.touch(held)
            other.touch(ids(held))
            new = pool.get_new_blocks(-(-len(tokens) // SIZE) - cached)
            assert ids(new) == list(other.get_new_blocks(len(new)))
            held += new
            full = len(request.block_hashes)
            pool.cache_full_blocks(request, held, cached, full, SIZE, 0)
            other.cache_full_blocks(
                None, ids(held), cached, full, block_hashes=request.block_hashes, token_ids=tokens,
                session_id=request.session_id,
            )  # fmt: skip
            running.append(held)
        if rnd.random() < 0.3:
            assert EventList(pool.to_events()) == other.take_events()
            assert ids(pool.to_free_blocks(99)) == list(other.free_order())
    assert pool.get_usage() == other.get_usage()


def test_extra_keys_are_asked_for_only_where_there_are_some() -> None:
    pool = Pool()
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(Request([1] * 8), blocks, 0, 2, SIZE, 0)
    salted = Request([2] * 12, cache_salt="x")
    pool.cache_full_blocks(salted, [*pool.get_new_blocks(2), *blocks[2:]], 0, 3, SIZE, 0, [True, False, True])
    pool.cache_full_blocks(salted, pool.get_new_blocks(3), 1, 3, SIZE, 0)
    keys = [event.extra_keys for event in pool.to_events()]  # type: ignore[attr-defined]
    assert keys == [[None, None], [("salt", 0), ("salt", 0)], [None, None]]


def test_hashes_that_connectors_put_in_are_found_and_leave_with_the_block() -> None:
    pool = Pool()
    (block,) = pool.get_new_blocks(1)
    first, second = b"a" * 32 + bytes(4), b"b" * 32 + bytes([0, 0, 0, 2])
    pool._insert_block_hash(first, block, 4)
    pool._insert_block_hash(second, block, None)
    pool._insert_block_hash(second, block, None)
    assert (block.block_hash, block.block_hash_num_tokens) == (first, 4)
    assert pool.to_keys_of(block.block_id) == [(first, 4), (second, None)]
    assert pool.to_copies(second) == [block]
    assert pool.to_events() == []
    assert pool._maybe_evict_cached_block(block) is True
    assert [e.group_idx for e in pool.to_events()] == [0, 2]  # type: ignore[attr-defined]
    assert block.block_hash is None
    assert sorted(pool.to_keys()) == []


def test_what_the_pool_cannot_do_is_handed_over_and_nothing_has_changed() -> None:
    pool = Pool()
    blocks = pool.get_new_blocks(3)
    request = Request([1] * 8)
    strange = Pool().get_new_blocks(1)
    wrong: list[Any] = [
        lambda: pool.cache_full_blocks(request, [*blocks[:1], *strange], 0, 2, SIZE, 0),
        lambda: pool.cache_full_blocks(request, blocks, 0, 3, SIZE, 0),  # more blocks than hashes
        lambda: pool.cache_full_blocks(request, blocks, 0, 2, SIZE + 1, 0),
        lambda: pool.cache_full_blocks(Request([1] * 8, block_hashes=(b"a",) * 2), blocks, 0, 2, SIZE, 0),
        lambda: pool.cache_full_blocks(Request([1] * 8, all_token_ids=["x"] * 8), blocks, 0, 2, SIZE, 0),
        lambda: pool.cache_full_blocks(request, blocks, 0, 2**62, SIZE, 0),
        lambda: pool.cache_full_blocks(request, blocks, 0, 2, SIZE, 0, [True]),
        lambda: pool.cache_partial_block(request, blocks[0], 3, 0, SIZE),
        lambda: pool.get_cached_block("no bytes", [0]),  # type: ignore[arg-type]
        lambda: pool.evict_blocks([99]),
        lambda: pool.free_blocks([*blocks, *blocks[:1]]),
        lambda: pool.touch(strange),
        lambda: pool._insert_block_hash(b"abc", blocks[0], 1),
        lambda: setattr(blocks[0], "ref_cnt", 0),
        lambda: setattr(blocks[0], "_block_hash", b"x"),
        blocks[0].reset_hash,
        lambda: blocks[0].next_free_block,
    ]
    for call in wrong:
        with pytest.raises(HandedOver):
            call()
    assert pool.to_events() == []
    assert [b.ref_cnt for b in blocks] == [1, 1, 1]
    assert pool.get_num_free_blocks() == 12
    with pytest.raises(ValueError, match="Cannot get 13 free blocks"):
        pool.get_new_blocks(13)


def test_blocks_are_the_same_objects_and_hold_their_pool_weakly() -> None:
    pool = Pool()
    blocks = pool.get_new_blocks(2)
    assert pool.to_blocks()[1] is blocks[0]
    assert blocks[0].pool is pool
    assert isinstance(blocks[0], Request)  # the engine's own class is what they say they are
    blocks[0].ref_cnt += 2
    assert blocks[0].ref_cnt == 3
    assert pool._next_free(None) is pool.to_blocks()[3]
    assert pool._next_free(blocks[0]) is None
    del pool
    assert blocks[0].pool is None
    assert (blocks[0].block_id, blocks[0].ref_cnt) == (1, 3)
