"""The block pool and its event queue.

`BlockPool` keeps which blocks are free and which hold what; `take_events()`, called once a step, says what
changed. `EventQueue` is the event half alone, for engines with their own pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvevents._core import BlockIds, BlockPool, EventQueue, PoolStats

__all__ = ["BlockIds", "BlockPool", "EventQueue", "KVCacheGroup", "PoolStats"]

Sequence.register(BlockIds)


class KVCacheGroup(msgspec.Struct, frozen=True):
    """One group of layers that share blocks; hybrid models have several.

    The group's position in ``BlockPool(groups=...)`` is its ``group_idx`` in events, part of a block's key.
    """

    block_size: int
    """Tokens in a block of this group: a multiple of the pool's ``block_size``."""
    kind: str = "full_attention"
    """vLLM's name (``KVCacheSpecKind``): ``full_attention``, ``sliding_window``, ``mamba``, ..."""
    sliding_window: int | None = None
    """Tokens, for sliding windows: `BlockPool.find_longest_cache_hit` then needs only the last window."""
