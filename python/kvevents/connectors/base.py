"""The connector API: vLLM's shape, without torch and without vLLM.

A connector moves KV blocks between an engine and somewhere else. It has two halves: one object in the
scheduler process, one in every worker process, told apart by :class:`KVConnectorRole`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from kvevents.connectors.mixin import KVEventsMixin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvevents.connectors.stats import KVConnectorStats

__all__ = [
    "KVConnectorBase",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorWorkerMetadata",
]


class KVConnectorRole(enum.Enum):
    """Which half of a connector an object is."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024 - a marker, as in vLLM
    """What the scheduler half tells the worker halves in one step. Travels by pickle."""


class KVConnectorWorkerMetadata(ABC):
    """What a worker half tells the scheduler half in one step, beside events and statistics."""

    @abstractmethod
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join with another worker's; called in order of workers."""


class KVConnectorBase(KVEventsMixin, ABC):
    """Base of connectors. Subclass it in Python; override what the connector does.

    ``vllm_config`` and ``kv_cache_config`` are whatever the engine passes. One object is used by one
    thread, but events may be recorded from others (:class:`KVEventsMixin`).
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        self._vllm_config = vllm_config
        self._role = role
        self._kv_cache_config = kv_cache_config
        self._connector_metadata: KVConnectorMetadata | None = None

    @property
    def role(self) -> KVConnectorRole:
        """Which half this is."""
        return self._role

    # ---------------------------------------------------------------- worker half

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Take note of the engine's memory, by name of layer; called once, before the first step."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the scheduler's word for this step, before the model runs."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """Forget it, after the model ran."""
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        """Whether metadata is bound."""
        return self._connector_metadata is not None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to load blocks; may return before they are there."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Block until the layer's blocks are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Begin to save one layer; may return before it is done."""

    def wait_for_save(self) -> None:
        """Block until saving no longer needs the engine's memory."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose async sends and receives are done."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the ids of blocks that could not be loaded since the last call."""
        return set()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what was observed since the last call."""
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what the scheduler half must know of this step."""
        return None

    # ---------------------------------------------------------------- scheduler half

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many more tokens can be loaded, and whether that is done asynchronously."""

    @abstractmethod
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take note of the blocks that the request got."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Build the word of this step for the workers."""

    def get_finished_count(self) -> int | None:
        """Return how many workers report each finished request; ``None`` for all."""
        return None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the blocks are freed later (by ``get_finished``), and parameters to hand on."""
        return False, None

    def reset_cache(self) -> bool | None:
        """Forget what is stored; ``None`` where that is not supported."""
        return None

    def shutdown(self) -> None:
        """Let go of threads, files and connections. Safe to call twice."""


KVConnectorBase_V1 = KVConnectorBase
"""vLLM's name of the same class."""
