"""The whole system, simulated from a seed: what holds, what a failure prints, and that faults are seen."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import msgspec
import pytest

from kvevents import AllBlocksCleared, EventList, ResidentSet
from kvevents.codec import decode
from kvevents.connectors import KVEventsMixin
from kvevents.errors import DecodeError
from kvevents.subscribe.items import Batch
from kvevents.subscribe.sequence import Sequence
from kvevents.subscribe.session import Session
from kvevents.testing import system
from kvevents.testing.system import FAULTS, Options, Step, explain, simulate
from kvevents.testing.system.__main__ import main
from kvevents.testing.system.plan import draw_plan, parse_numbers, say_numbers


class TrustingSession(Session):
    """A reader without repairs: whatever comes is applied as it comes, and nothing is asked or doubted."""

    def connected(self, now):
        return []

    def live(self, frames, now):
        try:
            batch = decode(frames[2])
        except DecodeError:
            return []
        return [Batch(self.name, int.from_bytes(frames[1], "big"), batch, False, None)]

    def deadline(self, now):
        return float("inf")

    def wants(self, now):
        return False


class GullibleSession(Session):
    """A reader that takes a conversation that broke off for one that has said all."""

    def _failed(self, reason, now, *, retry=True):
        q = self.sequence
        if reason != "unreachable" or not isinstance(q, Sequence) or not q.held:
            return super()._failed(reason, now, retry=retry)
        self._asking.request = q.job = None
        q._verified = q._anchored = True
        q.next = q.held.lowest
        actions = []
        q._drain(actions)
        return self._do(actions, now)


# ---------------------------------------------------------------- everything holds


@pytest.mark.parametrize(("seed", "steps"), [(1, 5_000), (2, 3_000), (3, 2_000)])
def test_after_every_fault_readers_hold_what_engines_hold(seed, steps):
    options = Options(seed=seed, steps=steps)
    report = simulate(options)
    assert report.failure is None, explain(options, report)
    assert set(FAULTS) <= set(report.counts), "a kind of fault never happened"
    assert report.counts["compared"] > steps / 2
    assert report.counts["answers"] > 0


# ---------------------------------------------------------------- determinism


def run_module(*args, hash_seed="0"):
    return subprocess.run(
        [sys.executable, "-m", "kvevents.testing.system", *args],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_seed_is_a_run_in_every_process():
    first, second = (run_module("--seed", "4", "--steps", "600", hash_seed=seed) for seed in ("1", "2"))
    assert first.returncode == second.returncode == 0, first.stdout + first.stderr
    assert first.stdout == second.stdout
    assert simulate(Options(seed=4, steps=600)).trace in first.stdout


def test_other_seeds_are_other_runs():
    traces = {simulate(Options(seed=seed, steps=100)).trace for seed in range(4)}
    assert len(traces) == 4


def test_a_plan_depends_on_its_seed_alone_and_leaving_steps_out_changes_no_other():
    assert draw_plan(1, 300) == draw_plan(1, 300)
    assert draw_plan(1, 300)[:200] == draw_plan(1, 900)[:200]
    some = Options(seed=1, steps=300, only=(3, 7, 8))
    assert [step.number for step in some.plan()] == [3, 7, 8]
    assert some.plan()[1] == draw_plan(1, 300)[7]


def test_numbers_of_steps_can_be_said_and_read():
    assert say_numbers([1, 2, 3, 9, 12, 13]) == "1-3,9,12-13"
    assert parse_numbers("1-3,9,12-13") == [1, 2, 3, 9, 12, 13]


# ---------------------------------------------------------------- a failure


@pytest.fixture
def _deaf_to_clears(monkeypatch):
    """Resident sets that do not take batches with a clear in them."""
    real = ResidentSet.apply

    def apply(self, item):
        if not (isinstance(item, Batch) and any(isinstance(e, AllBlocksCleared) for e in item.batch.events)):
            real(self, item)

    monkeypatch.setattr(ResidentSet, "apply", apply)


@pytest.mark.usefixtures("_deaf_to_clears")
def test_a_failure_prints_itself_the_command_and_the_few_steps_that_suffice(capsys):
    assert main(["--seed", "2", "--steps", "2000"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("seed 2, step ")
    assert "the set of" in printed[0]
    assert printed[1].strip().startswith("again:  python -m kvevents.testing.system --seed 2 --steps 2000")
    shrunk = next(line for line in printed if line.strip().startswith("shrunk:"))
    steps = printed[printed.index(shrunk) + 2 :]
    assert 1 <= len(steps) <= 6, printed
    assert all(step.split()[1] in system.KINDS for step in steps)

    words = shrunk.split("kvevents.testing.system ")[1].split()
    assert main([*words, "--no-shrink"]) == 1
    again = capsys.readouterr().out.splitlines()
    main([*words, "--no-shrink"])
    assert capsys.readouterr().out.splitlines() == again, "it replays identically"
    assert "the set of" in again[0]


def test_shrinking_leaves_out_nothing_that_matters():
    plan = [Step(n, "work", 0, 1, 0) for n in range(500)]
    needed = {17, 333, 334, 490}
    left = system.shrink(plan, lambda steps: needed <= {step.number for step in steps})
    assert {step.number for step in left} == needed


def test_what_raises_is_a_failure_too(monkeypatch):
    monkeypatch.setattr(ResidentSet, "apply", lambda self, item: 1 / 0)
    report = simulate(Options(seed=1, steps=50))
    assert report.failure is not None
    assert report.failure.invariant == "raised ZeroDivisionError"


def test_wrong_faults_are_usage(capsys):
    assert main(["--faults", "fire"]) == 2
    assert "there are drop" in capsys.readouterr().err


# ---------------------------------------------------------------- every fault is seen


def test_without_faults_even_a_trusting_reader_holds_what_engines_hold():
    assert simulate(Options(seed=1, steps=500, faults=()), session=TrustingSession).failure is None


HEALED_BY_READERS = sorted(set(FAULTS) - {"mute", "deafen", "poison", "worker", "leave", "join"})


@pytest.mark.parametrize("fault", HEALED_BY_READERS)
def test_every_fault_turns_a_reader_without_repairs_red(fault):
    options = Options(seed=1, steps=1500, faults=(fault,))
    assert simulate(options, session=TrustingSession).failure is not None, f"{fault} was not noticed"
    report = simulate(msgspec.structs.replace(options, steps=250))
    assert report.failure is None, "the real one heals it"


@pytest.mark.parametrize("fault", ["mute", "deafen"])
def test_a_repair_that_breaks_off_turns_a_gullible_reader_red(fault):
    assert simulate(Options(seed=1, steps=750, faults=("drop",)), session=GullibleSession).failure is None
    options = Options(seed=1, steps=3000, faults=("drop", fault))
    assert simulate(options, session=GullibleSession).failure is not None, f"{fault} was not noticed"
    assert simulate(msgspec.structs.replace(options, steps=250)).failure is None, "the real one heals it"


def test_a_reader_that_joins_late_and_trusts_is_seen():
    options = Options(seed=1, steps=1500, faults=("leave", "join"))
    assert simulate(options, session=TrustingSession).failure is not None


def test_a_publisher_that_loses_a_batch_for_one_bad_event_is_seen(monkeypatch):
    monkeypatch.setattr(
        "kvevents.publish.writer._sort_out",
        lambda events: (EventList(), [(i, "", "bad") for i in range(len(events))]),
    )
    report = simulate(Options(seed=1, steps=1500, faults=("poison",)))
    assert report.failure is not None
    assert report.failure.invariant in {"mirror", "digest"}


def test_a_vote_that_outlives_its_worker_is_seen(monkeypatch):
    monkeypatch.setattr(KVEventsMixin, "forget_worker", lambda self, worker: None)
    assert simulate(Options(seed=1, steps=1500, faults=())).failure is None
    report = simulate(Options(seed=1, steps=1500, faults=("worker",)))
    assert report.failure is not None
    assert report.failure.invariant in {"mirror", "digest"}


def test_a_queue_that_keeps_what_it_should_drop_is_seen(monkeypatch):
    monkeypatch.setattr(
        "kvevents.publish.outbox.Outbox._put_full", lambda self, batch: self._queue.append(batch)
    )
    report = simulate(Options(seed=1, steps=1500, faults=("overflow",)))
    assert report.failure is not None
    assert report.failure.invariant == "bounded"


def test_a_long_run_needs_no_more_memory_than_a_short_one():
    held = []

    def count(step, world):
        if step.kind == "quiet":
            gc.collect()
            held.append(len(gc.get_objects()))

    assert simulate(Options(seed=5, steps=2_500), progress=count).failure is None
    assert max(held[5:]) < 1.5 * max(held[1:5])
