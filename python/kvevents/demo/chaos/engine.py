"""An engine process: one or more data-parallel ranks, each with its pool, publisher and side file."""

from __future__ import annotations

import random
import sys
import time
from array import array
from collections import deque
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kvevents.demo.chaos.ledger import LedgerWriter, ledger_path
from kvevents.demo.chaos.prompts import Prompt
from kvevents.demo.chaos.verdict import SourceReport
from kvevents.publish import ZmqEventPublisher
from kvevents.simulate.engine import EngineConfig, MockEngine
from kvevents.simulate.workloads import mixed
from kvevents.tokens import TokenBlocks

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvevents.demo.chaos.options import ChaosOptions, EngineSpec
    from kvevents.events import KVEventBatch

__all__ = ["engine_main"]

_RECENT = 300
"""Prompts of a rank that are offered for quiet points."""
_BURSTS = 20
"""So often an overflow is tried: only a sender that is faster than a bare loop can prevent one."""


class _Rank:
    """One data-parallel rank: pool, publisher, side file."""

    def __init__(self, options: ChaosOptions, spec: EngineSpec, rank: int, life: int, folder: str) -> None:
        base = Path(folder) / spec.name
        self.source = spec.sources()[rank]
        self._spec = spec
        self._queue = options.queue
        self._held: list[KVEventBatch] | None = None
        self._recent: deque[Prompt] = deque(maxlen=_RECENT)
        self.publisher = ZmqEventPublisher(
            rank,
            endpoint=f"ipc://{base}.live",
            replay_endpoint=f"ipc://{base}.replay",
            data_parallel_size=spec.ranks,
            buffer_steps=options.log_batches,
            max_queue_size=options.queue,
            exact_for="engine",
        )
        self.epoch = self.publisher.stats().epoch
        self._ledger = LedgerWriter(ledger_path(folder, self.source), self.epoch)
        self.engine = MockEngine(
            EngineConfig(
                num_blocks=spec.pool_blocks,
                block_size=spec.block_size,
                hash_algorithm=spec.hash_algorithm,
                hash_form=spec.hash_form,
                data_parallel_rank=rank if spec.ranks > 1 else None,
                tokens_per_step=spec.block_size // 2,
            ),
            publisher=self,
            before_publish=self._write_truth,
        )
        # All engines serve the same users, each a part of them, so that they have prefixes in common.
        traffic = mixed(seed=options.seed, block_size=spec.block_size)
        dice = random.Random(f"{options.seed} {self.source} {life}")  # noqa: S311 - repeatable
        self._traffic = (r for r in islice(traffic, 40 * life, None) if dice.random() < 0.5)

    def publish(self, events: KVEventBatch) -> None:
        """Hand a batch on, or keep it for the next burst."""
        if self._held is None:
            self.publisher.publish(events)
        else:
            self._held.append(events)

    def step(self) -> None:
        """One step of the scheduler."""
        engine = self.engine
        while engine.num_waiting < engine.config.max_running:
            request = next(self._traffic)
            self._recent.append(Prompt(request.prompt, request.cache_salt))
            engine.submit(request)
        engine.step()

    def overflow(self) -> int:
        """Publish faster than the sender can follow, until batches were dropped; how many."""
        switch = sys.getswitchinterval()
        for _ in range(_BURSTS):
            held = self._held = []
            while len(held) < 2 * self._queue:
                self.step()
            self._held = None
            # The sender needs the interpreter for each batch; it does not get it during the burst.
            sys.setswitchinterval(10.0)
            try:
                for batch in held:
                    self.publisher.publish(batch)
            finally:
                sys.setswitchinterval(switch)
            if dropped := self.publisher.stats().dropped:
                return dropped
        return 0

    def recent(self) -> list[Prompt]:
        """What was asked lately."""
        return list(self._recent)

    def answers(self, prompts: list[Prompt]) -> array[int]:
        """How many tokens of each prompt the pool holds."""
        spec, held = self._spec, array("I")
        for prompt in prompts:
            tokens = TokenBlocks(spec.block_size, algorithm=spec.hash_algorithm, cache_salt=prompt.salt)
            tokens.extend(prompt.tokens)
            hit = self.engine.pool.find_longest_cache_hit(tokens, tokens.num_blocks)
            held.append(len(hit) * spec.block_size)
        return held

    def report(self) -> SourceReport:
        """What this life did so far."""
        stats, published = self.engine.stats, self.publisher.stats()
        return SourceReport(
            epoch=self.epoch,
            batches=stats.batches,
            dropped=published.dropped,
            blocks_stored=stats.blocks_stored,
            blocks_removed=stats.blocks_removed,
            digest=self.engine.pool.digest(),
        )

    def close(self) -> None:
        """End the publisher."""
        self.publisher.shutdown()
        self._ledger.close()

    def _write_truth(self, seq: int, batch: KVEventBatch) -> None:
        self._ledger.write(seq, self.engine.pool.digest(), float(batch.ts))


def engine_main(pipe: Connection, options: ChaosOptions, spec: EngineSpec, life: int, folder: str) -> None:
    """Says ``ready`` with its addresses, serves from ``go`` on, ends with ``stop``.

    Between, it is told ``overflow``, ``pause`` (answers ``paused``: what each rank did), ``recent`` (its
    latest prompts), ``ask`` (answers: what its pools hold of these prompts) and ``go`` again.
    """
    ranks = [_Rank(options, spec, rank, life, folder) for rank in range(spec.ranks)]
    addresses = [rank.publisher.get_publisher_config() for rank in ranks]
    pipe.send(("ready", [(a.endpoint, a.replay_endpoint) for a in addresses]))
    running, due = False, 0.0
    while True:
        wait = due - time.monotonic() if running else None
        if pipe.poll(max(0.0, wait) if wait is not None else None):
            word, value = pipe.recv()
            if word == "go":
                running, due = True, time.monotonic()
            elif word == "overflow":
                pipe.send(("overflowed", ranks[0].overflow()))
            elif word == "pause":
                running = False
                pipe.send(("paused", {rank.source: rank.report() for rank in ranks}))
            elif word == "recent":
                pipe.send(("recent", [prompt for rank in ranks for prompt in rank.recent()]))
            elif word == "ask":
                pipe.send(("answers", {rank.source: rank.answers(value) for rank in ranks}))
            elif word == "stop":
                for rank in ranks:
                    rank.close()
                pipe.send(("stopped", {rank.source: rank.report() for rank in ranks}))
                return
            continue
        for rank in ranks:
            rank.step()
        # Who is late is not hurried: the machine is busy.
        due = max(due + 1 / options.rate, time.monotonic() - 0.1)
