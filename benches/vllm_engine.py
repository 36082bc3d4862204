"""Figures inside a vLLM environment: stock against the plug-in, in one process, interleaved pairs.

    python benches/vllm_engine.py [--pairs 7]

Each pair runs stock and ours one after the other, in turn first; printed are both medians, the median
of the pairs' ratios and its range. Run by `make bench-vllm`.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import statistics
import time

import vllm
import vllm.envs
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

BATCHES, EVENTS, HASHES, TOKENS = 200, 64, 16, 256


def stores(seed, events=EVENTS, hashes=HASHES, tokens=TOKENS):
    """A batch's stores, as the pool makes them."""
    step = 0x9E3779B97F4A7C15
    return [
        kv_events.BlockStored(
            block_hashes=[(seed * 1_000_003 + e * hashes + i) * step % 2**64 for i in range(hashes)],
            parent_block_hash=None, token_ids=[(seed + e + i) % 32_000 for i in range(tokens)],
            block_size=tokens // hashes, lora_id=None, medium="GPU", lora_name=None, group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
        for e in range(events)
    ]  # fmt: skip


def batches(count):
    return [kv_events.KVEventBatch(ts=1.0, events=stores(n)) for n in range(count)]


def publish(make, percentile):
    """Microseconds of `publish()` in the caller, paced as an engine steps, p50 or p99."""
    publisher = make()
    work = batches(BATCHES)
    times = []
    for batch in work:
        start = time.perf_counter_ns()
        publisher.publish(batch)
        times.append(time.perf_counter_ns() - start)
        time.sleep(0.002)
    publisher.shutdown()
    return sorted(times)[int(len(times) * percentile)] / 1000


class Container(kv_events.KVConnectorKVEvents):
    """As the connectors of vLLM have it, over the aggregator that is in place."""

    def __init__(self, aggregator, events):
        self._a = aggregator(1)
        self._a.add_events(events)

    def add_events(self, events):
        self._a.add_events(events)

    def aggregate(self):
        common = self._a.get_common_events()
        self._a.clear_events()
        self._a.add_events(common)
        self._a.reset_workers()
        return self

    def increment_workers(self, count=1):
        self._a.increment_workers(count)

    def get_all_events(self):
        return self._a.get_all_events()

    def get_number_of_workers(self):
        return self._a.get_number_of_workers()

    def clear_events(self):
        self._a.clear_events()
        self._a.reset_workers()


def aggregation(aggregate, container, workers=8, steps=6):
    """Microseconds an event and worker: eight workers' containers of a step to the agreed events."""
    outputs = []
    for step in range(steps):
        events = stores(step)
        made = [container(events) for _ in range(workers)]
        outputs.append(
            [
                ModelRunnerOutput(
                    req_ids=[], req_id_to_index={},
                    kv_connector_output=KVConnectorOutput(kv_cache_events=pickle.loads(pickle.dumps(c))),
                )
                for c in made
            ]
        )  # fmt: skip
    joined = KVOutputAggregator(workers)
    start = time.perf_counter()
    for step in outputs:
        got = aggregate(joined, step).kv_connector_output.kv_cache_events.aggregate().get_all_events()
        assert sum(len(e.block_hashes) for e in got) == EVENTS * HASHES
    return (time.perf_counter() - start) * 1e6 / (steps * EVENTS * workers)


def compare(name, unit, stock, ours, pairs):
    """One row."""
    a, b = [], []
    for i in range(pairs):
        for which in (stock, ours) if i % 2 else (ours, stock):
            gc.collect()
            (a if which is stock else b).append(which())
    ratios = sorted(y / x for x, y in zip(a, b, strict=True))
    print(
        f"{name:<44} stock {statistics.median(a):9.2f} {unit}, plug-in {statistics.median(b):9.2f} {unit}, "
        f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=7)
    pairs = parser.parse_args().pairs
    vllm.envs.enable_envs_cache()
    stock_publisher, stock_aggregate = kv_events.ZmqEventPublisher, KVOutputAggregator.aggregate
    stock_events = kv_events.KVEventAggregator

    from kvevents.connectors import WorkerKVEvents
    from kvevents.integrations.vllm import plugin

    plugin.register()
    print(plugin.report().line())
    gc.collect()
    gc.freeze()
    config = {"endpoint": "inproc://bench", "replay_endpoint": "inproc://bench-replay"}
    numbers = iter(range(10**6))

    def make(create):
        names = {key: f"{value}-{next(numbers)}" for key, value in config.items()}
        return lambda: create(data_parallel_rank=0, **names)

    def create_ours(**fields):
        engine = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=fields["endpoint"],
                                replay_endpoint=fields["replay_endpoint"])  # fmt: skip
        return kv_events.EventPublisherFactory.create(engine, 0)

    for name, percentile in (("publish() in the engine core, p50", 0.5), ("the same, p99", 0.99)):
        compare(
            name, "us", lambda p=percentile: publish(make(stock_publisher), p),
            lambda p=percentile: publish(make(create_ours), p), pairs,
        )  # fmt: skip
    compare(
        "aggregation, 8 workers, from vLLM's Structs", "us",
        lambda: aggregation(stock_aggregate, lambda e: Container(stock_events, e)),
        lambda: aggregation(KVOutputAggregator.aggregate, lambda e: Container(stock_events, e)), pairs,
    )  # fmt: skip
    compare(
        "the same, from our container", "us",
        lambda: aggregation(stock_aggregate, lambda e: Container(stock_events, e)),
        lambda: aggregation(KVOutputAggregator.aggregate, WorkerKVEvents), pairs,
    )  # fmt: skip


if __name__ == "__main__":
    main()
