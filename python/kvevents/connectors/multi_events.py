"""The container of a ``MultiConnector``: one container per child, by position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvevents._core import EventList
from kvevents.connectors.containers import KVConnectorKVEvents, WorkerKVEvents
from kvevents.connectors.tagging import tag_container
from kvevents.errors import EventTypeError, PickleError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MultiConnectorKVEvents", "split_container"]

PICKLE_VERSION = 1


class MultiConnectorKVEvents(KVConnectorKVEvents):
    """Implements the interface of any other container, so that nothing else needs to know about it.

    Children keep their identity by position, two of one class as well. Each child's own container
    aggregates its own events. There are no deep copies.
    """

    __slots__ = ("_children",)

    def __init__(self, num_children: int) -> None:
        self._children: list[KVConnectorKVEvents | None] = [None] * num_children

    @property
    def children(self) -> list[KVConnectorKVEvents | None]:
        """The children's containers, by position; ``None`` where a child reported nothing."""
        return list(self._children)

    def set_child(self, index: int, container: KVConnectorKVEvents) -> None:
        """Add a child's container to what is already held for it."""
        if not 0 <= index < len(self._children):
            msg = f"child {index} of {len(self._children)}"
            raise IndexError(msg)
        held = self._children[index]
        self._children[index] = container if held is None else held.merge(container)

    def tagged(self, worker: int) -> MultiConnectorKVEvents:
        """Return the same events as those of ``worker``."""
        copy = MultiConnectorKVEvents(len(self._children))
        copy._children = [None if c is None else tag_container(c, worker) for c in self._children]
        return copy

    def add_events(self, events: Iterable[Any]) -> None:
        """Add events that say which child they are of, as :meth:`get_all_events` returns them.

        Raises :class:`EventTypeError` for events without a source: they cannot be told apart.
        """
        columns = events if isinstance(events, EventList) else EventList(events)
        for source, part in columns.by_source():
            head, _, rest = (source or "").partition("/")
            if not head.isdecimal() or int(head) >= len(self._children):
                raise EventTypeError(
                    f"events of a MultiConnector need the child they are of, saw source {source!r}; use the "
                    "list that get_all_events() returned, or set_child(index, container), or "
                    "EventList.with_origin(source='<index>')"
                )
            index = int(head)
            child = self._children[index]
            if child is None:
                nested = MultiConnectorKVEvents(0) if rest else None
                if nested is not None:
                    nested._children = [None] * (int(rest.partition("/")[0]) + 1)
                child = self._children[index] = nested or WorkerKVEvents()
            if rest and isinstance(child, MultiConnectorKVEvents):
                needed = int(rest.partition("/")[0]) + 1
                child._children.extend([None] * (needed - len(child._children)))
            child.add_events(part.with_source(rest or None))

    def merge(self, other: KVConnectorKVEvents) -> MultiConnectorKVEvents:
        """Take over another's, child by child.

        A single container goes to the one child that has its type. Raises :class:`EventTypeError` where
        there is no such child, or more than one.
        """
        if isinstance(other, MultiConnectorKVEvents):
            if len(other._children) > len(self._children):
                self._children.extend([None] * (len(other._children) - len(self._children)))
            for i, child in enumerate(other._children):
                if child is not None:
                    self.set_child(i, child)
            return self
        same = [i for i, c in enumerate(self._children) if type(c) is type(other)]
        if len(same) != 1:
            raise EventTypeError(
                f"a {type(other).__name__} can be merged only where exactly one child has that type, "
                f"here {len(same)} of {len(self._children)} have; use set_child(index, container)"
            )
        self.set_child(same[0], other)
        return self

    def aggregate(self) -> MultiConnectorKVEvents:
        """Let every child's container aggregate its own."""
        self._children = [None if c is None else c.aggregate() for c in self._children]
        return self

    def increment_workers(self, count: int = 1) -> None:
        """Raise every child's number of workers."""
        for child in self._children:
            if child is not None:
                child.increment_workers(count)

    def get_number_of_workers(self) -> int:
        """Return the largest number of workers of any child; 1 where none reported."""
        return max((c.get_number_of_workers() for c in self._children if c is not None), default=1)

    def get_all_events(self) -> EventList:
        """Return the children's events in child order, each with its source (position) and worker."""
        joined = EventList()
        for i, child in enumerate(self._children):
            if child is not None:
                events = child.get_all_events()
                columns = events if isinstance(events, EventList) else EventList(events)
                joined += columns.with_source(str(i), nest=True)
        return joined

    def clear_events(self) -> None:
        """Forget all events; the children keep their places."""
        for child in self._children:
            if child is not None:
                child.clear_events()

    def is_empty(self) -> bool:
        """Whether no child has an event."""
        return not any(self._children)

    def __repr__(self) -> str:
        return f"<MultiConnectorKVEvents {self._children!r}>"

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _load_multi_events, (PICKLE_VERSION, self._children)


def _load_multi_events(version: int, children: list[KVConnectorKVEvents | None]) -> MultiConnectorKVEvents:
    if version != PICKLE_VERSION:
        raise PickleError(
            f"this container was pickled in version {version}, this build reads version {PICKLE_VERSION}; "
            "run the same kvevents release in every process"
        )
    container = MultiConnectorKVEvents(len(children))
    container._children = list(children)
    return container


def split_container(container: Any, num_children: int) -> list[Any]:
    """Return every child's container, ``None`` for a child that reported nothing."""
    if container is None:
        return [None] * num_children
    if not isinstance(container, MultiConnectorKVEvents):
        raise EventTypeError(
            f"a MultiConnector takes a MultiConnectorKVEvents, not {type(container).__name__}: "
            "the workers do not run the same connectors as the scheduler"
        )
    children = container.children
    if len(children) > num_children:
        raise EventTypeError(f"events of {len(children)} connectors, the scheduler has {num_children}")
    return children + [None] * (num_children - len(children))
