"""The event half of a connector: records in the workers, votes in the scheduler.

A connector for a real engine inherits :class:`KVEventsMixin` beside that engine's own base class; the
base of this package uses the same mixin. The state of the vote lives here, in the scheduler half, and
nowhere else.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

from kvevents._core import EventList, KVEventRecorder
from kvevents.aggregate import Aggregator
from kvevents.connectors.containers import WorkerKVEvents
from kvevents.connectors.tagging import iter_worker_events
from kvevents.errors import AggregatorError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvevents.aggregate import Rule
    from kvevents.connectors.containers import KVConnectorKVEvents
    from kvevents.connectors.output import KVConnectorOutput

__all__ = ["KVEventsMixin", "check_chunk_size", "check_event_hooks"]

logger = logging.getLogger(__name__)

_HOOKS = ("get_kv_connector_kv_cache_events", "update_connector_output", "take_events")


class KVEventsMixin:
    """Records events in the worker half, aggregates them per block in the scheduler half.

    Attributes, of the class or set before the first step, say what the connector promises:

    - ``kv_events_rule``: how many workers must hold a block before it is announced (``"all"``, ``"any"``,
      a number, or a ``Quorum``); ``kv_events_group_rules`` overrides it per KV cache group.
    - ``emits_removals``: whether every block that leaves the tier is announced. A store-only tier says
      ``False``, and readers let its blocks expire.
    - ``emits_kv_events``: whether there are events at all.
    - ``kv_events_chunk_size``: tokens of a block in its events, where that is not the engine's block size;
      see :func:`check_chunk_size`.

    ``self.kv_events`` in the worker half is a :class:`KVEventRecorder`; it may be used from any thread.
    """

    kv_events_rule: Rule = "all"
    kv_events_group_rules: Mapping[int | None, Rule] | None = None
    emits_removals: bool = True
    emits_kv_events: bool = True
    kv_events_chunk_size: int | None = None

    _kv_recorder: KVEventRecorder | None = None
    _kv_aggregator: Aggregator | None = None

    # ---------------------------------------------------------------- worker half

    @property
    def kv_events(self) -> KVEventRecorder:
        """Where the worker half records what it stored and dropped. Made on first use."""
        if self._kv_recorder is None:
            self._kv_recorder = KVEventRecorder()
        return self._kv_recorder

    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        """Hand over what was recorded since the last call; called after each step.

        Returns ``None`` where nothing was recorded, which changes nothing at the other end.
        """
        if self._kv_recorder is None:
            return None
        events = self._kv_recorder.take()
        if not len(events):
            return None
        container, worker = WorkerKVEvents(events), self.kv_events_worker()
        return container if worker is None else container.tagged(worker)

    def kv_events_worker(self) -> int | None:
        """Return which worker this is; ``None`` where only the engine's output aggregation knows.

        Taken from the engine's configuration (``parallel_config.rank``). An engine whose aggregation joins
        the workers' lists without saying whose they are works all the same then.
        """
        parallel = getattr(getattr(self, "_vllm_config", None), "parallel_config", None)
        rank, size = getattr(parallel, "rank", None), getattr(parallel, "world_size", None)
        if not isinstance(rank, int) or not isinstance(size, int) or rank < 0 or size < 1:
            return None
        return rank % size  # ranks of several data-parallel engines may be counted on

    # ---------------------------------------------------------------- scheduler half

    def kv_events_num_workers(self) -> int:
        """Return the number of workers that vote.

        Taken from the engine's configuration (``parallel_config.world_size``); override it where the
        connector knows better.
        """
        config = getattr(self, "_vllm_config", None)
        parallel = getattr(config, "parallel_config", None)
        size = getattr(parallel, "world_size", None) or getattr(config, "num_workers", None)
        if size is None and isinstance(config, dict):
            size = config.get("num_workers")
        if not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"{type(self).__name__}: the number of workers is not known; give parallel_config.world_size "
                "or num_workers in the configuration, or override kv_events_num_workers()"
            )
        return size

    @property
    def kv_event_votes(self) -> Aggregator:
        """The votes of all workers. Made on first use; ``stats()`` says who waits for whom."""
        if self._kv_aggregator is None:
            self._kv_aggregator = Aggregator(
                self.kv_events_num_workers(),
                rule=self.kv_events_rule,
                group_rules=self.kv_events_group_rules,
            )
        return self._kv_aggregator

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Count what the workers reported in this step.

        Raises :class:`AggregatorError` for a worker that there is not; nothing was counted then.
        """
        container = connector_output.kv_cache_events
        if container is None:
            return
        votes = self.kv_event_votes
        reports = list(iter_worker_events(container))
        for worker, _ in reports:
            if worker >= votes.num_workers:
                raise AggregatorError(
                    f"{type(self).__name__}: a report of worker {worker}, there are {votes.num_workers} "
                    "(kv_events_num_workers)"
                )
        votes.add_all(reports)

    def forget_worker(self, worker: int) -> None:
        """Take the votes of a worker that restarted or left; the next :meth:`take_events` has the removals.

        Raises ``AggregatorError`` for a worker that there is not.
        """
        self.kv_event_votes.forget_worker(worker)

    def take_events(self) -> EventList:
        """Return what became resident, or ceased to be, by the rule since the last call."""
        if self._kv_aggregator is None:
            return EventList()
        return self._kv_aggregator.drain()


def check_event_hooks(connector: Any) -> None:
    """Refuse a connector that promises events but whose events cannot reach the scheduler.

    That is one that sets ``emits_kv_events`` and neither inherits nor overrides one of the hooks. Raises
    :class:`ConfigError` naming the class and the hook.
    """
    if not getattr(connector, "emits_kv_events", False):
        return
    cls = type(connector)
    for hook in _HOOKS:
        method = inspect.getattr_static(cls, hook, None)
        if method is None or not _does_something(method):
            raise ConfigError(
                f"{cls.__module__}.{cls.__qualname__} says that it emits KV events but does not hand them "
                f"over: {hook}() is {'missing' if method is None else 'a no-op'}. "
                "Inherit kvevents.connectors.KVEventsMixin before the engine's base class, or override it"
            )


def check_chunk_size(connector: Any, block_size: int) -> None:
    """Compare the blocks in a connector's events with those that the engine's readers look for.

    A chunk of several blocks is said in a warning: a reader that looks for the engine's blocks never finds
    it, one with the chunk's size does. Raises :class:`ConfigError` for a chunk that is no multiple.
    """
    chunk = getattr(connector, "kv_events_chunk_size", None)
    if chunk is None or chunk == block_size or not getattr(connector, "emits_kv_events", False):
        return
    name = f"{type(connector).__module__}.{type(connector).__qualname__}"
    if chunk < 1 or chunk % block_size:
        raise ConfigError(
            f"{name}: its chunks of {chunk} tokens are no number of the engine's blocks of {block_size}; "
            "choose a multiple of the block size"
        )
    logger.warning(
        "%s announces chunks of %d tokens, the engine's blocks have %d: an index of %d tokens a block cannot "
        "match them. Announce every block, set the chunk size to %d, or run readers with %d",
        name,
        chunk,
        block_size,
        block_size,
        block_size,
        chunk,
    )


def _does_something(method: Any) -> bool:
    """Whether a hook is more than the no-op that engines' base classes have."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None:
        return True
    # A no-op body is a docstring and `return None` or `return ()`: it names nothing and calls nothing.
    return bool(code.co_names or code.co_freevars)
