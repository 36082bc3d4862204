"""What went wrong in other engines' pools, as tests of ours; `docs/field-reports.md` has the table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvevents import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStored,
    EventQueue,
    KVCacheGroup,
    ResidentSet,
    TokenBlocks,
)

SIZE = 4


def request(tokens: Sequence[int], size: int = SIZE, **options: Any) -> TokenBlocks:
    r = TokenBlocks(size, **options)
    r.extend(tokens)
    return r


def stored(events: Any) -> list[BlockStored]:
    return [e for e in events if isinstance(e, BlockStored)]


def removed(events: Any) -> list[Any]:
    return [h for e in events if isinstance(e, BlockRemoved) for h in e.block_hashes]


# ------------------------------------------------------------ R17


def test_removing_one_of_two_copies_does_not_announce_the_hash_as_gone() -> None:
    pool = BlockPool(8, SIZE)
    r = request(range(8))
    for _ in range(2):  # the same prompt, computed twice: two blocks for each hash
        pool.cache_full_blocks(r, blocks := pool.get_new_blocks(2), 0, 2)
    assert len(stored(pool.take_events())) == 1
    pool.evict_blocks(blocks)
    assert len(pool.take_events()) == 0
    assert pool.find_longest_cache_hit(r) == [1, 2]
    pool.evict_blocks([1, 2])
    assert removed(pool.take_events()) == list(r.block_hashes)


def test_every_copy_balances_stores_and_removals() -> None:
    pool = BlockPool(8, SIZE, report="every_copy")
    r = request(range(4))
    for _ in range(2):
        pool.cache_full_blocks(r, pool.get_new_blocks(1), 0, 1)
    pool.evict_blocks([1])
    pool.evict_blocks([2])
    events = pool.take_events()
    assert (len(stored(events)), len(removed(events))) == (2, 2)


# ------------------------------------------------------------ R18


def test_tokens_always_belong_to_the_hashes_beside_them_when_blocks_are_skipped() -> None:
    pool = BlockPool(8, SIZE)
    r = request(range(20), cache_salt="s")
    new = pool.get_new_blocks(3)
    pool.cache_full_blocks(r, [0, new[0], new[1], 0, new[2]], 0, 5)
    first, second = pool.take_events()
    h = list(r.block_hashes)
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == (
        [h[1], h[2]],
        h[0],
        [*range(4, 12)],
    )
    assert (second.block_hashes, second.parent_block_hash, second.token_ids) == (
        [h[4]],
        h[3],
        [*range(16, 20)],
    )
    for e in (first, second):
        assert len(e.token_ids) == len(e.block_hashes) * e.block_size
        assert len(e.extra_keys) == len(e.block_hashes)


def test_every_copy_has_the_engines_own_shape_for_skipped_blocks() -> None:
    pool = BlockPool(8, SIZE, report="every_copy")
    r = request(range(8))
    pool.cache_full_blocks(r, [0, pool.get_new_blocks(1)[0]], 0, 2)
    (event,) = events = pool.take_events()
    assert (event.block_hashes, event.token_ids) == ([r.block_hashes[1]], [*range(8)])
    assert event.extra_keys == [None]
    assert events.irregular == 1


# ------------------------------------------------------------ R26


@pytest.mark.parametrize(
    ("options", "name", "number"),
    [
        ({}, None, None),
        ({"lora_name": "a", "lora_id": 1}, "a", 1),
        ({"lora_name": "a"}, "a", None),
        ({"lora_id": 7}, None, 7),
    ],
)
@pytest.mark.parametrize("report", ["residency", "every_copy"])
def test_adapters_with_and_without_name_and_number_make_events(
    options: dict[str, Any], name: str | None, number: int | None, report: str
) -> None:
    pool = BlockPool(8, SIZE, report=report)
    pool.cache_full_blocks(request(range(8), **options), pool.get_new_blocks(2), 0, 2)
    (event,) = pool.take_events()
    assert (event.lora_name, event.lora_id) == (name, number)
    assert event.extra_keys == ([(name,), (name,)] if name else [None, None])


# ------------------------------------------------------------ R51, R52


def partial_pool(report: str = "residency") -> tuple[BlockPool, TokenBlocks, Any]:
    """Hash step 4, block 16: one full block, and 12 tokens of the next."""
    pool = BlockPool(8, 4, groups=[KVCacheGroup(16)], report=report)
    r = request(range(28))
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(r, blocks, 0, 1)
    return pool, r, blocks


def test_a_partial_block_names_a_parent_that_was_announced() -> None:
    pool, r, blocks = partial_pool()
    h = list(r.block_hashes)
    assert pool.cache_partial_block(r, blocks[1], 24) == h[5]
    full, partial = pool.take_events()
    assert full.block_hashes == [h[3]]
    assert (partial.parent_block_hash, partial.block_hashes) == (h[3], [h[5]])
    assert (partial.token_ids, partial.block_size) == ([*range(16, 24)], 8)
    assert partial.extra_keys == [None]


def test_a_partial_block_whose_ancestors_are_gone_spans_from_the_root() -> None:
    pool, r, blocks = partial_pool()
    pool.evict_blocks([blocks[0]])
    pool.cache_partial_block(r, blocks[1], 24)
    partial = stored(pool.take_events())[-1]
    assert (partial.parent_block_hash, partial.token_ids) == (None, [*range(24)])


def test_every_copy_reports_a_partial_block_as_the_engine_does() -> None:
    pool, r, blocks = partial_pool("every_copy")
    pool.cache_partial_block(r, blocks[1], 24)
    partial = stored(pool.take_events())[-1]
    assert (partial.parent_block_hash, partial.token_ids) == (r.block_hashes[4], [*range(20, 24)])


def test_a_promoted_block_takes_the_boundary_inside_it_out_of_the_stream_for_good() -> None:
    pool = BlockPool(8, 4, groups=[KVCacheGroup(16)])
    r = request(range(16))
    h = list(r.block_hashes)
    blocks = pool.get_new_blocks(1)
    assert pool.cache_partial_block(r, blocks[0], 8) == h[1]
    pool.cache_full_blocks(r, blocks, 0, 1)
    assert [getattr(e, "block_hashes") for e in pool.take_events()] == [[h[1]], [h[1]], [h[3]]]  # noqa: B009
    # The calls once more: refused, and nothing comes back.
    assert pool.cache_partial_block(r, blocks[0], 8) is None
    pool.cache_full_blocks(r, blocks, 0, 1)
    assert len(pool.take_events()) == 0
    assert pool.get_cached_block(h[1]) is None


# ------------------------------------------------------------ R57


def evict_by_allocation(pool: BlockPool, block: int) -> None:
    pool.free_blocks([block])
    pool.get_new_blocks(pool.get_num_free_blocks())


def replace(pool: BlockPool, block: int) -> None:
    pool.cache_partial_block(request([9] * 4), block, 4, replace_existing_hashes=True)


def promote(pool: BlockPool, block: int) -> None:
    pool.cache_partial_block(request([*range(4), 9, 9, 9, 9]), block, 8)


@pytest.mark.parametrize(
    "leave", [evict_by_allocation, lambda pool, block: pool.evict_blocks([block]), replace, promote]
)
@pytest.mark.parametrize("report", ["residency", "every_copy"])
def test_every_way_out_of_the_cache_announces_one_removal(leave: Any, report: str) -> None:
    pool = BlockPool(8, SIZE, report=report)
    r = request(range(4))
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks(r, [block], 0, 1)
    pool.take_events()
    leave(pool, block)
    assert removed(pool.take_events()) == [r.block_hashes[0]]
    # Going again finds nothing to announce.
    pool.evict_blocks([block])
    assert r.block_hashes[0] not in removed(pool.take_events())


def test_a_reset_is_one_clear_and_no_removals() -> None:
    pool = BlockPool(8, SIZE)
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(request(range(4)), blocks, 0, 1)
    pool.free_blocks(blocks)
    pool.take_events()
    pool.reset_prefix_cache()
    pool.get_new_blocks(7)
    assert pool.take_events() == [AllBlocksCleared()]


# ------------------------------------------------------------ R58


def test_the_parent_is_none_at_the_root_and_the_block_before_otherwise() -> None:
    pool = BlockPool(16, SIZE)
    r = request(range(24))
    h = list(r.block_hashes)
    blocks = pool.get_new_blocks(6)
    pool.cache_full_blocks(r, blocks, 0, 3)  # three blocks in one step
    for i in range(3, 6):  # three blocks over three steps
        pool.cache_full_blocks(r, blocks, i, i + 1)
    assert [e.parent_block_hash for e in pool.take_events()] == [None, h[2], h[3], h[4]]
    other = request([*range(8), 99, 99, 99, 99])  # a prefix is reused, then one new block
    hits = pool.find_longest_cache_hit(other)
    pool.touch(hits)
    pool.cache_full_blocks(other, hits + pool.get_new_blocks(1), len(hits), 3)
    (event,) = pool.take_events()
    assert event.parent_block_hash == h[1]


# ------------------------------------------------------------ R60


def test_reused_blocks_are_announced_again_only_when_the_owner_asked_for_it() -> None:
    r = request(range(8))
    quiet, full = BlockPool(8, SIZE), BlockPool(8, SIZE, report_hits=True)
    for pool in (quiet, full):
        pool.cache_full_blocks(r, pool.get_new_blocks(2), 0, 2)
        pool.take_events()
        pool.emit_cached_block_events(r, 2)
    assert len(quiet.take_events()) == 0
    events = full.take_events()
    (event,) = events
    assert event.block_hashes == list(r.block_hashes)
    # Told apart from new blocks, and without effect on a reader that keeps a set.
    assert event.metadata == {"already_resident": True}
    assert ResidentSet(full.snapshot() + events).digest() == full.digest()


def test_what_is_gone_is_not_announced_as_reused() -> None:
    pool = BlockPool(8, SIZE, report_hits=True)
    r = request(range(12))
    pool.cache_full_blocks(r, pool.get_new_blocks(3), 0, 3)
    pool.evict_blocks([2])
    pool.take_events()
    pool.emit_cached_block_events(r, 3)
    h = list(r.block_hashes)
    assert [(e.block_hashes, e.parent_block_hash) for e in pool.take_events()] == [
        ([h[0]], None),
        ([h[2]], h[1]),
    ]


def test_the_full_report_of_every_copy_is_the_engines() -> None:
    pool = BlockPool(8, SIZE, report="every_copy", report_hits=True)
    r = request(range(8))
    pool.cache_full_blocks(r, pool.get_new_blocks(2), 0, 2)
    pool.emit_cached_block_events(r, 2)
    first, again = pool.take_events()
    assert first == again


# ------------------------------------------------------------ R64


def test_each_group_stores_and_removes_on_its_own() -> None:
    groups = [KVCacheGroup(16), KVCacheGroup(4, "sliding_window", 8)]
    pool = BlockPool(16, 4, groups=groups)
    r = request(range(16))
    h = list(r.block_hashes)
    full, window = pool.get_new_blocks(1), pool.get_new_blocks(4)
    pool.cache_full_blocks(r, full, 0, 1, group=0)
    pool.cache_full_blocks(r, window, 0, 4, group=1)
    a, b = pool.take_events()
    assert (a.block_hashes, a.block_size, a.group_idx, a.kv_cache_spec_kind) == (
        [h[3]],
        16,
        0,
        "full_attention",
    )
    assert (b.block_hashes, b.block_size, b.group_idx) == (h, 4, 1)
    assert (b.kv_cache_spec_kind, b.kv_cache_spec_sliding_window) == ("sliding_window", 8)
    # The same hash leaves one group and stays in the other.
    pool.evict_blocks([window[3]])
    assert pool.take_events() == [BlockRemoved([h[3]], "GPU", 1)]
    assert pool.get_cached_block(h[3], [0]) == full
    assert pool.get_cached_block(h[3], [1]) is None
    assert pool.get_cached_block(h[3], [0, 1]) is None


# ------------------------------------------------------------ R71, R96


def test_blocks_that_were_never_cached_make_no_removals_and_fill_no_queue() -> None:
    pool = BlockPool(8, SIZE)
    for _ in range(20_000):
        pool.free_blocks(pool.get_new_blocks(7))
    assert (pool.stats().queued_events, pool.stats().evicted_blocks) == (0, 0)
    assert len(pool.take_events()) == 0


def test_overflow_is_counted_and_told_and_nothing_is_lost_for_the_reader() -> None:
    pool = BlockPool(64, SIZE, max_queued_events=4)
    reader = ResidentSet()
    for i in range(10):
        pool.cache_full_blocks(request([i] * 4), pool.get_new_blocks(1), 0, 1)
    assert pool.stats().resyncs == 1
    reader.apply(pool.take_events())
    assert reader.digest() == pool.digest()

    queue = EventQueue(max_queued_events=4)
    for i in range(10):
        queue.push_removed([i], group_idx=i)
    assert queue.overflows == 2
    assert queue.take().overflowed


# ------------------------------------------------------------ R80


def test_equal_tokens_at_different_positions_have_different_hashes() -> None:
    pool = BlockPool(8, SIZE)
    r = request([7] * 12)
    pool.cache_full_blocks(r, pool.get_new_blocks(3), 0, 3)
    (event,) = pool.take_events()
    assert len({*event.block_hashes, event.parent_block_hash}) == 4
    assert pool.stats().resident_hashes == 3


def test_a_hash_twice_in_one_call_is_announced_once() -> None:
    """Hashes of others may not be chained."""
    pool = BlockPool(8, SIZE)
    pool.cache_full_blocks(None, pool.get_new_blocks(3), 0, 3, block_hashes=[7, 7, 8], token_ids=[1] * 12)
    events = pool.take_events()
    assert [(e.block_hashes, e.parent_block_hash) for e in events] == [([7], None), ([8], 7)]
    pool.evict_blocks([1])
    assert len(pool.take_events()) == 0


# ------------------------------------------------------------ R84


def test_one_block_more_costs_the_same_whatever_is_resident() -> None:
    def cost(resident: int) -> float:
        pool = BlockPool(resident + 600, SIZE)
        pool.cache_full_blocks(request(range(SIZE * resident)), pool.get_new_blocks(resident), 0, resident)
        r = request(range(1_000_000, 1_000_000 + SIZE * 512))
        blocks = pool.get_new_blocks(512)
        best = float("inf")
        for _ in range(5):
            pool.take_events()
            start = time.thread_time_ns()
            for i in range(512):
                pool.cache_full_blocks(r, blocks, i, i + 1)
            best = min(best, time.thread_time_ns() - start)
            pool.evict_blocks(blocks)
        return best / 512

    small, large = cost(10), cost(10_000)
    assert large < small * 6, (small, large)


def test_reads_never_make_events() -> None:
    pool = BlockPool(8, SIZE, report_hits=True)
    r = request(range(8))
    pool.cache_full_blocks(r, pool.get_new_blocks(2), 0, 2)
    pool.take_events()
    for _ in range(100):
        pool.touch(pool.find_longest_cache_hit(r))
        pool.get_cached_block(r.block_hashes[0])
        pool.digest()
        pool.snapshot()
    assert len(pool.take_events()) == 0


# ------------------------------------------------------------ R86


def test_a_removal_can_say_why_where_the_owner_knows() -> None:
    queue = EventQueue()
    queue.push_removed([1], medium="GPU", metadata={"reason": "demoted"})
    queue.push_removed([2], medium="GPU", metadata={"reason": "something new"})
    queue.push_removed([3], medium="GPU")
    assert [e.metadata for e in queue.take()] == [{"reason": "demoted"}, {"reason": "something new"}, None]
