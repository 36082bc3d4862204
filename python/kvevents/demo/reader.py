"""The reader process: repairs what it missed, rebuilds the set, compares it at every sequence."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvevents.demo.truth import TruthReader
from kvevents.demo.verdict import ReaderReport
from kvevents.events import BlockRemoved, BlockStored, EventList, KVEventBatch
from kvevents.resident import ResidentKey, ResidentSet
from kvevents.subscribe import Batch, Gap, Item, Reset, Snapshot, Source, Subscriber

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvevents.demo.options import DemoOptions

__all__ = ["Comparison", "reader_main"]

_REPORT_EVERY_S = 0.1


class Comparison:
    """The reader's set beside the engine's word for it, sequence by sequence."""

    def __init__(self, truth: TruthReader, *, leave_one_removal_out: bool = False) -> None:
        self._truth = truth
        self._breaking = leave_one_removal_out
        self.resident = ResidentSet()
        self.applied = 0
        self.identical = 0
        self.explained = 0
        self.repaired = 0
        self.resets = 0
        self.gaps: list[str] = []
        self.left_out: int | None = None
        self.first_difference: int | None = None
        self.held: frozenset[ResidentKey] = frozenset()
        self.next_seq = 0
        """The first sequence that was neither applied nor explained, nor given up."""

    def take(self, item: Item) -> None:
        """Apply one item, and compare where it stands for a state of the engine."""
        if isinstance(item, Batch):
            self.repaired += item.replayed
            self.resident.apply(self._broken(item) if self._breaking else item)
            self.applied += 1
            self.next_seq = item.seq + 1
            self._compare(item.seq)
            return
        self.resident.apply(item)
        if isinstance(item, Snapshot):
            self.explained += max(0, item.resume_seq - self.next_seq)
            self.next_seq = max(self.next_seq, item.resume_seq)
            self._compare(item.resume_seq - 1)
        elif isinstance(item, Gap):
            self.gaps.append(f"sequences {item.first} to {item.last} are lost: {item.reason}")
            self.next_seq = item.last + 1
        elif isinstance(item, Reset):
            self.resets += 1

    def report(self) -> ReaderReport:
        """What was seen."""
        return ReaderReport(
            applied=self.applied,
            identical=self.identical,
            explained=self.explained,
            repaired=self.repaired,
            gaps=tuple(self.gaps),
            resets=self.resets,
            first_difference=self.first_difference,
            held_at_difference=self.held,
            left_out=self.left_out,
        )

    def _compare(self, seq: int) -> None:
        true = self._truth.digest(seq)
        if true is None:
            return
        if self.resident.digest() == true:
            self.identical += 1
        elif self.first_difference is None:
            self.first_difference = seq
            self.held = frozenset(self.resident.keys())

    def _broken(self, item: Batch) -> Batch:
        """The batch without one of its removals, the first time that leaving it out makes a difference."""
        if item.batch is None:
            return item
        events = list(item.batch.events)
        stored = {h for e in events if isinstance(e, BlockStored) for h in e.block_hashes}
        for i, event in enumerate(events):
            lost = (
                [h for h in event.block_hashes if h not in stored] if isinstance(event, BlockRemoved) else []
            )
            if isinstance(event, BlockRemoved) and lost:
                kept = [h for h in event.block_hashes if h != lost[0]]
                events[i : i + 1] = [msgspec.structs.replace(event, block_hashes=kept)] if kept else []
                self._breaking = False
                self.left_out = item.seq
                return item._replace(
                    batch=KVEventBatch(item.batch.ts, EventList(events), item.batch.data_parallel_rank)
                )
        return item


def reader_main(pipe: Connection, options: DemoOptions, live: str, replay: str, truth_path: str) -> None:
    """Says ``ready``, follows the stream, is told how many sequences there are by ``end``, says ``done``.

    Gives up, and reports what it has, when nothing has come for most of the time that counts as stuck.
    """
    end: int | None = None
    with (
        TruthReader(Path(truth_path)) as truth,
        Subscriber([Source(live, replay)]) as subscriber,
    ):
        comparison = Comparison(truth, leave_one_removal_out=options.break_reader)
        pipe.send(("ready", None))
        heard = reported = time.monotonic()
        while end is None or comparison.next_seq < end:
            item = subscriber.poll(timeout=0.05)
            now = time.monotonic()
            if item is not None:
                comparison.take(item)
                heard = now
            elif end is not None and now - heard > options.silence_s * 0.8:
                break
            if now - reported > _REPORT_EVERY_S:
                reported = now
                pipe.send(("progress", comparison.applied))
                while pipe.poll():
                    word, value = pipe.recv()
                    if word == "end":
                        end = value
                        heard = now
        pipe.send(("done", comparison.report()))
        pipe.recv()  # the end of the pipe
