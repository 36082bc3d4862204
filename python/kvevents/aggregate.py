"""From what every worker holds to what the engine holds.

:class:`Aggregator` votes block by block and over steps: what a connector's scheduler half uses.
:class:`KVEventAggregator` has vLLM's methods and compares whole events within one interval.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias, cast

from kvevents import _core
from kvevents._core import EventList
from kvevents._reports import Report, Reports, as_events
from kvevents.errors import AggregatorTypeError, EventTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Aggregator", "AggregatorStats", "KVEventAggregator", "Quorum", "Rule"]


def _warn(message: str, *args: object) -> None:
    import logging  # noqa: PLC0415 - needed seldom, and importing the package should be fast

    logging.getLogger("kvevents.aggregate").warning(message, *args)


class Quorum(tuple[tuple[tuple[int, ...], int], ...]):
    """Every subset of workers reaches its own number: ``Quorum([([0, 1], 1), ([2, 3], 2)])``.

    For replicated heads inside every pipeline stage. Checked against the number of workers by the
    aggregator that gets it.
    """

    __slots__ = ()

    def __new__(cls, parts: Iterable[tuple[Iterable[int], int]]) -> Self:
        """From pairs of workers and the number of them that must hold a block."""
        try:
            return super().__new__(cls, tuple((tuple(workers), k) for workers, k in parts))
        except (TypeError, ValueError) as e:
            raise AggregatorTypeError(f"a quorum is made of pairs (workers, k), saw {parts!r}") from e

    def __repr__(self) -> str:
        return f"Quorum({[(list(workers), k) for workers, k in self]})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Quorum, (tuple(self),)


Rule: TypeAlias = Literal["all", "any"] | int | Quorum
"""When a block counts: every worker holds it, one does, at least so many do, or a :class:`Quorum`."""


class AggregatorStats(NamedTuple):
    """What an :class:`Aggregator` counts: the answer to 'why do I see no events'."""

    workers: int
    steps: int
    """Number of drains."""
    resident: int
    """Blocks that are announced."""
    waiting: int
    """Blocks that some worker holds and the rule does not accept."""
    oldest_waiting_steps: int
    """Steps that the oldest of them has waited."""
    waiting_for: tuple[int, ...]
    """By worker: how many of the waiting blocks it does not hold."""
    held: tuple[int, ...]
    """By worker: how many blocks it holds."""
    votes: int
    duplicates: int
    """Stores of blocks that the worker held already."""
    unknown_removals: int
    """Removals of blocks that the worker did not hold."""
    dropped_by_count: int
    """Blocks that lost their votes because too many waited."""
    dropped_by_age: int
    """Blocks that lost their votes because they waited too long."""
    disagreeing_tokens: int
    disagreeing_parents: int
    """Blocks for which a worker gave another parent than the first."""
    without_content: int
    """Blocks announced without tokens, which had been dropped (see ``keep_content``)."""
    steps_without_agreement: int
    """Steps with new stores since a block was agreed on."""
    nbytes: int


class Aggregator:
    """What enough workers of one source hold, block by block, with state that lives across steps.

    ``rule`` is for all groups, ``group_rules`` for groups with another one. A worker that says nothing
    changes nothing. Blocks wait for more workers within bounds: at most ``max_waiting``, each for at most
    ``max_age`` steps; then the oldest lose their votes, which is counted. With ``keep_content`` the fields of
    resident blocks are kept (about 4 bytes a token), so that :meth:`snapshot` and blocks that come back after
    a worker was replaced have their tokens; without it those are hash-only stores of block size 0.
    With ``forget`` a block is forgotten, with its votes, as soon as it is announced, and goes out each time
    that it is agreed on: for sources that never say that a block left.

    Safe from several threads. Never gives the interpreter lock away. Errors: ``AggregatorError`` and its
    subclasses, raised before anything changed.
    """

    __slots__ = ("_core",)

    def __init__(
        self,
        num_workers: int,
        *,
        rule: Rule = "all",
        group_rules: Mapping[int | None, Rule] | None = None,
        max_waiting: int = 1 << 20,
        max_age: int = 10_000,
        warn_after: int = 100,
        keep_content: bool = False,
        forget: bool = False,
    ) -> None:
        self._core = _core.Aggregator(
            num_workers,
            rule=rule,
            group_rules=tuple((group_rules or {}).items()),
            max_waiting=max_waiting,
            max_age=max_age,
            warn_after=warn_after,
            keep_content=keep_content,
            forget=forget,
        )

    def add(self, worker: int, events: EventList | Iterable[Any]) -> None:
        """Apply what a worker reports, in order. A clear takes all votes of that worker."""
        self._core.add(worker, events if isinstance(events, EventList) else EventList(events))

    def add_all(self, reports: Iterable[tuple[int, EventList]]) -> None:
        """Apply reports of several workers; those that say the same vote together, which costs one vote."""
        self._core.add_all(list(reports))

    def add_tagged(self, events: EventList) -> None:
        """Apply events that each name their worker (``EventList.with_origin(worker=...)``)."""
        self._core.add_tagged(events)

    def step(self, reports: list[EventList | None]) -> EventList:
        """Apply one report per worker, by position (``None`` for silence), and :meth:`drain`."""
        out = self._core.step(reports)
        if self._core.has_notices:
            self._tell()
        return out

    def drain(self) -> EventList:
        """End a step and return what changed: removals, then stores, parents first; never a clear."""
        out = self._core.drain()
        if self._core.has_notices:
            self._tell()
        return out

    def snapshot(self) -> EventList:
        """Return everything that is announced as stores, parents first."""
        return self._core.snapshot()

    def forget_worker(self, worker: int) -> None:
        """Take all votes of a worker that left or restarted; the next drain has the removals."""
        self._core.forget_worker(worker)

    def resize(
        self,
        num_workers: int,
        *,
        rule: Rule | None = None,
        group_rules: Mapping[int | None, Rule] | None = None,
    ) -> None:
        """Change the number of workers; rules that are not given stay.

        A worker that would be cut off must have been forgotten.
        """
        groups = None if group_rules is None else tuple(group_rules.items())
        self._core.resize(num_workers, rule=rule, group_rules=groups)

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._core.num_workers

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self._core.nbytes

    def held(self, worker: int) -> int:
        """Return the number of blocks that a worker holds."""
        return self._core.held(worker)

    def holders(
        self,
        block_hash: int | bytes,
        medium: str | None,
        *,
        group_idx: int | None = None,
        locality: str | None = None,
        ownership: str | None = None,
    ) -> tuple[int, ...]:
        """Return the workers that hold a block."""
        return self._core.holders(
            block_hash, medium, group_idx=group_idx, locality=locality, ownership=ownership
        )

    def stats(self) -> AggregatorStats:
        """Return what is counted, and who waits for whom; looks at every block."""
        return AggregatorStats(**cast("dict[str, Any]", self._core.to_stats()))

    def __len__(self) -> int:
        """Number of blocks that are announced."""
        return len(self._core)

    def __repr__(self) -> str:
        return f"<Aggregator workers={self.num_workers} resident={len(self)}>"

    def _tell(self) -> None:
        for what, number, detail in self._core.take_notices():
            if what == "nothing_agrees":
                _warn(
                    "%d steps brought stores and no block was agreed on; %s blocks are held by some workers "
                    "only. Do all workers hash alike (same hash seed and algorithm)? See stats()",
                    number,
                    detail,
                )
            else:
                _warn(
                    "worker %d gives another %s than the first worker for block %r; the first one's are "
                    "published. Further cases are only counted, see stats()",
                    number,
                    what,
                    detail,
                )


# ---------------------------------------------------------------- vLLM's methods, one interval


class KVEventAggregator:
    """Events that all workers reported in one interval, with vLLM's methods.

    The unit is the event, and each worker has a multiset of its own: a worker that reports one twice is not
    two workers. A worker that did not report has not reported, so nothing is common without it. Events are
    ours, or an engine's own Structs with the same class and field names; hashes may be anything hashable.
    ``metadata`` does not count, the first worker's wins. Asking changes nothing, and no event or list that
    was given is ever changed. Not thread-safe.
    """

    __slots__ = ("_common", "_reports", "_warned")

    def __init__(self, num_workers: int) -> None:
        self._reports = Reports(num_workers)
        self._common: Sequence[Any] | None = None
        self._warned = False

    def add_events(self, events: EventList | Iterable[Any], worker: int | None = None) -> None:
        """Add a worker's report. Without ``worker`` it is the next one's; tagged lists keep their tags."""
        self._reports.add(as_events(events), worker)
        self._common = None

    def get_common_events(self) -> Any:
        """Return the events that all workers reported, in the order of the first worker.

        An event is in it as often as in the report that has it least often. An ``EventList`` if all
        reports were, else a list.
        """
        if self._common is None:
            self._common = _intersection(self._reports.settled())
        return self._common if isinstance(self._common, EventList) else list(self._common)

    def get_all_events(self) -> Any:
        """Return all events, worker by worker: a tagged ``EventList`` if all reports were columns."""
        reports = self._reports.settled()
        if not all(isinstance(p, EventList) for r in reports for p in r.parts):
            return [event for r in reports for part in r.parts for event in part]
        everything = EventList()
        worker = 0
        for r in reports:
            if r.parts:
                events = cast("EventList", r.events())
                tag = r.covers == 1 and len(reports) > 1
                everything += events.with_origin(worker=worker) if tag else events
            worker += r.covers
        return everything

    def clear_events(self) -> None:
        """Forget all events; the number of workers stays."""
        self._reports.clear()
        self._common = None

    def increment_workers(self, count: int = 1) -> None:
        """Raise the number of workers.

        If a report was added for which there was no worker yet, it is the new worker's. For ``count > 1`` its
        events cannot be told apart by worker and are counted instead, which is said once.
        """
        if self._reports.increment(count) and not self._warned:
            self._warned = True
            _warn(
                "a flattened list counts for %d workers: events are counted in it, which cannot tell one "
                "worker that reports twice from two; add each worker's events on their own, or a tagged "
                "EventList",
                count,
            )
        self._common = None

    def reset_workers(self) -> None:
        """One worker from here on, who reported whatever was reported."""
        everything = self.get_all_events()
        self._reports = Reports(1)
        if len(everything):
            untagged = everything.with_origin() if isinstance(everything, EventList) else everything
            self._reports.add(untagged)
        self._common = None

    def get_number_of_workers(self) -> int:
        """Return the number of workers."""
        return self._reports.num_workers

    def merge(self, other: KVEventAggregator) -> None:
        """Add another aggregator's workers, each with its own report."""
        self._reports.absorb(other._reports)
        self._common = None

    def __len__(self) -> int:
        """Number of events, over all workers."""
        return len(self._reports)

    def __repr__(self) -> str:
        return f"<KVEventAggregator workers={self.get_number_of_workers()}, events={len(self)}>"


def _intersection(reports: list[Report]) -> Sequence[Any]:
    columns = all(isinstance(p, EventList) for r in reports for p in r.parts)
    lists = [r.events() for r in reports]
    first = lists[0]
    if not all(len(events) for events in lists):
        return EventList() if columns else []
    if all(r.covers == 1 for r in reports) and all(events == first for events in lists[1:]):
        return first
    entries: dict[Any, list[_Entry]] = {}
    order = [_count(event, entries, 0, len(lists)) for event in first]
    for i, events in enumerate(lists[1:], 1):
        for event in events:
            _count(event, entries, i, len(lists))
    for entry in order:
        entry.left = min(n // r.covers for n, r in zip(entry.counts, reports, strict=True))
    common = []
    for event, entry in zip(first, order, strict=True):
        if entry.left:
            entry.left -= 1
            common.append(event)
    return EventList(common) if columns else common


class _Entry:
    """One event and how often each report has it."""

    __slots__ = ("counts", "event", "left")

    def __init__(self, event: Any, reports: int) -> None:
        self.event = event
        self.counts = [0] * reports
        self.left = 0


def _count(event: Any, entries: dict[Any, list[_Entry]], report: int, reports: int) -> _Entry:
    try:
        bucket = entries.setdefault(_key(event), [])
    except TypeError as e:
        raise EventTypeError(f"a block hash must be hashable: {e}") from e
    for entry in bucket:
        if _same(entry.event, event):
            break
    else:
        entry = _Entry(event, reports)
        bucket.append(entry)
    entry.counts[report] += 1
    return entry


def _key(event: Any) -> Any:
    """Cheap, and equal for equal events: token ids are left to the comparison."""
    hashes = getattr(event, "block_hashes", None)
    kind = type(event).__name__
    return (kind, tuple(hashes), event.medium) if hashes is not None else kind


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or _content(a) == _content(b)


def _content(event: Any) -> tuple[str, Any]:
    """Fields that count; the same for an engine's Struct and ours."""
    names = getattr(event, "__struct_fields__", None)
    if names is None:
        return type(event).__name__, event
    fields = {n: _frozen(getattr(event, n)) for n in names if n != "metadata"}
    return type(event).__name__, {n: v for n, v in fields.items() if v is not None}


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, (list, tuple)) else value
