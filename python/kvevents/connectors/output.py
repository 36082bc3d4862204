"""What workers hand to the scheduler once a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvevents.connectors.base import KVConnectorWorkerMetadata
    from kvevents.connectors.containers import KVConnectorKVEvents
    from kvevents.connectors.stats import KVConnectorStats

__all__ = ["KVConnectorOutput", "ModelRunnerOutput"]


@dataclass
class KVConnectorOutput:
    """The connector's part of one worker's step, or (aggregated) of all workers'.

    Fields are vLLM's. Travels by pickle.
    """

    finished_sending: set[str] | None = None
    """Requests whose blocks were sent."""
    finished_recving: set[str] | None = None
    """Requests whose blocks arrived."""
    kv_connector_stats: KVConnectorStats | None = None
    kv_cache_events: KVConnectorKVEvents | None = None
    kv_connector_worker_meta: KVConnectorWorkerMetadata | None = None
    invalid_block_ids: set[int] = field(default_factory=set)
    """Blocks that could not be loaded; their requests compute them again."""
    failed_recving: set[str] = field(default_factory=set)
    """Requests whose receive failed."""
    expected_finished_count: int = 0
    """How many workers report each finished request; 0 where the aggregator's own number holds."""

    def is_empty(self) -> bool:
        """Whether there is nothing to tell. Events count: a step may consist of nothing else."""
        stats = self.kv_connector_stats
        return not (
            self.finished_sending
            or self.finished_recving
            or (stats is not None and not stats.is_empty())
            or self.kv_cache_events
            or self.invalid_block_ids
            or self.failed_recving
            or self.kv_connector_worker_meta
        )


@dataclass
class ModelRunnerOutput:
    """The least of an engine's step output that :class:`KVOutputAggregator` needs.

    Engines pass their own class; only the attribute ``kv_connector_output`` is touched.
    """

    kv_connector_output: KVConnectorOutput | None = None
