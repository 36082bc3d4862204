"""A pool of ours becomes one of vLLM's own code: same object, blocks, hashes, order and waiting events."""

from __future__ import annotations

import logging
import types
from typing import Any

from vllm.v1.core import block_pool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from kvevents._core import EnginePool

__all__ = ["hand_over", "rebased"]

log = logging.getLogger("vllm.kvevents")

_StockMap = block_pool.BlockHashToBlockMap

_own_code: Any = type(
    "BlockPool",
    (EnginePool,),
    {
        "_hand_over": lambda _self, _why: None,  # a view that somebody kept asks again
        **{
            name: value
            for name, value in vars(block_pool.BlockPool).items()
            if name not in {"__dict__", "__weakref__"}
        },
    },
)
"""A pool of ours whose methods are vLLM's own."""


def hand_over(pool: Any, cls: Any, why: str) -> None:
    """Make ``pool``, of our class ``cls`` or a subclass, vLLM's own; one warning says why."""
    log.warning("kvevents: one pool is handed over to vLLM's own code: %s", why)
    shares_queue = type(pool).kv_event_queue is not cls.kv_event_queue
    waiting = [] if shares_queue else pool.kv_event_queue
    collector = pool.metrics_collector
    free = pool.to_free_blocks(pool.num_gpu_blocks)
    own = [KVCacheBlock(i, ref_cnt=block.ref_cnt, pool=pool) for i, block in enumerate(pool.blocks)]
    own[0].is_null = True
    keys = _StockMap()
    for key in pool.to_keys():
        for block in pool.to_copies(key):
            keys.insert(key, block)
    further: dict[int, set[bytes]] = {}
    for i, block in enumerate(own):
        held = pool.to_keys_of(i)
        if held:
            block.set_block_hash(*held[0])
        if held[1:]:
            further[i] = {key for key, _ in held[1:]}

    # Nothing above changed anything; from here on the blocks and the pool are vLLM's.
    pool._adopt(own)
    pool.__class__ = rebased(type(pool), _own_code, cls)
    pool.columns = False
    pool.free_block_queue = FreeKVCacheBlockQueue(free)
    pool.cached_block_hash_to_block = keys
    pool.cached_block_hashes_by_block = further
    pool.metrics_collector = collector
    if not shares_queue:
        pool.kv_event_queue = waiting
    if pool.exact_for is not None:  # every copy is announced from here on
        pool.exact_for("stream")


def rebased(cls: Any, base: Any, was: Any = None) -> Any:
    """A class of the same body on another base; ``super()`` in its methods finds that base.

    ``was`` itself becomes ``base``.
    """
    if cls is was:
        return base
    cell = types.CellType()
    body = {
        name: _with_class(value, cell)
        for name, value in vars(cls).items()
        if name not in {"__dict__", "__weakref__"}
    }
    cell.cell_contents = made = type(cls.__name__, (base,), body)
    return made


def _with_class(value: Any, cell: types.CellType) -> Any:
    if isinstance(value, property):
        get, put, drop = (f and _with_class(f, cell) for f in (value.fget, value.fset, value.fdel))
        return property(get, put, drop, value.__doc__)
    if not isinstance(value, types.FunctionType) or "__class__" not in value.__code__.co_freevars:
        return value
    names, old = value.__code__.co_freevars, value.__closure__ or ()
    cells = tuple(cell if name == "__class__" else c for name, c in zip(names, old, strict=True))
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    made.__kwdefaults__, made.__qualname__ = value.__kwdefaults__, value.__qualname__
    return made
