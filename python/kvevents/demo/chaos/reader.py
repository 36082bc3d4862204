"""A reader process: follows all sources into one index, and compares it at every sequence number."""

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvevents.demo.chaos.ledger import LedgerReader, ledger_path
from kvevents.demo.chaos.prompts import held_by
from kvevents.demo.chaos.verdict import FollowReport
from kvevents.events import BlockRemoved, BlockStored, EventList, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.subscribe import Batch, Gap, Item, Reset, Snapshot, Source, Subscriber, Timing

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvevents.demo.chaos.ledger import Entry
    from kvevents.demo.chaos.options import ChaosOptions
    from kvevents.demo.chaos.prompts import Prompt

__all__ = ["Followed", "reader_main"]

_REPORT_EVERY_S = 0.1
_TIMING = Timing(silence_s=0.4, replay_timeout_s=1.0)
_HWM = 1_000
"""Messages that may wait for a reader on each socket."""


class Followed:
    """One source as a reader sees it: what the subscriber yields, applied to the index and compared."""

    def __init__(self, index: PrefixIndex, ledger: LedgerReader, source: str, rank: int) -> None:
        self.report = FollowReport()
        self.breaking = False
        self.position: tuple[bytes, int] | None = None
        """Life and next number, as the side file knows them: for the comparison only."""
        self._index = index
        self._ledger = ledger
        self._source = source
        self._rank = rank
        index.add_source(source, rank)

    def take(self, item: Item) -> None:
        """Apply one item, and compare."""
        report = self.report
        self._index.apply_item(self._broken(item) if self.breaking and isinstance(item, Batch) else item)
        if isinstance(item, Batch):
            assert item.batch is not None  # noqa: S101 - the subscriber decodes
            report.applied += 1
            report.repaired += item.replayed
            self._compare(self._ledger.of_batch(item.seq, float(item.batch.ts)))
        elif isinstance(item, Gap):
            report.gaps += 1
        elif isinstance(item, Reset):
            self.position = None
            report.resets += 1
        elif isinstance(item, Snapshot):
            report.snapshots += 1
            assert item.epoch is not None  # noqa: S101 - a subscriber's snapshot says it
            if item.resume_seq:
                self._compare(self._ledger.of_life(item.epoch, item.resume_seq - 1))
            else:
                self.position = (item.epoch, 0)

    def _compare(self, true: Entry | None) -> None:
        report = self.report
        held = self._index.digest(self._source, self._rank)
        if true is not None:
            self.position = (true.epoch, true.seq + 1)
        if true is None or held is None:
            report.uncompared += 1
        elif held == true.digest:
            report.identical += 1
        else:
            report.different += 1
            if report.first_difference is None:
                report.first_difference = true.seq

    def _broken(self, item: Batch) -> Batch:
        """The batch without its removals, the first time that it has some that matter."""
        assert item.batch is not None  # noqa: S101 - the subscriber decodes
        events = list(item.batch.events)
        stored = {h for e in events if isinstance(e, BlockStored) for h in e.block_hashes}
        kept = [e for e in events if not (isinstance(e, BlockRemoved) and stored.isdisjoint(e.block_hashes))]
        self.breaking = len(kept) == len(events)
        batch = KVEventBatch(item.batch.ts, EventList(kept), item.batch.data_parallel_rank)
        return item._replace(batch=batch)


def reader_main(
    pipe: Connection,
    options: ChaosOptions,
    reader: int,
    sources: dict[str, tuple[int, str, str]],
    folder: str,
) -> None:
    """Says ``ready``, follows ``sources`` (name: rank, live and replay address), sends ``progress``.

    Told ``slow``, it waits so many seconds before each item. Told ``quiet`` with the position of each source
    and prompts, it says ``caught`` when it is there, or is not getting there: whether it is, and what its
    index answers.
    """
    # What happens to it is in its report; warnings of twelve streams would bury the verdict.
    logging.getLogger("kvevents").setLevel(logging.ERROR)
    index = PrefixIndex()
    with ExitStack() as stack:
        followed = {
            name: Followed(index, stack.enter_context(LedgerReader(ledger_path(folder, name))), name, rank)
            for name, (rank, _, _) in sources.items()
        }
        next(iter(followed.values())).breaking = options.break_reader and reader == 0
        subscriber = stack.enter_context(
            Subscriber(
                [Source(live, replay, name=name) for name, (_, live, replay) in sources.items()],
                timing=_TIMING,
                hwm=_HWM,
            )
        )
        pipe.send(("ready", None))
        slow, reported, late, moved = 0.0, 0.0, math.inf, time.monotonic()
        quiet: tuple[dict[str, tuple[bytes, int]], list[Prompt]] | None = None
        while True:
            item = subscriber.poll(timeout=0.05)
            now = time.monotonic()
            if item is not None:
                followed[item.source].take(item)
                moved = now
                time.sleep(slow)
            if now - reported > _REPORT_EVERY_S:
                reported = now
                pipe.send(("progress", {name: one.report for name, one in followed.items()}))
                while pipe.poll():
                    word, value = pipe.recv()
                    moved = now
                    if word == "slow":
                        slow = value
                    elif word == "quiet":
                        quiet, late = value, now + options.silence_s
            if quiet is not None:
                behind = [name for name, at in quiet[0].items() if followed[name].position != at]
                if not behind or now - moved > options.silence_s / 2 or now > late:
                    reports = {name: one.report for name, one in followed.items()}
                    pipe.send(("caught", (behind, reports, held_by(index, list(sources), quiet[1]))))
                    quiet = None
