"""Lists of events are immutable handles: any number of threads may use one."""

from __future__ import annotations

import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from kvevents import BlockRemoved, EventList

EVENTS = [BlockRemoved(block_hashes=[i], medium="GPU") for i in range(2_000)]


def test_threads_read_one_list() -> None:
    events = EventList(EVENTS)
    start = threading.Barrier(8)

    def work(n: int) -> bool:
        start.wait(10)
        part = events[n:] + events[:n]
        return (
            list(events) == EVENTS
            and part == EVENTS[n:] + EVENTS[:n]
            and pickle.loads(pickle.dumps(part)) == part
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_one_iterator_gives_every_event_to_one_thread_only() -> None:
    iterator = iter(EventList(EVENTS))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            parts = list(pool.map(lambda _: [e.block_hashes[0] for e in iterator], range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert sorted(h for part in parts for h in part) == list(range(2_000))
    assert next(iterator, None) is None
