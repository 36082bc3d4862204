"""Across the seam: the pool and the naive pool are asked the same, and answer the same, events included."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvevents import BlockIds, BlockPool, KVCacheGroup, TokenBlocks
from kvevents.errors import BlockError
from kvevents.resident import ResidentSet
from kvevents.testing.pool import NaiveBlockPool, NaiveRequest

EXAMPLES = 2000 if os.environ.get("KVEVENTS_HYPOTHESIS") == "slow" else 300
STEP = 2
GROUPS = [(), (2, 4), (4, 8, 2)]

small = st.integers(0, 63)
operations = st.lists(
    st.tuples(st.sampled_from("aaaaddffeepmrx"), small, small, small), min_size=5, max_size=60
)


class Both:
    """Two pools, and the sequences that are being served."""

    def __init__(self, num_blocks: int, groups: tuple[int, ...], report: str, form: str) -> None:
        self.form = form
        self.pool = BlockPool(
            num_blocks, STEP, report=report, groups=[KVCacheGroup(size) for size in groups] or None
        )
        self.naive = NaiveBlockPool(num_blocks, STEP, groups, every_copy=report == "every_copy")
        self.sizes = groups or (STEP,)
        self.reader = ResidentSet()
        self.live: list[dict[str, Any]] = []

    def arguments(self, handle: TokenBlocks) -> tuple[TokenBlocks | None, dict[str, Any]]:
        """The request as a handle, as buffers, or as lists."""
        if self.form == "handle":
            return handle, {}
        hashes: Any = handle.block_hashes
        tokens: Any = handle.to_token_ids()
        if self.form == "lists":
            return None, {"block_hashes": list(hashes), "token_ids": tokens}
        return None, {"block_hashes": hashes, "token_ids": memoryview(BlockIds(tokens))}

    def naive_request(self, handle: TokenBlocks) -> NaiveRequest:
        return NaiveRequest(list(handle.block_hashes), handle.to_token_ids())

    def store(self, r: dict[str, Any]) -> None:
        handle, group = r["handle"], r["group"]
        full = max(r["cached"], handle.num_tokens // self.sizes[group])
        request, lists = self.arguments(handle)
        blocks: Any = r["blocks"] if self.form == "lists" else BlockIds(r["blocks"])
        self.pool.cache_full_blocks(request, blocks, r["cached"], full, group=group, **lists)
        self.naive.cache_full_blocks(self.naive_request(handle), r["blocks"], r["cached"], full, group)
        r["cached"] = full

    def admit(self, x: int, y: int, z: int) -> None:
        n, group = 1 + x % 30, z % len(self.sizes)
        size = self.sizes[group]
        handle = TokenBlocks(STEP)
        handle.extend([y % 2] * (n // 2) + [y % 3] * (n - n // 2))
        limit = (n - 1) // size if y % 4 else 0
        hits = self.pool.find_longest_cache_hit(handle, limit, group)
        assert hits == self.naive.find_longest_cache_hit(self.naive_request(handle), limit, group)
        needed = -(-n // size) - len(hits)
        if needed > len(self.naive.free) - sum(b in self.naive.free for b in hits):
            return
        self.pool.touch(hits)
        self.naive.touch(hits)
        new = self.pool.get_new_blocks(needed)
        assert new == self.naive.get_new_blocks(needed)
        blocks = list(hits + new)
        if z % 5 == 0 and needed:
            hole = len(hits) + x % needed
            self.free([blocks[hole]])
            blocks[hole] = 0
        r = {"handle": handle, "group": group, "blocks": blocks, "cached": len(hits)}
        self.store(r)
        self.live.append(r)

    def free(self, blocks: list[int]) -> None:
        self.pool.free_blocks(blocks)
        self.naive.free_blocks(blocks)

    def decode(self, r: dict[str, Any], x: int) -> None:
        size = self.sizes[r["group"]]
        for _ in range(1 + x % (2 * size)):
            if r["handle"].num_tokens % size == 0:
                if not self.naive.free:
                    break
                new = self.pool.get_new_blocks(1)
                assert new == self.naive.get_new_blocks(1)
                r["blocks"] += new
            r["handle"].extend([x % 2])
        self.store(r)

    def partial(self, r: dict[str, Any], x: int, y: int) -> None:
        boundaries = r["handle"].num_blocks
        if not boundaries:
            return
        tokens = (1 + x % boundaries) * STEP
        block = r["blocks"][(tokens - 1) // self.sizes[r["group"]]]
        request, lists = self.arguments(r["handle"])
        ours = self.pool.cache_partial_block(
            request, block, tokens, group=r["group"], replace_existing_hashes=y % 5 == 0, **lists
        )
        naive = self.naive.cache_partial_block(
            self.naive_request(r["handle"]), block, tokens, r["group"], replace=y % 5 == 0
        )
        assert ours == naive

    def move(self, r: dict[str, Any], x: int) -> None:
        cached = [b for b in r["blocks"] if b in self.naive.owned]
        if not cached or not self.naive.free:
            return
        new = self.pool.get_new_blocks(1)
        assert new == self.naive.get_new_blocks(1)
        src = cached[x % len(cached)]
        self.pool.move_block_hashes(src, new[0])
        self.naive.move_block_hashes(src, new[0])
        r["cached"] = len(r["blocks"])
        self.free(list(new))

    def mistake(self, x: int) -> None:
        """An error, and everything is as it was."""
        before = self.pool.digest(), self.pool.free_order(), self.pool.stats()
        free = self.naive.free[0] if self.naive.free else 0
        for bad in (
            lambda: self.pool.get_new_blocks(len(self.naive.free) + 1),
            lambda: self.pool.get_new_blocks(-1 - x),
            lambda: self.pool.touch([1, self.naive.num_blocks + x]),
            lambda: self.pool.evict_blocks({self.naive.num_blocks}),
            lambda: self.pool.free_blocks([0, free] if free else [-1]),
            lambda: self.pool.move_block_hashes(0, 1),
        ):
            try:
                bad()
            except BlockError:
                continue
            raise AssertionError("no error")
        assert before == (self.pool.digest(), self.pool.free_order(), self.pool.stats())

    def run(self, op: str, x: int, y: int, z: int) -> None:
        r = self.live[y % len(self.live)] if self.live else None
        match op:
            case "a":
                self.admit(x, y, z)
            case "d" if r:
                self.decode(r, x)
            case "f" if r:
                self.live.remove(r)
                self.free(r["blocks"][::-1])
            case "e":
                blocks = [x % self.naive.num_blocks, y % self.naive.num_blocks]
                self.pool.evict_blocks(blocks)
                self.naive.evict_blocks(blocks)
            case "p" if r:
                self.partial(r, x, z)
            case "m" if r:
                self.move(r, x)
            case "r":
                if z % 2:
                    while self.live:
                        self.free(self.live.pop()["blocks"][::-1])
                assert self.pool.reset_prefix_cache() == self.naive.reset_prefix_cache()
            case "x":
                self.mistake(x)

    def check(self) -> None:
        events = self.pool.take_events()
        assert list(events) == self.naive.take_events()
        self.reader.apply(events)
        truth = self.naive.digest()
        assert self.pool.digest() == truth
        if not self.naive.every_copy:
            assert self.reader.digest() == truth
            assert events.irregular == 0
        assert self.pool.free_order() == self.naive.free


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    num_blocks=st.integers(8, 64),
    groups=st.sampled_from(GROUPS),
    report=st.sampled_from(["residency", "every_copy"]),
    form=st.sampled_from(["handle", "buffers", "lists"]),
    ops=operations,
)
def test_the_pool_and_the_naive_pool_agree(
    num_blocks: int, groups: tuple[int, ...], report: str, form: str, ops: list[tuple[str, int, int, int]]
) -> None:
    both = Both(num_blocks, groups, report, form)
    for op in ops:
        both.run(*op)
        both.check()
    snapshot = ResidentSet(both.pool.snapshot())
    assert snapshot.digest() == both.pool.digest()
