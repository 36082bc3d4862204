"""Worker processes of a mock engine: spawned, one per tensor-parallel rank.

Each runs the worker halves of the connectors, hands one small pickle a step to the scheduler, and writes
what its tiers really hold into a ledger file that nobody else reads before the end.
"""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvevents.connectors import (
    KVConnectorOutput,
    KVConnectorRole,
    ModelRunnerOutput,
    MultiConnector,
)
from kvevents.simulate.tier import TierConnector

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from kvevents.connectors import KVConnectorMetadata
    from kvevents.simulate.tier import TierConfig

__all__ = ["WorkerGroup", "make_connector", "read_ledger"]


def make_connector(tiers: Sequence[TierConfig], role: KVConnectorRole) -> MultiConnector:
    """One half of the mock engine's connectors."""
    children = [TierConnector(tier, role) for tier in tiers]
    return MultiConnector(None, role, connectors=children)


def _work(conn: Connection, tiers: Sequence[TierConfig], ledger_path: str) -> None:
    """One worker's loop: metadata in, output out, until the other end closes."""
    connector = make_connector(tiers, KVConnectorRole.WORKER)
    with Path(ledger_path).open("a", encoding="ascii") as ledger:
        while True:
            try:
                message = conn.recv_bytes()
            except (EOFError, OSError):
                return
            step, metadata = pickle.loads(message)  # noqa: S301 - from our own parent
            connector.bind_connector_metadata(metadata)
            connector.start_load_kv(None)
            connector.wait_for_save()
            sending, recving = connector.get_finished(set())
            output = KVConnectorOutput(
                finished_sending=sending,
                finished_recving=recving,
                kv_connector_stats=connector.get_kv_connector_stats(),
                kv_cache_events=connector.get_kv_connector_kv_cache_events(),
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
                invalid_block_ids=connector.get_block_ids_with_load_errors(),
            )
            connector.clear_connector_metadata()
            for i, tier in enumerate(connector.sub_connectors):
                for sign, block_hash in cast("TierConnector", tier).take_ledger():
                    text = block_hash.hex() if isinstance(block_hash, bytes) else f"i{block_hash}"
                    ledger.write(f"{step} {i} {sign} {text}\n")
            ledger.flush()
            conn.send_bytes(pickle.dumps(ModelRunnerOutput(output), protocol=5))


class WorkerGroup:
    """All workers of one engine. Used by the engine's thread only."""

    def __init__(self, tiers: Sequence[Sequence[TierConfig]], ledger_dir: Path) -> None:
        """``tiers[w]`` are worker ``w``'s connectors."""
        self._context = multiprocessing.get_context("spawn")
        self._tiers = tiers
        self._dir = ledger_dir
        self._workers: list[tuple[Any, Connection]] = [self._start(w) for w in range(len(tiers))]
        self.pickled_bytes = 0
        self.outputs = 0

    def _start(self, worker: int) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        path = str(self._dir / f"ledger-{worker}.txt")
        process = self._context.Process(
            target=_work, args=(theirs, self._tiers[worker], path), name=f"kvevents-worker-{worker}"
        )
        process.start()
        theirs.close()
        return process, ours

    def step(self, step: int, metadata: KVConnectorMetadata) -> list[ModelRunnerOutput]:
        """Let every worker do one step; returns their outputs, by worker."""
        message = pickle.dumps((step, metadata), protocol=5)
        for _, conn in self._workers:
            conn.send_bytes(message)
        outputs = []
        for _, conn in self._workers:
            data = conn.recv_bytes()
            self.pickled_bytes += len(data)
            self.outputs += 1
            outputs.append(pickle.loads(data))  # noqa: S301 - from our own child
        return outputs

    def restart(self, worker: int, step: int) -> None:
        """Kill a worker between two steps and start it anew: its memory is gone."""
        process, conn = self._workers[worker]
        process.kill()
        process.join()
        conn.close()
        with (self._dir / f"ledger-{worker}.txt").open("a", encoding="ascii") as ledger:
            ledger.write(f"{step} * ! restarted\n")
        self._workers[worker] = self._start(worker)

    def close(self) -> None:
        """End all workers. Idempotent."""
        for process, conn in self._workers:
            conn.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []


def read_ledger(path: Path) -> list[tuple[int, int | None, str, bytes | int | None]]:
    """Return ``(step, connector, sign, hash)`` of every line; a restart has neither connector nor hash."""
    entries: list[tuple[int, int | None, str, bytes | int | None]] = []
    for line in path.read_text(encoding="ascii").splitlines():
        step, connector, sign, text = line.split(" ", 3)
        if sign == "!":
            entries.append((int(step), None, sign, None))
            continue
        block_hash = int(text[1:]) if text[0] == "i" else bytes.fromhex(text)
        entries.append((int(step), int(connector), sign, block_hash))
    return entries
