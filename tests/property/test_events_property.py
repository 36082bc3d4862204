"""Any events: what goes into columns comes out, whatever is done in between."""

from __future__ import annotations

import copy
import pickle

import msgspec
from hypothesis import given
from hypothesis import strategies as st

import kvevents
from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, EventList, KVEventBatch

ints = st.one_of(st.integers(0, 2**64 - 1), st.integers(-(2**63), -1), st.integers(0, 200))
hashes = st.one_of(ints, st.binary(max_size=64), st.binary(min_size=32, max_size=32))
hash_lists = st.one_of(
    st.lists(hashes, max_size=6),
    st.lists(st.integers(0, 2**64 - 1), max_size=6),
    st.lists(st.binary(min_size=32, max_size=32), max_size=6),
)
plain_tokens = st.integers(0, 2**32 - 1)
tokens = st.one_of(plain_tokens, ints, st.text(max_size=4), st.lists(ints, min_size=2, max_size=2))
token_lists = st.one_of(st.lists(plain_tokens, max_size=12), st.lists(tokens, max_size=12))
words = st.one_of(st.none(), st.sampled_from(["GPU", "CPU", "STORAGE", ""]), st.text(max_size=5))
small_ints = st.one_of(st.none(), st.integers(-3, 300), st.integers(-(2**63), 2**63 - 1))
scalars = st.one_of(
    st.none(), st.booleans(), ints, st.floats(allow_nan=False), st.text(max_size=8), st.binary(max_size=8)
)
values = st.recursive(
    scalars,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3),
    max_leaves=6,
)
maps = st.one_of(st.none(), st.dictionaries(st.text(max_size=6), values, max_size=3))
frozen = st.recursive(scalars, lambda v: st.lists(v, max_size=3).map(tuple), max_leaves=4)
extra_keys = st.one_of(
    st.none(),
    st.lists(st.none(), max_size=6),
    st.lists(st.one_of(st.none(), st.lists(frozen, max_size=3).map(tuple)), max_size=6),
)
common = {"metadata": maps, "other_fields": maps}


@st.composite
def stores(draw: st.DrawFn) -> BlockStored:
    """Regular stores and the odd ones of others."""
    ids = draw(token_lists)
    return BlockStored(
        block_hashes=draw(hash_lists),
        parent_block_hash=draw(st.one_of(st.none(), hashes)),
        token_ids=ids,
        block_size=draw(st.integers(1 if ids else 0, 2**32 - 1) | st.integers(1, 4)),
        lora_id=draw(small_ints),
        medium=draw(words),
        lora_name=draw(words),
        extra_keys=draw(extra_keys),
        group_idx=draw(small_ints),
        kv_cache_spec_kind=draw(words),
        kv_cache_spec_sliding_window=draw(small_ints),
        locality=draw(words),
        ownership=draw(words),
        session_id=draw(words),
        lookahead_token_ids=draw(st.one_of(st.none(), st.lists(values, max_size=4))),
        cache_salt=draw(words),
        **{k: draw(v) for k, v in common.items()},
    )


events = st.one_of(
    stores(),
    st.builds(
        BlockRemoved,
        block_hashes=hash_lists,
        medium=words,
        group_idx=small_ints,
        locality=words,
        ownership=words,
        **common,
    ),
    st.builds(AllBlocksCleared, **common),
)
event_lists = st.lists(events, max_size=6)


@given(event_lists)
def test_columns_give_back_what_was_put_in(structs: list) -> None:
    columns = EventList(structs)
    assert list(columns) == structs
    assert columns == structs
    assert EventList(list(columns)) == columns
    assert copy.deepcopy(columns) == structs
    assert columns.num_blocks == (
        sum(len(e.block_hashes) for e in structs if isinstance(e, BlockStored)),
        sum(len(e.block_hashes) for e in structs if isinstance(e, BlockRemoved)),
    )


@given(event_lists, st.slices(6))
def test_slices_and_pickles_are_those_of_a_list(structs: list, part: slice) -> None:
    columns = EventList(structs)[part]
    assert columns == structs[part]
    back = pickle.loads(pickle.dumps(columns))
    assert list(back) == structs[part]
    assert back.irregular == columns.irregular


@given(event_lists, event_lists)
def test_concatenation_and_equality_are_those_of_lists(a: list, b: list) -> None:
    assert EventList(a) + EventList(b) == a + b
    assert EventList(a) + b == a + b
    assert (EventList(a) == EventList(b)) == (a == b)
    assert (EventList(a) == b) == (a == b)


@given(event_lists, st.floats(allow_nan=False), st.one_of(st.none(), st.integers(0, 8)))
def test_a_batch_travels_inside_other_messages(structs: list, ts: float, rank: int | None) -> None:
    batch = KVEventBatch(ts=ts, events=EventList(structs), data_parallel_rank=rank)
    encoded = msgspec.msgpack.encode(batch, enc_hook=kvevents.enc_hook)
    assert msgspec.msgpack.decode(encoded, type=KVEventBatch, dec_hook=kvevents.dec_hook) == batch
    assert pickle.loads(pickle.dumps(batch)) == batch


@given(stores())
def test_irregular_is_what_does_not_fit_together(event: BlockStored) -> None:
    n = len(event.block_hashes)
    fits = (
        n > 0
        and event.block_size > 0
        and len(event.token_ids) == n * event.block_size
        and (event.extra_keys is None or len(event.extra_keys) == n)
        and (event.lookahead_token_ids is None or len(event.lookahead_token_ids) == n)
    )
    assert EventList([event]).is_irregular(0) == (not fits)


@given(event_lists, st.randoms(use_true_random=False))
def test_damaged_pickles_are_refused(structs: list, rng: object) -> None:
    data = bytearray(EventList(structs).to_bytes())
    at = rng.randrange(len(data))
    data[at] ^= rng.randrange(1, 256)
    try:
        EventList.from_bytes(bytes(data))
    except kvevents.errors.PickleError:
        return
    raise AssertionError(f"byte {at} of {len(data)} may be anything")
