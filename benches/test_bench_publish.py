"""The publisher: what the engine's step pays, what other threads pay, replay, and the memory of the log.

Rows against vLLM need its package in the same environment (`make bench ENGINE=DIR`).
"""

from __future__ import annotations

import itertools
import logging
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benches.harness import Absent, as_tests, have, value
from benches.workloads import stored_events
from kvevents import EventList, KVEventBatch
from kvevents._core import ReplayLog
from kvevents.publish import ZmqEventPublisher

NO_VLLM = Absent("vLLM is not installed here: make bench ENGINE=DIR")
ANY = "tcp://127.0.0.1:0"
PAIRS = 7


def _theirs() -> Any:
    """vLLM's publisher module."""
    logging.disable(logging.WARNING)
    from vllm.distributed import kv_events

    return kv_events


def _their_events(module: Any, events: list[Any]) -> list[Any]:
    fields = module.BlockStored.__struct_fields__
    return [module.BlockStored(**{name: getattr(e, name) for name in fields}) for e in events]


_ports = itertools.count(29_500)


def _their_publisher(module: Any) -> tuple[Any, str]:
    """Bound to free ports, with a replay server, and that server's address."""
    while True:
        port = next(_ports)
        replay = f"tcp://127.0.0.1:{port}"
        try:
            return module.ZmqEventPublisher(0, f"tcp://*:{port + 500}", replay), replay
        except Exception as e:
            if "in use" not in str(e):
                raise


def _p99(publish: Any, make: Any, n: int = 1000, rate: float = 1000.0) -> float:
    """Nanoseconds in the caller, one batch a millisecond."""
    times = []
    due = time.perf_counter()
    for i in range(n):
        batch = make(i)
        start = time.perf_counter_ns()
        publish(batch)
        times.append(time.perf_counter_ns() - start)
        due += 1 / rate
        time.sleep(max(0.0, due - time.perf_counter()))
    return sorted(times)[n * 99 // 100]


@value("publish() at 1,000 batches/s, p99, against vLLM's", unit="x", floor=1.2, aim=0.5, against="vLLM")
def publish_p99() -> float | Absent:
    """Ratio of the medians of 7 interleaved pairs of runs; every batch must have been sent."""
    if not have("vllm"):
        return NO_VLLM
    module = _theirs()
    events = stored_events(8, 1)
    columns, structs = EventList(events), _their_events(module, events)
    ours, theirs = [], []
    for _ in range(PAIRS):
        publisher = ZmqEventPublisher(endpoint=ANY, replay_endpoint=ANY)
        ours.append(_p99(publisher.publish, lambda i: KVEventBatch(float(i), columns)))
        assert publisher.shutdown(10) == 0
        assert publisher.stats().sent == 1000
        other, _ = _their_publisher(module)
        theirs.append(_p99(other.publish, lambda i: module.KVEventBatch(ts=float(i), events=structs)))
        other.shutdown()
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"  publish() p99: {a / 1e3:.1f} us, vLLM {b / 1e3:.1f} us")
    return a / b


CLIENT = """
import sys, time, zmq
dealer = zmq.Context().socket(zmq.DEALER)
dealer.rcvtimeo = 20_000
dealer.connect(sys.argv[1])
for _ in sys.stdin:
    began = time.perf_counter()
    dealer.send_multipart([b"", bytes(8)])
    n = 0
    while dealer.recv_multipart()[-2] != b"\\xff" * 8:
        n += 1
    print(time.perf_counter() - began, n, flush=True)
"""


class _Client:
    """A process that asks for everything when told, and says how long it took and how much came."""

    def __init__(self, endpoint: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self) -> tuple[float, int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        seconds, n = self.process.stdout.readline().split()
        return float(seconds), int(n)

    def close(self) -> None:
        self.process.communicate(timeout=10)  # closes both pipes


@value("replay of 10,000 batches, time against vLLM's", unit="x", floor=1.0, aim=0.5, against="vLLM")
def replay_time() -> float | Absent:
    """Ratio of medians of 7 interleaved pairs, client in a process of its own; ours must deliver all."""
    n = 10_000
    events = stored_events(8, 1)
    columns = EventList(events)
    publisher = ZmqEventPublisher(endpoint=ANY, replay_endpoint=ANY)
    for i in range(n):
        publisher.publish(KVEventBatch(float(i), columns))
    while publisher.stats().sent < n:
        time.sleep(0.01)
    client = _Client(str(publisher.get_publisher_config().replay_endpoint))
    other = other_client = None
    try:
        ours, theirs, delivered = [], [], []
        if have("vllm"):
            module = _theirs()
            other, endpoint = _their_publisher(module)
            structs = _their_events(module, events)
            for i in range(n):
                other.publish(module.KVEventBatch(ts=float(i), events=structs))
            while len(other._buffer) < n:
                time.sleep(0.01)
            other_client = _Client(endpoint)
        for _ in range(PAIRS):
            seconds, got = client.ask()
            assert got == n, f"{got} of {n} batches arrived"
            ours.append(seconds)
            if other_client is not None:
                seconds, got = other_client.ask()
                theirs.append(seconds)
                delivered.append(got)
        if not theirs:
            return NO_VLLM
        print(
            f"  replay of {n}: {statistics.median(ours) * 1e3:.0f} ms, all delivered; "
            f"vLLM {statistics.median(theirs) * 1e3:.0f} ms, delivered {min(delivered)} to {max(delivered)}"
        )
        return statistics.median(ours) / statistics.median(theirs)
    finally:
        client.close()
        publisher.shutdown()
        if other_client is not None:
            other_client.close()
        if other is not None:
            other.shutdown()


@value("replay log, memory a batch beyond its payload", unit="B", floor=64, aim=24, against="payload bytes")
def replay_log() -> float:
    """10,000 batches of 700 bytes, after as many again went through."""
    log = ReplayLog(10_000, 1 << 30)
    for seq in range(20_000):
        log.append(seq, bytes(700))
    assert log.get(19_999) == bytes(700)
    assert log.payload_bytes == 7_000_000
    return (log.nbytes - log.payload_bytes) / len(log)


def _schedstat() -> tuple[float, float]:
    """Seconds that this thread ran, and that it waited for a processor."""
    fields = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    return int(fields[0]) / 1e9, int(fields[1]) / 1e9


def _progress(loops: int) -> float:
    """How much of the time in which a thread of pure Python had a processor it could use.

    What it waited for a processor is left out: other processes of the machine are not the publisher's doing.
    """
    ran, waited = _schedstat()
    start = time.perf_counter()
    x = 0
    for i in range(loops):
        x += i
    wall = time.perf_counter() - start
    ran_after, waited_after = _schedstat()
    return min(1.0, (ran_after - ran) / (wall - (waited_after - waited)))


@value(
    "another thread's progress while 64 x (16 hashes, 256 tokens) are sent back to back",
    unit="of alone", floor=0.9, aim=0.97, more_is_better=True, against="alone",
)  # fmt: skip
def other_threads() -> float | Absent:
    """Median of 7 interleaved pairs; batches must go out meanwhile."""
    if not Path("/proc/self/schedstat").exists():
        return Absent("needs the scheduler's statistics of Linux")
    events = EventList(stored_events(64, 16))
    publisher = ZmqEventPublisher(endpoint=ANY, replay_endpoint=ANY)
    try:
        ratios = []
        sent = 0
        for _ in range(PAIRS):
            alone = _progress(2_000_000)
            before = publisher.stats().sent
            for i in range(3000):
                publisher.publish(KVEventBatch(float(i), events))
            ratios.append(_progress(2_000_000) / alone)
            assert publisher.stats().queued > 0, "the queue ran dry"
            sent += publisher.stats().sent - before
            while publisher.stats().queued:
                time.sleep(0.005)
        size = publisher.stats().bytes_sent // publisher.stats().sent
        print(f"  {sent} batches of {size} bytes went out meanwhile")
        return statistics.median(ratios)
    finally:
        publisher.shutdown()


test_rows = as_tests(__name__)
