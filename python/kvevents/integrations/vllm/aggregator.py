"""Part ``aggregator``: workers' events are voted on by block and worker, over steps.

``KVOutputAggregator`` keeps everything but the events. The methods are patched, not the name: the executors
hold the class since their import.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

from kvevents.aggregate import KVEventAggregator
from kvevents.integrations.vllm.votes import Rules, Votes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvevents.integrations.vllm.settings import Settings

__all__ = ["install"]

log = logging.getLogger("vllm.kvevents")

_LMCACHE = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector"
_STOCK_NAME = "KVEventAggregatorOfVLLM"
_stock_aggregate = KVOutputAggregator.aggregate
_stock_from_connector = KVOutputAggregator.from_connector.__func__
_stock_defer: Any = getattr(KVOutputAggregator, "ft_defer_kv_connector_outputs", None)
"""0.33's: what is left of a step in which a worker failed."""


def install(_settings: Settings) -> str:
    """Replace the event part of ``KVOutputAggregator``, and ``KVEventAggregator``."""
    KVOutputAggregator.aggregate = aggregate
    KVOutputAggregator.from_connector = classmethod(from_connector)
    if _stock_defer is not None:
        KVOutputAggregator.ft_defer_kv_connector_outputs = defer
    _replace_event_aggregator()
    return "votes by block and worker, over steps"


def _replace_event_aggregator() -> None:
    """The name is ours from here on; vLLM's class stays reachable, under another name, for pickle.

    A connector that took the class before this has containers that hold it, and those travel by pickle.
    """
    stock = kv_events.KVEventAggregator
    stock.__qualname__ = _STOCK_NAME
    setattr(kv_events, _STOCK_NAME, stock)
    kv_events.KVEventAggregator = KVEventAggregator
    loaded: Any = sys.modules.get(_LMCACHE)
    if loaded is not None:  # it holds the name since its import
        loaded.KVEventAggregator = KVEventAggregator


@functools.wraps(_stock_from_connector)
def from_connector(cls: Any, connector: Any, world_size: int) -> Any:
    """vLLM's, and what the connector says about its events."""
    made = _stock_from_connector(cls, connector, world_size)
    made._kvevents_votes = Votes(Rules.of(connector))
    made._kvevents_workers = world_size
    return made


@functools.wraps(_stock_aggregate)
def aggregate(self: Any, outputs: Sequence[Any], output_rank: int = 0) -> Any:
    """vLLM's, without the events; those are taken out before it and put in after it.

    A worker is its position in ``outputs``. Where vLLM returns ``None``, the events stay for the next step.
    """
    votes = _votes_of(self)
    _take_over(votes, [output and output.kv_connector_output for output in outputs])
    result = _stock_aggregate(self, outputs, output_rank)
    if result is not None:
        result.kv_connector_output.kv_cache_events = votes.take(len(outputs))
    return result


def defer(self: Any, kv_connector_outputs: list[Any]) -> None:
    """vLLM's, which drops the events of a step that failed; here they wait for the next step, as votes do.

    Only where every worker left its part: else nobody says whose is whose. Blocks that were stored then are
    never agreed on, and blocks that were removed stay announced, which is said once.
    """
    if len(kv_connector_outputs) == self.__dict__.get("_kvevents_workers"):
        _take_over(_votes_of(self), kv_connector_outputs)
    elif any(part and part.kv_cache_events is not None for part in kv_connector_outputs):
        if not self.__dict__.get("_kvevents_told"):
            log.warning(
                "kvevents: a worker failed, connectors' events of that step are lost: it is not said whose"
            )
        self._kvevents_told = True
    _stock_defer(self, kv_connector_outputs)


def _votes_of(aggregator: Any) -> Votes:
    votes: Votes | None = aggregator.__dict__.get("_kvevents_votes")
    if votes is None:
        votes = aggregator._kvevents_votes = Votes()
    return votes


def _take_over(votes: Votes, parts: list[Any]) -> None:
    """Each worker's container out of its output; a worker is its position."""
    for worker, part in enumerate(parts):
        if part and part.kv_cache_events is not None:
            votes.add(worker, part.kv_cache_events)
            part.kv_cache_events = None
