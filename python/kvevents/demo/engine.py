"""The engine process: serves the requests, writes down the truth, publishes."""

from __future__ import annotations

import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

from kvevents.demo.drive import Drive
from kvevents.demo.truth import TruthWriter
from kvevents.demo.verdict import EngineReport
from kvevents.publish import ZmqEventPublisher

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvevents.demo.options import DemoOptions
    from kvevents.events import KVEventBatch

__all__ = ["engine_main"]

_REPORT_EVERY_S = 0.1
_KEPT_FOR_REPLAY = 100_000
"""Batches in the replay log: more than a reader can be behind in any run of a few minutes."""


class _TimedPublisher:
    """Measures ``publish()`` as its caller sees it."""

    def __init__(self, inner: ZmqEventPublisher) -> None:
        self._inner = inner
        self.durations_ns = array("Q")

    def publish(self, events: KVEventBatch) -> None:
        """Hand the batch on."""
        start = time.perf_counter_ns()
        self._inner.publish(events)
        self.durations_ns.append(time.perf_counter_ns() - start)

    def percentile_us(self, share: float) -> float:
        """The duration that ``share`` of the calls stayed below, in microseconds."""
        ordered = sorted(self.durations_ns)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1000 if ordered else 0.0


def engine_main(pipe: Connection, options: DemoOptions, truth_path: str) -> None:
    """Says ``ready`` with its addresses, runs on ``go``, says ``done``, answers replay until ``stop``.

    The last word, ``stopped``, says how many batches left the publisher.
    """
    with ZmqEventPublisher(
        0, endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", buffer_steps=_KEPT_FOR_REPLAY
    ) as publisher:
        addresses = publisher.get_publisher_config()
        pipe.send(("ready", (addresses.endpoint, addresses.replay_endpoint)))
        pipe.recv()  # go
        timed = _TimedPublisher(publisher)
        with TruthWriter(Path(truth_path)) as truth:
            drive = Drive(
                options,
                publisher=timed,
                before_publish=lambda seq, _batch: truth.write(seq, drive.engine.pool.digest()),
            )
            seconds = _run(pipe, options, drive)
        stats = drive.engine.stats
        report = EngineReport(
            batches=stats.batches,
            finished=stats.finished,
            hit_rate=stats.hit_rate,
            blocks_stored=stats.blocks_stored,
            blocks_removed=stats.blocks_removed,
            seconds=seconds,
            publish_p50_us=timed.percentile_us(0.5),
            publish_p99_us=timed.percentile_us(0.99),
        )
        pipe.send(("done", report))
        pipe.recv()  # stop
        publisher.shutdown()
        pipe.send(("stopped", publisher.stats().sent))


def _run(pipe: Connection, options: DemoOptions, drive: Drive) -> float:
    """Serve all requests at the pace that was asked for; returns the seconds that it took."""
    stats = drive.engine.stats
    start = time.monotonic()
    reported = start
    for events in drive.steps():
        now = time.monotonic()
        if now - reported > _REPORT_EVERY_S:
            reported = now
            pipe.send(("progress", (stats.finished + stats.refused, stats.batches)))
        if len(events):
            ahead = start + stats.batches / options.rate - now
            if ahead > 0:
                time.sleep(ahead)
    return time.monotonic() - start
