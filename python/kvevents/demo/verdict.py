"""What a run has shown: reports of the processes, and the verdict that follows from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from kvevents.demo.options import DemoOptions
    from kvevents.resident import ResidentKey

__all__ = ["ConnectorReport", "DemoResult", "EngineReport", "ReaderReport", "judge"]

FAULTS_CERTAIN_FROM = 1000
"""Requests from which on every kind of fault must have happened."""

_RATE_OF = {
    "dropped": "drop",
    "duplicated": "duplicate",
    "delayed": "delay",
    "reordered": "reorder",
    "reconnects": "cut_every",
}


class ConnectorReport(msgspec.Struct, frozen=True):
    """What the workers behind the engine went through."""

    pickle_bytes_per_step: float
    """From all workers together."""
    late_stores: int
    failed_stores: int
    """Wholly or in part."""
    evicted: int
    restarts: int
    reannounced: int
    """Blocks that were announced again after the pool's clear."""


class EngineReport(msgspec.Struct, frozen=True):
    """What the engine process did."""

    batches: int
    """Batches that were handed to the publisher, so sequence numbers that were used."""
    finished: int
    hit_rate: float
    blocks_stored: int
    blocks_removed: int
    seconds: float
    publish_p50_us: float
    publish_p99_us: float
    connectors: ConnectorReport | None = None


class ReaderReport(msgspec.Struct, frozen=True):
    """What the reader process saw."""

    applied: int
    identical: int
    explained: int
    """Sequences that a snapshot stands for."""
    repaired: int
    """Batches that came by replay."""
    gaps: tuple[str, ...]
    resets: int
    first_difference: int | None
    held_at_difference: frozenset[ResidentKey]
    left_out: int | None
    """With ``break_reader``: the sequence whose removal was left out."""


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a run, field for field what ``demo --json`` prints; ``reasons`` is for people."""

    verdict: str
    sequences: int
    identical: int
    first_difference: dict[str, Any] | None
    requests: int
    hit_rate: float
    blocks_stored: int
    blocks_removed: int
    batches_sent: int
    link: dict[str, int]
    repaired: int
    publish_p50_us: float
    publish_p99_us: float
    blocks_per_s: float
    workers: int
    connectors: int
    connector_work: dict[str, float] | None
    """Fields of :class:`ConnectorReport`; ``None`` without workers."""
    reasons: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """One JSON object; what is about workers only where there are any."""
        fields = msgspec.structs.asdict(self)
        del fields["reasons"]
        if not self.workers:
            for name in ("workers", "connectors", "connector_work"):
                del fields[name]
        return msgspec.json.encode(fields)


def judge(
    options: DemoOptions,
    engine: EngineReport,
    *,
    batches_sent: int,
    link: dict[str, int],
    reader: ReaderReport,
    first_difference: dict[str, Any] | None,
) -> DemoResult:
    """Judge a run.

    Identical only if every sequence was applied, or explained by a snapshot, with the digests agreeing, and
    (from 1,000 requests on) every kind of fault that was asked for happened.
    """
    reasons: list[str] = []
    if first_difference is not None:
        seq, missing, extra = (first_difference[k] for k in ("seq", "missing", "extra"))
        reasons.append(
            f"first difference at sequence {seq}: {len(missing)} block(s) missing, {len(extra)} too many"
        )
    if reader.applied != reader.identical and first_difference is None:
        reasons.append(f"{reader.applied - reader.identical} sequence(s) could not be compared")
    unseen = engine.batches - reader.applied - reader.explained
    if unseen:
        reasons.append(f"{unseen} sequence(s) were neither applied nor explained by a snapshot")
    reasons += reader.gaps
    if options.requests >= FAULTS_CERTAIN_FROM:
        absent = [
            fault for fault, rate in _RATE_OF.items() if getattr(options.link, rate) and not link[fault]
        ]
        if engine.connectors is not None:
            absent += [k for k, n in msgspec.structs.asdict(engine.connectors).items() if not n]
        if absent:
            reasons.append(f"faults that never happened: {', '.join(absent)}")
    return DemoResult(
        verdict="different" if reasons else "identical",
        sequences=engine.batches,
        identical=reader.identical,
        first_difference=first_difference,
        requests=engine.finished,
        hit_rate=round(engine.hit_rate, 4),
        blocks_stored=engine.blocks_stored,
        blocks_removed=engine.blocks_removed,
        batches_sent=batches_sent,
        link={fault: link[fault] for fault in _RATE_OF},
        repaired=reader.repaired,
        publish_p50_us=round(engine.publish_p50_us, 1),
        publish_p99_us=round(engine.publish_p99_us, 1),
        blocks_per_s=round(engine.blocks_stored / engine.seconds, 1) if engine.seconds else 0.0,
        workers=options.behind.workers if options.behind else 0,
        connectors=options.behind.connectors if options.behind else 0,
        connector_work=(
            None
            if engine.connectors is None
            else {k: round(n, 1) for k, n in msgspec.structs.asdict(engine.connectors).items()}
        ),
        reasons=tuple(reasons),
    )
