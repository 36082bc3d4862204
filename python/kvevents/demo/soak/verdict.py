"""What a soak has shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvevents.demo.soak.memory import Growth  # noqa: TC001 - a field's type is read at run time

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvevents.demo.soak.options import SoakOptions

__all__ = ["QuietReport", "ReaderReport", "SoakResult", "VisitorReport", "judge"]


class ReaderReport(msgspec.Struct):
    """What the reader saw, over all sources."""

    batches: int = 0
    repaired: int = 0
    """Batches that came by replay."""
    gaps: int = 0
    resets: int = 0
    snapshots: int = 0


class VisitorReport(msgspec.Struct):
    """What the visitors did."""

    plain: int = 0
    """Whole replays by vLLM's protocol."""
    snapshots: int = 0
    """Whole snapshots over extended replay."""
    subscribers: int = 0
    """Subscribers that came, were in step, and went."""
    refused: int = 0
    """Answers that did not come: the link was cut, or the engine was restarted."""


class QuietReport(msgspec.Struct, frozen=True, kw_only=True):
    """One quiet point."""

    sources: int
    behind: list[str]
    """Sources whose end the reader did not reach, and why."""
    different: list[str]
    """Sources of which set or index had another digest than the engine's pool."""
    answers: int
    equal: int
    """Answers of the index that were the pools'."""


class SoakResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a run, field for field what ``--json`` prints."""

    verdict: str
    """``sound`` or ``failed``."""
    reasons: list[str]
    seconds: float
    restarts: int
    outages: int
    dropped: int
    """Batches that overflowed a publisher's queue."""
    link: dict[str, int]
    reader: ReaderReport
    visitor: VisitorReport
    quiet: list[QuietReport]
    memory: list[Growth]

    def to_json(self) -> bytes:
        """One JSON object."""
        return msgspec.json.encode(self)


def judge(
    options: SoakOptions,
    *,
    seconds: float,
    happened: dict[str, int],
    link: dict[str, int],
    reader: ReaderReport,
    visitor: VisitorReport,
    quiet: list[QuietReport],
    memory: list[Growth],
) -> SoakResult:
    """Sound only if every comparison was equal, everything that was to happen did, and nothing grew."""
    reasons = [*_differences(quiet), *_missing(happened, link, reader, visitor)]
    if not quiet:
        reasons.append("there was no quiet point: the run was too short")
    if options.memory:
        judged = [g for g in memory if g.mb_per_minute is not None]
        reasons += [
            f"{g.process} grew by {g.mb_per_minute:.2f} MB a minute over {g.seconds:.0f} s "
            f"({g.first_mb:.1f} to {g.last_mb:.1f} MB)"
            for g in judged
            if (g.mb_per_minute or 0.0) >= options.limit_mb
        ]
        unjudged = {g.process for g in memory} - {g.process for g in judged} - {"engine a"}
        reasons += [f"{name} was sampled too shortly to be judged" for name in sorted(unjudged)]
    return SoakResult(
        verdict="failed" if reasons else "sound",
        reasons=reasons,
        seconds=round(seconds, 1),
        link=link,
        reader=reader,
        visitor=visitor,
        quiet=quiet,
        memory=memory,
        **happened,
    )


def _differences(quiet: Iterable[QuietReport]) -> Iterable[str]:
    for point, q in enumerate(quiet, 1):
        for what in q.behind:
            yield f"quiet point {point}: not at the end of {what}"
        for what in q.different:
            yield f"quiet point {point}: different from {what}"
        if q.equal != q.answers:
            yield f"quiet point {point}: {q.answers - q.equal} of {q.answers} answers are not the pools'"


def _missing(
    happened: dict[str, int], link: dict[str, int], reader: ReaderReport, visitor: VisitorReport
) -> Iterable[str]:
    """What was to happen and has not."""
    needed = {
        **{f"{fault} messages": n for fault, n in link.items()},
        "an engine's restart": happened["restarts"],
        "a restart that the reader noticed": reader.resets,
        "an outage": happened["outages"],
        "a queue's overflow": happened["dropped"],
        "a batch repaired by replay": reader.repaired,
        "a snapshot that healed a hole": reader.snapshots,
        "a visitor's plain replay": visitor.plain,
        "a visitor's snapshot": visitor.snapshots,
        "a visiting subscriber in step": visitor.subscribers,
    }
    return (f"did not happen: {what}" for what, n in needed.items() if not n)
