"""The example connector: the bytes that come back are those that went, and readers know where they are."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path

import pytest

from kvevents import BlockStored, ResidentSet

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def two_workers(monkeypatch):
    """The example's engine, imported afresh."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("memory_connector", "two_workers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("two_workers")


def test_the_example_is_short_enough_to_read():
    assert len((EXAMPLES / "memory_connector.py").read_text().splitlines()) < 80


def contents(engine, blocks):
    return [[[bytes(layer[b]) for b in blocks] for layer in memory.values()] for memory in engine.memory]


def expected(module, tokens, rank, layer):
    """What the model of the example writes into a block: a function of tokens, worker and layer."""
    return (bytes(tokens) + bytes([rank, layer])).ljust(64, b"\0")


def test_loaded_blocks_have_the_bytes_that_were_stored_in_every_worker_and_layer(two_workers):
    engine = two_workers.Engine()
    seen = []
    take = engine.pool.get_new_blocks
    engine.pool = Spy(engine.pool, get_new_blocks=lambda n: seen.append(list(take(n))) or seen[-1])
    prompt = list(range(1, 14))
    assert engine.serve("first", prompt) == (0, set())
    for n in range(4):
        engine.serve(f"other {n}", list(range(50 * n + 50, 50 * n + 63)))
    for memory in engine.memory:  # whatever is right from here on was loaded
        for layer in memory.values():
            for block in layer:
                block[:] = b"\xee" * 64
    assert engine.serve("again", prompt) == (12, set())
    size = two_workers.BLOCK_SIZE
    for rank, memory in enumerate(engine.memory):
        for n, layer in enumerate(memory.values()):
            for i, block in enumerate(seen[-1][:3]):
                assert layer[block] == expected(two_workers, prompt[i * size : (i + 1) * size], rank, n)


class Spy:
    """A pool with one method replaced."""

    def __init__(self, pool, **methods):
        self._pool = pool
        self.__dict__.update(methods)

    def __getattr__(self, name):
        return getattr(self._pool, name)


def test_what_readers_see_is_what_both_workers_hold_at_every_step(two_workers):
    engine = two_workers.Engine()
    rng = random.Random(3)
    for n in range(120):
        prompt = [rng.randrange(6)] * 5 + [rng.randrange(3) for _ in range(rng.randrange(1, 20))]
        engine.serve(str(n), prompt)
        cpu = {k.hash for k in engine.resident.keys() if k.medium == "CPU"}  # noqa: SIM118 - not a dict
        assert cpu == set(engine.workers[0]._tier) & set(engine.workers[1]._tier)
        gpu = ResidentSet(engine.pool.snapshot())
        assert {k for k in engine.resident.keys() if k.medium == "GPU"} == gpu.keys()  # noqa: SIM118
    assert len(engine.workers[0]._tier) == 16
    assert engine.collector.stats()["connector_failures"] == 0


def test_a_block_that_one_worker_lost_is_reported_and_is_no_longer_announced(two_workers):
    engine = two_workers.Engine()
    prompt = list(range(1, 14))
    engine.serve("first", prompt)
    for n in range(2):
        engine.serve(f"other {n}", list(range(50 * n + 50, 50 * n + 63)))
    lost = next(iter(engine.workers[1]._tier))
    del engine.workers[1]._tier[lost]
    loaded, failed = engine.serve("again", prompt)
    assert (loaded, len(failed)) == (12, 1)
    # Deleted behind the connector's back: it has to say so, and then everybody knows.
    engine.workers[1].kv_events.removed([lost])
    engine.step([], [])
    assert lost not in {k.hash for k in engine.resident.keys() if k.medium == "CPU"}  # noqa: SIM118


def test_blocks_that_came_from_the_connector_are_announced_before_what_follows_them(two_workers):
    """An engine that received a prefix and computed the rest names no parent that nobody heard of."""
    engine = two_workers.Engine()
    batches = []
    engine.collector._publisher = Recorder(batches)
    prompt = list(range(1, 14))
    engine.serve("first", prompt)
    for n in range(4):
        engine.serve(f"other {n}", list(range(50 * n + 50, 50 * n + 63)))
    batches.clear()
    assert engine.serve("longer", prompt + list(range(20, 30))) == (12, set())
    known = set()
    for event in (e for batch in batches for e in batch.events if isinstance(e, BlockStored)):
        if event.medium == "GPU":
            assert event.parent_block_hash is None or event.parent_block_hash in known
            known.update(event.block_hashes)
    assert len(known) == 23 // two_workers.BLOCK_SIZE


class Recorder:
    def __init__(self, batches):
        self._batches = batches

    def publish(self, batch):
        self._batches.append(batch)
