"""Aggregation in the engine core: eight workers' containers of a step to the events that are agreed on."""

from __future__ import annotations

import pickle
import time

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import lmcache_connector
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from benches.engine import stock
from benches.engine.pairs import Pair, row
from benches.engine.workload import EVENTS, TOKENS, stores
from kvevents import EventList
from kvevents.connectors import KVEventsMixin, WorkerKVEvents

WORKERS, STEPS = 8, 20


class _Connector(KVEventsMixin):
    """The scheduler's half of a connector of this package."""

    def __init__(self):
        self._vllm_config = {"num_workers": WORKERS}

    def get_finished_count(self):
        return None


class _LMCache:
    """The event part of vLLM's LMCache connector's scheduler half."""

    get_finished_count = _Connector.get_finished_count
    update_connector_output = lmcache_connector.LMCacheConnectorV1.update_connector_output
    take_events = lmcache_connector.LMCacheConnectorV1.take_events
    _kv_cache_events = None


def _outputs(pickled):
    """Every worker's output of a step, with its container as it has just come out of the worker's pickle."""
    return [
        ModelRunnerOutput(
            req_ids=[], req_id_to_index={},
            kv_connector_output=KVConnectorOutput(kv_cache_events=pickle.loads(pickled)),
        )
        for _ in range(WORKERS)
    ]  # fmt: skip


def _aggregated(aggregate, connector, container):
    """Thread CPU microseconds an event and worker, from the outputs to what `take_events()` gives."""
    steps = [pickle.dumps(container(stores(step, medium="CPU"))) for step in range(STEPS)]
    joined = KVOutputAggregator.from_connector(connector, WORKERS)
    got = []
    spent = 0
    for step in steps:
        outputs = _outputs(step)
        start = time.thread_time_ns()
        connector.update_connector_output(aggregate(joined, outputs).kv_connector_output)
        events = connector.take_events()
        got.append(events if isinstance(events, EventList) else list(events))
        spent += time.thread_time_ns() - start
    for step, events in enumerate(got):
        hashes = [h for e in events for h in e.block_hashes]
        assert sorted(hashes) == sorted(h for e in stores(step) for h in e.block_hashes)
        assert sum(len(e.token_ids) for e in events) == EVENTS * TOKENS
    return spent / 1000 / (STEPS * EVENTS * WORKERS)


def _lmcache(aggregator):
    """vLLM's container, over the event aggregator that stock, or the plug-in, has under the name."""

    def make(events):
        mine = lmcache_connector.KVEventAggregator
        lmcache_connector.KVEventAggregator = aggregator
        try:
            made = lmcache_connector.LMCacheKVEvents(1)
        finally:
            lmcache_connector.KVEventAggregator = mine
        made.add_events(events)
        return made

    return make


def _stock():
    return _aggregated(stock.aggregate, _LMCache(), _lmcache(stock.EventAggregator))


@row(
    "aggregation, 8 workers, 256-token events, from vLLM's Structs",
    unit="us",
    floor=2,
    aim=4,
    more=True,
    digits=3,
)
def from_structs():
    """LMCache's container, which the plug-in gives its event aggregator."""
    return Pair(
        stock=_stock,
        ours=lambda: _aggregated(
            KVOutputAggregator.aggregate, _LMCache(), _lmcache(lmcache_connector.KVEventAggregator)
        ),
    )


@row("the same, from our container", unit="us", floor=20, aim=40, more=True, digits=3)
def from_ours():
    """The answer is the handle that `take_events()` of the mixin gives."""
    return Pair(
        stock=_stock, ours=lambda: _aggregated(KVOutputAggregator.aggregate, _Connector(), WorkerKVEvents)
    )
