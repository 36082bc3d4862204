"""The engine process: serves the requests, writes down the truth, publishes."""

from __future__ import annotations

import contextlib
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

from kvevents.demo.drive import Drive
from kvevents.demo.truth import TruthWriter, add_digests
from kvevents.demo.verdict import ConnectorReport, EngineReport
from kvevents.publish import ZmqEventPublisher
from kvevents.simulate.connectors import EngineConnectors
from kvevents.simulate.ledger import LedgerTruth
from kvevents.simulate.workers import WorkerGroup

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


def engine_main(pipe: Connection, options: DemoOptions, folder: str) -> None:
    """Says ``ready`` with its addresses, runs on ``go``, says ``done``, answers replay until ``stop``.

    The last word, ``stopped``, says how many batches left the publisher. The truth goes into ``folder``.
    """
    with (
        contextlib.ExitStack() as stack,
        ZmqEventPublisher(
            0,
            endpoint="tcp://127.0.0.1:0",
            replay_endpoint="tcp://127.0.0.1:0",
            buffer_steps=_KEPT_FOR_REPLAY,
        ) as publisher,
    ):
        addresses = publisher.get_publisher_config()
        tiers = options.tiers()
        connectors = (
            stack.enter_context(EngineConnectors(tiers, WorkerGroup(tiers, Path(folder)))) if tiers else None
        )
        pipe.send(("ready", (addresses.endpoint, addresses.replay_endpoint)))
        pipe.recv()  # go
        timed = _TimedPublisher(publisher)
        with TruthWriter(Path(folder) / "truth") as truth:
            ledgers = stack.enter_context(LedgerTruth(Path(folder), tiers[0])) if tiers else None

            def write_truth(seq: int, _batch: KVEventBatch) -> None:
                step = drive.engine.stats.steps
                digest = drive.engine.pool.digest()
                if ledgers is not None:
                    ledgers.advance(step)
                    digest = add_digests(digest, ledgers.digest())
                truth.write(seq, digest, step)

            drive = Drive(options, publisher=timed, before_publish=write_truth, connectors=connectors)
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
            connectors=_report_connectors(connectors, stats.steps) if connectors is not None else None,
        )
        pipe.send(("done", report))
        pipe.recv()  # stop
        publisher.shutdown()
        pipe.send(("stopped", publisher.stats().sent))


def _report_connectors(connectors: EngineConnectors, steps: int) -> ConnectorReport:
    counts = connectors.stats.data
    return ConnectorReport(
        pickle_bytes_per_step=connectors.workers.pickled_bytes / steps,
        late_stores=counts.get("late", 0),
        failed_stores=counts.get("failed", 0) + counts.get("partial", 0),
        evicted=counts.get("evicted", 0),
        restarts=connectors.restarts,
        reannounced=connectors.collector.stats()["reannounced"],
    )


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
