"""A lower tier that behaves as real ones do: late, in pieces, and sometimes not at all.

Each worker keeps its own shard of every block and its own order of eviction. Stores finish up to three
steps later, in splits of the worker's own, and some fail. What a worker really holds goes into its
*ledger*, beside and independent of the events that it records.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from kvevents._core import EventList
from kvevents.connectors import KVConnectorBase, KVConnectorMetadata, KVConnectorRole, KVConnectorStats
from kvevents.events import BlockStored

if TYPE_CHECKING:
    from kvevents.aggregate import Rule

__all__ = ["Change", "TierConfig", "TierConnector", "TierMetadata", "TierStats"]

Change: TypeAlias = tuple[str, bytes | int]
"""``("+", hash)``: from now on the worker holds the block; ``("-", hash)``: no more."""


@dataclass(frozen=True)
class TierConfig:
    """One connector of a mock engine in one worker; travels to it by pickle."""

    medium: str = "CPU"
    capacity: int = 4096
    """Blocks that a worker holds before it evicts those that were stored least recently."""
    rule: Rule = "all"
    num_workers: int = 1
    worker: int = 0
    seed: int = 0
    max_delay: int = 3
    """Steps that a store may take beyond its own."""
    fail_rate: float = 0.01
    """Share of the stores that fail, in each worker on its own."""


@dataclass
class TierMetadata(KVConnectorMetadata):
    """What the workers are to store: the blocks that the pool stored in this step."""

    step: int
    stored: EventList


@dataclass
class TierStats(KVConnectorStats):
    """Counts of what stores went through: ``stores``, ``late``, ``failed``, ``partial``, ``evicted``."""

    def add(self, what: str, count: int = 1) -> None:
        """Count one more."""
        self.data[what] = self.data.get(what, 0) + count

    def reset(self) -> None:
        """Forget everything observed."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TierStats:
        """Add another worker's or step's counts."""
        for what, count in other.data.items():
            self.add(what, count)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts themselves."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


@dataclass
class _Pending:
    due: int
    ticket: int
    hashes: list[bytes | int]
    fails: bool


class TierConnector(KVConnectorBase):
    """Stores every block that the engine's pool stored, in every worker."""

    def __init__(self, vllm_config: TierConfig, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config
        self.kv_events_rule = vllm_config.rule
        self._rng = random.Random(f"{vllm_config.seed}/{vllm_config.worker}/{vllm_config.medium}")
        self._held: OrderedDict[bytes | int, None] = OrderedDict()
        self._pending: list[_Pending] = []
        self._ledger: list[Change] = []
        self._stats = TierStats()

    # ---------------------------------------------------------------- worker half

    def wait_for_save(self) -> None:
        """Begin this step's stores, and finish those that are due."""
        meta = self._connector_metadata
        if not isinstance(meta, TierMetadata):
            return
        for event in meta.stored:
            if isinstance(event, BlockStored):
                self._begin(event, meta.step)
        due = [p for p in self._pending if p.due <= meta.step]
        self._pending = [p for p in self._pending if p.due > meta.step]
        for p in due:
            self._finish(p)

    def get_kv_connector_stats(self) -> TierStats | None:
        """Return what was counted since the last call."""
        stats, self._stats = self._stats, TierStats()
        return None if stats.is_empty() else stats

    def take_ledger(self) -> list[Change]:
        """Return what really came and went since the last call, in order."""
        ledger, self._ledger = self._ledger, []
        return ledger

    def _begin(self, event: BlockStored, step: int) -> None:
        n = len(event.block_hashes)
        start = 0
        while start < n:
            # Every worker cuts a run in its own way.
            end = min(n, start + self._rng.choice((1, 2, 3, 5, 8, n)))
            ticket = self.kv_events.begin_store(
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
                start=start,
                end=end,
                medium=self._config.medium,
                group_idx=event.group_idx,
                lora_name=event.lora_name,
                extra_keys=event.extra_keys,
            )
            delay = self._rng.choice((0, 0, 0, *range(1, self._config.max_delay + 1)))
            fails = self._rng.random() < self._config.fail_rate
            self._pending.append(_Pending(step + delay, ticket, event.block_hashes[start:end], fails))
            self._stats.add("stores")
            if delay:
                self._stats.add("late")
            start = end

    def _finish(self, p: _Pending) -> None:
        done = len(p.hashes)
        if p.fails:
            # A part may have made it before the failure.
            done = self._rng.randrange(done)
            self._stats.add("partial" if done else "failed")
            if done == 0:
                self.kv_events.fail(p.ticket)
                return
        self._make_room(p.hashes[:done])
        self.kv_events.complete(p.ticket, stored=done)
        self._keep(p.hashes[:done])

    def _make_room(self, hashes: list[bytes | int]) -> None:
        """Evict before the store: the removal comes before it in the stream, too."""
        new = sum(1 for h in hashes if h not in self._held)
        gone = []
        while self._held and len(self._held) + new > self._config.capacity:
            h, _ = self._held.popitem(last=False)
            gone.append(h)
            self._ledger.append(("-", h))
        if gone:
            self._stats.add("evicted", len(gone))
            self.kv_events.removed(gone, medium=self._config.medium, group_idx=0)

    def _keep(self, hashes: list[bytes | int]) -> None:
        for h in hashes:
            if h not in self._held:
                self._ledger.append(("+", h))
            self._held[h] = None
            self._held.move_to_end(h)

    # ---------------------------------------------------------------- scheduler half

    def kv_events_num_workers(self) -> int:
        """Return the number of workers of the mock engine."""
        return self._config.num_workers

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing is ever loaded: the mock engine has no memory to load into."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing to note."""

    def build_connector_meta(self, scheduler_output: Any) -> TierMetadata:
        """Tell the workers what the pool stored in this step: ``scheduler_output`` is ``(step, events)``."""
        step, events = scheduler_output
        return TierMetadata(step, EventList(e for e in events if isinstance(e, BlockStored)))
