"""Stock's publisher and ours from the same configuration, each with a reader that counts."""

from __future__ import annotations

import itertools
import time

import zmq
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed import kv_events

from benches.engine import stock

_numbers = itertools.count()


class Wired:
    """A publisher and its reader, connected: the first batch that arrives has been waited for."""

    def __init__(self, ours):
        n = next(_numbers)
        endpoint, replay = f"inproc://bench-{n}", f"inproc://bench-replay-{n}"
        if ours:
            config = KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, replay_endpoint=replay
            )
            self.publisher = kv_events.EventPublisherFactory.create(config, 0)
            assert type(self.publisher) is not stock.Publisher, "the plug-in is not in"
        else:
            self.publisher = stock.Publisher(0, endpoint=endpoint, replay_endpoint=replay)
        self._sub = zmq.Context.instance().socket(zmq.SUB)
        self._sub.set_hwm(0)
        self._sub.subscribe(b"")
        self._sub.connect(endpoint)
        deadline = time.monotonic() + 10
        while not self._sub.poll(10):
            self.publisher.publish(kv_events.KVEventBatch(ts=0.0, events=[]))
            assert time.monotonic() < deadline, "nothing arrives"
        time.sleep(0.1)
        self.received()

    def received(self):
        """The payloads that have arrived since the last call."""
        out = []
        while self._sub.poll(50):
            out.append(self._sub.recv_multipart()[2])
        return out

    def wait_for(self, count):
        """The next `count` payloads; the reader's thread sleeps meanwhile."""
        out = []
        while len(out) < count:
            assert self._sub.poll(20_000), f"{len(out)} of {count} batches arrived"
            out.append(self._sub.recv_multipart()[2])
        return out

    def close(self):
        self.publisher.shutdown()
        self._sub.close(0)
