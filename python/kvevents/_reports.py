"""Who reported what in one interval: the bookkeeping that aggregators and containers share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any

from kvevents._core import EventList
from kvevents.errors import AggregatorError, EventTypeError, WorkerIndexError

__all__ = ["MAX_WORKERS", "Report", "Reports", "as_events", "check_count"]

MAX_WORKERS = 1024


def as_events(events: Any) -> EventList | list[Any]:
    """An ``EventList`` as it is, anything else that holds events as a list of its own."""
    if isinstance(events, EventList):
        return events
    if isinstance(events, (str, bytes, bytearray)) or not isinstance(events, Iterable):
        raise EventTypeError(f"events must be an EventList or a list of events, saw {type(events).__name__}")
    return list(events)


def check_count(count: int, what: str = "count") -> int:
    """A number of workers."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_WORKERS:
        raise AggregatorError(f"{what} must be 1 to {MAX_WORKERS}, saw {count!r}")
    return count


class Report:
    """What one worker said, in parts; or a list in which ``covers`` workers were flattened."""

    __slots__ = ("covers", "parts", "reported")

    def __init__(
        self, parts: Iterable[Sequence[Any]] = (), *, covers: int = 1, reported: bool = False
    ) -> None:
        self.parts = list(parts)
        self.covers = covers
        self.reported = reported

    def add(self, events: Sequence[Any]) -> None:
        """One part more; an empty one says that the worker has reported."""
        self.reported = True
        if len(events):
            self.parts.append(events)

    def copy(self) -> Report:
        """With parts of its own."""
        return Report(self.parts, covers=self.covers, reported=self.reported)

    def events(self) -> Sequence[Any]:
        """All parts as one; shared where there is one only."""
        if len(self.parts) == 1:
            return self.parts[0]
        if self.parts and all(isinstance(p, EventList) for p in self.parts):
            return reduce(add, self.parts)
        return [event for part in self.parts for event in part]


class Reports:
    """Reports of a number of workers.

    Each untagged report is the next worker's. Which one a surplus report belongs to is known only when
    the number of workers grows (engines add a list and raise the number afterwards): the last is then the
    new worker's, and those before it are more of what the others said.
    """

    __slots__ = ("_surplus", "reports")

    def __init__(self, workers: int) -> None:
        self.reports = [Report() for _ in range(check_count(workers, "num_workers"))]
        self._surplus: list[Sequence[Any]] = []

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return sum(r.covers for r in self.reports)

    def add(self, events: Sequence[Any], worker: int | None = None) -> None:
        """Add a report; an ``EventList`` whose events name workers is split by them."""
        if worker is not None:
            self._of(worker).add(events)
            return
        parts = events.by_worker() if isinstance(events, EventList) else []
        if any(w is not None for w, _ in parts):
            targets = [(None if w is None else self._of(w), part) for w, part in parts]
            for target, part in targets:
                if target is None:
                    self._add_next(part)
                else:
                    target.add(part)
            return
        self._add_next(events)

    def _add_next(self, events: Sequence[Any]) -> None:
        free = next((r for r in self.reports if not r.reported), None)
        if free is None:
            self._surplus.append(events)
        else:
            free.add(events)

    def _of(self, worker: int) -> Report:
        if not isinstance(worker, int) or isinstance(worker, bool):
            raise WorkerIndexError(f"a worker is an int, saw {worker!r}")
        at = worker
        for report in self.reports:
            if 0 <= at < report.covers:
                if report.covers > 1:
                    raise AggregatorError(
                        f"worker {worker} is one of {report.covers} whose events came in one flattened list"
                    )
                return report
            at -= report.covers
        raise WorkerIndexError(
            f"worker {worker} does not exist: there are {self.num_workers}, numbered from 0"
        )

    def increment(self, count: int) -> bool:
        """Raise the number of workers; whether the last list now counts for several of them."""
        check_count(count)
        check_count(self.num_workers + count, "the number of workers")
        if not self._surplus:
            self.reports.extend(Report() for _ in range(count))
            return False
        last = self._surplus.pop()
        self.reports = self.settled()
        self._surplus = []
        self.reports.append(Report([last] if len(last) else (), covers=count, reported=True))
        return count > 1

    def settled(self) -> list[Report]:
        """Every worker's report, surplus ones in turn added to them; shares events, not lists."""
        reports = [r.copy() for r in self.reports]
        for i, events in enumerate(self._surplus):
            reports[i % len(reports)].add(events)
        return reports

    def absorb(self, other: Reports) -> None:
        """Add another's workers to these, each as its own."""
        check_count(self.num_workers + other.num_workers, "the number of workers")
        self.reports = self.settled() + other.settled()
        self._surplus = []

    def clear(self) -> None:
        """Forget what was said; the number of workers stays."""
        self.reports = [Report() for _ in range(self.num_workers)]
        self._surplus = []

    def __len__(self) -> int:
        return sum(len(p) for r in self.reports for p in r.parts) + sum(map(len, self._surplus))
