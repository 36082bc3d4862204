"""Connectors: vLLM's API without torch and without vLLM, with events that reach the scheduler."""

from kvevents.connectors.base import (
    KVConnectorBase,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from kvevents.connectors.containers import KVConnectorKVEvents, LMCacheKVEvents, WorkerKVEvents
from kvevents.connectors.factory import KVConnectorFactory
from kvevents.connectors.mixin import KVEventsMixin, check_chunk_size, check_event_hooks
from kvevents.connectors.multi import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from kvevents.connectors.multi_events import MultiConnectorKVEvents
from kvevents.connectors.output import KVConnectorOutput, ModelRunnerOutput
from kvevents.connectors.output_aggregator import KVOutputAggregator
from kvevents.connectors.stats import KVConnectorStats, MultiKVConnectorStats

__all__ = [
    "KVConnectorBase",
    "KVConnectorBase_V1",
    "KVConnectorFactory",
    "KVConnectorKVEvents",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "KVEventsMixin",
    "KVOutputAggregator",
    "LMCacheKVEvents",
    "ModelRunnerOutput",
    "MultiConnector",
    "MultiConnectorKVEvents",
    "MultiKVConnectorMetadata",
    "MultiKVConnectorStats",
    "MultiKVConnectorWorkerMetadata",
    "WorkerKVEvents",
    "check_chunk_size",
    "check_event_hooks",
]
