"""What the workers of one connector agree on, over steps; each child of a ``MultiConnector`` on its own."""

from __future__ import annotations

import logging
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from vllm.distributed import kv_events

from kvevents import events as ours
from kvevents.aggregate import Aggregator
from kvevents.connectors.containers import KVConnectorKVEvents, WorkerKVEvents
from kvevents.connectors.tagging import tag_container
from kvevents.errors import KVEventsError
from kvevents.events import EventList
from kvevents.integrations.vllm.containers import ChildKVEvents

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvevents.aggregate import Rule

__all__ = ["Rules", "Votes"]

log = logging.getLogger("vllm.kvevents")

STORE_ONLY = frozenset({"LMCacheKVEvents", "MooncakeStoreKVEvents"})
"""Containers of connectors that never announce a removal."""


class Rules(NamedTuple):
    """What a connector says about its events, in attributes of the names that ``KVEventsMixin`` has."""

    rule: Rule = "all"
    group_rules: Mapping[int | None, Rule] | None = None
    emits_removals: bool | None = None
    """``None``: it does not say."""
    children: tuple[Rules, ...] = ()

    @classmethod
    def of(cls, connector: Any) -> Rules:
        """A connector's, and those of its children."""
        return cls(
            getattr(connector, "kv_events_rule", "all"),
            getattr(connector, "kv_events_group_rules", None),
            getattr(connector, "emits_removals", None),
            tuple(cls.of(child) for child in getattr(connector, "_connectors", ())),
        )


class Votes:
    """One connector's reports of one or more steps, and the votes of its workers over all steps.

    ``add`` each worker's container, then ``take`` what the connector's scheduler half is to get. Steps that
    are not taken stay. Containers of this package travel on untouched, tagged with their worker; those of
    others are voted on block by block, and the agreed blocks go into one of them, as one worker's.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self._rules = rules or Rules()
        self._reports: list[tuple[int, Any]] = []
        self._ours: list[tuple[int, KVConnectorKVEvents]] = []
        self._children: list[Votes] = []
        self._aggregator: Aggregator | None = None
        self._as_stock = False

    def add(self, worker: int, container: Any) -> None:
        """One worker's report; ``worker`` is its position among the outputs."""
        if isinstance(container, ChildKVEvents):
            while len(self._children) < len(container.children):
                known, i = self._rules.children, len(self._children)
                self._children.append(Votes(known[i] if i < len(known) else None))
            for votes, child in zip(self._children, container.children, strict=False):
                if child is not None:
                    votes.add(worker, child)
        elif isinstance(container, KVConnectorKVEvents):
            self._ours.append((worker, container))
        else:
            self._reports.append((worker, container))

    def take(self, workers: int) -> Any:
        """The container for the scheduler's half; ``None`` where there is nothing to tell."""
        if self._children:
            parts = [votes.take(workers) for votes in self._children]
            return None if all(part is None for part in parts) else ChildKVEvents(parts)
        if self._ours:
            containers, self._ours = self._ours, []
            return _joined(containers)
        if not self._reports:
            return None
        reports, self._reports = self._reports, []
        if not self._as_stock:
            try:
                return self._vote(reports, workers)
            except (KVEventsError, TypeError, ValueError) as e:
                self._as_stock = True
                log.warning(
                    "kvevents: events of %s are merged by vLLM's own rule from here on: %s: %s",
                    type(reports[0][1]).__name__, type(e).__name__, e,
                )  # fmt: skip
        return _merged(reports)

    def _vote(self, reports: list[tuple[int, Any]], workers: int) -> Any:
        lists = [list(container.get_all_events()) for _, container in reports]
        columns = [EventList(events) for events in lists]
        first = reports[0][1]
        votes = self._votes(workers, first)
        votes.add_all((worker, events) for (worker, _), events in zip(reports, columns, strict=True))
        agreed = votes.drain()
        if not len(agreed):
            return None
        if agreed.same_blocks(columns[0]) or agreed == columns[0]:
            # All that the first worker reported, and nothing else: its container says it already.
            if first.get_number_of_workers() == 1:
                return first
            return _filled(first, lists[0])
        return _filled(first, [_engine_event(e) for e in agreed.to_originals(columns[0], lists[0])])

    def _votes(self, workers: int, container: Any) -> Aggregator:
        votes = self._aggregator
        if votes is None:
            groups = self._rules.group_rules or _replication(container, workers)
            votes = self._aggregator = Aggregator(
                workers, rule=self._rules.rule, group_rules=groups, forget=self._forgets(container)
            )
        elif votes.num_workers != workers:
            for gone in range(workers, votes.num_workers):
                votes.forget_worker(gone)
            votes.resize(workers)
        return votes

    def _forgets(self, container: Any) -> bool:
        """Whether a block is to be announced each time that it is stored: nobody will say that it left."""
        if self._rules.emits_removals is None:
            return type(container).__name__ in STORE_ONLY
        return not self._rules.emits_removals


def _joined(containers: list[tuple[int, KVConnectorKVEvents]]) -> KVConnectorKVEvents:
    """One container of ours for those of all workers, each tagged with its worker."""
    if all(type(container) is WorkerKVEvents for _, container in containers):
        return WorkerKVEvents.of_workers(cast("list[tuple[int, WorkerKVEvents]]", containers))
    first, *others = (tag_container(container, worker) for worker, container in containers)
    for tagged in others:
        first = first.merge(tagged)
    return first


def _replication(container: Any, workers: int) -> dict[int | None, Rule] | None:
    """Mooncake's groups whose heads are replicated: one of so many workers reports a block there."""
    factors = getattr(container, "_group_tp_replication_factors", ())
    return {i: ceil(workers / factor) for i, factor in enumerate(factors) if factor > 1} or None


_CLASSES: dict[type, Any] = {
    ours.BlockStored: kv_events.BlockStored,
    ours.BlockRemoved: kv_events.BlockRemoved,
    ours.AllBlocksCleared: kv_events.AllBlocksCleared,
}


def _engine_event(event: Any) -> Any:
    """The engine's Struct of one of ours, with the fields that this vLLM knows; its own ones as they are."""
    cls = _CLASSES.get(type(event))
    if cls is None:
        return event
    return cls(**{name: getattr(event, name) for name in cls.__struct_fields__})


def _filled(container: Any, agreed: list[Any]) -> Any:
    container.clear_events()
    container.add_events(agreed)
    return container


def _merged(reports: list[tuple[int, Any]]) -> Any:
    """As vLLM merges: one more worker for each further report."""
    first = reports[0][1]
    for _, container in reports[1:]:
        first.add_events(container.get_all_events())
        first.increment_workers(1)
    return first
