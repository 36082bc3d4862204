"""Containers: what carries one step's events from the workers to the scheduler.

A worker's container crosses the process border as one small pickle; merging keeps who said what.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from kvevents import _core
from kvevents._core import EventList
from kvevents._reports import MAX_WORKERS, Report, Reports, as_events, check_count
from kvevents.aggregate import KVEventAggregator, Quorum
from kvevents.errors import EventError, EventTypeError, KVEventsError, PickleError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvevents.aggregate import Rule

__all__ = ["KVConnectorKVEvents", "LMCacheKVEvents", "WorkerKVEvents"]

PICKLE_VERSION = 1
"""Of containers; the columns inside have a version of their own."""


class KVConnectorKVEvents(ABC):
    """Abstract base of containers, with vLLM's methods. A container without events is falsy."""

    __slots__ = ()

    @abstractmethod
    def add_events(self, events: Iterable[Any]) -> None:
        """Add events; an ``EventList`` whose events name their workers keeps them."""

    @abstractmethod
    def aggregate(self) -> Self:
        """Keep what enough workers reported in this interval, as one worker's; return ``self``."""

    @abstractmethod
    def increment_workers(self, count: int = 1) -> None:
        """Raise the number of workers that contribute."""

    @abstractmethod
    def get_all_events(self) -> Any:
        """Return all events, a sequence; ``other.add_events`` takes it."""

    @abstractmethod
    def get_number_of_workers(self) -> int:
        """Return the number of workers that contribute."""

    @abstractmethod
    def clear_events(self) -> None:
        """Forget all events; one worker contributes again."""

    def merge(self, other: KVConnectorKVEvents) -> Self:
        """Take over the events of ``other``, which keeps them; return ``self``.

        Containers that know their workers override this, so that each worker stays one.
        """
        self.add_events(other.get_all_events())
        return self

    def is_empty(self) -> bool:
        """Whether there is no event. Finished transfers and the like do not count."""
        return len(self.get_all_events()) == 0

    def __bool__(self) -> bool:
        return not self.is_empty()


class WorkerKVEvents(KVConnectorKVEvents):
    """Events of one worker in columns, or of several with each one's kept apart.

    A worker makes one without knowing its rank; the scheduler's side says whose it is with :meth:`tagged`
    (the position in the list of outputs). Tagging and merging share the columns. :meth:`aggregate` votes
    block by block within this container; the vote that lives across steps is
    :class:`kvevents.Aggregator`'s. Not thread-safe.
    """

    __slots__ = ("_num_workers", "_reports", "_rule")

    def __init__(self, events: Iterable[Any] = (), *, num_workers: int = 1, rule: Rule = "all") -> None:
        # Refuses a rule that no number of workers can meet; that this many can is found by `aggregate`.
        _core.Aggregator(MAX_WORKERS, rule=rule)
        check_count(num_workers, "num_workers")
        self._num_workers = num_workers
        self._rule: Rule = rule
        self._reports: list[tuple[int | None, EventList]] = []
        self.add_events(events)

    def add_events(self, events: Iterable[Any]) -> None:
        """Add events of this container's own worker; tagged events are those of their workers."""
        columns = EventList(as_events(events))
        for worker, part in columns.by_worker():
            self._append(worker, part)

    def _append(self, worker: int | None, events: EventList) -> None:
        for i, (w, known) in enumerate(self._reports):
            if w == worker:
                self._reports[i] = (w, known + events)
                return
        self._reports.append((worker, events))

    def tagged(self, worker: int) -> WorkerKVEvents:
        """Return the same events as those of ``worker``; parts that name a worker keep it."""
        return WorkerKVEvents.of_workers([(worker, self)])

    @classmethod
    def of_workers(cls, containers: Iterable[tuple[int, WorkerKVEvents]]) -> WorkerKVEvents:
        """Join containers, each as its worker's: the same as :meth:`tagged` and then :meth:`merge`.

        The rule is the first one's. None of them changes, and the columns are shared.
        """
        joined: dict[int | None, EventList] = {}
        count = 0
        rule: Rule = "all"
        for number, (worker, container) in enumerate(containers):
            rule = rule if number else container._rule
            named = {worker if w is None else w for w, _ in container._reports}
            count += container._num_workers - len(named & joined.keys())
            for w, events in container._reports:
                whose = worker if w is None else w
                joined[whose] = joined[whose] + events if whose in joined else events
        made = cls.__new__(cls)
        made._num_workers, made._rule = check_count(count, "the number of workers"), rule
        made._reports = list(joined.items())
        return made

    def by_worker(self) -> Iterator[tuple[int | None, EventList]]:
        """Yield ``(worker, events)``, ``None`` for a worker that is not known."""
        return iter(self._reports)

    def merge(self, other: KVConnectorKVEvents) -> Self:
        """Take over the events of ``other``, each worker's as its own, and count its workers.

        Two containers that do not say whose they are belong to two workers, also where one is empty: silence
        is no agreement. The same worker in both counts once.
        """
        parts = other.by_worker() if isinstance(other, WorkerKVEvents) else _columns(other).by_worker()
        theirs = list(parts)
        named = [{w for w, _ in reports if w is not None} for reports in (self._reports, theirs)]
        workers = self._num_workers + other.get_number_of_workers() - len(named[0] & named[1])
        self._num_workers = check_count(workers, "the number of workers")
        if self._reports and theirs:
            free = (w for w in range(MAX_WORKERS) if w not in named[0] | named[1])
            self._reports = [(next(free) if w is None else w, events) for w, events in self._reports]
            theirs = [(next(free) if w is None else w, events) for w, events in theirs]
        for worker, events in theirs:
            self._append(worker, events)
        return self

    def aggregate(self) -> Self:
        """Keep the blocks that the rule accepts among the workers of this container."""
        named = {w for w, _ in self._reports if w is not None}
        workers = max(self._num_workers, *(w + 1 for w in named), 1)
        votes = _core.Aggregator(workers, rule=self._rule)
        free = next((w for w in range(workers) if w not in named), 0)
        votes.add_all([(free if worker is None else worker, events) for worker, events in self._reports])
        agreed = votes.drain()
        self.clear_events()
        self.add_events(agreed)
        return self

    def increment_workers(self, count: int = 1) -> None:
        """Raise the number of workers among which :meth:`aggregate` decides."""
        self._num_workers = check_count(self._num_workers + check_count(count), "the number of workers")

    def get_number_of_workers(self) -> int:
        """Return the number of workers among which :meth:`aggregate` decides."""
        return self._num_workers

    def get_all_events(self) -> EventList:
        """Return all events; those of a known worker carry it as their origin."""
        everything = EventList()
        for worker, events in self._reports:
            everything += events if worker is None else events.with_origin(worker=worker)
        return everything

    def clear_events(self) -> None:
        """Forget all events; one worker contributes again."""
        self._reports = []
        self._num_workers = 1

    def is_empty(self) -> bool:
        """Whether there is no event."""
        return not self._reports

    def __len__(self) -> int:
        """Number of events."""
        return sum(len(events) for _, events in self._reports)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkerKVEvents):
            return NotImplemented
        mine = (self._num_workers, self._rule, self._reports)
        return mine == (other._num_workers, other._rule, other._reports)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        workers = [w for w, _ in self._reports]
        return f"<{type(self).__name__} events={len(self)} workers={workers} of {self._num_workers}>"

    def __reduce__(self) -> tuple[Any, ...]:
        joined = sum((e for _, e in self._reports[1:]), self._reports[0][1]) if self._reports else EventList()
        split = tuple((w, len(e)) for w, e in self._reports)
        rule = tuple(self._rule) if isinstance(self._rule, Quorum) else self._rule
        return _load, (type(self), PICKLE_VERSION, joined.to_bytes(), self._num_workers, split, rule)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """As :meth:`__reduce__`; from protocol 5 on the columns may travel out of band, without a copy."""
        load, (cls, version, columns, *scalars) = self.__reduce__()
        if operator.index(protocol) >= 5:
            columns = PickleBuffer(columns)
        return load, (cls, version, columns, *scalars)

    @classmethod
    def _restore(cls, data: bytes | PickleBuffer, num_workers: int, split: Any, rule: Any) -> Self:
        columns = EventList.from_bytes(data)
        restored = cls(num_workers=num_workers, rule=Quorum(rule) if isinstance(rule, tuple) else rule)
        restored._reports = _cut(columns, split)
        return restored


class LMCacheKVEvents(KVConnectorKVEvents):
    """Events of workers as LMCache's container holds them, over :class:`KVEventAggregator`.

    Compares whole events, so workers must cut runs alike; takes an engine's own Structs as they are. The
    engine's habit, adding another container's list and raising the number of workers, works; :meth:`merge`
    does both.
    """

    __slots__ = ("_aggregator",)

    def __init__(self, num_workers: int = 1) -> None:
        self._aggregator = KVEventAggregator(num_workers)

    def add_events(self, events: Iterable[Any]) -> None:
        """Add a worker's events: the next worker's, or of those that they name."""
        self._aggregator.add_events(events)

    def aggregate(self) -> Self:
        """Keep the events that all workers reported, as one worker's."""
        common = self._aggregator.get_common_events()
        self._aggregator = KVEventAggregator(1)
        if len(common):
            self._aggregator.add_events(common)
        return self

    def increment_workers(self, count: int = 1) -> None:
        """Raise the number of workers; see :meth:`KVEventAggregator.increment_workers`."""
        self._aggregator.increment_workers(count)

    def get_all_events(self) -> Any:
        """Return all events, worker by worker."""
        return self._aggregator.get_all_events()

    def get_number_of_workers(self) -> int:
        """Return the number of workers."""
        return self._aggregator.get_number_of_workers()

    def clear_events(self) -> None:
        """Forget all events; one worker contributes again."""
        self._aggregator = KVEventAggregator(1)

    def merge(self, other: KVConnectorKVEvents) -> Self:
        """Take over the workers of ``other``, each as its own."""
        if isinstance(other, LMCacheKVEvents):
            self._aggregator.merge(other._aggregator)
        else:
            self.add_events(other.get_all_events())
            self.increment_workers(other.get_number_of_workers())
        return self

    def is_empty(self) -> bool:
        """Whether there is no event."""
        return len(self._aggregator) == 0

    def __len__(self) -> int:
        """Number of events, over all workers."""
        return len(self._aggregator)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} events={len(self)} workers={self.get_number_of_workers()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        reports = self._aggregator._reports.settled()
        lists = [r.events() for r in reports]
        split = tuple((len(e), r.covers, r.reported) for e, r in zip(lists, reports, strict=True))
        try:
            joined = EventList()
            for events in lists:
                joined += EventList(events)
            payload: Any = joined.to_bytes()
        except (EventError, EventTypeError):
            # Hashes that columns cannot hold (strings, say) travel as the objects that they are.
            payload = [event for events in lists for event in events]
        return _load, (type(self), PICKLE_VERSION, payload, split)

    @classmethod
    def _restore(cls, payload: bytes | list[Any], split: Any) -> Self:
        events: Any = payload if isinstance(payload, list) else EventList.from_bytes(payload)
        restored = cls()
        reports = Reports(1)
        reports.reports = []
        at = 0
        for length, covers, reported in split:
            part = events[at : at + length]
            reports.reports.append(Report([part] if length else (), covers=covers, reported=reported))
            at += length
        if at != len(events) or not reports.reports:
            raise PickleError(f"a container of {len(events)} events says that its workers have {at}")
        restored._aggregator._reports = reports
        return restored


def _columns(container: KVConnectorKVEvents) -> EventList:
    return EventList(as_events(container.get_all_events()))


def _cut(columns: EventList, split: Any) -> list[tuple[int | None, EventList]]:
    reports, at = [], 0
    for worker, length in split:
        reports.append((worker, columns[at : at + length]))
        at += length
    if at != len(columns):
        raise PickleError(f"a container of {len(columns)} events says that its workers have {at}")
    return reports


def _load(cls: type[Any], version: object, *state: Any) -> Any:
    """Unpickle a container; whatever is not one of this version is a ``PickleError``."""
    if version != PICKLE_VERSION:
        raise PickleError(
            f"this container was pickled in version {version!r}, this build reads version {PICKLE_VERSION}; "
            "run the same kvevents release in every process"
        )
    try:
        return cls._restore(*state)
    except PickleError:
        raise
    except (KVEventsError, TypeError, ValueError, AttributeError, KeyError) as e:
        raise PickleError(f"not a valid pickled container: {e}") from e
