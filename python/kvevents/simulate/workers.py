"""Worker processes of a mock engine: spawned, one per tensor-parallel rank.

Each runs the worker halves of the connectors, hands one small pickle a step to the scheduler, and writes
what its tiers really hold into a ledger of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from kvevents.connectors import KVConnectorOutput, KVConnectorRole, ModelRunnerOutput, MultiConnector
from kvevents.errors import KVEventsError
from kvevents.simulate.ledger import LedgerWriter, ledger_path
from kvevents.simulate.tier import TierConnector

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from types import TracebackType

    from kvevents.connectors import KVConnectorMetadata
    from kvevents.simulate.tier import TierConfig

__all__ = ["WorkerError", "WorkerGroup", "make_connector", "run_step"]

_FAILED = b"\0"
"""First byte of a worker's last word; no pickle begins with it."""


class WorkerError(KVEventsError, RuntimeError):
    """A worker process failed, died or fell silent; says which, in which step, and how it ended."""


def make_connector(tiers: Sequence[TierConfig], role: KVConnectorRole) -> MultiConnector:
    """One half of the mock engine's connectors."""
    return MultiConnector(None, role, connectors=[TierConnector(tier, role) for tier in tiers])


def run_step(connector: MultiConnector, metadata: KVConnectorMetadata) -> ModelRunnerOutput:
    """One step of a worker: its connectors do what ``metadata`` says, and report."""
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
    return ModelRunnerOutput(output)


def _work(pipe: Connection, tiers: Sequence[TierConfig], ledger: str) -> None:
    """One worker's loop: metadata in, output out, until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's: we end when it does
    connector = make_connector(tiers, KVConnectorRole.WORKER)
    with LedgerWriter(Path(ledger)) as book, contextlib.suppress(EOFError, OSError):
        while True:
            message = pipe.recv_bytes()
            try:
                step, metadata = pickle.loads(message)  # noqa: S301 - from our own parent
                output = run_step(connector, metadata)
                for i, tier in enumerate(connector.sub_connectors):
                    book.write(step, i, cast("TierConnector", tier).take_ledger())
                # The ledger is written first: who has the output finds the truth of the step.
                answer = pickle.dumps(output, protocol=5)
            except Exception as e:
                pipe.send_bytes(_FAILED + f"{type(e).__name__}: {e}".encode())
                return
            pipe.send_bytes(answer)


class WorkerGroup:
    """All workers of one engine, as a context that ends them. Used by the engine's thread only."""

    def __init__(
        self, tiers: Sequence[Sequence[TierConfig]], ledger_dir: Path, *, silence_s: float = 20.0
    ) -> None:
        """``tiers[w]`` are worker ``w``'s connectors; one that says nothing for ``silence_s`` is stuck."""
        self._context = multiprocessing.get_context("spawn")
        self._tiers = tiers
        self._dir = ledger_dir
        self._silence_s = silence_s
        self._workers: list[tuple[Any, Connection]] = []
        self.pickled_bytes = 0
        """Of all outputs so far."""
        try:
            for worker in range(len(tiers)):
                ledger_path(ledger_dir, worker).touch()
                self._workers.append(self._start(worker))
        except BaseException:
            self.close()
            raise

    def _start(self, worker: int) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_work,
            args=(theirs, self._tiers[worker], str(ledger_path(self._dir, worker))),
            name=f"kvevents-worker-{worker}",
            daemon=True,
        )
        process.start()
        theirs.close()
        return process, ours

    def step(self, step: int, metadata: KVConnectorMetadata) -> list[ModelRunnerOutput]:
        """Let every worker do one step; returns their outputs, by worker.

        :raises WorkerError: where one failed, died or says nothing.
        """
        message = pickle.dumps((step, metadata), protocol=5)
        for worker in range(len(self._workers)):
            try:
                self._workers[worker][1].send_bytes(message)
            except OSError as e:
                raise self._gone(worker, step) from e
        return [self._receive(worker, step) for worker in range(len(self._workers))]

    def _receive(self, worker: int, step: int) -> ModelRunnerOutput:
        pipe = self._workers[worker][1]
        try:
            if not pipe.poll(self._silence_s):
                raise WorkerError(f"worker {worker} said nothing for {self._silence_s:g} s in step {step}")
            data = pipe.recv_bytes()
        except (EOFError, OSError) as e:
            raise self._gone(worker, step) from e
        if data.startswith(_FAILED):
            raise WorkerError(f"worker {worker} failed in step {step}: {data[1:].decode()}")
        self.pickled_bytes += len(data)
        return cast("ModelRunnerOutput", pickle.loads(data))  # noqa: S301 - from our own child

    def _gone(self, worker: int, step: int) -> WorkerError:
        process = self._workers[worker][0]
        process.join(2.0)
        return WorkerError(f"worker {worker} ended in step {step} (exit code {process.exitcode})")

    def restart(self, worker: int, next_step: int) -> None:
        """Kill a worker between two steps and start it anew: what it held is gone."""
        process, pipe = self._workers[worker]
        process.kill()
        process.join()
        pipe.close()
        with LedgerWriter(ledger_path(self._dir, worker)) as book:
            book.restarted(next_step)
        self._workers[worker] = self._start(worker)

    def close(self) -> None:
        """End all workers. Idempotent."""
        workers, self._workers = self._workers, []
        for _, pipe in workers:
            pipe.close()
        for process, _ in workers:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
