"""The index against the naive one, across the seam, over random streams of several sources."""

from __future__ import annotations

from typing import Any

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventList,
    KVEventBatch,
    PrefixIndex,
    ResidentSet,
    encode,
)
from kvevents.testing import NaivePrefixIndex

SIZE = 2
# Few enough tokens that prompts share prefixes and blocks repeat.
TREES = [[a, b, *c] for a in (1, 2) for b in (1, 2) for c in ([1, 1, 2, 2, 1, 1], [2, 1, 2, 1, 1, 2])]
assert len(set(map(tuple, TREES))) == 8


def hashes_of(tokens: list[int], engine: int, size: int) -> list[int | bytes]:
    """Chained hashes: integers, signed ones, or digests, by engine."""
    out: list[int | bytes] = []
    h = engine
    for i in range(0, len(tokens) - size + 1, size):
        h = xxhash.xxh3_64_intdigest(bytes(tokens[i : i + size]), seed=h)
        out.append([h, h - 2**63, h.to_bytes(8, "big") * 4][engine % 3])
    return out


@st.composite
def store(draw: st.DrawFn, engine: int) -> BlockStored:
    """A run of blocks of a prompt, most of them regular, in any tier and group."""
    tokens = draw(st.sampled_from(TREES))
    group = draw(st.sampled_from([None, None, 0, 1]))
    size = 4 if group == 1 and engine == 1 else SIZE
    hashes = hashes_of(tokens, engine * 10 + (group == 1) * (size == 4), size)
    start = draw(st.integers(0, len(hashes) - 1))
    end = draw(st.integers(start + 1, len(hashes)))
    shape = draw(st.sampled_from(["regular"] * 9 + ["short", "hash only", "own parent", "twice"]))
    run = hashes[start:end]
    parent = hashes[start - 1] if start else None
    ids: list[int] = tokens[start * size : end * size]
    if shape == "short":
        run = run[-1:] if len(run) > 1 else []
    elif shape == "own parent":
        parent = run[0]
    elif shape == "twice" and len(run) > 1:
        run[-1] = run[0]
    elif shape == "hash only":
        ids, size, parent = [], 0, None
    shared = draw(st.sampled_from([(None, None)] * 5 + [("REMOTE", "store")]))
    salt = draw(st.sampled_from([None, None, None, "s"]))
    window = group == 1
    return BlockStored(
        run,
        parent,
        ids,
        size,
        None,
        draw(st.sampled_from([None, "GPU", "cpu", "CXL"])),
        draw(st.sampled_from([None, None, None, "lora"])),
        extra_keys=[(salt,)] + [None] * (len(run) - 1) if salt and run and not start else None,
        group_idx=group,
        kv_cache_spec_kind="sliding_window" if window else None,
        kv_cache_spec_sliding_window=3 if window else None,
        locality=shared[0],
        ownership=shared[1],
    )


@st.composite
def removal(draw: st.DrawFn, engine: int) -> BlockRemoved:
    """Blocks of a prompt leave a tier; they need not be there."""
    event = draw(store(engine))
    run = list(event.block_hashes)
    picked = draw(st.lists(st.sampled_from(run), max_size=3)) if run else []
    scope = (event.medium, event.group_idx, event.locality, event.ownership)
    return BlockRemoved(picked, scope[0], group_idx=scope[1], locality=scope[2], ownership=scope[3])


@st.composite
def batch(draw: st.DrawFn) -> tuple[int, list[Any]]:
    """Events of one of three engines."""
    engine = draw(st.integers(0, 2))
    one = st.one_of(store(engine), store(engine), store(engine), removal(engine), removal(engine))
    events = draw(st.lists(one, min_size=1, max_size=4))
    if draw(st.integers(0, 15)) == 0:
        events.insert(draw(st.integers(0, len(events))), AllBlocksCleared())
    return engine, events


@given(batches=st.lists(batch(), min_size=1, max_size=12), bound=st.sampled_from([65_536, 3]))
def test_answers_and_digests_equal_the_naive_ones(batches: list[tuple[int, list[Any]]], bound: int) -> None:
    """After every batch: every prompt, with and without LoRA name and salt, by tokens and by hashes."""
    real, naive = PrefixIndex(orphan_blocks=bound), NaivePrefixIndex(orphan_blocks=bound)
    sets = [ResidentSet() for _ in range(3)]
    for seq, (engine, events) in enumerate(batches):
        name = f"e{engine}"
        if seq % 2:
            real.apply(name, 0, None, encode(KVEventBatch(0.0, events)))
        else:
            real.apply_events(name, 0, EventList(events))
        naive.apply_events(name, 0, events)
        sets[engine].apply(events)

        for prompt in TREES[seq % 2 :: 2]:
            for asked in ({}, {"lora_name": "lora"}, {"cache_salt": "s"}):
                assert list(real.find(prompt, **asked)) == naive.find(prompt, **asked)
            hashes = hashes_of(prompt, engine * 10, SIZE)
            assert list(real.find(block_hashes=hashes, source=name)) == naive.find(
                block_hashes=hashes, source=name
            )
        assert real.digest(name) == naive.digest(name)
        assert real.digest("store", owner=True) == naive.digest("store", owner=True)
        if real.digest(name) is not None:
            assert real.digest(name) == sets[engine].digest()

    loaded = PrefixIndex.load(real.dump())
    for s in real.stats():
        loaded.confirm(s["source"])
    waiting = {s["source"] for s in real.stats() if s["waiting"]}
    for prompt in TREES:
        for mine, theirs in zip(real.find(prompt), loaded.find(prompt), strict=True):
            assert mine == theirs or (mine.source in waiting and mine[:3] == theirs[:3])
    for s in real.stats():
        if s["source"] not in waiting:
            who = (s["source"], s["rank"])
            assert loaded.digest(*who, owner=s["owner"]) == real.digest(*who, owner=s["owner"])
