"""One behaviour suite over the real index and the naive one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kvevents
from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventList,
    KVEventBatch,
    PrefixIndex,
    ResidentSet,
    TokenBlocks,
    encode,
)
from kvevents.testing import NaivePrefixIndex

SIZE = 4


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=[PrefixIndex, NaivePrefixIndex], ids=["real", "naive"])
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def index(make: Callable[..., Any]) -> Any:
    return make()


def prompt(n: int, first: int = 0) -> list[int]:
    """Token ids of n blocks."""
    return list(range(first, first + n * SIZE))


def hashes_of(tokens: list[int], seed: int, size: int) -> list[int]:
    """Chained 64-bit hashes, another function for every seed."""
    out, h = [], seed * 0x9E3779B97F4A7C15 % 2**64
    for i in range(0, len(tokens) - size + 1, size):
        for t in tokens[i : i + size]:
            h = (h ^ t) * 0x100000001B3 % 2**64
            h ^= h >> 29
        out.append(h)
    return out


def stored(
    tokens: list[int],
    start: int = 0,
    end: int | None = None,
    *,
    seed: int = 1,
    size: int = SIZE,
    **fields: Any,
) -> BlockStored:
    """Blocks `start` to `end` of a prompt became resident."""
    all_hashes = hashes_of(tokens, seed, size)
    end = len(all_hashes) if end is None else end
    given = {"lora_id": None, "medium": "GPU", "lora_name": None, "block_size": size, **fields}
    return BlockStored(
        block_hashes=list(all_hashes[start:end]),
        parent_block_hash=all_hashes[start - 1] if start else None,
        token_ids=tokens[start * size : end * size],
        **given,
    )


def removed(tokens: list[int], *blocks: int, seed: int = 1, size: int = SIZE, **fields: Any) -> BlockRemoved:
    """Blocks of a prompt ceased to be."""
    given = {"medium": "GPU", **fields}
    return BlockRemoved(block_hashes=[hashes_of(tokens, seed, size)[b] for b in blocks], **given)


def lengths(index: Any, tokens: list[int], **options: Any) -> dict[tuple[str, int], int]:
    """Usable tokens by source."""
    return {(m.source, m.rank): m.tokens for m in index.find(tokens, **options)}


def one(index: Any, tokens: list[int], **options: Any) -> kvevents.Match:
    """The only answer."""
    (match,) = index.find(tokens, **options)
    return match  # type: ignore[no-any-return]


# ------------------------------------------------------------------ matching


def test_a_prefix_is_found_from_tokens_whatever_the_engine_hashes(index: Any) -> None:
    """R129: engines with other seeds, hash functions and block sizes share one index."""
    tokens = prompt(6)
    index.apply_events("a", 0, [stored(tokens, seed=1)])
    index.apply_events("b", 0, [stored(tokens, 0, 3, seed=2)])
    index.apply_events("c", 0, [stored(tokens, seed=3, size=8)])
    assert lengths(index, [*tokens, 7, 7]) == {("a", 0): 24, ("b", 0): 12, ("c", 0): 24}
    assert lengths(index, tokens[:11]) == {("a", 0): 8, ("b", 0): 8, ("c", 0): 8}
    assert lengths(index, [99, *tokens]) == {}
    assert lengths(index, []) == {}


def test_the_longest_match_comes_first_and_ties_in_order_of_arrival(index: Any) -> None:
    """R128."""
    tokens = prompt(3)
    for name, blocks in (("a", 1), ("b", 3), ("c", 1), ("d", 3)):
        index.apply_events(name, 0, [stored(tokens, 0, blocks)])
    assert [m.source for m in index.find(tokens)] == ["b", "d", "a", "c"]
    assert [m.blocks for m in index.find(tokens)] == [3, 3, 1, 1]


def test_a_removed_middle_block_hides_what_follows_until_it_comes_back(index: Any) -> None:
    tokens = prompt(5)
    index.apply_events("a", 0, [stored(tokens), removed(tokens, 2)])
    assert one(index, tokens).tokens == 2 * SIZE
    index.apply_events("a", 0, [stored(tokens, 2, 3)])
    assert one(index, tokens).tokens == 5 * SIZE


def test_tiers_are_apart_and_add_up(index: Any) -> None:
    """R123: a removal from one tier leaves the others."""
    tokens = prompt(8)
    index.apply_events("a", 0, [stored(tokens, 0, 4), stored(tokens, 4, 8, medium="CPU")])
    index.apply_events("a", 0, [stored(tokens, 0, 1, medium="CPU")])
    match = one(index, tokens)
    assert match.tokens == 32
    assert match.alone == {"GPU": 16, "CPU": 4}
    assert match.cumulative == {"GPU": 16, "CPU": 32}
    index.apply_events("a", 0, [removed(tokens, 0)])
    assert one(index, tokens).alone == {"GPU": 0, "CPU": 4}
    assert one(index, tokens).tokens == 32


def test_media_are_folded_by_one_rule_for_every_kind_of_event(index: Any) -> None:
    """R104."""
    tokens = prompt(2)
    index.apply_events("a", 0, [stored(tokens, medium=None), stored(tokens, medium="cpu")])
    assert one(index, tokens).alone == {"GPU": 8, "CPU": 8}
    index.apply_events("a", 0, [removed(tokens, 0, 1, medium=None)])
    assert one(index, tokens).alone == {"GPU": 0, "CPU": 8}


def test_an_unknown_medium_is_a_tier_of_its_own(index: Any) -> None:
    """R105: never taken for the device."""
    tokens = prompt(2)
    index.apply_events("a", 0, [stored(tokens, medium="CXL")])
    assert one(index, tokens).alone == {"CXL": 8}
    index.apply_events("a", 0, [stored(tokens, 0, 1)])
    assert one(index, tokens).cumulative == {"GPU": 4, "CXL": 8}


def test_ranks_and_sources_have_state_of_their_own(index: Any) -> None:
    """R124."""
    tokens = prompt(2)
    for rank in (0, 1):
        index.apply_events("a", rank, [stored(tokens)])
    index.apply_events("a", 0, [removed(tokens, 0)])
    assert lengths(index, tokens) == {("a", 1): 8}
    index.apply_events("a", 1, [AllBlocksCleared()])
    assert lengths(index, tokens) == {}


def test_lora_salt_and_images_are_part_of_the_content_down_the_chain(index: Any) -> None:
    """R78: identity is the adapter's name; two tenants never share an entry."""
    tokens = prompt(4)
    index.apply_events("base", 0, [stored(tokens)])
    index.apply_events("lora", 0, [stored(tokens, 0, 2, lora_name="x", lora_id=1, extra_keys=[("x",)] * 2)])
    index.apply_events("lora", 0, [stored(tokens, 2, 4, lora_name="x", lora_id=1, extra_keys=[("x",)] * 2)])
    index.apply_events("unnamed", 0, [stored(tokens, lora_id=1)])
    index.apply_events("salted", 0, [stored(tokens, extra_keys=[("s",), None, None, None])])
    index.apply_events("sglang", 0, [stored(tokens, cache_salt="s")])
    index.apply_events("image", 0, [stored(tokens, extra_keys=[None, (("img", 1),), (("img", -3),), None])])
    assert lengths(index, tokens) == {("base", 0): 16, ("image", 0): 4}
    assert lengths(index, tokens, lora_name="x") == {("lora", 0): 16}
    assert lengths(index, tokens, lora_name="y") == {}
    assert lengths(index, tokens, cache_salt="s") == {("salted", 0): 16, ("sglang", 0): 16}
    assert lengths(index, tokens, mm=[("img", 5, 6)]) == {("image", 0): 16, ("base", 0): 4}
    assert lengths(index, tokens, mm=[("img", 6, 6)]) == {("base", 0): 4, ("image", 0): 4}


def test_a_pool_and_the_index_agree_on_extra_keys(index: Any) -> None:
    """What `TokenBlocks` hashes and a pool announces is found by the same words."""
    tokens = prompt(4)
    options: dict[str, Any] = {"lora_name": "x", "cache_salt": "s", "mm": [("img", 2, 7)]}
    pool = kvevents.BlockPool(10, SIZE)
    request = TokenBlocks(SIZE, **options)
    request.extend(tokens)
    pool.cache_full_blocks(request, pool.get_new_blocks(4), 0, 4)
    index.apply_events("a", 0, pool.take_events())
    assert one(index, tokens, **options).tokens == 16
    assert lengths(index, tokens, lora_name="x", cache_salt="s") == {}
    assert index.digest("a") == pool.digest()


def test_hashes_of_a_named_source_can_be_asked(index: Any) -> None:
    tokens = prompt(5)
    index.apply_events("a", 0, [stored(tokens, 0, 3), stored(tokens, 3, 4, medium="CPU")])
    match = one(index, None, block_hashes=hashes_of(tokens, 1, SIZE), source="a")  # type: ignore[arg-type]
    assert (match.tokens, match.alone) == (16, {"GPU": 12, "CPU": 0})
    assert list(index.find(block_hashes=hashes_of(tokens, 2, SIZE), source="a")) == []
    assert list(index.find(block_hashes=hashes_of(tokens, 1, SIZE), source="b")) == []


def test_a_source_of_hashes_only_answers_in_blocks(index: Any) -> None:
    index.apply_events("a", 0, [hash_only([5, 6, 7])])
    match = one(index, None, block_hashes=[5, 6, 8], source="a")  # type: ignore[arg-type]
    assert (match.tokens, match.block_size) == (2, 1)
    assert list(index.find(prompt(2))) == []


def hash_only(hashes: list[Any], medium: str = "CPU", **fields: Any) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[],
        block_size=0,
        lora_id=None,
        medium=medium,
        lora_name=None,
        **fields,
    )


# ------------------------------------------------------------------ events of all kinds


@pytest.mark.parametrize("late", [False, True])
def test_a_store_without_tokens_is_another_tier_of_a_known_block(index: Any, *, late: bool) -> None:
    """R65: before the GPU's store of the same hashes, or after it."""
    tokens = prompt(3)
    tier = hash_only(hashes_of(tokens, 1, SIZE))
    events = [stored(tokens), tier] if late else [tier, stored(tokens)]
    index.apply_events("a", 0, events)
    assert one(index, tokens).alone == {"GPU": 12, "CPU": 12}
    index.apply_events("a", 0, [removed(tokens, 0, 1, 2)])
    assert one(index, tokens).cumulative == {"GPU": 0, "CPU": 12}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_orphans_wait_for_their_parent_and_are_never_roots(index: Any, order: tuple[int, ...]) -> None:
    """R120."""
    tokens = prompt(6)
    for k in order:
        index.apply_events("a", 0, [stored(tokens, 2 * k, 2 * k + 2)])
        assert k == 0 or lengths(index, tokens[2 * k * SIZE :]) == {}
    assert one(index, tokens).tokens == 24
    assert one(index, tokens).complete
    assert index.digest("a") == ResidentSet([stored(tokens)]).digest()


def test_an_orphan_that_is_given_up_is_said(make: Callable[..., Any]) -> None:
    index = make(orphan_blocks=4)
    for k in range(5):
        index.apply_events("a", 0, [stored(prompt(2, 100 * k), 1, 2)])
    index.apply_events("a", 0, [stored(prompt(1, 900))])
    assert not one(index, prompt(1, 900)).complete
    assert index.digest("a") is None
    index.apply_events("a", 0, [AllBlocksCleared(), stored(prompt(1, 900))])
    assert one(index, prompt(1, 900)).complete
    assert index.digest("a") == ResidentSet([stored(prompt(1, 900))]).digest()


def test_an_orphan_that_has_gone_is_no_loss(make: Callable[..., Any]) -> None:
    index = make(orphan_blocks=2)
    for k in range(4):
        tokens = prompt(2, 100 * k)
        index.apply_events("a", 0, [stored(tokens, 1, 2), removed(tokens, 1)])
    assert index.digest("a") == bytes(16)


def test_the_ancestry_of_another_source_counts(index: Any) -> None:
    """R121: blocks that came by transfer were announced elsewhere."""
    tokens = prompt(4)
    index.apply_events("prefill", 0, [stored(tokens, 0, 2)])
    index.apply_events("decode", 0, [stored(tokens, 2, 4)])
    assert lengths(index, tokens) == {("prefill", 0): 8}
    index.apply_events("decode", 0, [stored(tokens, 0, 2)])
    assert lengths(index, tokens) == {("decode", 0): 16, ("prefill", 0): 8}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_the_ancestry_of_another_source_counts_whenever_it_comes(index: Any, order: tuple[int, ...]) -> None:
    """R121: three engines tell of a third of a prompt each, in any order."""
    tokens = prompt(6)
    for k in order:
        index.apply_events(f"e{k}", 0, [stored(tokens, 2 * k, 2 * k + 2)])
    for k in range(3):
        index.apply_events("late", 0, [hash_only(hashes_of(tokens, 1, SIZE)[2 * k : 2 * k + 2])])
    index.apply_events("late", 0, [stored(tokens, 5, 6)])
    index.apply_events("e2", 0, [hash_only(hashes_of(tokens, 1, SIZE)[:4], "GPU"), stored(tokens, 0, 4)])
    assert lengths(index, tokens)["e2", 0] == 24


def test_a_child_of_a_removed_parent_still_has_its_place(index: Any) -> None:
    tokens = prompt(3)
    index.apply_events("a", 0, [stored(tokens, 0, 2), removed(tokens, 1), stored(tokens, 2, 3)])
    assert one(index, tokens).tokens == 4
    index.apply_events("a", 0, [stored(tokens, 1, 2)])
    assert one(index, tokens).tokens == 12


def test_self_parents_and_repeats_are_refused_and_the_rest_applied(index: Any) -> None:
    """R80: no panic, no wrong match, and the digest still is the publisher's."""
    tokens = prompt(4)
    odd = stored(tokens)
    h = list(odd.block_hashes)
    events = [
        BlockStored([h[0]], h[0], tokens[:4], SIZE, None, "GPU", None),
        BlockStored([h[1], h[1], h[2]], None, tokens[:12], SIZE, None, "GPU", None),
        BlockStored([h[3], 77, h[3]], None, tokens[4:], SIZE, None, "GPU", None),
        stored(prompt(2, 500)),
    ]
    index.apply_events("a", 0, events)
    assert one(index, prompt(2, 500)).tokens == 8
    assert one(index, tokens).tokens == 4
    assert one(index, tokens[4:]).tokens == 8
    assert index.digest("a") == ResidentSet(events).digest()


def test_a_hash_that_comes_with_other_tokens_keeps_the_first(index: Any) -> None:
    tokens, other = prompt(3), prompt(3, 100)
    event = stored(tokens)
    index.apply_events("a", 0, [event])
    clash = BlockStored(event.block_hashes, None, other, SIZE, None, "GPU", None)
    index.apply_events("a", 0, [clash])
    assert one(index, tokens).tokens == 12
    assert lengths(index, other) == {}


def test_irregular_events_count_by_hash_only(index: Any) -> None:
    tokens = prompt(4)
    event = stored(tokens)
    short = BlockStored(event.block_hashes[2:], None, tokens, SIZE, None, "GPU", None)
    index.apply_events("a", 0, [short, stored(tokens, 0, 2)])
    assert one(index, tokens).tokens == 8
    assert index.digest("a") == ResidentSet([short, stored(tokens, 0, 2)]).digest()
    index.apply_events("a", 0, [stored(tokens, 2, 4)])
    assert one(index, tokens).tokens == 16


def test_stores_of_two_block_sizes_fill_in_for_one_another(index: Any) -> None:
    """R94: a connector's chunks are larger than the engine's blocks."""
    tokens = prompt(8)
    index.apply_events("a", 0, [stored(tokens, 0, 3), stored(tokens, 0, 1, size=16, seed=9, medium="CPU")])
    index.apply_events("a", 0, [stored(tokens, 3, 6)])
    index.apply_events("a", 0, [removed(tokens, 1)])
    match = one(index, tokens)
    assert (match.tokens, match.alone) == (24, {"GPU": 4, "CPU": 16})


def group(g: int, kind: str = "full_attention", window: int | None = None) -> dict[str, Any]:
    return {"group_idx": g, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window}


def test_full_groups_need_the_whole_prefix_and_window_groups_their_window(index: Any) -> None:
    """R64."""
    tokens = prompt(6)
    window = group(1, "sliding_window", 8)
    index.apply_events("a", 0, [stored(tokens, **group(0)), stored(tokens, **window)])
    assert one(index, tokens).tokens == 24
    index.apply_events("a", 0, [removed(tokens, 0, 1, group_idx=1)])
    assert one(index, tokens).tokens == 24
    assert lengths(index, tokens[:12]) == {}
    index.apply_events("a", 0, [removed(tokens, 5, group_idx=1)])
    assert one(index, tokens).tokens == 20
    index.apply_events("a", 0, [removed(tokens, 4, group_idx=0)])
    assert one(index, tokens).tokens == 16
    index.apply_events("a", 0, [removed(tokens, 3, group_idx=1)])
    assert lengths(index, tokens) == {}


def test_groups_may_differ_in_block_size(index: Any) -> None:
    tokens = prompt(6)
    index.apply_events("a", 0, [stored(tokens, **group(0)), stored(tokens, size=8, seed=2, **group(1))])
    assert one(index, tokens).tokens == 24
    index.apply_events("a", 0, [removed(tokens, 2, size=8, seed=2, group_idx=1)])
    assert one(index, tokens).tokens == 16


def test_one_hash_may_end_prefixes_that_are_cut_into_blocks_of_several_sizes(index: Any) -> None:
    """vLLM names a larger block of a hybrid model by the hash of the last small one inside it."""
    tokens = prompt(6)
    large = {"size": 8, **group(1)}
    index.apply_events("a", 0, [stored(tokens, **group(0)), stored(tokens, **large)])
    assert one(index, tokens).tokens == 24
    index.apply_events("a", 0, [removed(tokens, 2, size=8, group_idx=1)])
    assert one(index, tokens).tokens == 16
    assert one(index, tokens).alone == {"GPU": 16}
    # Hash-only news of a group goes to its own blocks, and a hash counts once in a scope.
    again = {"lora_id": None, "medium": "GPU", "lora_name": None, "block_size": 0, **group(1)}
    last = hashes_of(tokens, 1, 8)[2]
    for _ in range(2):
        index.apply_events(
            "a", 0, [BlockStored(block_hashes=[last], parent_block_hash=None, token_ids=[], **again)]
        )
    assert one(index, tokens).tokens == 24
    index.apply_events(
        "a", 0, [removed(tokens, *range(6), group_idx=0), removed(tokens, 0, 1, 2, size=8, group_idx=1)]
    )
    assert not index.find(tokens)
    assert index.digest("a") == bytes(16)


def test_a_tier_of_larger_blocks_with_the_same_hashes_counts_beside_the_small_ones(index: Any) -> None:
    tokens = prompt(8)
    index.apply_events("a", 0, [stored(tokens, 0, 2), stored(tokens, size=8, medium="CPU")])
    assert one(index, tokens).alone == {"GPU": 8, "CPU": 32}
    assert one(index, tokens).tokens == 32


def test_recurrent_groups_need_their_last_block(index: Any) -> None:
    tokens = prompt(4)
    index.apply_events("a", 0, [stored(tokens, **group(0)), stored(tokens, **group(1, "mamba"))])
    index.apply_events("a", 0, [removed(tokens, 0, 1, 3, group_idx=1)])
    assert one(index, tokens).tokens == 12


def test_a_tier_without_groups_counts_for_all_of_them(index: Any) -> None:
    tokens = prompt(4)
    index.apply_events("a", 0, [stored(tokens, 0, 2, **group(0)), stored(tokens, 0, 2, **group(1))])
    index.apply_events("a", 0, [stored(tokens, 2, 4, medium="CPU")])
    assert one(index, tokens).cumulative == {"GPU": 8, "CPU": 16}


# ------------------------------------------------------------------ shared tiers


def test_a_shared_tier_answers_as_its_owner_and_outlives_who_told_of_it(index: Any) -> None:
    """R99."""
    tokens = prompt(3)
    shared = stored(tokens, medium="STORAGE", locality="REMOTE", ownership="store-1")
    index.apply_events("a", 0, [stored(tokens, 0, 1), shared])
    found = {(m.source, m.owner): m for m in index.find(tokens)}
    assert found["a", False].tokens == 4
    assert found["a", False].alone == {"GPU": 4}
    assert found["store-1", True].alone == {"STORAGE": 12}
    assert index.digest("a") == ResidentSet([stored(tokens, 0, 1), shared]).digest()
    index.apply_events("a", 0, [AllBlocksCleared()])
    assert [m.source for m in index.find(tokens)] == ["store-1"]
    index.drop("a")
    assert [m.source for m in index.find(tokens)] == ["store-1"]
    gone = removed(tokens, 1, 2, medium="STORAGE", locality="REMOTE", ownership="store-1")
    index.apply_events("b", 0, [gone])
    assert [(m.source, m.tokens) for m in index.find(tokens)] == [("store-1", 4)]
    index.drop("store-1", owner=True)
    assert list(index.find(tokens)) == []


def test_a_locality_that_nobody_knows_is_not_credited_to_the_worker(index: Any) -> None:
    tokens = prompt(2)
    index.apply_events("a", 0, [stored(tokens, medium="STORAGE", locality="SOMEWHERE")])
    assert [(m.source, m.owner) for m in index.find(tokens)] == [("shared", True)]
    index.apply_events("b", 0, [stored(tokens, medium="STORAGE", locality="LOCAL")])
    assert {(m.source, m.owner) for m in index.find(tokens)} == {("shared", True), ("b", False)}


# ------------------------------------------------------------------ certainty


def test_a_number_that_does_not_follow_makes_the_view_incomplete(index: Any) -> None:
    tokens = prompt(4)
    index.apply_events("a", 0, [stored(tokens, 0, 1)], seq=0)
    index.apply_events("a", 0, [stored(tokens, 1, 2)], seq=1)
    assert one(index, tokens).complete
    index.apply_events("a", 0, [stored(tokens, 3, 4)], seq=3)
    assert one(index, tokens).tokens == 8
    assert not one(index, tokens).complete
    assert index.digest("a") is None
    index.apply_events("a", 0, [AllBlocksCleared(), stored(tokens)], seq=4)
    assert one(index, tokens).complete
    assert index.digest("a") == ResidentSet([stored(tokens)]).digest()


def test_a_late_joiner_is_incomplete_until_a_snapshot(index: Any) -> None:
    tokens = prompt(2)
    index.apply_events("a", 0, [stored(tokens, 0, 1)], seq=7)
    assert not one(index, tokens).complete
    assert index.apply_snapshot("a", 0, [stored(tokens)], resume_seq=10)
    assert one(index, tokens).complete
    index.apply_events("a", 0, [removed(tokens, 1)], seq=10)
    assert (one(index, tokens).tokens, one(index, tokens).complete) == (4, True)
    assert not index.apply_snapshot("a", 0, [], resume_seq=10)
    assert one(index, tokens).tokens == 4
    index.add_source("b", first_seq=1)
    index.apply_events("b", 0, [stored(tokens)], seq=1)
    assert next(iter(index.find(tokens))).complete


def test_a_bad_event_makes_the_view_incomplete_even_beside_a_clear(index: Any) -> None:
    tokens = prompt(1)
    payload = bytearray(encode(KVEventBatch(1.0, [AllBlocksCleared(), stored(tokens)])))
    index.apply("a", 0, 0, bytes(payload))
    assert one(index, tokens).complete
    payload[payload.index(b"AllBlocksCleared") : payload.index(b"AllBlocksCleared") + 3] = b"XYZ"
    index.apply("a", 0, 1, bytes(payload))
    assert not one(index, tokens).complete
    assert index.digest("a") is None


def test_a_reset_and_a_mark(index: Any) -> None:
    tokens = prompt(2)
    index.apply_events("a", 0, [stored(tokens)], seq=0)
    index.mark_incomplete("a", last_seq=4)
    assert not one(index, tokens).complete
    index.reset("a")
    assert list(index.find(tokens)) == []
    index.apply_events("a", 0, [stored(tokens)], seq=0)
    assert one(index, tokens).complete


# ------------------------------------------------------------------ upkeep


def test_events_of_a_dropped_source_are_ignored_until_it_is_added_again(index: Any) -> None:
    """R119."""
    tokens = prompt(2)
    index.apply_events("a", 0, [stored(tokens)])
    index.apply_events("a", 1, [stored(tokens)])
    assert index.drop("a", 0)
    assert lengths(index, tokens) == {("a", 1): 8}
    index.apply_events("a", 0, [stored(tokens)])
    index.apply_snapshot("a", 0, [stored(tokens)])
    assert lengths(index, tokens) == {("a", 1): 8}
    assert index.drop("a")
    assert not index.drop("a")
    assert lengths(index, tokens) == {}
    index.add_source("a", 0)
    index.apply_events("a", 0, [stored(tokens, 0, 1)])
    assert lengths(index, tokens) == {("a", 0): 4}


def test_a_store_only_source_expires_and_a_new_store_refreshes(make: Callable[..., Any]) -> None:
    """R75."""
    clock = Clock()
    index = make(expires_s=60, clock=clock)
    tokens = prompt(3)
    index.add_source("a", emits_removals=False)
    index.apply_events("a", 0, [stored(tokens)])
    index.apply_events("b", 0, [stored(tokens)])
    clock.now += 50
    index.apply_events("a", 0, [stored(tokens, 0, 1)])
    clock.now += 20
    assert lengths(index, tokens) == {("b", 0): 12, ("a", 0): 4}
    clock.now += 50
    assert lengths(index, tokens) == {("b", 0): 12}


def test_a_store_only_tier_expires_and_the_others_stay(make: Callable[..., Any]) -> None:
    """R75: a connector that never announces removals beside a pool that does."""
    clock = Clock()
    index = make(expires_s=60, clock=clock)
    tokens = prompt(4)
    index.add_source("a", store_only=["disk"])
    index.apply_events("a", 0, [stored(tokens, 0, 2), stored(tokens, medium="STORAGE")])
    clock.now += 40
    # Another tier's store refreshes nothing.
    index.apply_events("a", 0, [stored(tokens, 2, 4), stored(tokens, 0, 3, medium="STORAGE")])
    clock.now += 40
    assert one(index, tokens).alone == {"GPU": 16, "STORAGE": 12}
    index.apply_events("a", 0, [removed(tokens, 3), removed(tokens, 2)])
    assert one(index, tokens).cumulative == {"GPU": 8, "STORAGE": 12}
    clock.now += 40
    assert one(index, tokens).alone == {"GPU": 8, "STORAGE": 0}
    index.apply_events("a", 0, [stored(tokens, 1, 4, medium="NVME")])
    assert one(index, tokens).cumulative == {"GPU": 8, "STORAGE": 16}
    index.add_source("a")
    clock.now += 500
    assert one(index, tokens).cumulative["STORAGE"] == 16


def test_a_shared_tier_expires_where_its_teller_says_so(make: Callable[..., Any]) -> None:
    clock = Clock()
    index = make(expires_s=60, clock=clock)
    tokens = prompt(2)
    index.add_source("a", store_only=["EXTERNAL"])
    index.apply_events("a", 0, [stored(tokens, ownership="pool", medium="EXTERNAL")])
    index.apply_events("a", 0, [stored(tokens, 0, 1, ownership="pool", medium="CPU")])
    assert one(index, tokens).cumulative == {"CPU": 4, "EXTERNAL": 8}
    clock.now += 61
    assert one(index, tokens).cumulative == {"CPU": 4, "EXTERNAL": 4}


def test_one_tier_of_a_source_can_be_cleared(index: Any) -> None:
    """R54, R82: what an event cannot say, its operator can."""
    tokens = prompt(2)
    index.apply_events("a", 0, [stored(tokens), stored(tokens, medium="CPU")])
    assert index.clear_tier("a", "GPU") == 2
    assert one(index, tokens).alone == {"GPU": 0, "CPU": 8}
    assert one(index, tokens).complete
    assert index.digest("a") is None


def test_expected_blocks_are_told_apart_and_replaced_by_the_event(make: Callable[..., Any]) -> None:
    """R132."""
    clock = Clock()
    index = make(clock=clock)
    tokens, other = prompt(4), prompt(2, 100)
    assert index.expect("a", 0, tokens, 5) == 0
    index.apply_events("a", 0, [stored(other)])
    index.apply_events("b", 0, [stored(tokens, 0, 1)])
    assert index.expect("a", 0, tokens, 5) == 4
    assert [(m.source, m.tokens, m.expected) for m in index.find(tokens)] == [("b", 4, 4), ("a", 0, 16)]
    index.apply_events("a", 0, [stored(tokens, 0, 3)])
    assert [(m.source, m.tokens, m.expected) for m in index.find(tokens)] == [("a", 12, 16), ("b", 4, 4)]
    index.apply_events("a", 0, [removed(tokens, 2)])
    assert (index.find(tokens)[0].tokens, index.find(tokens)[0].expected) == (8, 8)
    clock.now += 6
    assert [(m.source, m.tokens, m.expected) for m in index.find(tokens)] == [("a", 8, 8), ("b", 4, 4)]


def test_answers_for_many_prompts_are_those_for_each(index: Any) -> None:
    index.apply_events("a", 0, [stored(prompt(4))])
    prompts = [prompt(2), prompt(4), prompt(1, 50), []]
    assert [list(m) for m in index.find_many(prompts)] == [list(index.find(p)) for p in prompts]


def test_an_event_list_is_applied_as_its_events_are(index: Any) -> None:
    events = [stored(prompt(4)), removed(prompt(4), 3)]
    index.apply_events("a", 0, EventList(events))
    index.apply("b", 0, None, encode(KVEventBatch(1.0, events)))
    assert lengths(index, prompt(4)) == {("a", 0): 12, ("b", 0): 12}
    assert index.digest("a") == index.digest("b") == ResidentSet(events).digest()


def test_an_orphan_of_a_hash_that_comes_twice_takes_the_first_content(index: Any) -> None:
    """A repeat within one event is a conflict: it gives no orphan another place."""
    tokens = prompt(3)
    h = hashes_of(tokens, 1, SIZE)
    index.apply_events("a", 0, [stored(tokens, 1, 3)])
    odd = BlockStored([h[0], h[1], h[0]], None, [*tokens[:8], 9, 9, 9, 9], SIZE, None, "GPU", None)
    index.apply_events("a", 0, [odd])
    assert one(index, tokens).tokens == 12
