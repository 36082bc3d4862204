"""Whose events a container holds: said on the way from the workers to the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvevents._core import EventList
from kvevents.connectors.containers import KVConnectorKVEvents, WorkerKVEvents

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["iter_worker_events", "tag_container"]


def tag_container(container: Any, worker: int) -> KVConnectorKVEvents:
    """Return ``container`` as ``worker``'s, leaving it as it was.

    Containers of other packages, which cannot say who said what, become a :class:`WorkerKVEvents`.
    """
    tagged = getattr(container, "tagged", None)
    if tagged is not None:
        result: KVConnectorKVEvents = tagged(worker)
        return result
    return WorkerKVEvents(container.get_all_events()).tagged(worker)


def iter_worker_events(container: Any) -> Iterator[tuple[int, EventList]]:
    """Yield ``(worker, events)`` of a tagged container. Events whose worker is unknown are worker 0's."""
    by_worker = getattr(container, "by_worker", None)
    parts = by_worker() if by_worker is not None else EventList(container.get_all_events()).by_worker()
    for worker, events in parts:
        yield 0 if worker is None else worker, EventList(events)
