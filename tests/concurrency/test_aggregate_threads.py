"""Recording from background threads while the step drains."""

from __future__ import annotations

import threading

from kvevents import Aggregator, BlockStored, EventList

THREADS = 4
EVENTS = 25_000


def test_reports_from_four_threads_lose_nothing_and_double_nothing() -> None:
    # Whoever drains without a pause makes steps without number; none of them is to give up a block.
    votes = Aggregator(THREADS, max_age=2**40)
    lists = [
        EventList([BlockStored([i], None, [i], 1, None, "CPU", None) for i in range(at, at + 500)])
        for at in range(0, EVENTS, 500)
    ]
    start = threading.Barrier(THREADS + 1)

    def work(worker: int) -> None:
        start.wait(30)
        for events in lists:
            votes.add(worker, events)

    threads = [threading.Thread(target=work, args=(w,)) for w in range(THREADS)]
    for t in threads:
        t.start()
    start.wait(30)
    seen: list[int] = []
    while any(t.is_alive() for t in threads):
        seen += [h for e in votes.drain() for h in e.block_hashes]
    for t in threads:
        t.join(30)
    seen += [h for e in votes.drain() for h in e.block_hashes]
    assert len(seen) == EVENTS
    assert set(seen) == set(range(EVENTS))
    assert votes.stats().votes == EVENTS * THREADS
