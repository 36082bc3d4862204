"""Part ``pool``: this package's pool behind vLLM's ``BlockPool``.

Blocks, free queue, hashes and events live in Rust; vLLM's managers hold one handle per block. Whatever vLLM's
own code may do to a pool from outside and the native pool cannot (a block of another class, a hash set by
hand, a queue edited in place) hands that one pool over to vLLM's own code, with its contents and one warning.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import TYPE_CHECKING, Any, Self

from vllm import envs
from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core import block_pool, kv_cache_coordinator, kv_cache_manager, single_type_kv_cache_manager
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    generate_block_hash_extra_keys,
    to_event_extra_keys,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.hisparse import block_pool as hisparse

from kvevents._core import EnginePool
from kvevents.integrations.vllm.pool_handover import hand_over, rebased
from kvevents.integrations.vllm.pool_views import BlockMap, FreeQueue, HashesByBlock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvevents.integrations.vllm.settings import Settings

__all__ = ["BlockPool", "install"]

log = logging.getLogger("vllm.kvevents")

_stock_init = Scheduler.__init__
_stock_take = kv_cache_manager.KVCacheManager.take_events

_report = "every_copy"


def install(settings: Settings) -> str:
    """Put our class where vLLM looks for its own, and the column path where both ends are ours."""
    global _report  # noqa: PLW0603 - one setting a process
    _report = settings.options.report
    block_pool.BlockPool = BlockPool
    kv_cache_coordinator.BlockPool = BlockPool
    shared = rebased(hisparse.SharedEventQueueBlockPool, BlockPool)
    hisparse.SharedEventQueueBlockPool = shared
    single_type_kv_cache_manager.SharedEventQueueBlockPool = shared
    kv_cache_manager.KVCacheManager.take_events = take_events
    Scheduler.__init__ = scheduler_init
    return f"report={_report}"


def extra_keys(request: Any, start: int, size: int, holes: list[bool]) -> list[Any] | None:
    """What events say of the extra keys of a request's blocks, by vLLM's own code; ``None`` for holes."""
    out: list[Any] = []
    at = 0
    for i, hole in enumerate(holes):
        keys = None
        if not hole:
            first = start + i * size
            keys, at = generate_block_hash_extra_keys(request, first, first + size, at)
        out.append(keys)
    found: list[Any] | None = to_event_extra_keys(out)
    return found


class BlockPool(EnginePool):
    """vLLM's ``BlockPool``: its methods, its attributes, and what its own modules and tests reach into."""

    def __new__(  # noqa: D102, PLR0917 - vLLM's positions
        cls,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: Any = None,  # noqa: ARG004 - `__init__` takes it
        medium: str = MEDIUM_GPU,
        **_subclass: Any,
    ) -> Self:
        if not isinstance(num_gpu_blocks, int) or num_gpu_blocks <= 0:
            raise AssertionError(f"num_gpu_blocks: at least 1 was expected, saw {num_gpu_blocks}")
        return super().__new__(
            cls,
            num_gpu_blocks,
            hash_block_size,
            enable_caching=enable_caching,
            enable_kv_cache_events=enable_kv_cache_events,
            medium=medium,
            report=_report,
            narrow=envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES,
            block_class=KVCacheBlock,
            event_classes=(BlockStored, BlockRemoved, AllBlocksCleared),
            extra_keys=extra_keys,
        )

    def __init__(  # noqa: PLR0917 - vLLM's positions
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: Any = None,
        medium: str = MEDIUM_GPU,
    ) -> None:
        self._bind(weakref.ref(self))
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.medium = medium
        self.blocks: list[Any] = self.to_blocks()
        self.null_block = self.blocks[0]
        self._queue: list[Any] = []
        self._reuse_watchers: dict[int, Any] = {}
        self._collector: Any = None
        self.columns = False
        """Whether :meth:`take_columns` may be used: somebody takes columns and does nothing else."""
        self.exact_for: Any = None
        """Who tells readers what the events are exact for: to be told when this pool is handed over."""
        self.metrics_collector = metrics_collector
        # A subclass may keep its events in the list of another pool (hisparse).
        self._set_shared_queue(type(self).kv_event_queue is not BlockPool.kv_event_queue)
        self.kv_event_queue = []

    # ---------------------------------------------------------------- what others look into

    @property
    def kv_event_queue(self) -> list[Any]:
        """Events that wait, as a list in which others may put theirs."""
        self._queue.extend(self.to_events())
        return self._queue

    @kv_event_queue.setter
    def kv_event_queue(self, events: list[Any]) -> None:
        self._take_columns()
        self._queue = events

    @property
    def free_block_queue(self) -> FreeQueue:
        """The free blocks in the order in which they are given out."""
        return FreeQueue(self)

    @property
    def cached_block_hash_to_block(self) -> BlockMap:
        """Which blocks hold a hash."""
        return BlockMap(self)

    @property
    def cached_block_hashes_by_block(self) -> HashesByBlock:
        """Further hashes of blocks, beside each one's own."""
        return HashesByBlock(self)

    @property
    def metrics_collector(self) -> Any:
        """Who is told of single blocks, or ``None``."""
        return self._collector

    @metrics_collector.setter
    def metrics_collector(self, collector: Any) -> None:
        self._collector = collector
        self._hook()

    def _hook(self) -> None:
        self._set_hooked(bool(self._collector) or bool(self._reuse_watchers))

    # ---------------------------------------------------------------- events

    def take_events(self) -> list[Any]:
        """All events since the last call, as vLLM's own Structs."""
        if not self.enable_kv_cache_events:
            return []
        events = self.kv_event_queue
        self.kv_event_queue = []
        return events

    def take_columns(self) -> Any:
        """The same as one ``EventList``, or ``None`` where Structs wait that somebody else has put there."""
        return None if self._queue else self._take_columns()

    # ---------------------------------------------------------------- calls that tell of single blocks

    def _get_new_blocks_hooked(self, num_blocks: int) -> list[Any]:
        """As vLLM: who waits for a block is told before it is given out, the collector before and after."""
        if num_blocks > self.get_num_free_blocks():
            return self._take_blocks(num_blocks)
        coming = self.to_free_blocks(num_blocks)
        self._notify_reuse(coming)
        collector = self._collector
        if collector and self.enable_caching:
            for block in coming:
                collector.on_block_evicted(block)
        blocks = self._take_blocks(num_blocks)
        if collector:
            for block in blocks:
                collector.on_block_allocated(block)
        return blocks

    def _notify_reuse(self, blocks: Iterable[Any]) -> None:
        if not self._reuse_watchers:
            return
        for block in blocks:
            watcher = self._reuse_watchers.pop(block.block_id, None)
            if watcher is not None:
                watcher(block)
        self._hook()

    def _touch_hooked(self, blocks: Sequence[Any]) -> None:
        self._touch(blocks)
        if self._collector:
            for block in blocks:
                self._collector.on_block_accessed(block)

    def _evict_blocks_hooked(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if block_id >= len(self.blocks):
                raise AssertionError(f"block {block_id} is none of this pool's {len(self.blocks)}")
            self._maybe_evict_cached_block(self.blocks[block_id])

    def _maybe_evict_cached_block(self, block: Any) -> bool:
        """Take all hashes from a block; whether it had any."""
        if self._collector:
            self._collector.on_block_evicted(block)
        return super()._maybe_evict_cached_block(block)

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Any) -> None:
        """Release blocks that stay readable; ``on_reuse`` is called with each when it is given out again."""
        blocks = list(blocks)
        self._unpin(blocks, on_reuse)
        for block in blocks:
            self._reuse_watchers[block.block_id] = on_reuse
        self._hook()

    def reset_prefix_cache(self) -> bool:
        """Forget all hashes, unless blocks are in use."""
        used = self.num_gpu_blocks - self.get_num_free_blocks() - 1
        if used or not self._reset():
            log.warning("kvevents: the prefix cache is not reset, %d blocks are in use", used)
            return False
        self._notify_reuse([self.blocks[block_id] for block_id in list(self._reuse_watchers)])
        if self._collector:
            self._collector.reset()
        log.info("kvevents: the prefix cache was reset")
        if self.enable_kv_cache_events and not self.enable_caching:
            self.kv_event_queue.append(AllBlocksCleared())
        return True

    def _free_mixed(self, blocks: list[Any], why: str) -> None:
        """Blocks of several pools go to their own; anything else is vLLM's to judge."""
        by_pool: dict[Any, list[Any]] = {}
        for block in blocks:
            by_pool.setdefault(block.pool or self, []).append(block)
        own = by_pool.pop(self, [])
        if not by_pool:
            self._hand_over(why)
            self.free_blocks(blocks)
            return
        self.free_blocks(own)
        for pool, others in by_pool.items():
            pool.free_blocks(others)

    def _hand_over(self, why: str) -> None:
        """From here on this pool is vLLM's own, with the same blocks, hashes, order and events."""
        hand_over(self, BlockPool, why)


# -------------------------------------------------------------------- the column path


def take_events(self: Any) -> list[Any]:
    """``KVCacheManager``'s; one ``EventList`` in a list where pool and publisher are both ours."""
    pool = self.block_pool
    if getattr(pool, "columns", False):
        events = pool.take_columns()
        if events is not None:
            return [events] if len(events) else []
    found: list[Any] = _stock_take(self)
    return found


def scheduler_init(self: Any, *args: Any, **kwargs: Any) -> None:
    """vLLM's; after it, columns go from our pool to our publisher."""
    _stock_init(self, *args, **kwargs)
    join(self.kv_cache_manager, self.kv_event_publisher, alone=self.connector is None)


def join(manager: Any, publisher: Any, *, alone: bool) -> bool:
    """Let columns go from ``manager``'s pool to ``publisher``, where both are ours; whether they are.

    ``alone``: nobody else's events go to that publisher, so that with ``report="residency"`` its mirror is
    exact for the engine, which readers are told.
    """
    pool = manager.block_pool
    ours: Any = sys.modules.get("kvevents.integrations.vllm.publisher")
    if ours is None or not isinstance(publisher, ours.EnginePublisher) or not isinstance(pool, BlockPool):
        return False
    for group, (kind, window) in enumerate(manager.kv_cache_event_metadata):
        pool._set_group(group, kind, window)
    pool.columns = True
    if alone and _report == "residency":
        pool.exact_for = publisher.exact_for
        pool.exact_for("engine")
    return True
