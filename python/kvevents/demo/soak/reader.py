"""The reader process: follows all sources into a resident set and an index, all the time."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from kvevents.demo.chaos.prompts import held_by
from kvevents.demo.soak.verdict import ReaderReport
from kvevents.index import PrefixIndex
from kvevents.resident import ResidentSet
from kvevents.subscribe import Batch, Gap, Reset, Snapshot, Source, Subscriber, Timing

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvevents.demo.chaos.prompts import Prompt
    from kvevents.subscribe import Item

__all__ = ["End", "Seen", "reader_main"]

_REPORT_EVERY_S = 1.0
TIMING = Timing(silence_s=0.4, replay_timeout_s=1.0)
HWM = 1_000
"""Messages that may wait for a reader on each socket."""


class End(NamedTuple):
    """Where a source stands at a quiet point."""

    seq: int
    """Number of its last batch; -1 where there is none."""
    digest: bytes
    """Of its pool."""


class Seen:
    """What a subscriber's items amount to."""

    def __init__(self, sources: dict[str, int]) -> None:
        self.report = ReaderReport()
        self.sources = sources
        self.set = ResidentSet()
        self.index = PrefixIndex()
        self.next: dict[str, int] = {}
        for name, rank in sources.items():
            self.index.add_source(name, rank)

    def take(self, item: Item) -> None:
        """Apply one item."""
        report = self.report
        if isinstance(item, Batch):
            report.batches += 1
            report.repaired += item.replayed
            self.next[item.source] = item.seq + 1
        elif isinstance(item, Gap):
            report.gaps += 1
        elif isinstance(item, Snapshot):
            report.snapshots += 1
            self.next[item.source] = item.resume_seq
        elif isinstance(item, Reset):
            report.resets += 1
            self.next.pop(item.source, None)
        self.set.apply(item)
        self.index.apply_item(item)

    def behind(self, ends: dict[str, End]) -> list[str]:
        """Sources that are not known to their end."""
        return [
            f"{name} (next is {self.next.get(name, 0)}, its is {end.seq + 1})"
            for name, end in ends.items()
            if self.next.get(name, 0) != end.seq + 1 or self.set.why_invalid(name) is not None
        ]

    def different(self, ends: dict[str, End]) -> list[str]:
        """Sources of which something else is held than their pools hold."""
        return [
            name
            for name, end in ends.items()
            if self.set.digest(name) != end.digest
            or self.index.digest(name, self.sources[name]) != end.digest
        ]


def reader_main(pipe: Connection, sources: dict[str, tuple[int, str, str]], silence_s: float) -> None:
    """Says ``ready``, follows ``sources`` (name: rank, live and replay address), sends ``progress``.

    Told ``quiet`` with the end of each source and prompts, it says ``caught`` when it is there, or after
    ``silence_s``: what is behind, what is different, and what its index answers.
    """
    logging.getLogger("kvevents").setLevel(logging.ERROR)
    seen = Seen({name: rank for name, (rank, _, _) in sources.items()})
    listed = [Source(live, replay, name=name) for name, (_, live, replay) in sources.items()]
    with Subscriber(listed, timing=TIMING, hwm=HWM) as subscriber:
        pipe.send(("ready", None))
        reported = time.monotonic()
        quiet: tuple[dict[str, End], list[Prompt]] | None = None
        late = 0.0
        while True:
            item = subscriber.poll(timeout=0.05)
            if item is not None:
                seen.take(item)
            now = time.monotonic()
            if now - reported > _REPORT_EVERY_S or item is None:
                reported = now
                pipe.send(("progress", seen.report))
            while pipe.poll():
                _, quiet = pipe.recv()
                late = now + silence_s
            if quiet is not None:
                ends, prompts = quiet
                behind = seen.behind(ends)
                if not behind or now > late:
                    different = [] if behind else seen.different(ends)
                    answers = held_by(seen.index, list(sources), prompts)
                    pipe.send(("caught", (behind, different, answers)))
                    quiet = None
