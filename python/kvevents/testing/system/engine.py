"""A simulated engine: pool, workers, collector and publisher of its present life, and the truth of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvevents._core import EventList
from kvevents.collector import KVEventCollector
from kvevents.events import BlockStored, KVEventBatch
from kvevents.resident import ResidentSet
from kvevents.simulate.connectors import EngineConnectors
from kvevents.simulate.tier import TierConfig
from kvevents.testing.system.publisher import Publisher
from kvevents.testing.system.serving import Serving
from kvevents.testing.system.truth import Truth
from kvevents.testing.system.workers import InlineWorkers

if TYPE_CHECKING:
    import random

    from kvevents.testing.system.config import EngineSpec
    from kvevents.testing.system.link import Dealer, Link
    from kvevents.testing.system.schedule import Schedule
    from kvevents.testing.system.serving import Prompt

__all__ = ["Engine"]

STEP_S = 0.0005
"""What an engine needs for a step; no two batches have the same stamp."""
WORKERS = 2


def _poison() -> BlockStored:
    """An event with a hash that no wire can carry."""
    return BlockStored([object()], None, [1], 1, None, "GPU", None)  # type: ignore[list-item]


class Engine:
    """One source. Its links stay while it dies and comes back."""

    def __init__(self, spec: EngineSpec, schedule: Schedule, prompts: list[Prompt], seed: int) -> None:
        self.spec = spec
        self.truth = Truth()
        self.links: list[Link] = []
        self.dealers: dict[bytes, Dealer] = {}
        self.publisher: Publisher | None = None
        self.lives = 0
        self.dropped = 0
        """Batches that full queues dropped, in earlier lives."""
        self._schedule = schedule
        self._prompts = prompts
        self._seed = seed
        self._poisoned = False
        self.begin()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.publisher is not None

    # ------------------------------------------------------------ lives

    def begin(self) -> None:
        """Start with nothing, under a new epoch."""
        if self.publisher is not None:
            return
        spec, clock = self.spec, self._schedule.clock
        self.lives += 1
        self.serving = Serving(spec, self._prompts)
        self._stream = ResidentSet()
        epoch = f"{self._seed % 10**6:06}{spec.name[:4]:4}{self.lives:06}".encode()
        self.publisher = Publisher(spec, self._schedule, self.truth, epoch, self.dealers)
        self.publisher.writer.send = self._send
        self._steps = 0
        self._workers: InlineWorkers | None = None
        if spec.kind == "tiers":
            tiers = [
                [
                    TierConfig(capacity=24, num_workers=WORKERS, worker=worker, seed=self._seed + self.lives),
                    TierConfig(
                        medium="STORAGE", capacity=40, rule="any", num_workers=WORKERS, worker=worker,
                        seed=self._seed + self.lives, fail_rate=0.05,
                    ),
                ]
                for worker in range(WORKERS)
            ]  # fmt: skip
            self._workers = InlineWorkers(tiers)
            self._connectors = EngineConnectors(tiers, self._workers)
            self._connectors.connect(self, data_parallel_rank=spec.rank, clock=clock)
        else:
            self._collector = KVEventCollector(
                self.serving.pool,
                publisher=self,
                data_parallel_rank=spec.rank,
                clock=clock,
                flush_interval_s=0,
            )
        for link in self.links:
            link.connect()

    def die(self, seconds: float) -> None:
        """End, with everything; come back after some time."""
        if self.publisher is not None:
            self.dropped += self.publisher.outbox.dropped
            self.publisher.alive = False
            self.publisher = None
            for link in self.links:
                link.broken()
            self.dealers.clear()
        self._schedule.after(seconds, self.begin)

    # ------------------------------------------------------------ steps

    def work(self, rng: random.Random, operations: int) -> None:
        """Change the pool, then do what an engine does at the end of a step."""
        if self.publisher is None:
            return
        for _ in range(operations):
            self.serving.act(rng)
        self.step()

    def step(self) -> None:
        """Collect what happened, and publish it."""
        self._schedule.run(STEP_S)
        if self.publisher is None:
            return
        self._steps += 1
        if self._workers is None:
            self._collector.step()
        else:
            self._connectors.step(self._steps, EventList(self.serving.pool.take_events()))

    def speak(self, rng: random.Random) -> None:
        """Work until a batch is published: a plain replay cannot tell of holes behind the last one."""
        if self.publisher is not None:
            self._poisoned = False
            before = self.publisher.outbox.next_sequence
            while self.publisher.outbox.next_sequence + self.truth.waiting == before:
                self.work(rng, 1)

    def reset(self) -> None:
        """Reset the prefix cache; the next step says so."""
        if self.publisher is not None:
            self.serving.reset()
            self.step()

    def restart_worker(self, worker: int) -> None:
        """Start one worker anew."""
        if self._workers is not None and self.publisher is not None:
            self._connectors.restart_worker(worker % WORKERS, self._steps + 1)
            self.step()

    def poison(self) -> None:
        """The next batch holds an event that cannot be encoded."""
        self._poisoned = True

    def stand(self, until: float) -> None:
        """The sender does nothing before ``until``."""
        if self.publisher is not None:
            self.publisher.stands_until = until

    def publish(self, events: KVEventBatch) -> None:
        """What the collector calls."""
        if self.publisher is None:
            return
        digest = self._digest(events.events)
        if self._poisoned:
            self._poisoned = False
            listed: list[Any] = [*events.events, _poison()]
            events = KVEventBatch(events.ts, listed, events.data_parallel_rank)
        self.publisher.publish(events, digest)

    def _digest(self, events: Any) -> bytes:
        """What is true now, by the books of pool and workers; for the literal stream, by the stream."""
        if self.spec.kind == "every_copy":
            self._stream.apply(events)
            return self._stream.digest()
        digest = self.serving.pool.digest()
        if self._workers is None:
            return digest
        total = int.from_bytes(digest, "big") + int.from_bytes(self._workers.truth.digest(), "big")
        return (total % 2**128).to_bytes(16, "big")

    def _send(self, number: bytes, payload: bytes) -> None:
        if self.publisher is not None:
            for link in self.links:
                link.send([self.publisher.topic, number, payload])
