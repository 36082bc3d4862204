"""What an engine calls once per step: everything that happened, as one batch to everybody.

The collector joins the pool's events with those of the connectors, keeps what several sources hold
announced exactly once, repairs what the wire's clear would wrongly tell of other tiers, and publishes.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvevents._core import EventList, ResidentSet
from kvevents.aggregate import Aggregator
from kvevents.errors import ConfigError, ConnectorError
from kvevents.events import KVEventBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvevents.sinks import EventSink

__all__ = ["BatchSink", "KVEventCollector"]

logger = logging.getLogger(__name__)


class BatchSink(Protocol):
    """Where batches go: any publisher of this package, or anything else with this method."""

    def publish(self, events: KVEventBatch) -> None:
        """Take one batch."""


class KVEventCollector:
    """Collects a step's events of one engine (one data-parallel rank) and publishes them.

    - ``pool``: anything with ``take_events()``, or ``None``.
    - ``connectors``: scheduler halves. A block that several of them hold in one tier (or several children of
      one ``MultiConnector``) is announced once, and removed when the last lets it go. Their tiers are other
      than the pool's.
    - ``clear``: the wire's clear has no scope, readers wipe every tier of the rank. ``"reannounce"``
      follows the pool's clear, in the same batch, by stores of all blocks that connectors still hold;
      ``"expand"`` sends removals of the pool's blocks instead of the clear.
    - Of connectors with ``emits_removals = False`` the media in which they store are declared to a publisher
      that has ``declare_store_only``, before the first such batch: readers let those blocks expire.
    - ``flush_interval_s``: an idle engine still speaks: what :meth:`update` brought is published by a
      timer after at most this long (0 switches the timer off).

    Thread-safe: the engine calls :meth:`step`; :meth:`update` may be called from another thread. A
    failing connector is counted and logged and costs the others nothing.
    """

    def __init__(
        self,
        pool: Any,
        connectors: Sequence[Any] = (),
        *,
        publisher: BatchSink | None = None,
        sinks: Sequence[EventSink] = (),
        data_parallel_rank: int | None = None,
        clear: Literal["reannounce", "expand"] = "reannounce",
        flush_interval_s: float = 0.1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if clear not in ("reannounce", "expand"):
            raise ConfigError(f"clear: 'reannounce' or 'expand', saw {clear!r}")
        if pool is not None and not callable(getattr(pool, "take_events", None)):
            raise ConfigError(
                f"{type(pool).__module__}.{type(pool).__qualname__} has no take_events(): its blocks would "
                "come and go unannounced; give it one (an EventQueue's), or pool=None"
            )
        self._pool = pool
        self._connectors = list(connectors)
        self._publisher = publisher
        self._rank = data_parallel_rank
        self._clock = clock
        # Who holds a block: sources instead of workers, any of them is enough.
        self._held = Aggregator(len(self._connectors), rule="any", keep_content=True) if connectors else None
        self._holders: dict[tuple[int, str | None], int] = {}
        self._store_only: set[str] = set()
        self._pool_set = ResidentSet() if clear == "expand" else None
        self._lock = threading.Lock()
        names = ("batches", "events", "clears", "reannounced", "flushes", "connector_failures")
        self._counters = dict.fromkeys(names, 0)
        self._sinks = None
        if sinks:
            from kvevents.sinks import SinkRunner  # noqa: PLC0415 - a thread only where there are sinks

            self._sinks = SinkRunner(sinks)
        self._pending = False
        self._stop = threading.Event()
        self._timer: threading.Thread | None = None
        if flush_interval_s > 0 and self._connectors:
            self._interval = flush_interval_s
            self._timer = threading.Thread(target=self._flush_loop, name="kvevents-flush", daemon=True)
            self._timer.start()

    def update(self, connector_output: Any, connector: int = 0) -> None:
        """Hand the workers' (aggregated) output to a connector; published by the next step or the timer."""
        with self._lock:
            # Also where it raises: a MultiConnector has given the other children theirs.
            self._pending = True
            self._connectors[connector].update_connector_output(connector_output)

    def step(self) -> KVEventBatch | None:
        """Collect, publish and return this step's batch; ``None`` where nothing happened."""
        with self._lock:
            return self._collect()

    def flush(self) -> KVEventBatch | None:
        """Publish now what is waiting; what the timer and administrative calls (reset, sleep) use."""
        with self._lock:
            self._counters["flushes"] += 1
            return self._collect()

    def stats(self) -> dict[str, int]:
        """Return counters.

        Batches, events, clears, blocks announced again after them, flushes, connector failures, sink losses.
        """
        with self._lock:
            counters = dict(self._counters)
        return counters | (self._sinks.stats() if self._sinks else {})

    def close(self, timeout: float = 2.0) -> None:
        """Publish what is waiting and stop the timer and the sinks. The publisher stays its owner's."""
        self._stop.set()
        if self._timer is not None:
            self._timer.join(timeout)
        self.flush()
        if self._sinks is not None:
            self._sinks.shutdown(timeout)

    # ---------------------------------------------------------------- inside the lock

    def _collect(self) -> KVEventBatch | None:
        self._pending = False
        events, cleared = self._take_pool()
        if self._held is not None:
            if cleared:
                held = self._held.snapshot()
                self._counters["reannounced"] += held.num_blocks[0]
                events += held
            for i, connector in enumerate(self._connectors):
                for source, part in self._take(connector).by_source():
                    if _is_store_only(connector, source):
                        self._declare(part)
                    self._held.add(self._holder(i, source), part)
            events += self._held.drain()
        if not len(events):
            return None
        batch = KVEventBatch(ts=self._clock(), events=events, data_parallel_rank=self._rank)
        self._counters["batches"] += 1
        self._counters["events"] += len(events)
        if self._publisher is not None:
            self._publisher.publish(batch)
        if self._sinks is not None:
            self._sinks.put(batch, dict(self._counters))
        return batch

    def _declare(self, events: EventList) -> None:
        new = set(events.stored_media) - self._store_only
        if new:
            self._store_only |= new
            declare = getattr(self._publisher, "declare_store_only", None)
            if declare is not None:
                declare(sorted(new))

    def _take_pool(self) -> tuple[EventList, bool]:
        """The pool's events, and whether a clear is among them."""
        events = EventList() if self._pool is None else EventList(self._pool.take_events())
        parts = events.split_at_clears()
        self._counters["clears"] += len(parts) - 1
        if self._pool_set is not None:
            return self._expand_clears(parts, self._pool_set), False
        return events, len(parts) > 1

    @staticmethod
    def _expand_clears(parts: Sequence[EventList], held: ResidentSet) -> EventList:
        """Put removals of what the pool held in the place of each clear between the parts."""
        expanded = parts[0]
        held.apply(parts[0])
        for part in parts[1:]:
            expanded += held.difference(ResidentSet()) + part
            held.clear()
            held.apply(part)
        return expanded

    def _holder(self, connector: int, source: str | None) -> int:
        """The number under which a connector's child holds blocks."""
        holder = self._holders.setdefault((connector, source), len(self._holders))
        if self._held is not None and holder >= self._held.num_workers:
            self._held.resize(holder + 1)
        return holder

    def _take(self, connector: Any) -> EventList:
        try:
            return EventList(connector.take_events())
        except Exception as e:
            self._counters["connector_failures"] += 1
            logger.exception(
                "take_events() of %s failed; its events follow when it works", type(connector).__name__
            )
            kept = getattr(e, "events", None) if isinstance(e, ConnectorError) else None
            return EventList() if kept is None else kept

    def _flush_loop(self) -> None:
        while not self._stop.wait(self._interval):
            if self._pending:
                self.flush()


def _is_store_only(connector: Any, source: str | None) -> bool:
    """Whether a connector, or the child of it that is ``source``, never announces removals."""
    children = getattr(connector, "sub_connectors", None)
    if children is None or source is None:
        return not getattr(connector, "emits_removals", True)
    first, _, rest = source.partition("/")
    if not first.isdecimal() or int(first) >= len(children):
        return not getattr(connector, "emits_removals", True)
    return _is_store_only(children[int(first)], rest or None)
