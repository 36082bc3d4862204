"""A reader process: follows all sources into one index, and compares it at every sequence number."""

from __future__ import annotations

import logging
import math
import time
from array import array
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvevents.demo.chaos.fetch import fetch_snapshot
from kvevents.demo.chaos.ledger import LedgerReader, ledger_path
from kvevents.demo.chaos.verdict import FollowReport
from kvevents.events import BlockRemoved, BlockStored, EventList, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.subscribe import Batch, Gap, Item, Reset, Snapshot, Source, Subscriber, Timing

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvevents.demo.chaos.fetch import Fetched
    from kvevents.demo.chaos.ledger import Entry
    from kvevents.demo.chaos.options import ChaosOptions
    from kvevents.demo.chaos.prompts import Prompt

__all__ = ["Followed", "reader_main"]

_REPORT_EVERY_S = 0.1
_SNAPSHOT_S = 3.0
"""How long a snapshot is waited for before the stream is looked at again."""
_TIMING = Timing(silence_s=0.4, replay_timeout_s=1.0)
_HWM = 1_000
"""Messages that may wait for a reader on each socket."""


class Followed:
    """One source as a reader sees it: applied to the index, mended by snapshots, compared."""

    def __init__(
        self, index: PrefixIndex, ledger: LedgerReader, source: str, rank: int, replay_endpoint: str
    ) -> None:
        self.report = FollowReport()
        self.breaking = False
        self.position: tuple[bytes, int] | None = None
        """Life and next number, as the side file knows them: for the comparison only."""
        self._index = index
        self._ledger = ledger
        self._source = source
        self._rank = rank
        self._replay = replay_endpoint
        self._have: Fetched | None = None
        self._wanted: int | None = None
        self._retry_at = 0.0
        index.add_source(source, rank)

    def take(self, item: Item) -> None:
        """Apply one item, and compare."""
        report = self.report
        if isinstance(item, Batch):
            assert item.batch is not None  # noqa: S101 - the subscriber decodes
            ts = float(item.batch.ts)
            if self._is_void(item.seq, ts):
                report.contained += 1
                return
            self._index.apply_item(self._broken(item) if self.breaking else item)
            report.applied += 1
            report.repaired += item.replayed
            self._compare(self._ledger.of_batch(item.seq, ts))
        elif isinstance(item, Gap):
            if self._have is not None and item.last < self._have.resume_seq:
                return
            self._index.apply_item(item)
            report.gaps += 1
            self._wanted = item.last + 1
            self.mend()
        elif isinstance(item, Reset):
            self._index.apply_item(item)
            self._have = self._wanted = self.position = None
            report.resets += 1
        elif isinstance(item, Snapshot):
            self._index.apply_item(item)
            report.snapshots += 1

    def mend(self) -> None:
        """Take a snapshot where one is needed."""
        if self._wanted is None or time.monotonic() < self._retry_at:
            return
        found = fetch_snapshot(self._replay, self._wanted, _SNAPSHOT_S)
        if found is None:
            self._retry_at = time.monotonic() + 0.5
            return
        index, source, rank = self._index, self._source, self._rank
        if not index.apply_snapshot(source, rank, found.events, resume_seq=found.resume_seq):
            # Of another life, which counts from its own beginning.
            index.reset(source, rank)
            index.apply_snapshot(source, rank, found.events, resume_seq=found.resume_seq)
        self._have, self._wanted = found, None
        self.report.snapshots += 1
        if found.resume_seq:
            self._compare(self._ledger.of_life(found.epoch, found.resume_seq - 1))
        else:
            self.position = (found.epoch, 0)

    def _is_void(self, seq: int, ts: float) -> bool:
        """Whether a batch is in the snapshot already, or of a life before that of the snapshot."""
        have = self._have
        if have is None:
            return False
        return ts <= have.made_at if seq < have.resume_seq else ts < have.life_from

    def _compare(self, true: Entry | None) -> None:
        report = self.report
        held = self._index.digest(self._source, self._rank)
        if true is not None:
            self.position = (true.epoch, true.seq + 1)
        if self._wanted is not None or true is None or held is None:
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
            name: Followed(
                index, stack.enter_context(LedgerReader(ledger_path(folder, name))), name, rank, replay
            )
            for name, (rank, _, replay) in sources.items()
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
            for one in followed.values():
                one.mend()
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
                    pipe.send(("caught", (behind, reports, _answers(index, list(sources), quiet[1]))))
                    quiet = None


def _answers(index: PrefixIndex, sources: list[str], prompts: list[Prompt]) -> dict[str, array[int]]:
    """By source: how many tokens of each prompt it holds, by the index."""
    held = {name: array("I", bytes(4 * len(prompts))) for name in sources}
    for i, prompt in enumerate(prompts):
        for match in index.find(prompt.tokens, cache_salt=prompt.salt):
            held[match.source][i] = match.tokens
    return held
