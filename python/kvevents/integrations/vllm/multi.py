"""Part ``multi``: the workers' events of a ``MultiConnector``'s children reach those children."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvevents.errors import ConfigError
from kvevents.integrations.vllm.containers import ChildKVEvents

if TYPE_CHECKING:
    from kvevents.integrations.vllm.settings import Settings

__all__ = ["install"]

_stock_update = MultiConnector.update_connector_output


def install(_settings: Settings) -> str:
    """Give ``MultiConnector`` the hook that it lacks, and hand events back by child."""
    if "get_kv_connector_kv_cache_events" in vars(MultiConnector):
        raise ConfigError("this vLLM's MultiConnector collects its children's events itself")
    MultiConnector.get_kv_connector_kv_cache_events = get_kv_connector_kv_cache_events
    MultiConnector.update_connector_output = update_connector_output
    return "children's events are kept apart"


def get_kv_connector_kv_cache_events(self: Any) -> ChildKVEvents | None:
    """In a worker, after its step: every child's container, or ``None`` if no child reports."""
    children = [child.get_kv_connector_kv_cache_events() for child in self._connectors]
    return None if all(c is None for c in children) else ChildKVEvents(children)


def update_connector_output(self: Any, connector_output: Any) -> None:
    """In the scheduler: each child gets its own events, and its own worker metadata as in vLLM."""
    events, meta = connector_output.kv_cache_events, connector_output.kv_connector_worker_meta
    if not isinstance(events, ChildKVEvents):
        _stock_update(self, connector_output)
        return
    try:
        for i, child in enumerate(self._connectors):
            connector_output.kv_cache_events = events.children[i] or None
            connector_output.kv_connector_worker_meta = None if meta is None else meta.metadata[i]
            child.update_connector_output(connector_output)
    finally:
        connector_output.kv_cache_events, connector_output.kv_connector_worker_meta = events, meta
