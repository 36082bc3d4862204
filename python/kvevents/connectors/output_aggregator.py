"""One step's outputs of all workers made one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvevents.connectors.output import KVConnectorOutput
from kvevents.connectors.tagging import tag_container
from kvevents.errors import ConnectorError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvevents.connectors.base import KVConnectorBase

__all__ = ["KVOutputAggregator"]


class KVOutputAggregator:
    """Joins the connector outputs of all workers, where a worker is its position in the list.

    Finished requests are counted over workers, invalid blocks united, statistics and worker metadata
    aggregated in order of workers. Events are only carried: every worker's container, tagged with its
    worker, reaches the scheduler half of the connector, which holds the votes.

    ``None`` and empty outputs are silence, and silence changes nothing. What arrives in a step whose
    ``output_rank`` output is ``None`` is kept for the next. Not thread-safe: one per executor.
    """

    def __init__(self, expected_finished_count: int) -> None:
        self._expected = expected_finished_count
        self._sending: dict[str, int] = {}
        self._recving: dict[str, int] = {}
        self._failed_recving: set[str] = set()
        self._kept: KVConnectorOutput | None = None

    @classmethod
    def from_connector(cls, connector: KVConnectorBase, world_size: int) -> KVOutputAggregator:
        """Make the aggregator that a connector needs in a group of ``world_size`` workers."""
        return cls(connector.get_finished_count() or world_size)

    def aggregate(self, outputs: Sequence[Any], output_rank: int = 0) -> Any:
        """Join ``outputs`` (one a worker, ``None`` for none) into that of ``output_rank``.

        Returns ``outputs[output_rank]`` with its ``kv_connector_output`` replaced, or ``None`` where
        that worker gave none. The inputs' containers are not changed.
        """
        joined = self._kept or KVConnectorOutput()
        self._kept = None
        for worker, output in enumerate(outputs):
            part = None if output is None else output.kv_connector_output
            if part is not None:
                self._join(joined, part, worker)
        chosen = outputs[output_rank]
        if chosen is None:
            self._kept = joined
            return None
        recving = joined.finished_recving or set()
        joined.failed_recving = self._failed_recving & recving
        self._failed_recving -= joined.failed_recving
        joined.expected_finished_count = self._expected
        chosen.kv_connector_output = joined
        return chosen

    def _join(self, joined: KVConnectorOutput, part: KVConnectorOutput, worker: int) -> None:
        if part.expected_finished_count > 0:
            self._expected = part.expected_finished_count
        joined.finished_sending = self._count(part.finished_sending, self._sending, joined.finished_sending)
        joined.finished_recving = self._count(part.finished_recving, self._recving, joined.finished_recving)
        joined.invalid_block_ids |= part.invalid_block_ids
        self._failed_recving |= part.failed_recving
        for name in ("kv_connector_stats", "kv_connector_worker_meta"):
            so_far, new = getattr(joined, name), getattr(part, name)
            if new is None:
                continue
            if not hasattr(new, "aggregate"):
                raise ConnectorError(
                    f"worker {worker}: {name} is a {type(new).__name__}, which has no aggregate(); inherit "
                    "KVConnectorWorkerMetadata or KVConnectorStats"
                )
            setattr(joined, name, new if so_far is None else so_far.aggregate(new))
        if part.kv_cache_events is not None:
            tagged = tag_container(part.kv_cache_events, worker)
            if joined.kv_cache_events is None:
                joined.kv_cache_events = tagged
            else:
                joined.kv_cache_events.merge(tagged)

    def _count(
        self, reported: set[str] | None, remaining: dict[str, int], finished: set[str] | None
    ) -> set[str] | None:
        for request in reported or ():
            left = remaining.get(request, self._expected) - 1
            if left > 0:
                remaining[request] = left
                continue
            remaining.pop(request, None)
            finished = finished or set()
            finished.add(request)
        return finished
