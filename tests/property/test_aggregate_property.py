"""The aggregator beside ledgers, across the seam."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents import Aggregator, AllBlocksCleared, BlockRemoved, BlockStored, EventList, Quorum
from kvevents.testing import NaiveAggregator


def stored(sequence: int, start: int, n: int, medium: str | None, *, group: int, wide: bool) -> BlockStored:
    def name(i: int) -> bytes | int:
        value = sequence * 100 + i
        return value.to_bytes(32, "big") if wide else value - 300

    run = range(start, start + n)
    return BlockStored(
        [name(i) for i in run],
        name(start - 1) if start else None,
        [sequence * 1000 + i * 10 + t for i in run for t in range(2)],
        2,
        None,
        medium,
        None,
        group_idx=group,
    )


@st.composite
def event(draw) -> object:
    kind = draw(st.sampled_from(["stored"] * 6 + ["removed"] * 3 + ["cleared"]))
    if kind == "cleared":
        return AllBlocksCleared()
    e = stored(
        draw(st.integers(0, 4)),
        draw(st.integers(0, 5)),
        draw(st.integers(1, 6)),
        draw(st.sampled_from(["CPU", "STORAGE", None])),
        group=draw(st.integers(0, 1)),
        wide=draw(st.booleans()),
    )
    return e if kind == "stored" else BlockRemoved(e.block_hashes, e.medium, group_idx=e.group_idx)


@st.composite
def world(draw) -> tuple:
    workers = draw(st.integers(1, 9))
    rule = st.one_of(
        st.just("all"),
        st.just("any"),
        st.integers(1, workers),
        st.integers(1, workers).map(
            lambda cut: Quorum([(range(cut), 1), (range(workers - cut, workers), cut)])
        ),
    )
    # Most workers say the same, some later, some less: else nothing ever agrees.
    common = draw(st.lists(event(), max_size=8))
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        step = []
        for _ in range(workers):
            picked = draw(st.lists(st.sampled_from(common), max_size=6)) if common else []
            step.append(picked if draw(st.booleans()) else common)
        steps.append(step)
    return workers, draw(rule), {1: draw(rule)}, steps, draw(st.booleans())


def apply(resident: set, out: EventList) -> None:
    """As a strict reader: nothing unknown goes, nothing known comes, no parent after its child."""
    seen_as_parent = set()
    for e in out:
        keys = [NaiveAggregator.key(e, h) for h in e.block_hashes]
        if isinstance(e, BlockRemoved):
            for k in keys:
                resident.remove(k)
            continue
        assert isinstance(e, BlockStored)
        if e.parent_block_hash is not None:
            seen_as_parent.add(NaiveAggregator.key(e, e.parent_block_hash))
        for k in keys:
            assert k not in resident
            assert k not in seen_as_parent
            resident.add(k)


RESTARTS = st.lists(st.integers(0, 8), max_size=2)


@given(world(), RESTARTS)
def test_the_output_implies_what_the_rule_says_of_the_ledgers(world, restarts) -> None:
    check(Aggregator, world, restarts)


class Counting:
    """The rule of old: an event counts when it was seen as often as there are workers, in one step."""

    def __init__(self, workers: int, **kwargs: object) -> None:
        self.workers = workers
        self.counts: Counter = Counter()

    def add(self, worker: int, events: list) -> None:
        self.counts.update(e for e in events if not isinstance(e, AllBlocksCleared))

    def forget_worker(self, worker: int) -> None:
        pass

    def drain(self) -> list:
        counts, self.counts = self.counts, Counter()
        return [e for e, n in counts.items() if n == self.workers]

    def step(self, reports: list) -> list:
        for worker, events in enumerate(reports):
            self.add(worker, events)
        return self.drain()


def test_the_rule_of_old_fails_the_same_suite() -> None:
    @settings(max_examples=300, database=None, derandomize=True, report_multiple_bugs=False)
    @given(world(), RESTARTS)
    def suite(world, restarts) -> None:
        check(Counting, world, restarts)

    with pytest.raises((AssertionError, KeyError)):
        suite()


def s(*numbers: int, parent: int | None = None) -> BlockStored:
    tokens = [t for n in numbers for t in (n, n)]
    return BlockStored(list(numbers), parent, tokens, 2, None, "CPU", None, group_idx=0)


@pytest.mark.parametrize(
    "steps",
    [
        [[[s(1), s(1)], []]],
        [[[s(1), s(1)], [s(1)]]],
        [[[s(1)], []], [[], [s(1)]]],
        [[[s(1, 2)], [s(1), s(2, parent=1)]]],
        [[[s(1)], [s(1)]], [[AllBlocksCleared()], []]],
    ],
    ids=["one worker twice", "one too many", "a step later", "cut differently", "a worker that cleared"],
)
def test_where_the_rule_of_old_is_wrong(steps) -> None:
    world = (2, "all", {}, steps, False)
    check(Aggregator, world, [])
    with pytest.raises((AssertionError, KeyError)):
        check(Counting, world, [])


def check(votes_by: type, world: tuple, restarts: list[int]) -> None:
    """Drive an aggregator and the ledgers side by side."""
    workers, rule, group_rules, steps, keep = world
    votes = votes_by(workers, rule=rule, group_rules=group_rules, keep_content=keep)
    truth = NaiveAggregator(workers, rule=rule, group_rules=group_rules)
    resident: set = set()
    for i, step in enumerate(steps):
        for worker, events in enumerate(step):
            truth.add(worker, events)
        if i < len(restarts) and restarts[i] < workers:
            for worker, events in enumerate(step):
                votes.add(worker, events)
            truth.forget_worker(restarts[i])
            votes.forget_worker(restarts[i])
            out = votes.drain()
        else:
            out = votes.step([EventList(events) for events in step])
        apply(resident, out)
        assert resident == truth.resident()
        if votes_by is not Aggregator:
            continue
        stats = votes.stats()
        assert stats.waiting == len(truth.waiting())
        assert stats.held == tuple(len(ledger) for ledger in truth.ledgers)
    if votes_by is not Aggregator:
        return
    snapshot: set = set()
    apply(snapshot, votes.snapshot())
    assert snapshot == resident
