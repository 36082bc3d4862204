"""Our subscriber reads vLLM's own publisher class, in a process of the environment in `KVEVENTS_ENGINE`."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import pytest

from kvevents import EventList, PrefixIndex, ResidentSet, Source, Subscriber
from kvevents.simulate import WORKLOADS, EngineConfig, MockEngine
from kvevents.subscribe import Reset, Timing
from kvevents.testing.link import FaultyLink, LinkConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from kvevents import KVEventBatch
    from kvevents.subscribe import Item

HERE = Path(__file__).resolve().parent
PYTHON = Path(os.environ.get("KVEVENTS_ENGINE", "/nowhere")).expanduser() / "bin" / "python"
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="not run: KVEVENTS_ENGINE names no environment with vLLM"),
]


class VllmPublisher:
    """The process, and what was published in its present life."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [PYTHON, HERE / "vllm_publisher.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
            | {"CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"},
        )
        try:
            assert self._answer() == 0
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        while line and not line.strip().isdigit():
            line = self._process.stdout.readline()
        assert line, f"vLLM's process ended: {self._process.poll()}"
        return int(line)

    def _tell(self, what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        self.published = self._answer()

    def publish(self, batch: KVEventBatch) -> None:
        """What an engine's scheduler hands over."""
        events = EventList(batch.events)
        self._tell({"events": [_as_json(e) for e in events]})
        self.truth.apply(events)

    def begin(self, name: str) -> None:
        """A new publisher at its own addresses."""
        # vLLM listens only at wildcards and files; a wildcard would be open to everybody.
        self.live, self.replay = (f"ipc://{self._folder}/{name}{end}" for end in ("l", "r"))
        self.restart()

    def restart(self) -> None:
        """End the publisher that there is, and begin anew at the same addresses."""
        self._tell([self.live, self.replay])
        self.truth = ResidentSet()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=30)


def _as_json(event: Any) -> list[Any]:
    fields = msgspec.structs.asdict(event)
    return [type(event).__name__, json.loads(json.dumps(fields, default=lambda b: {"hex": b.hex()}))]


@pytest.fixture(scope="module")
def process() -> Iterator[VllmPublisher]:
    """One for all tests: importing vLLM takes long."""
    # A short path: those of sockets have a limit.
    with tempfile.TemporaryDirectory(prefix="kv") as folder, VllmPublisher(folder) as publisher:
        yield publisher


@pytest.fixture
def vllm(process: VllmPublisher, request: pytest.FixtureRequest) -> VllmPublisher:
    process.begin(str(abs(hash(request.node.name)) % 10_000))
    return process


def drive(publisher: VllmPublisher, seed: int, requests: int, hash_form: str = "bytes") -> None:
    """An engine with too little memory: blocks come and go."""
    engine = MockEngine(EngineConfig(num_blocks=120, hash_form=hash_form), publisher=publisher)
    for request in islice(WORKLOADS["chat"](seed=seed), requests):
        engine.serve(request)
    assert engine.stats.blocks_removed > 20


def read_until_equal(
    subscriber: Subscriber, publisher: VllmPublisher, *readers: ResidentSet | PrefixIndex
) -> list[Item]:
    """Until everything was read; then every reader must hold what was published."""
    items = []
    end = time.monotonic() + 40
    while subscriber.stats()[0].last_seq != publisher.published - 1 or not subscriber.stats()[0].complete:
        assert time.monotonic() < end, subscriber.stats()
        if (item := subscriber.poll(0.1)) is not None:
            items.append(item)
            for reader in readers:
                reader.apply_item(item) if isinstance(reader, PrefixIndex) else reader.apply(item)
    while (item := subscriber.poll(0.05)) is not None:
        items.append(item)
        for reader in readers:
            reader.apply_item(item) if isinstance(reader, PrefixIndex) else reader.apply(item)
    for reader in readers:
        assert reader.digest("vllm") == publisher.truth.digest()
    return items


@pytest.mark.parametrize("hash_form", ["bytes", "int"])
def test_holes_in_vllms_stream_are_repaired_by_its_plain_replay(vllm: VllmPublisher, hash_form: str) -> None:
    """Behind a link that loses, repeats and reorders."""
    resident, index = ResidentSet(), PrefixIndex()
    config = LinkConfig(
        upstream=vllm.live, upstream_replay=vllm.replay, drop=0.1, duplicate=0.1, reorder=0.1, seed=3
    )
    with FaultyLink(config) as link:
        source = Source(link.live_endpoint, link.replay_endpoint, name="vllm")
        with Subscriber(source, timing=Timing(silence_s=0.3)) as subscriber:
            subscriber.poll(0.5)
            drive(vllm, 4, 15, hash_form)
            items = read_until_equal(subscriber, vllm, resident, index)
            stats = subscriber.stats()[0]
        assert link.counters.dropped > 3
    assert stats.replayed > 3
    assert stats.gaps == 0
    assert len(items) == vllm.published > 50


def test_a_late_reader_and_a_restart_of_vllms_publisher_end_with_the_same_set(vllm: VllmPublisher) -> None:
    resident, index = ResidentSet(), PrefixIndex()
    drive(vllm, 5, 15)
    source = Source(vllm.live, vllm.replay, name="vllm")
    with Subscriber(source, timing=Timing(silence_s=0.3)) as subscriber:
        read_until_equal(subscriber, vllm, resident, index)
        assert subscriber.stats()[0].replayed > 0
        old = resident.digest("vllm")
        vllm.restart()
        drive(vllm, 6, 15)
        items = read_until_equal(subscriber, vllm, resident, index)
    assert sum(isinstance(i, Reset) for i in items) == 1
    assert old != resident.digest("vllm")
