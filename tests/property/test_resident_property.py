"""The resident set against the naive one, over random streams."""

from __future__ import annotations

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, ResidentSet
from kvevents.testing import NaiveResidentSet

hashes = st.lists(
    st.one_of(
        st.integers(-(2**63), 2**64 - 1),
        st.integers(-40, 300),
        st.binary(min_size=1, max_size=64),
        st.sampled_from([b"\0" * 32, b"\1" * 32, 5, -1, 2**64 - 1]),
    ),
    max_size=4,
)
media = st.sampled_from([None, "GPU", "CPU", "x" * 40, "m" * 300])
groups = st.sampled_from([None, 0, 1, 127, 128, -1, -33, 70_000, 2**40, -(2**40)])
names = st.sampled_from([None, None, "REMOTE"])
events = st.one_of(
    st.builds(
        lambda h, m, g, l, o: BlockStored(
            h, None, [], 0, None, m, None, group_idx=g, locality=l, ownership=o
        ),
        hashes,
        media,
        groups,
        names,
        names,
    ),
    st.builds(BlockRemoved, hashes, media, groups, names, names),
    st.builds(AllBlocksCleared),
)


@given(st.lists(st.lists(events, max_size=6), max_size=6))
def test_the_set_agrees_with_the_naive_one(batches: list[list[KVCacheEvent]]) -> None:
    fast, naive = ResidentSet(), NaiveResidentSet()
    for batch in batches:
        fast.apply(batch)
        naive.apply(batch)
        assert fast.keys() == naive.keys
        assert fast.digest() == naive.digest(xxhash.xxh3_128_intdigest)
    assert fast.duplicate_stores == naive.duplicate_stores
    assert fast.unknown_removals == naive.unknown_removals
