"""The scheduler's side of a mock engine's connectors: metadata out, outputs in, one batch a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from kvevents._core import EventList
from kvevents.collector import KVEventCollector
from kvevents.connectors import KVConnectorRole, KVOutputAggregator, MultiKVConnectorStats
from kvevents.simulate.tier import TierStats
from kvevents.simulate.workers import make_connector

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from kvevents.collector import BatchSink
    from kvevents.connectors import KVConnectorMetadata, ModelRunnerOutput
    from kvevents.simulate.tier import TierConfig

__all__ = ["EngineConnectors", "Workers"]


class _Taken:
    """The pool's events of this step, which the engine has taken already."""

    def __init__(self) -> None:
        self.events = EventList()

    def take_events(self) -> EventList:
        events, self.events = self.events, EventList()
        return events


class Workers(Protocol):
    """The worker halves of an engine's connectors: processes, or not."""

    @property
    def pickled_bytes(self) -> int:
        """Of all outputs so far."""

    def step(self, step: int, metadata: KVConnectorMetadata) -> list[ModelRunnerOutput]:
        """Let every worker do one step; returns their outputs, by worker."""

    def restart(self, worker: int, next_step: int) -> None:
        """Start a worker anew between two steps: what it held is gone."""

    def close(self) -> None:
        """End all workers. Idempotent."""


class EngineConnectors:
    """Everything between the workers of an engine and its publisher. One engine's, one thread's.

    Every step: the scheduler half of a ``MultiConnector`` tells the workers what the pool stored, the workers
    answer with one pickle each, ``KVOutputAggregator`` joins them, the scheduler half votes, and
    ``KVEventCollector`` makes the batch.
    """

    def __init__(self, tiers: Sequence[Sequence[TierConfig]], workers: Workers) -> None:
        """``tiers[w]`` are worker ``w``'s connectors; ``workers`` are ended with this."""
        self.scheduler = make_connector(tiers[0], KVConnectorRole.SCHEDULER)
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler, len(tiers))
        self._taken = _Taken()
        self.collector: KVEventCollector
        self.stats = TierStats()
        """Of all workers and connectors together."""
        self.restarts = 0
        self.workers = workers

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
