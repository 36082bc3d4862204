"""The scheduler's side of a mock engine's connectors: metadata out, outputs in, one batch a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from kvevents._core import EventList
from kvevents.collector import KVEventCollector
from kvevents.connectors import KVConnectorRole, KVOutputAggregator, MultiKVConnectorStats
from kvevents.simulate.tier import TierStats
from kvevents.simulate.workers import WorkerGroup, make_connector

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from kvevents.collector import BatchSink
    from kvevents.simulate.tier import TierConfig

__all__ = ["EngineConnectors"]


class _Taken:
    """The pool's events of this step, which the engine has taken already."""

    def __init__(self) -> None:
        self.events = EventList()

    def take_events(self) -> EventList:
        events, self.events = self.events, EventList()
        return events


class EngineConnectors:
    """Worker processes and everything between them and the publisher. One engine's, one thread's.

    Every step: the scheduler half of a ``MultiConnector`` tells the workers what the pool stored, the workers
    answer with one pickle each, ``KVOutputAggregator`` joins them, the scheduler half votes, and
    ``KVEventCollector`` makes the batch.
    """

    def __init__(self, tiers: Sequence[Sequence[TierConfig]], folder: Path) -> None:
        """``tiers[w]`` are worker ``w``'s connectors; the ledgers go into ``folder``."""
        self.scheduler = make_connector(tiers[0], KVConnectorRole.SCHEDULER)
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler, len(tiers))
        self._taken = _Taken()
        self.collector: KVEventCollector
        self.stats = TierStats()
        """Of all workers and connectors together."""
        self.restarts = 0
        self.workers = WorkerGroup(tiers, folder)

    def connect(
        self, publisher: BatchSink, *, data_parallel_rank: int | None, clock: Callable[[], float]
    ) -> None:
        """Say where the batches go. The engine does it once."""
        self.collector = KVEventCollector(
            self._taken,
            [self.scheduler],
            publisher=publisher,
            data_parallel_rank=data_parallel_rank,
            flush_interval_s=0,  # the engine steps until its stores are finished
            clock=clock,
        )

    def step(self, step: int, pool_events: EventList) -> EventList:
        """Let the workers do their part; publishes and returns the events of the step."""
        metadata = self.scheduler.build_connector_meta((step, pool_events))
        output = self._aggregator.aggregate(self.workers.step(step, metadata)).kv_connector_output
        if isinstance(output.kv_connector_stats, MultiKVConnectorStats):
            for stats in output.kv_connector_stats.data.values():
                self.stats.aggregate(stats)
        self.collector.update(output)
        self._taken.events = pool_events
        batch = self.collector.step()
        return EventList() if batch is None else EventList(batch.events)

    def restart_worker(self, worker: int, next_step: int) -> None:
        """Kill a worker and start it anew, and take its votes."""
        self.workers.restart(worker, next_step)
        self.scheduler.forget_worker(worker)
        self.restarts += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.workers.close()
