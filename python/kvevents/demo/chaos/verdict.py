"""What a chaos run has shown: reports of its processes, and the verdict that follows from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvevents.demo.chaos.options import ChaosOptions

__all__ = ["ChaosResult", "FollowReport", "QuietPoint", "ReaderLife", "SourceReport", "judge"]

_RATE_OF = {
    "dropped": "drop",
    "duplicated": "duplicate",
    "delayed": "delay",
    "reordered": "reorder",
    "reconnects": "cut_every",
}


class SourceReport(msgspec.Struct, frozen=True, kw_only=True):
    """One life of one data-parallel rank."""

    epoch: bytes
    batches: int
    """Handed to the publisher: numbers that were used."""
    dropped: int
    """By the publisher's queue."""
    blocks_stored: int
    blocks_removed: int
    digest: bytes
    """Of the pool."""


class FollowReport(msgspec.Struct):
    """What one reader saw of one source."""

    applied: int = 0
    """Batches; each is compared."""
    identical: int = 0
    """States, after a batch or a snapshot, whose digest was the engine's."""
    different: int = 0
    uncompared: int = 0
    """Because the index said that it could not know, or the side file did not know the state."""
    repaired: int = 0
    """Batches that came by replay."""
    gaps: int = 0
    resets: int = 0
    snapshots: int = 0
    first_difference: int | None = None


class ReaderLife(msgspec.Struct, frozen=True, kw_only=True):
    """One reader process from its start to its end."""

    reader: int
    role: str
    life: int
    sources: dict[str, FollowReport]

    def total(self, field: str) -> int:
        """Over all sources."""
        return sum(getattr(report, field) for report in self.sources.values())


class QuietPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One reader at one quiet point."""

    point: int
    reader: int
    behind: list[str]
    """Sources whose last batch it had not reached."""
    answers: int
    """Prompts times sources."""
    equal: int
    """Answers that were the pool's."""
    hits: int
    """Answers that were not 0."""


class ChaosResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a run, field for field what ``demo --chaos --json`` prints."""

    verdict: str
    reasons: list[str]
    seed: int
    seconds: float
    sequences: int
    """Numbers that the engines used, in all their lives."""
    compared: int
    identical: int
    answers: int
    answers_equal: int
    dropped: int
    """Batches that overflowed a publisher's queue."""
    restarts: int
    outages: int
    link: dict[str, int]
    readers: list[ReaderLife]
    quiet: list[QuietPoint]

    def to_json(self) -> bytes:
        """One JSON object."""
        return msgspec.json.encode(self)


def judge(
    options: ChaosOptions,
    *,
    seconds: float,
    sequences: int,
    dropped: int,
    restarts: int,
    outages: int,
    link: Mapping[str, int],
    readers: Sequence[ReaderLife],
    quiet: Sequence[QuietPoint],
) -> ChaosResult:
    """Judge a run: identical only if every comparison was equal and everything that was to happen did."""
    reasons: list[str] = []
    for life in readers:
        who = f"reader {life.reader + 1} ({life.role})"
        for source, report in life.sources.items():
            if report.different:
                reasons.append(
                    f"{who} differs from {source} at {report.different} sequence number(s), "
                    f"first at {report.first_difference}"
                )
            if report.uncompared:
                reasons.append(f"{who} could not be compared with {source} {report.uncompared} time(s)")
            if not report.identical:
                reasons.append(f"{who} never saw anything of {source}")
    for q in quiet:
        who = f"reader {q.reader + 1} at quiet point {q.point}"
        if q.behind:
            reasons.append(f"{who} did not get to the end of {', '.join(q.behind)}")
        if q.equal != q.answers:
            reasons.append(f"{who}: {q.answers - q.equal} of {q.answers} answers are not the pools'")
        if not q.hits:
            reasons.append(f"{who}: no prompt was found at all")
    reasons += [f"did not happen: {what}" for what in _absent(options, dropped, link, readers)]
    return ChaosResult(
        verdict="different" if reasons else "identical",
        reasons=reasons,
        seed=options.seed,
        seconds=round(seconds, 1),
        sequences=sequences,
        compared=sum(r.total(f) for r in readers for f in ("identical", "different", "uncompared")),
        identical=sum(r.total("identical") for r in readers),
        answers=sum(q.answers for q in quiet),
        answers_equal=sum(q.equal for q in quiet),
        dropped=dropped,
        restarts=restarts,
        outages=outages,
        link={fault: link[fault] for fault in _RATE_OF},
        readers=list(readers),
        quiet=list(quiet),
    )


def _absent(
    options: ChaosOptions, dropped: int, link: Mapping[str, int], readers: Sequence[ReaderLife]
) -> list[str]:
    """What was asked for and has not been seen."""
    absent = [
        f"{fault} messages"
        for fault, rate in _RATE_OF.items()
        if getattr(options.link, rate) and not link[fault]
    ]
    if not options.faults:
        return absent
    if not dropped:
        absent.append("an overflow of a publisher's queue")
    needs: dict[str, Any] = {
        "first": ("a restart that the first reader noticed", "resets"),
        "late": ("a snapshot for the late reader", "snapshots"),
        "killed": ("a snapshot for the reader that was started again", "snapshots"),
    }
    for life in readers:
        what, field = needs[life.role]
        if (life.role != "killed" or life.life) and not life.total(field):
            absent.append(what)
        if life.role == "first" and not life.total("snapshots"):
            absent.append("an outage that only a snapshot could mend")
    return absent
