"""What publishing costs the engine core's thread, and what the sender's thread takes from other threads."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from benches.engine.pairs import Pair, Row, row, rows
from benches.engine.publishers import Wired
from benches.engine.workload import batches

PACED, STREAM = 400, 100


def _paced(ours, work):
    """Microseconds of `publish()` in the caller, p50 and p99, at 500 batches a second."""
    wired = Wired(ours)
    times = []
    try:
        publish = wired.publisher.publish
        for batch in work:
            start = time.perf_counter_ns()
            publish(batch)
            times.append(time.perf_counter_ns() - start)
            time.sleep(0.002)
        got = wired.received()
        assert len(got) == len(work), f"{len(got)} of {len(work)} batches arrived"
    finally:
        wired.close()
    times.sort()
    return times[len(times) // 2] / 1000, times[int(len(times) * 0.99)] / 1000


@rows(
    Row("publish() in the engine core, 64 x (16 hashes, 256 tokens), p50", unit="us", floor=1.05, aim=0.5),
    Row("the same, p99", unit="us", floor=1.2, aim=0.5),
)
def publish():
    """Both get the same batches."""
    work = batches(PACED)
    return Pair(stock=lambda: _paced(False, work), ours=lambda: _paced(True, work))


def _schedstat():
    """Seconds that this thread ran, and that it waited for a processor."""
    fields = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    return int(fields[0]) / 1e9, int(fields[1]) / 1e9


def _lost(ours, work):
    """Microseconds a batch in which a counting thread could not count, until the stream has arrived.

    The time that it waited for a processor is left out: other processes are not the sender's doing.
    """
    wired = Wired(ours)
    try:
        arrived = threading.Event()
        got = []

        def read():
            got.extend(wired.wait_for(len(work)))
            arrived.set()

        reader = threading.Thread(target=read)
        reader.start()
        for batch in work:
            wired.publisher.publish(batch)
        ran, waited = _schedstat()
        start = time.perf_counter()
        x, done = 0, arrived.is_set
        while not done():
            x += 1
        wall = time.perf_counter() - start
        ran_after, waited_after = _schedstat()
        reader.join()
        assert len(got) == len(work)
        return (wall - (ran_after - ran) - (waited_after - waited)) * 1e6 / len(work)
    finally:
        wired.close()


@row("what a counting thread loses to the sender thread, a batch", unit="us", floor=0.7, aim=0.3)
def sender():
    """The reader's part, one wake-up a batch, is in both figures."""
    work = batches(STREAM)
    return Pair(stock=lambda: _lost(False, work), ours=lambda: _lost(True, work))
