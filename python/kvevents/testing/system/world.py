"""Everything together, one step after the other, and what must hold whenever it is quiet."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from typing import TYPE_CHECKING

from kvevents.subscribe.session import Session
from kvevents.testing.system.engine import STEP_S, Engine
from kvevents.testing.system.failure import check
from kvevents.testing.system.reader import LIMITS, Reader
from kvevents.testing.system.schedule import Schedule
from kvevents.testing.system.serving import prompts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvevents.index import Match
    from kvevents.testing.system.config import SystemConfig
    from kvevents.testing.system.plan import Step
    from kvevents.testing.system.port import Port
    from kvevents.testing.system.serving import Prompt

__all__ = ["World"]

HEAL_S = 600.0
"""Virtual seconds within which everything has to be repaired."""
LOOK_S = 0.37
WAITING = 4_000
"""Calls that may wait for their time at a quiet point."""


class World:
    """A simulated system. What it does depends on its configuration and its steps alone."""

    def __init__(self, config: SystemConfig, session: Callable[..., Session] = Session) -> None:
        self.config = config
        self.schedule = Schedule()
        self.prompts = prompts_of(config.seed)
        self.counts: Counter[str] = Counter()
        self._session = session
        self._trace = hashlib.blake2b(digest_size=16)
        self._joined = 0
        self.engines = {
            spec.name: Engine(spec, self.schedule, self.prompts, config.seed) for spec in config.engines
        }
        self.readers: dict[str, Reader] = {}
        for spec in config.readers:
            self._admit(spec.name)

    @property
    def trace(self) -> str:
        """A digest of all that any reader was told, and when."""
        return self._trace.hexdigest()

    def totals(self) -> Counter[str]:
        """Counts of all that happened so far."""
        total = Counter(self.counts)
        for reader in self.readers.values():
            total.update(reader.counts)
        return total

    # ------------------------------------------------------------ steps

    def perform(self, step: Step) -> None:
        """Do one step."""
        rng = random.Random(step.seed)
        self.counts[step.kind] += 1
        getattr(self, f"_{step.kind}")(step, rng)

    def _engine(self, step: Step) -> Engine:
        engines = list(self.engines.values())
        return engines[step.who % len(engines)]

    def _reader(self, step: Step) -> Reader | None:
        readers = list(self.readers.values())
        return readers[step.who % len(readers)] if readers else None

    def _port(self, step: Step) -> Port | None:
        ports = [port for reader in self.readers.values() for port in reader.ports.values()]
        return ports[step.who % len(ports)] if ports else None

    def _work(self, step: Step, rng: random.Random) -> None:
        engine = self._engine(step)
        for _ in range(step.amount):
            engine.work(rng, rng.randrange(1, 4))

    def _hoard(self, step: Step, rng: random.Random) -> None:
        self._engine(step).work(rng, step.amount)

    def _wait(self, step: Step, rng: random.Random) -> None:  # noqa: ARG002 - all steps have it
        self.schedule.run(0.001 * 2**step.amount)

    def _reset(self, step: Step, rng: random.Random) -> None:  # noqa: ARG002
        self._engine(step).reset()

    def _arm(self, step: Step, rng: random.Random) -> None:  # noqa: ARG002
        if port := self._port(step):
            count = step.amount if step.kind in {"drop", "garble"} else 1
            port.link.faults.extend([step] * count)

    _drop = _duplicate = _reorder = _delay = _garble = _arm

    def _cut(self, step: Step, rng: random.Random) -> None:  # noqa: ARG002
        if port := self._port(step):
            port.link.cut(0.001 * 2**step.amount)

    def _partition(self, step: Step, rng: random.Random) -> None:  # noqa: ARG002
        if port := self._port(step):
            port.link.partition(0.001 * 2**step.amount)

    def _mute(self, step: Step, rng: random.Random) -> None:  # noqa: ARG002
        if port := self._port(step):
            port.link.mute += step.amount

    def _deafen(self, step: Step, rng: random.Random) -> None:  # noqa: ARG002
        if port := self._port(step):
            port.link.deaf += step.amount

    def _slow(self, step: Step, rng: random.Random) -> None:  # noqa: ARG002
        if reader := self._reader(step):
            reader.slow_down(0.001 * 2**step.amount)

    def _overflow(self, step: Step, rng: random.Random) -> None:
        engine = self._engine(step)
        engine.stand(self.schedule.now + step.amount * STEP_S)
        for _ in range(step.amount):
            engine.work(rng, 2)

    def _poison(self, step: Step, rng: random.Random) -> None:  # noqa: ARG002
        self._engine(step).poison()

    def _restart(self, step: Step, rng: random.Random) -> None:  # noqa: ARG002
        engine = self._engine(step)
        if engine.spec.can_restart:
            engine.die(0.001 * 2**step.amount)

    def _worker(self, step: Step, rng: random.Random) -> None:
        engines = [e for e in self.engines.values() if e.spec.kind == "tiers"]
        if engines:
            engines[step.who % len(engines)].restart_worker(rng.randrange(8))

    def _leave(self, step: Step, rng: random.Random) -> None:  # noqa: ARG002
        reader = self._reader(step)
        if reader is not None and len(self.readers) > 1:
            reader.leave()
            self.counts.update(reader.counts)
            del self.readers[reader.spec.name]

    def _join(self, step: Step, rng: random.Random) -> None:  # noqa: ARG002
        absent = [spec.name for spec in self.config.readers if spec.name not in self.readers]
        if absent:
            self._admit(absent[step.who % len(absent)])

    def _admit(self, name: str) -> None:
        self._joined += 1
        spec = next(spec for spec in self.config.readers if spec.name == name)
        self.readers[name] = Reader(
            spec, self.engines, self.schedule, seed=self._joined, session=self._session, note=self._note
        )

    def _note(self, *what: object) -> None:
        self._trace.update(repr(what).encode())

    # ------------------------------------------------------------ quiet

    def _quiet(self, step: Step, rng: random.Random) -> None:
        """Heal everything, wait for the repairs, and compare."""
        for reader in self.readers.values():
            for port in reader.ports.values():
                port.link.heal()
            reader.hurry()
        for engine in self.engines.values():
            engine.begin()
            engine.stand(0.0)
            for _ in range(4):
                engine.step()  # what tiers were still storing
        self.schedule.run(1.0)
        for engine in self.engines.values():
            if engine.spec.server != "extended":
                engine.speak(rng)
        end = self.schedule.now + HEAL_S
        while (behind := self._behind()) and self.schedule.now < end:
            self.schedule.run(LOOK_S)
        check("healed", not behind, "after {} s without a fault: {}", HEAL_S, "; ".join(behind))
        self._check_bounds()
        self._check_answers(rng)
        self._note("quiet", step.number, self.schedule.now)

    def _behind(self) -> list[str]:
        """Who does not hold what its engine holds, and has not said that it cannot."""
        return [
            f"{reader.spec.name} of {name}: {why}"
            for reader in self.readers.values()
            for name, port in reader.ports.items()
            if (why := self._why_behind(reader, name, port))
        ]

    def _why_behind(self, reader: Reader, name: str, port: Port) -> str | None:
        engine = self.engines[name]
        if engine.truth.waiting:
            return f"{engine.truth.waiting} batches are not sent"
        following, true = engine.truth.newest
        session = port.session
        if session.request is not None or session.sequence.held:
            return "a repair is not finished"
        if name not in reader.resident.sources:
            return None if following == 0 else "nothing was heard"
        flaw = reader.resident.why_invalid(name)
        if flaw is not None and engine.spec.server == "extended" and reader.spec.policy == "snapshot":
            return f"flagged: {flaw}"
        if flaw is not None:
            at = session.sequence.next
            return None if at >= following else f"flagged, at {at} of {following}: {flaw}"
        if reader.resident.digest(name) != true:
            return f"differs, at {session.sequence.next} of {following}"
        return None

    def _check_bounds(self) -> None:
        """Nothing grows without bound."""
        waiting = len(self.schedule)
        check("bounded", waiting < WAITING, "{} calls wait", waiting)
        for name, engine in self.engines.items():
            publisher = engine.publisher
            assert publisher is not None  # noqa: S101 - it was begun
            spec = engine.spec
            for what, count, bound in (
                ("batches in the log", len(publisher.log), spec.log_batches),
                ("bytes in the log", publisher.log.payload_bytes, spec.log_bytes),
                ("blocks in the mirror", len(publisher.mirror), 5 * spec.num_blocks),
                ("ranges of holes", len(publisher.outbox.holes.ranges()), 256),
                ("dealers", len(engine.dealers), 8 * len(self.readers)),
                ("snapshots", len(publisher.snapshots._kept), 2),
            ):
                check("bounded", count <= bound, "{}: {} {}, at most {}", name, count, what, bound)
        for reader in self.readers.values():
            for name, port in reader.ports.items():
                sequence = port.session.sequence
                held = len(sequence.held)
                check("bounded", held <= LIMITS.hold_batches, "{} holds {}", name, held)
                check("bounded", len(sequence._seen) <= LIMITS.remember, "{}: remembers", name)

    # ------------------------------------------------------------ answers

    def _check_answers(self, rng: random.Random) -> None:
        """Indexes answer as the naive one does, and as the pools themselves."""
        for reader in self.readers.values():
            for prompt in rng.sample(self.prompts, 6):
                found = {
                    match.source: match for match in reader.index.find(prompt.tokens, cache_salt=prompt.salt)
                }
                if reader.naive is not None:
                    naive = {
                        match.source: match
                        for match in reader.naive.find(prompt.tokens, cache_salt=prompt.salt)
                    }
                    check("naive", found == naive, "{}: {} against {}", reader.spec.name, found, naive)
                for name, engine in self.engines.items():
                    if reader.resident.sources.count(name) and reader.resident.why_invalid(name) is None:
                        self._check_answer(reader, name, engine, found, prompt)

    def _check_answer(
        self, reader: Reader, name: str, engine: Engine, found: dict[str, Match], prompt: Prompt
    ) -> None:
        if engine.spec.kind == "every_copy" or not engine.spec.mirror_tokens:
            # The literal stream loses a block with its first copy; a snapshot without tokens has hashes only.
            return
        held = engine.serving.held(prompt)
        match = found.get(name)
        said = 0 if match is None else match.alone.get("GPU", 0)
        self.counts["answers"] += 1
        check(
            "answer", said == held,
            "{}: the index says {} tokens of a prompt on {}, its pool has {}",
            reader.spec.name, said, name, held,
        )  # fmt: skip
