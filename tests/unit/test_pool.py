"""The block pool: allocation, hashes, errors, events off, the bounded queue, handles."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
import weakref
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from kvevents import (
    AllBlocksCleared,
    BlockIds,
    BlockPool,
    BlockRemoved,
    BlockStored,
    EventQueue,
    KVCacheGroup,
    ResidentSet,
    TokenBlocks,
)
from kvevents.errors import (
    BlockError,
    BlockTypeError,
    ConfigError,
    EventError,
    EventTypeError,
    KVEventsError,
    NoFreeBlocksError,
)

SIZE = 4


def request(tokens: Sequence[int], **options: Any) -> TokenBlocks:
    r = TokenBlocks(SIZE, **options)
    r.extend(tokens)
    return r


def filled(pool: BlockPool, tokens: Sequence[int], **options: Any) -> tuple[TokenBlocks, BlockIds]:
    """A request of which all full blocks are cached."""
    r = request(tokens, **options)
    blocks = pool.get_new_blocks(-(-len(tokens) // SIZE))
    pool.cache_full_blocks(r, blocks, 0, r.num_blocks)
    return r, blocks


def state(pool: BlockPool) -> tuple[Any, ...]:
    return pool.digest(), pool.free_order(), pool.stats(), [pool.ref_count(b) for b in range(pool.num_blocks)]


# ------------------------------------------------------------ allocation


def test_blocks_are_given_out_in_order_and_the_null_block_never() -> None:
    pool = BlockPool(6, SIZE)
    assert pool.get_num_free_blocks() == 5
    assert pool.get_new_blocks(3) == [1, 2, 3]
    assert pool.get_usage() == pytest.approx(0.6)
    assert pool.get_new_blocks(0) == []
    assert pool.free_order() == [4, 5]
    assert pool.NULL_BLOCK == 0


def test_freed_blocks_without_a_hash_go_first_and_cached_ones_last_in_the_given_order() -> None:
    pool = BlockPool(8, SIZE)
    _, blocks = filled(pool, range(10))
    assert blocks == [1, 2, 3]
    pool.free_blocks(blocks[::-1])
    # 3 has no hash: next. 2 and 1 are cached: last, the tail of the sequence before its head.
    assert pool.free_order() == [3, 4, 5, 6, 7, 2, 1]


def test_a_hit_takes_a_block_out_of_the_queue_and_two_users_must_free_it() -> None:
    pool = BlockPool(8, SIZE)
    r, blocks = filled(pool, range(8))
    pool.free_blocks(blocks[::-1])
    hits = pool.find_longest_cache_hit(r)
    assert hits == [1, 2]
    pool.touch(hits)
    pool.touch(hits)
    assert [pool.ref_count(b) for b in hits] == [2, 2]
    assert 1 not in pool.free_order()
    pool.free_blocks(hits)
    assert pool.get_num_free_blocks() == 5
    pool.free_blocks(hits[::-1])
    assert pool.get_num_free_blocks() == 7


def test_a_hit_is_limited_and_ends_at_the_first_miss() -> None:
    pool = BlockPool(16, SIZE)
    r, blocks = filled(pool, range(16))
    assert pool.find_longest_cache_hit(r, 3) == [1, 2, 3]
    assert pool.find_longest_cache_hit(list(r.block_hashes)) == [1, 2, 3, 4]
    assert pool.find_longest_cache_hit(r.block_hashes, max_blocks=0) == []
    pool.evict_blocks({blocks[1]})
    assert pool.find_longest_cache_hit(r) == [1]
    assert pool.find_longest_cache_hit(request([9] * 8)) == []


def test_a_sliding_window_needs_only_its_last_window() -> None:
    groups = [KVCacheGroup(SIZE), KVCacheGroup(SIZE, "sliding_window", 9)]
    pool = BlockPool(32, SIZE, groups=groups)
    r = request(range(24))
    blocks = pool.get_new_blocks(6)
    pool.cache_full_blocks(r, blocks, 0, 6, group=1)
    # 8 tokens before the next one are seen: two blocks.
    assert pool.find_longest_cache_hit(r, group=1) == [0, 0, 0, 0, 5, 6]
    pool.evict_blocks([5])
    assert pool.find_longest_cache_hit(r, group=1) == [0, 0, 3, 4]
    pool.evict_blocks([3])
    assert pool.find_longest_cache_hit(r, group=1) == [1, 2]
    assert pool.find_longest_cache_hit(r, group=0) == []


def test_one_hash_in_several_blocks_a_hit_takes_the_first_that_was_stored() -> None:
    pool = BlockPool(8, SIZE)
    r, first = filled(pool, range(4))
    _, second = filled(pool, range(4))
    assert pool.get_cached_block(r.block_hashes[0]) == first
    assert pool.stats().copies == 2
    pool.evict_blocks(first)
    assert pool.get_cached_block(r.block_hashes[0]) == second
    assert pool.get_cached_block(r.block_hashes[0], [0]) == second


def test_reset_is_refused_while_blocks_are_in_use_and_keeps_the_order_of_free_blocks() -> None:
    pool = BlockPool(8, SIZE)
    r, blocks = filled(pool, range(8))
    before = state(pool)
    assert pool.reset_prefix_cache() is False
    assert state(pool) == before
    pool.free_blocks(blocks[::-1])
    order = pool.free_order()
    pool.take_events()
    assert pool.reset_prefix_cache() is True
    assert pool.free_order() == order
    assert pool.find_longest_cache_hit(r) == []
    assert pool.take_events() == [AllBlocksCleared()]


def test_unpinned_blocks_go_to_the_tail_and_their_reuse_is_announced_once() -> None:
    pool = BlockPool(5, SIZE)
    blocks = pool.get_new_blocks(2)
    seen: list[int] = []
    pool.unpin_blocks(blocks, seen.append)
    assert pool.free_order() == [3, 4, 1, 2]
    taken = pool.get_new_blocks(3)
    assert seen == [1]
    pool.free_blocks(taken)
    assert pool.reset_prefix_cache()
    assert seen == [1, 2]
    pool.get_new_blocks(4)
    assert seen == [1, 2]


def test_what_a_callback_raises_costs_nobody_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: raised.append(args.exc_value))
    pool = BlockPool(4, SIZE)
    blocks = pool.get_new_blocks(2)
    told: list[int] = []

    def watch(block: int) -> None:
        told.append(block)
        pool.free_blocks([99])

    pool.unpin_blocks(blocks, watch)
    taken = pool.get_new_blocks(3)
    assert sorted(taken) == [1, 2, 3]
    assert sorted(told) == sorted(blocks)
    assert [type(e) for e in raised] == [BlockError, BlockError]
    pool.unpin_blocks(taken, watch)
    assert pool.reset_prefix_cache()
    assert len(told) == 5


def test_moved_hashes_stay_resident_without_an_event() -> None:
    pool = BlockPool(8, SIZE)
    r, _ = filled(pool, range(4))
    pool.take_events()
    before = pool.digest()
    dst = pool.get_new_blocks(1)[0]
    assert pool.is_block_writable(dst)
    assert not pool.is_block_writable(1)
    pool.move_block_hashes(1, dst)
    assert pool.get_cached_block(r.block_hashes[0]) == [dst]
    assert pool.block_hash(1) is None
    assert pool.block_hash(dst) == r.block_hashes[0]
    assert (pool.digest(), len(pool.take_events())) == (before, 0)


# ------------------------------------------------------------ forms of arguments


def forms(r: TokenBlocks) -> dict[str, dict[str, Any]]:
    tokens = r.to_token_ids()
    return {
        "lists": {"block_hashes": list(r.block_hashes), "token_ids": tokens},
        "buffers": {"block_hashes": r.block_hashes, "token_ids": array("i", tokens)},
        "memoryview": {
            "block_hashes": memoryview(r.block_hashes),
            "token_ids": memoryview(array("Q", tokens)),
        },
        "tuples": {"block_hashes": tuple(r.block_hashes), "token_ids": tuple(tokens)},
    }


@pytest.mark.parametrize("form", ["lists", "buffers", "memoryview", "tuples"])
@pytest.mark.parametrize("report", ["residency", "every_copy"])
def test_a_request_as_handle_lists_or_buffers_gives_the_same_events(form: str, report: str) -> None:
    r = request(range(100, 130))
    by_handle, by_parts = BlockPool(16, SIZE, report=report), BlockPool(16, SIZE, report=report)
    for start, end in [(0, 2), (2, 3), (3, 7)]:
        for pool, arguments in ((by_handle, {}), (by_parts, forms(r)[form])):
            blocks = [*range(1, 8)]
            if start == 0:
                pool.get_new_blocks(8)
            pool.cache_full_blocks(None if arguments else r, blocks, start, end, **arguments)
    assert by_handle.take_events() == by_parts.take_events()
    assert by_handle.digest() == by_parts.digest()


def test_integer_hashes_and_narrowed_digests() -> None:
    r = request(range(8), algorithm="xxh3_64")
    pool = BlockPool(8, SIZE)
    pool.cache_full_blocks(r, pool.get_new_blocks(2), 0, 2)
    assert pool.take_events()[0].block_hashes == list(r.block_hashes)
    assert pool.get_cached_block(r.block_hashes[1]) == [2]

    r = request(range(8))
    pool = BlockPool(8, SIZE, hash_form="int")
    pool.cache_full_blocks(r, pool.get_new_blocks(2), 0, 1)
    pool.cache_full_blocks(r, [1, 2], 1, 2)
    low = [int.from_bytes(h[-8:], "big") for h in r.block_hashes]
    events = pool.take_events()
    assert [e.block_hashes for e in events] == [[low[0]], [low[1]]]
    assert events[1].parent_block_hash == low[0]
    # The key stays the whole digest.
    assert pool.get_cached_block(r.block_hashes[1]) == [2]
    assert pool.get_cached_block(low[1]) is None
    assert ResidentSet(events).digest() == pool.digest()


def test_lora_extra_keys_and_session_travel_with_the_blocks() -> None:
    r = request(range(8), lora_name="a", lora_path="/a", lora_id=3, cache_salt="s", mm=[("img", 5, 2)])
    pool = BlockPool(8, SIZE)
    pool.cache_full_blocks(r, pool.get_new_blocks(2), 0, 2, session_id="x")
    (event,) = pool.take_events()
    assert (event.lora_name, event.lora_id, event.session_id) == ("a", 3, "x")
    assert event.extra_keys == [("a", "s"), ("a", ("img", 1))]
    again = pool.snapshot()
    assert [h for e in again for h in e.block_hashes] == event.block_hashes
    assert [k for e in again for k in e.extra_keys] == event.extra_keys
    assert {(e.lora_name, e.lora_id, e.session_id) for e in again} == {("a", 3, "x")}

    by_lists = BlockPool(8, SIZE)
    by_lists.cache_full_blocks(
        None,
        by_lists.get_new_blocks(2),
        0,
        2,
        block_hashes=list(r.block_hashes),
        token_ids=list(range(8)),
        lora_name="a",
        lora_id=3,
        extra_keys=[("a", "s"), ["a", ("img", 1)]],
        session_id="x",
    )
    assert by_lists.take_events() == [event]


def test_sessions_that_come_and_go_leave_nothing_behind() -> None:
    """Attributes are shared by number; a number that is used again must not carry old names."""
    pool = BlockPool(3, SIZE)
    for i in range(200):
        r = request([i] * SIZE)
        blocks = pool.get_new_blocks(1)
        pool.cache_full_blocks(r, blocks, 0, 1, session_id=f"s{i}")
        pool.free_blocks(blocks)
        if i % 7 == 0:
            stored = [e for e in pool.take_events() if isinstance(e, BlockStored)]
            assert stored[-1].session_id == f"s{i}"
            assert [e.session_id for e in stored] == [f"s{j}" for j in range(i - len(stored) + 1, i + 1)]
    assert sorted(e.session_id for e in pool.snapshot()) == ["s198", "s199"]


# ------------------------------------------------------------ mistakes


def mistakes() -> dict[str, Any]:
    r = request(range(8))
    lists = {"block_hashes": list(r.block_hashes), "token_ids": list(range(8))}
    return {
        "more blocks than are free": lambda p: p.get_new_blocks(100),
        "negative count": lambda p: p.get_new_blocks(-1),
        "huge count": lambda p: p.get_new_blocks(1 << 70),
        "touch out of range": lambda p: p.touch([1, 16]),
        "touch a negative id": lambda p: p.touch([1, -1]),
        "free out of range": lambda p: p.free_blocks([1, 16]),
        "free a free block": lambda p: p.free_blocks([1, 9]),
        "free twice in one list": lambda p: p.free_blocks([1, 2, 1]),
        "unpin the null block": lambda p: p.unpin_blocks([1, 0]),
        "unpin a free block": lambda p: p.unpin_blocks([1, 9]),
        "evict out of range": lambda p: p.evict_blocks([1, 99]),
        "move from the null block": lambda p: p.move_block_hashes(0, 3),
        "move to a free block": lambda p: p.move_block_hashes(1, 9),
        "move to a cached block": lambda p: p.move_block_hashes(1, 2),
        "more cached than full": lambda p: p.cache_full_blocks(r, [3], 2, 1),
        "too few blocks": lambda p: p.cache_full_blocks(r, [3], 0, 2),
        "too few hashes": lambda p: p.cache_full_blocks(r, [3, 4, 5], 0, 3),
        "too few hashes in a list": lambda p: p.cache_full_blocks(
            None, [3, 4], 0, 2, block_hashes=lists["block_hashes"][:1], token_ids=range(8)
        ),
        "too few tokens": lambda p: p.cache_full_blocks(
            None, [3, 4], 0, 2, block_hashes=lists["block_hashes"], token_ids=list(range(7))
        ),
        "no tokens": lambda p: p.cache_full_blocks(None, [3, 4], 0, 2, block_hashes=lists["block_hashes"]),
        "a token of 64 bits": lambda p: p.cache_full_blocks(
            None, [3], 0, 1, block_hashes=lists["block_hashes"], token_ids=[1, 2, 3, 1 << 64]
        ),
        "block out of range": lambda p: p.cache_full_blocks(r, [3, 16], 0, 2),
        "a free block": lambda p: p.cache_full_blocks(r, [3, 9], 0, 2),
        "one block twice": lambda p: p.cache_full_blocks(r, [3, 3], 0, 2),
        "a block that holds another hash": lambda p: p.cache_full_blocks(r, [1, 3], 0, 2),
        "no such group": lambda p: p.cache_full_blocks(r, [3], 0, 1, group=1),
        "blocks of another size": lambda p: p.cache_full_blocks(TokenBlocks(8), [3], 0, 1),
        "hashes of another form": lambda p: p.cache_full_blocks(
            None, [3], 0, 1, block_hashes=[7], token_ids=range(4)
        ),
        "hashes of several forms": lambda p: p.cache_full_blocks(
            None, [3, 4], 0, 2, block_hashes=[lists["block_hashes"][0], b"x"], token_ids=range(8)
        ),
        "too few extra keys": lambda p: p.cache_full_blocks(None, [3, 4], 0, 2, **lists, extra_keys=[None]),
        "counts beyond all memory": lambda p: p.cache_full_blocks(r, [3], 2**62, 2**63),
        "a boundary between hashes": lambda p: p.cache_partial_block(r, 3, 5),
        "a boundary behind the hashes": lambda p: p.cache_partial_block(r, 3, 12),
        "a boundary of nothing": lambda p: p.cache_partial_block(r, 3, 0),
        "a partial block that is free": lambda p: p.cache_partial_block(r, 9, 4),
        "a lookup in no group": lambda p: p.get_cached_block(r.block_hashes[0], [3]),
        "hits of another block size": lambda p: p.find_longest_cache_hit(TokenBlocks(2)),
    }


@pytest.mark.parametrize("name", mistakes())
def test_a_mistake_is_one_typed_error_and_nothing_has_changed(name: str) -> None:
    pool = BlockPool(16, SIZE)
    filled(pool, range(100, 108))  # blocks 1 and 2
    pool.get_new_blocks(6)  # 3 to 8
    before = state(pool)
    with pytest.raises(BlockError) as caught:
        mistakes()[name](pool)
    assert isinstance(caught.value, (KVEventsError, ValueError))
    assert state(pool) == before
    assert len(pool.take_events()) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.get_new_blocks("3"),
        lambda p: p.get_new_blocks(1.0),
        lambda p: p.touch(5),
        lambda p: p.free_blocks(["1"]),
        lambda p: p.cache_full_blocks("request", [1], 0, 1),
        lambda p: p.cache_full_blocks(None, [1], 0, 1),
        lambda p: p.cache_full_blocks(request(range(4)), [1], 0, 1, token_ids=[1]),
        lambda p: p.cache_full_blocks(None, [1], 0, 1, block_hashes=[1.5], token_ids=[1] * 4),
        lambda p: p.cache_full_blocks(None, [1], 0, 1, block_hashes=[1], token_ids=["a"] * 4),
        lambda p: p.cache_full_blocks(None, [1], 0, 1, block_hashes=[1], token_ids=[1] * 4, extra_keys=[3]),
        lambda p: p.get_cached_block(1.5),
        lambda p: p.unpin_blocks([1], 5),
    ],
)
def test_a_wrong_type_is_a_type_error_of_ours_and_nothing_has_changed(call: Any) -> None:
    pool = BlockPool(16, SIZE)
    pool.get_new_blocks(2)
    before = state(pool)
    with pytest.raises(BlockTypeError):
        call(pool)
    assert issubclass(BlockTypeError, TypeError)
    assert state(pool) == before


def test_the_message_says_what_was_asked_and_what_there_is() -> None:
    pool = BlockPool(4, SIZE)
    with pytest.raises(NoFreeBlocksError, match=r"9 blocks were asked for, 3 are free"):
        pool.get_new_blocks(9)
    with pytest.raises(BlockError, match=r"blocks\[1\]: block 7 of a pool of 4 \(0 to 3\)"):
        pool.touch([1, 7])
    with pytest.raises(BlockError, match=r"2 block hashes are needed, the request has 1"):
        pool.cache_full_blocks(request(range(4)), pool.get_new_blocks(2), 0, 2)
    hashes = list(request(range(8)).block_hashes)
    with pytest.raises(BlockError, match=r"8 token ids are needed, the request has 6"):
        pool.cache_full_blocks(None, [1, 2], 0, 2, block_hashes=hashes, token_ids=list(range(6)))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"report": "all"}, "residency, every_copy"),
        ({"hash_form": "hex"}, "bytes, int"),
        ({"groups": [KVCacheGroup(6)]}, "multiple of 4"),
        ({"groups": [KVCacheGroup(4, sliding_window=0)]}, "sliding_window"),
        ({"groups": [7]}, "KVCacheGroup"),
        ({"max_queued_events": 0}, "max_queued_events"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        BlockPool(**{"num_blocks": 8, "block_size": SIZE, **arguments})


# ------------------------------------------------------------ switches


def test_without_caching_nothing_is_found_and_nothing_is_kept() -> None:
    pool = BlockPool(8, SIZE, enable_caching=False)
    r, blocks = filled(pool, range(8))
    pool.free_blocks(blocks[::-1])
    assert pool.free_order()[:2] == [2, 1]
    assert pool.find_longest_cache_hit(r) == []
    assert len(pool.take_events()) == 0
    assert pool.stats().copies == 0
    assert pool.reset_prefix_cache()


def test_without_events_there_are_none_and_tokens_are_not_even_read() -> None:
    pool = BlockPool(8, SIZE, enable_kv_cache_events=False)
    r = request(range(8))
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(None, blocks, 0, 2, block_hashes=r.block_hashes)
    assert pool.find_longest_cache_hit(r) == blocks
    pool.free_blocks(blocks)
    pool.get_new_blocks(7)
    assert len(pool.take_events()) == 0
    with pytest.raises(BlockError, match="enable_kv_cache_events"):
        pool.snapshot()
    assert pool.digest() == ResidentSet().digest()


def test_a_pool_can_be_subclassed_and_is_hashed_by_identity() -> None:
    class Mine(BlockPool):
        def take_events(self) -> Any:
            return [*super().take_events(), "mine"]

    pool = Mine(4, SIZE)
    assert pool.take_events() == ["mine"]
    assert {pool: 1}[pool] == 1
    assert pool != Mine(4, SIZE)
    gone = weakref.ref(pool) if hasattr(pool, "__weakref__") else None
    del pool
    gc.collect()
    assert gone is None or gone() is None


# ------------------------------------------------------------ the bounded queue


@pytest.mark.parametrize("report", ["residency", "every_copy"])
def test_a_queue_that_nobody_drains_becomes_a_clear_and_what_is_resident(report: str) -> None:
    pool = BlockPool(64, SIZE, max_queued_events=10, report=report)
    reader = ResidentSet()
    for i in range(40):
        r = request([i, *range(11)])
        blocks = pool.get_new_blocks(3)
        pool.cache_full_blocks(r, blocks, 0, 3)
        pool.free_blocks(blocks[::-1])
        assert pool.stats().queued_events <= 10
    assert (pool.stats().resyncs, pool.stats().dropped_events) == (1, 10)
    events = pool.take_events()
    assert events[0] == AllBlocksCleared()
    announced: set[Any] = set()
    for e in events[1:]:
        assert isinstance(e, BlockStored)
        assert e.parent_block_hash is None or e.parent_block_hash in announced
        announced.update(e.block_hashes)
    reader.apply(events)
    assert reader.digest() == pool.digest()
    # From here on as before: the mark is gone.
    filled(pool, range(8))
    reader.apply(pool.take_events())
    assert reader.digest() == pool.digest()
    assert pool.stats().resyncs == 1


def test_taking_events_costs_the_same_however_many_wait() -> None:
    pool = BlockPool(4096, SIZE)
    first = pool.take_events()
    filled(pool, range(SIZE * 4000))
    many = pool.take_events()
    assert (len(first), len(many), len(pool.take_events())) == (0, 1, 0)
    assert len(many[0].block_hashes) == 4000


def test_several_threads_may_use_one_pool() -> None:
    pool = BlockPool(64, SIZE)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(200):
                r = request([seed, i % 5] * 4)
                blocks = pool.get_new_blocks(2)
                pool.cache_full_blocks(r, blocks, 0, 2)
                pool.free_blocks(blocks[::-1])
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert not errors
    assert pool.get_num_free_blocks() == 63
    assert ResidentSet(pool.take_events()).digest() == pool.digest()


# ------------------------------------------------------------ block ids


def test_block_ids_are_a_sequence_and_a_buffer() -> None:
    ids = BlockIds([5, 6, 7, 6])
    assert isinstance(ids, Sequence)
    assert (ids[0], ids[-1], ids[1:3], ids[::-1]) == (5, 6, [6, 7], [6, 7, 6, 5])
    assert isinstance(ids[1:], BlockIds)
    assert (list(ids), list(reversed(ids))) == ([5, 6, 7, 6], [6, 7, 6, 5])
    assert ids + [1] == BlockIds((5, 6, 7, 6, 1))
    assert (ids.index(6), ids.count(6), 7 in ids, "7" in ids) == (1, 2, True, False)
    view = memoryview(ids)
    assert (view.format, view.itemsize, view.readonly, view.tolist()) == ("i", 4, True, [5, 6, 7, 6])
    assert pickle.loads(pickle.dumps(ids)) == ids
    assert (repr(ids), ids.to_list()) == ("BlockIds([5, 6, 7, 6])", [5, 6, 7, 6])
    assert ids != [5]
    with pytest.raises(IndexError):
        ids[4]
    with pytest.raises(ValueError, match="not among"):
        ids.index(9)
    with pytest.raises(BlockError):
        BlockIds([-1])


# ------------------------------------------------------------ the queue alone


def test_a_queue_joins_events_that_continue_each_other() -> None:
    q = EventQueue()
    q.push_stored([1, 2], None, range(8), 4)
    q.push_stored([3], 2, range(4), 4)
    q.push_stored([4], 3, range(4), 4, lora_name="a")
    q.push_removed([1])
    q.push_removed([2])
    q.push_removed([3], group_idx=1)
    q.push_cleared()
    assert len(q) == 5
    events = list(q.take())
    assert [getattr(e, "block_hashes", None) for e in events] == [[1, 2, 3], [4], [1, 2], [3], None]
    assert events[0].token_ids == [*range(8), *range(4)]
    assert len(q.take()) == 0


def test_events_with_other_metadata_are_not_joined() -> None:
    q = EventQueue()
    q.push_stored([b"a" * 8], None, range(4), 4, metadata={"why": 1})
    q.push_stored([b"b" * 8], b"a" * 8, range(4), 4)
    q.push_removed([b"a" * 8], metadata={"reason": "demoted"})
    q.push_removed([b"b" * 8])
    assert [e.metadata for e in q.take()] == [{"why": 1}, None, {"reason": "demoted"}, None]


def test_a_queue_takes_events_of_others_word_for_word() -> None:
    q = EventQueue()
    store = BlockStored([1], None, [1, 2], 2, None, "CPU", None)
    odd = BlockStored([1, 2], 5, [1, 2, 3], 2, None, "CPU", None)
    q.append(store)
    q.extend([BlockStored([2], 1, [3, 4], 2, None, "CPU", None), odd, BlockRemoved([-1], "CPU")])
    events = q.take()
    assert [getattr(e, "block_hashes") for e in events] == [[1, 2], [1, 2], [-1]]  # noqa: B009
    assert events[1] == odd
    with pytest.raises(EventTypeError):
        q.extend([store, 7])  # type: ignore[list-item]
    assert len(q) == 0


def test_a_full_queue_says_so_and_counts() -> None:
    q = EventQueue(max_queued_events=3)
    for i in range(4):
        q.push_removed([i], group_idx=i)
    assert (q.overflows, q.dropped_events, q.max_queued_events) == (1, 3, 3)
    events = q.take()
    assert events.overflowed
    assert [e.block_hashes for e in events] == [[3]]
    q.push_cleared()
    assert not q.take().overflowed


@pytest.mark.parametrize(
    "call",
    [
        lambda q: q.push_stored([1], None, [1, 2, 3], 4),
        lambda q: q.push_stored([], None, [], 4),
        lambda q: q.push_stored([1], None, [1], 0),
        lambda q: q.push_stored([1.5], None, [1], 1),
        lambda q: q.push_stored([1], 1.5, [1], 1),
        lambda q: q.push_stored([1], None, [1 << 32], 1),
        lambda q: q.push_stored([1], None, [1], 1, extra_keys=[None, None]),
        lambda q: q.push_removed([]),
        lambda q: q.push_removed([1 << 64]),
    ],
)
def test_a_queue_refuses_what_does_not_fit_together(call: Any) -> None:
    q = EventQueue()
    with pytest.raises((EventError, EventTypeError)):
        call(q)
    assert len(q) == 0


def test_a_queue_is_safe_from_several_threads() -> None:
    q = EventQueue()
    taken: list[Any] = []

    def push(worker: int) -> None:
        for i in range(500):
            q.push_removed([worker * 1000 + i], group_idx=worker)
            if i % 50 == 0:
                taken.extend(q.take())

    threads = [threading.Thread(target=push, args=(w,)) for w in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    taken.extend(q.take())
    assert sorted(h for e in taken for h in e.block_hashes) == [
        w * 1000 + i for w in range(4) for i in range(500)
    ]
