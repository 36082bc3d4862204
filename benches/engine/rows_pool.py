"""`BlockPool` in vLLM's own calling pattern: vLLM's `Request`, handles of blocks, events taken once a step.

Every step allocates, caches and frees a request of 128 blocks in a pool that is full of others, so that each
block that is given out is evicted. The events of a step are taken as the scheduler takes them with this
plug-in: as columns where the publisher is this package's too, as vLLM's Structs where it is not.
"""

from __future__ import annotations

import time

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

import kvevents
from benches.engine import stock
from benches.engine.pairs import Pair, row
from kvevents.integrations.vllm.pool import BlockPool

SIZE, BLOCKS, REQUESTS, POOL = 16, 128, 60, 4096


def _requests():
    init_none_hash(sha256)
    hasher = get_request_block_hasher(SIZE, sha256)
    sampling = SamplingParams(max_tokens=1)
    return [
        Request(
            request_id=str(n), prompt_token_ids=[(n * 7919 + i * 13) % 150_000 for i in range(BLOCKS * SIZE)],
            sampling_params=sampling, pooling_params=None, block_hasher=hasher,
        )
        for n in range(REQUESTS)
    ]  # fmt: skip


def _at_once(pool, request):
    blocks = pool.get_new_blocks(BLOCKS)
    _cache(pool, request, blocks, 0, BLOCKS)
    pool.free_blocks(reversed(blocks))


def _one_by_one(pool, request):
    blocks = []
    for i in range(BLOCKS):
        blocks += pool.get_new_blocks(1)
        _cache(pool, request, blocks, i, i + 1)
    pool.free_blocks(reversed(blocks))


def _cache(pool, request, blocks, cached, full):
    """With the keywords of vLLM's `cache_blocks`."""
    pool.cache_full_blocks(
        request=request, blocks=blocks, num_cached_blocks=cached, num_full_blocks=full,
        block_size=SIZE, kv_cache_group_id=0, block_mask=None,
    )  # fmt: skip


def _measured(cls, requests, step, take, events=True):
    """Thread CPU nanoseconds a block, once the pool is full; `take` gives the events of a step."""
    pool = cls(POOL, True, SIZE, events)
    take = getattr(pool, take)
    for request in requests:
        step(pool, request)
        take()
    said = []
    start = time.thread_time_ns()
    for request in requests:
        step(pool, request)
        said.append(take())
    spent = time.thread_time_ns() - start
    for taken in said if events else ():
        blocks = kvevents.EventList(taken).num_blocks if type(taken) is list else taken.num_blocks
        assert blocks == (BLOCKS, BLOCKS)
    assert len(pool.cached_block_hash_to_block) == POOL - 1
    return spent / (REQUESTS * BLOCKS)


def _pair(step, take, events=True):
    requests = _requests()
    return Pair(
        stock=lambda: _measured(stock.BlockPool, requests, step, "take_events", events),
        ours=lambda: _measured(BlockPool, requests, step, take, events),
    )


@row("`BlockPool` steady state with events, columns to our publisher, a block", unit="ns", floor=3, aim=8,
     more=True, digits=0)  # fmt: skip
def at_once():
    """Both parts are plugged in."""
    return _pair(_at_once, "take_columns")


@row("the same, one block a call", unit="ns", floor=3, aim=6, more=True, digits=0)
def one_by_one():
    """As a request decodes."""
    return _pair(_one_by_one, "take_columns")


@row("the same at once, vLLM's Structs to vLLM's publisher", unit="ns", floor=3, more=True, digits=0)
def structs():
    """Part `pool` alone."""
    return _pair(_at_once, "take_events")


@row("the same one by one, vLLM's Structs", unit="ns", floor=3, more=True, digits=0)
def structs_one_by_one():
    """Part `pool` alone."""
    return _pair(_one_by_one, "take_events")


@row("the same at once, events off", unit="ns", more=True, digits=0)
def no_events():
    """What the pool alone costs."""
    return _pair(_at_once, "take_events", events=False)
