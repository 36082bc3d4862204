"""Runs the processes of the demo and collects what they say."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvevents.demo.children import ChildGroup
from kvevents.demo.drive import true_set
from kvevents.demo.engine import engine_main
from kvevents.demo.link import link_main
from kvevents.demo.reader import reader_main
from kvevents.demo.truth import TruthReader
from kvevents.demo.verdict import DemoResult, ReaderReport, judge
from kvevents.errors import ConfigError
from kvevents.resident import ResidentKey, ResidentSet
from kvevents.simulate.ledger import LedgerTruth

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from kvevents.demo.options import DemoOptions

__all__ = ["ProgressSink", "run_demo"]


class ProgressSink(Protocol):
    """Who is told how far a run is."""

    def served(self, requests: int, batches: int) -> None:
        """The engine has finished that many requests, and published that many batches."""

    def applied(self, sequences: int) -> None:
        """The reader has applied that many sequences."""


def run_demo(options: DemoOptions, progress: ProgressSink | None = None) -> DemoResult:
    """One run: engine, link and reader in processes of their own, on free ports of the loopback.

    Returns when the reader has caught up, or has found that it cannot. Leaves no process, port or file
    behind, also when interrupted.

    :raises ConfigError: no request fits into the pool, or ``break_reader`` where nothing was removed.
    :raises ChildError: where a process failed, died, or nothing moved for ``options.silence_s`` seconds.
    """

    def on_progress(who: str, word: str, value: Any) -> None:
        if progress is None or word != "progress":
            return
        if who == "engine":
            progress.served(*value)
        elif who == "reader":
            progress.applied(value)

    with (
        tempfile.TemporaryDirectory(prefix="kvevents-demo-") as folder,
        ChildGroup(options.silence_s) as group,
    ):
        truth = Path(folder) / "truth"
        truth.touch()
        group.start("engine", engine_main, options, folder, has_children=options.behind is not None)
        live, replay = group.expect("engine", "ready")
        group.start("link", link_main, options, live, replay)
        live, replay = group.expect("link", "ready")
        group.start("reader", reader_main, options, live, replay, str(truth))
        group.expect("reader", "ready")

        group.send("engine", "go")
        engine = group.expect("engine", "done", on_progress)
        group.send("reader", "end", engine.batches)
        reader = group.expect("reader", "done", on_progress)
        group.send("link", "stop")
        link = group.expect("link", "done")
        group.send("engine", "stop")
        sent = group.expect("engine", "stopped")
        first_difference = _first_difference(options, reader, Path(folder))
    if not engine.finished:
        raise ConfigError(
            f"blocks: none of {options.requests} requests fits into {options.pool_blocks} blocks of "
            f"{options.block_size} tokens, so nothing was shown; give more"
        )
    if options.break_reader and reader.left_out is None:
        raise ConfigError(
            f"break_reader: no block was removed in {engine.batches} batches, so none could be left out; "
            f"serve more than {options.requests} requests or give fewer than {options.pool_blocks} blocks"
        )
    return judge(
        options,
        engine,
        batches_sent=sent,
        link=link,
        reader=reader,
        first_difference=first_difference,
    )


def _first_difference(options: DemoOptions, reader: ReaderReport, folder: Path) -> dict[str, Any] | None:
    """What was missing and what was too much, against the engine run again, and the ledgers."""
    seq = reader.first_difference
    if seq is None:
        return None
    with TruthReader(folder / "truth") as truth:
        step = truth.step(seq)
    if step is None:
        raise ValueError(f"the side file has no line of sequence {seq}")
    true = set(ResidentSet(true_set(options, step)).keys())
    tiers = options.tiers()
    if tiers:
        with LedgerTruth(folder, tiers[0]) as ledgers:
            ledgers.advance(step)
            true |= ledgers.resident.keys()
    held = reader.held_at_difference
    return {"seq": seq, "missing": _names(true - held), "extra": _names(held - true)}


def _names(keys: AbstractSet[ResidentKey]) -> list[str]:
    return sorted(key.hash.hex() if isinstance(key.hash, bytes) else str(key.hash) for key in keys)
