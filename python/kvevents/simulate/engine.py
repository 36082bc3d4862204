"""A scheduler loop without a model: what an engine does to its block pool, and what it publishes.

Follows vLLM's scheduler (V1): running requests decode first, in the order of admission; then waiting
requests are admitted, first come first served, while blocks last; where a running request finds no block,
the one admitted last is preempted, and its blocks are freed. What a step does to the pool becomes one batch.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kvevents.errors import ConfigError
from kvevents.events import EventList, KVEventBatch
from kvevents.pool import BlockPool
from kvevents.tokens import TokenBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvevents.collector import BatchSink
    from kvevents.simulate.connectors import EngineConnectors
    from kvevents.simulate.workloads import Request

__all__ = ["EngineConfig", "EngineStats", "MockEngine"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a mock engine is made of; sizes count blocks, tokens or requests as their names say."""

    num_blocks: int = 2048
    """Blocks of the pool, the null block among them."""
    block_size: int = 16
    max_running: int = 8
    """Requests that decode at a time."""
    tokens_per_step: int = 1
    """Tokens that a running request decodes in a step: an engine's 1, more for long runs in fewer steps."""
    report: str = "residency"
    hash_algorithm: str = "sha256_cbor"
    hash_form: str = "bytes"
    data_parallel_rank: int | None = None
    enable_kv_cache_events: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot run; the pool checks the rest."""
        for name in ("max_running", "tokens_per_step"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}, at least 1 is needed")


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made."""

    steps: int = 0
    finished: int = 0
    refused: int = 0
    """Requests that need more blocks than the pool has: answered with nothing."""
    preempted: int = 0
    resets: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    """Prompt tokens that were not computed again; a request that was preempted is counted once."""
    batches: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the cache."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True)
class _Running:
    request: Request
    tokens: TokenBlocks
    decoded: int = 0
    """Output tokens that are computed and so hold a place in a block."""
    cached: int = 0
    """Blocks of the request that the pool knows by hash."""
    blocks: array[int] = field(default_factory=lambda: array("i"))
    counted: bool = False


class MockEngine:
    """Serves requests on a :class:`kvevents.BlockPool` and publishes one batch a step.

    Without a ``publisher``, :meth:`step` only returns its events.
    ``before_publish(n, batch)`` is called with the running number of each batch before it is published, so
    that a test can write down what is true at that moment. With ``connectors`` every step also runs their
    workers, and the batch has their events as well. Not thread-safe: one thread drives an engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        publisher: BatchSink | None = None,
        before_publish: Callable[[int, KVEventBatch], None] | None = None,
        clock: Callable[[], float] = time.time,
        connectors: EngineConnectors | None = None,
    ) -> None:
        self.config = config
        self.pool = BlockPool(
            config.num_blocks,
            config.block_size,
            enable_kv_cache_events=config.enable_kv_cache_events,
            report=config.report,
            hash_form=config.hash_form,
        )
        self.stats = EngineStats()
        self._publisher = publisher
        self._before_publish = before_publish
        self._clock = clock
        self._connectors = connectors
        if connectors is not None:
            connectors.connect(self, data_parallel_rank=config.data_parallel_rank, clock=clock)
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._running and not self._waiting

    @property
    def num_waiting(self) -> int:
        """Requests that were submitted and are not admitted."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request; it is admitted in one of the next steps."""
        tokens = TokenBlocks(
            self.config.block_size, algorithm=self.config.hash_algorithm, cache_salt=request.cache_salt
        )
        tokens.extend(request.prompt)
        self._waiting.append(_Running(request, tokens))

    def step(self) -> EventList:
        """One round of the scheduler; returns the events of the step, which were published.

        A step without events publishes nothing and returns an empty list.
        """
        self.stats.steps += 1
        finished: list[_Running] = []
        if not self._decode(finished):
            # As in vLLM: where somebody was preempted, nobody new is admitted in the same step.
            self._admit(finished)
        events = self._emit()
        for run in finished:
            self._running.remove(run)
            self._free(run)
            self.stats.finished += 1
        return events

    def serve(self, request: Request) -> None:
        """Submit one request and step until nothing is left to do."""
        self.submit(request)
        while not self.idle:
            self.step()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; refused (``False``) while requests run. Published with the next step."""
        done = self.pool.reset_prefix_cache()
        self.stats.resets += done
        return done

    def _decode(self, finished: list[_Running]) -> bool:
        """Advance every running request; returns whether one was preempted."""
        preempted = self.stats.preempted
        stride = self.config.tokens_per_step
        i = 0
        while i < len(self._running):
            run = self._running[i]
            output = run.request.output
            # The last sampled token is never computed.
            take = min(stride, len(output) - 1 - run.decoded)
            needed = self._blocks_for(run.tokens.num_tokens + take) - len(run.blocks)
            while needed > self.pool.get_num_free_blocks() and self._running[-1] is not run:
                self._preempt(self._running.pop())
            if needed > self.pool.get_num_free_blocks():
                self._preempt(self._running.pop())
                break
            run.tokens.extend(output[run.decoded : run.decoded + take])
            run.decoded += take
            self._fill(run, needed)
            if run.decoded >= len(output) - 1:
                finished.append(run)
            i += 1
        return self.stats.preempted != preempted

    def _admit(self, finished: list[_Running]) -> None:
        block_size = self.config.block_size
        while self._waiting and len(self._running) < self.config.max_running:
            run = self._waiting[0]
            n = run.tokens.num_tokens
            total = self._blocks_for(n)
            # The null block is never given out; a request that no empty pool could hold would wait for ever.
            final = self._blocks_for(len(run.request.prompt) + len(run.request.output) - 1)
            if final > self.config.num_blocks - 1:
                self._waiting.popleft()
                self.stats.refused += 1
                continue
            # The last token is always computed, so that there is something to sample from.
            hits = self.pool.find_longest_cache_hit(run.tokens, (n - 1) // block_size)
            if not self._fits(total, hits):
                break
            self._waiting.popleft()
            if not run.counted:
                run.counted = True
                self.stats.prompt_tokens += n
                self.stats.hit_tokens += len(hits) * block_size
            self.pool.touch(hits)
            run.blocks = array("i", hits)
            run.cached = len(hits)
            self._fill(run, total - len(hits))
            self._running.append(run)
            if run.decoded >= len(run.request.output) - 1:
                finished.append(run)

    def _fits(self, total: int, hits: Sequence[int]) -> bool:
        """Whether ``total`` blocks can be had, ``hits`` among them."""
        free = self.pool.get_num_free_blocks()
        if total <= free:
            return True
        # Hits that nobody uses are free blocks themselves: touching takes them out of what is free.
        unused = sum(self.pool.ref_count(block) == 0 for block in hits)
        return total - len(hits) <= free - unused

    def _fill(self, run: _Running, needed: int) -> None:
        """Take ``needed`` blocks and announce those of the request that its tokens fill now."""
        if needed:
            run.blocks.extend(self.pool.get_new_blocks(needed))
        full = run.tokens.num_tokens // self.config.block_size
        if full > run.cached:
            self.pool.cache_full_blocks(run.tokens, run.blocks, run.cached, full)
            run.cached = full

    def _preempt(self, run: _Running) -> None:
        self._free(run)
        run.blocks = array("i")
        run.cached = 0
        self.stats.preempted += 1
        self._waiting.appendleft(run)

    def _free(self, run: _Running) -> None:
        # Last block first: the tail of a sequence is evicted before its head.
        self.pool.free_blocks(run.blocks[::-1])

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def _emit(self) -> EventList:
        events = self.pool.take_events()
        if self._connectors is not None:
            return self._connectors.step(self.stats.steps, events)
        if len(events):
            self.publish(KVEventBatch(self._clock(), events, self.config.data_parallel_rank))
        return events

    def publish(self, events: KVEventBatch) -> None:
        """Count a step's batch and hand it to the publisher; called by the engine itself."""
        if self._before_publish is not None:
            self._before_publish(self.stats.batches, events)
        if self._publisher is not None:
            self._publisher.publish(events)
        stored, removed = EventList(events.events).num_blocks
        self.stats.batches += 1
        self.stats.blocks_stored += stored
        self.stats.blocks_removed += removed
