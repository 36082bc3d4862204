"""What enough workers hold, over steps and in one interval."""

from __future__ import annotations

import logging

import msgspec
import pytest

from kvevents import (
    Aggregator,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventList,
    KVEventAggregator,
    Quorum,
    ResidentSet,
)
from kvevents.errors import (
    AggregatorError,
    AggregatorTypeError,
    EventTypeError,
    KVEventsError,
    WorkerIndexError,
)
from kvevents.testing import NaiveAggregator


def stored(*hashes, parent=None, medium="CPU", tokens=None, **fields) -> BlockStored:
    ids = tokens if tokens is not None else [t for h in hashes for t in (hash(h) % 1000,) * 4]
    return BlockStored(list(hashes), parent, ids, 4, None, medium, None, **fields)


def removed(*hashes, medium="CPU") -> BlockRemoved:
    return BlockRemoved(list(hashes), medium)


def columns(*events) -> EventList:
    return EventList(events)


def hashes(events) -> list:
    return [h for e in events for h in e.block_hashes]


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("rule", "needed"),
    [("all", 4), ("any", 1), (1, 1), (3, 3), (Quorum([([0, 1], 1), ([2, 3], 1)]), 3)],
)
def test_a_block_is_announced_when_the_rule_begins_to_hold(rule, needed) -> None:
    votes = Aggregator(4, rule=rule)
    for worker in range(4):
        out = votes.step([columns(stored(7)) if w == worker else None for w in range(4)])
        assert hashes(out) == ([7] if worker + 1 == needed else [])


@pytest.mark.parametrize("share", [1, 2])
def test_strided_stores_need_a_rule_of_the_group(share) -> None:
    """Replicated heads: each block is reported by `share` of four workers."""
    reports = [[] for _ in range(4)]
    for block in range(8):
        for i in range(share):
            reports[(block + i) % 4].append(stored(block))
    steps = [columns(*r) for r in reports]
    assert not Aggregator(4).step(steps)
    announced = hashes(Aggregator(4, rule=share).step(steps))
    assert sorted(announced) == list(range(8))
    assert sorted(hashes(Aggregator(4, rule="any").step(steps))) == list(range(8))


def test_groups_may_have_rules_of_their_own() -> None:
    votes = Aggregator(2, group_rules={1: "any"})
    votes.add(0, columns(stored(1, group_idx=0), stored(2, group_idx=1)))
    assert hashes(votes.drain()) == [2]


@pytest.mark.parametrize(
    "rule", [0, 5, Quorum([]), Quorum([([0, 4], 1)]), Quorum([([1, 1], 2)]), "most", 2**40]
)
def test_rules_that_cannot_work_are_refused(rule) -> None:
    with pytest.raises(AggregatorError, match="rule"):
        Aggregator(4, rule=rule)


@pytest.mark.parametrize("rule", [None, 1.5, True, [1], b"all", (1, 2)])
def test_what_is_no_rule_is_a_type_error(rule) -> None:
    if rule is None:
        assert Aggregator(2, rule=rule).num_workers == 2
        return
    with pytest.raises(AggregatorTypeError) as e:
        Aggregator(4, rule=rule)
    assert isinstance(e.value, TypeError)
    assert isinstance(e.value, KVEventsError)


@pytest.mark.parametrize("workers", [0, -1, 1025, 2**70])
def test_numbers_of_workers_that_cannot_be_served(workers) -> None:
    with pytest.raises((AggregatorError, OverflowError)):
        Aggregator(workers)


def test_a_quorum_is_made_of_pairs() -> None:
    with pytest.raises(AggregatorTypeError, match="pairs"):
        Quorum([1, 2])
    quorum = Quorum([(range(2), 1)])
    assert quorum == (((0, 1), 1),)
    assert repr(quorum) == "Quorum([([0, 1], 1)])"


# ---------------------------------------------------------------- workers and steps


def test_silence_changes_nothing() -> None:
    """None and empty are a worker with no events, neither a yes nor a no."""
    votes = Aggregator(2)
    votes.step([columns(stored(1)), columns(stored(1))])
    for silent in ([None, None], [columns(), None], [None], []):
        assert not votes.step(silent)
    assert len(votes) == 1


def test_one_of_four_is_no_agreement_and_slower_workers_still_match() -> None:
    votes = Aggregator(4)
    assert not votes.step([columns(stored(1)), None, None, None])
    assert not votes.step([None, columns(stored(1)), columns(), None])
    assert votes.stats().waiting_for == (0, 0, 1, 1)
    assert not votes.step([None, None, columns(stored(1)), None])
    assert hashes(votes.step([None, None, None, columns(stored(1))])) == [1]


def test_a_worker_that_reports_twice_counts_once() -> None:
    votes = Aggregator(2)
    assert not votes.step([columns(stored(1), stored(1)), None])
    assert not votes.step([columns(stored(1)), None])
    assert votes.stats().duplicates == 2
    assert hashes(votes.step([None, columns(stored(1))])) == [1]


def test_workers_may_cut_runs_differently() -> None:
    a, b, c = b"a" * 32, b"b" * 32, b"c" * 32
    one = stored(a, b, c, tokens=list(range(12)))
    split = [
        stored(c, parent=b, tokens=[8, 9, 10, 11]),
        stored(a, b, tokens=list(range(8))),
    ]
    out = Aggregator(2).step([columns(one), columns(*split)])
    assert list(out) == [one]


def test_a_parent_comes_first_in_one_output() -> None:
    child, parent = stored(2, parent=1), stored(1, parent=None)
    votes = Aggregator(2)
    votes.add(0, columns(child, parent))
    votes.add(1, columns(child))
    votes.add(1, columns(parent))
    assert hashes(votes.drain()) == [1, 2]


def test_a_block_whose_parent_is_not_accepted_is_announced_at_once() -> None:
    votes = Aggregator(2)
    votes.add(0, columns(stored(1), stored(2, parent=1)))
    votes.add(1, columns(stored(2, parent=1)))
    (event,) = votes.drain()
    assert (event.block_hashes, event.parent_block_hash) == ([2], 1)


def test_neighbours_are_coalesced() -> None:
    report = columns(*(stored(i, parent=i - 1 if i else None) for i in range(6)))
    out = Aggregator(2).step([report, report])
    assert len(out) == 1
    assert out[0].block_hashes == list(range(6))


def test_a_removal_goes_out_when_the_rule_stops_to_hold() -> None:
    votes = Aggregator(3, rule=2)
    votes.step([columns(stored(1, 2))] * 3)
    assert not votes.step([columns(removed(1)), None, None])
    out = votes.step([None, columns(removed(1)), None])
    assert list(out) == [removed(1)]
    assert votes.holders(1, "CPU") == (2,)


def test_what_comes_and_goes_within_a_step_is_not_told() -> None:
    votes = Aggregator(1)
    assert not votes.step([columns(stored(1), removed(1))])
    assert votes.stats().unknown_removals == 0


def test_a_clear_takes_the_votes_of_its_worker_and_never_goes_out() -> None:
    votes = Aggregator(2, group_rules={1: "any"})
    votes.step([columns(stored(1), stored(9, group_idx=1))] * 2)
    out = votes.step([columns(AllBlocksCleared(), stored(2)), None])
    assert list(out) == [removed(1)]
    assert votes.holders(9, "CPU", group_idx=1) == (1,)
    assert votes.holders(2, "CPU") == (0,)


def test_a_worker_that_restarts_loses_its_votes() -> None:
    votes = Aggregator(2, keep_content=True)
    first = stored(1, 2, tokens=list(range(8)))
    votes.step([columns(first)] * 2)
    votes.forget_worker(1)
    assert hashes(votes.drain()) == [1, 2]
    assert votes.held(1) == 0
    out = votes.step([None, columns(stored(1, 2, tokens=list(range(8))))])
    assert list(out) == [first]


def test_resize_keeps_what_still_holds() -> None:
    votes = Aggregator(3, keep_content=True)
    votes.step([columns(stored(1))] * 3)
    with pytest.raises(AggregatorError, match="worker 2 still holds 1 blocks"):
        votes.resize(2)
    votes.forget_worker(2)
    assert list(votes.drain()) == [removed(1)]
    votes.resize(2)
    assert list(votes.drain()) == [stored(1)]
    votes.resize(200)
    assert list(votes.drain()) == [removed(1)]
    votes.resize(200, rule=2)
    assert list(votes.drain()) == [stored(1)]
    with pytest.raises(AggregatorError, match="rule"):
        votes.resize(1)


def test_without_kept_content_a_block_comes_back_without_tokens() -> None:
    votes = Aggregator(3)
    votes.step([columns(stored(1))] * 3)
    votes.forget_worker(2)
    votes.drain()
    votes.resize(2)
    (event,) = votes.drain()
    assert (event.block_hashes, event.token_ids, event.block_size) == ([1], [], 0)
    assert votes.stats().without_content == 1


def test_a_worker_that_does_not_exist() -> None:
    votes = Aggregator(2)
    for call in (
        lambda: votes.add(2, columns(stored(1))),
        lambda: votes.add(-1, columns(stored(1))),
        lambda: votes.forget_worker(2),
        lambda: votes.held(5),
        lambda: votes.step([None, None, columns(stored(1))]),
        lambda: votes.add_tagged(columns(stored(1)).with_origin(worker=2)),
    ):
        with pytest.raises(WorkerIndexError, match="does not exist") as e:
            call()
        assert isinstance(e.value, IndexError)
    assert votes.stats().votes == 0


def test_tagged_events_go_to_their_workers_and_untagged_ones_change_nothing() -> None:
    votes = Aggregator(2)
    tagged = columns(stored(1)).with_origin(worker=0) + columns(stored(1)).with_origin(worker=1)
    with pytest.raises(AggregatorTypeError, match="with_origin"):
        votes.add_tagged(tagged + columns(stored(2)))
    assert votes.stats().votes == 0
    votes.add_tagged(tagged)
    assert hashes(votes.drain()) == [1]


def test_fields_come_from_the_first_worker_and_disagreement_is_told_once(caplog) -> None:
    votes = Aggregator(2)
    mine = stored(1, tokens=[1, 2, 3, 4], session_id="s")
    votes.add(0, columns(mine, stored(2, parent=8)))
    votes.add(1, columns(stored(1, tokens=[1, 2, 3, 9]), stored(2, parent=9)))
    with caplog.at_level(logging.WARNING, "kvevents.aggregate"):
        out = votes.drain()
        votes.step([columns(stored(5, tokens=[1] * 4)), columns(stored(5, tokens=[2] * 4))])
    assert list(out) == [mine, stored(2, parent=8)]
    stats = votes.stats()
    assert (stats.disagreeing_tokens, stats.disagreeing_parents) == (2, 1)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "token_ids" in caplog.text


def test_the_first_worker_that_gave_tokens_gives_them() -> None:
    bare = BlockStored([1], None, [], 0, None, "CPU", None)
    out = Aggregator(2).step([columns(bare), columns(stored(1))])
    assert list(out) == [stored(1)]


def test_workers_that_hash_differently_are_warned_about(caplog) -> None:
    votes = Aggregator(2, warn_after=3)
    with caplog.at_level(logging.WARNING, "kvevents.aggregate"):
        for i in range(10):
            votes.step([None, None])
            assert not votes.step([columns(stored(2 * i)), columns(stored(2 * i + 1))])
    assert len(caplog.records) == 1
    assert "held by some workers only" in caplog.text
    stats = votes.stats()
    assert stats.waiting == 20
    assert stats.waiting_for == (10, 10)
    assert stats.oldest_waiting_steps == 19


def test_what_waits_is_bounded_by_count_and_by_age() -> None:
    votes = Aggregator(2, max_waiting=4)
    votes.add(0, columns(stored(1, 2, 3)))
    votes.add(0, columns(stored(4, 5, 6)))
    stats = votes.stats()
    assert (stats.waiting, stats.dropped_by_count, stats.held) == (3, 3, (3, 0))
    assert hashes(votes.step([None, columns(stored(1, 2, 3), stored(4, 5, 6))])) == [4, 5, 6]

    votes = Aggregator(2, max_age=2)
    votes.step([columns(stored(1)), None])
    votes.step([None, None])
    assert votes.stats().waiting == 1
    votes.step([None, None])
    assert (votes.stats().waiting, votes.stats().dropped_by_age) == (0, 1)
    assert not votes.step([None, columns(stored(1))])
    assert hashes(votes.step([columns(stored(1)), None])) == [1]


def test_memory_of_waiting_events_is_given_back() -> None:
    """One block of each large list waits on; the list does not."""
    votes = Aggregator(2)
    for step in range(100):
        blocks = [stored(step * 1000 + i, tokens=[i] * 4) for i in range(200)]
        votes.step([columns(*blocks), columns(*blocks[1:])])
    assert votes.stats().waiting == 100
    assert votes.nbytes < 100 * 200 * 100


def test_one_hash_in_two_tiers_is_two_blocks() -> None:
    votes = Aggregator(2)
    votes.add(0, columns(stored(1), stored(1, medium="STORAGE")))
    votes.add(1, columns(stored(1, medium="STORAGE"), stored(1, locality="REMOTE")))
    assert [e.medium for e in votes.drain()] == ["STORAGE"]


def test_minus_one_and_all_ones_are_one_block() -> None:
    out = Aggregator(2).step([columns(stored(-1)), columns(stored(2**64 - 1))])
    assert hashes(out) == [-1]


def test_rare_fields_survive_being_cut() -> None:
    keys = [("a",), None, ("c", 3)]
    run = stored(1, 2, 3, tokens=list(range(12)), extra_keys=keys, lookahead_token_ids=[4, 8, 12])
    run.metadata = {"who": "me"}
    votes = Aggregator(2)
    votes.add(0, columns(run))
    votes.add(1, columns(stored(2, 3, parent=1, tokens=list(range(4, 12)))))
    (event,) = votes.drain()
    assert event.extra_keys == keys[1:]
    assert event.lookahead_token_ids == [8, 12]
    assert event.token_ids == list(range(4, 12))
    assert event.metadata == {"who": "me"}
    assert event.parent_block_hash == 1


def test_hash_only_stores_are_tier_updates_in_any_cut() -> None:
    bare = BlockStored([1, 2], None, [], 0, None, "CPU", None)
    votes = Aggregator(2)
    votes.add(0, columns(bare))
    votes.add(1, columns(BlockStored([2], None, [], 0, None, "CPU", None)))
    (event,) = votes.drain()
    assert (event.block_hashes, event.token_ids, event.block_size) == ([2], [], 0)


def test_a_snapshot_rebuilds_what_is_announced() -> None:
    votes = Aggregator(2, keep_content=True)
    live, late = ResidentSet(), ResidentSet()
    for i in range(20):
        report = columns(stored(i, parent=i - 1 if i else None), removed(i - 7))
        live.apply(votes.step([report, report]))
    snapshot = votes.snapshot()
    late.apply(snapshot)
    assert late.digest() == live.digest()
    assert snapshot == [stored(*range(13, 20), parent=12)]


def test_the_old_way_of_counting_fails_where_it_should() -> None:
    """Negative control: a count over all events, equal to the number of workers."""

    class Counting:
        def __init__(self, workers) -> None:
            self.workers, self.counts = workers, {}

        def add(self, events) -> None:
            for e in events:
                self.counts[e] = self.counts.get(e, 0) + 1

        def common(self) -> list:
            return [e for e, n in self.counts.items() if n == self.workers]

    s = stored(1)
    for reports in ([[s, s], []], [[s, s], [s]], [[s], [], [s], [s]]):
        truth = NaiveAggregator(len(reports))
        old = Counting(len(reports))
        new = Aggregator(len(reports))
        for worker, report in enumerate(reports):
            truth.add(worker, report)
            old.add(report)
            new.add(worker, EventList(report))
        assert len(old.common()) != len(truth.resident()) or reports[1] == []
        assert len(new.drain()) == len(truth.resident())


# ---------------------------------------------------------------- vLLM's methods


def interval(*reports, **kwargs) -> KVEventAggregator:
    aggregator = KVEventAggregator(len(reports))
    for report in reports:
        aggregator.add_events(report, **kwargs)
    return aggregator


@pytest.mark.parametrize("make", [list, EventList])
def test_reports_of_one_worker_are_not_two_workers(make) -> None:
    s = stored(1)
    assert list(interval(make([s, s]), make([])).get_common_events()) == []
    assert list(interval(make([s, s]), make([s])).get_common_events()) == [s]
    assert list(interval(make([s, s]), make([s, s])).get_common_events()) == [s, s]


@pytest.mark.parametrize("make", [list, EventList])
def test_a_clear_from_every_worker_is_one_clear_in_its_place(make) -> None:
    report = [stored(1), AllBlocksCleared(), stored(2)]
    out = interval(make(report), make(report)).get_common_events()
    assert list(out) == report
    shuffled = interval(make(report), make(report[::-1])).get_common_events()
    assert list(shuffled) == report
    assert list(interval(make(report), make(report[:1])).get_common_events()) == report[:1]


def test_a_worker_that_did_not_report_has_not_reported() -> None:
    aggregator = KVEventAggregator(3)
    aggregator.add_events([stored(1)])
    aggregator.add_events([stored(1)])
    assert aggregator.get_common_events() == []
    aggregator.add_events([stored(1)])
    assert aggregator.get_common_events() == [stored(1)]


def test_the_order_is_that_of_the_first_worker_and_asking_twice_gives_the_same() -> None:
    a, b, c = stored(1), stored(2), removed(3)
    aggregator = interval([c, a, b], [b, a, c])
    assert aggregator.get_common_events() == aggregator.get_common_events() == [c, a, b]
    assert len(aggregator) == 6
    aggregator.get_common_events().clear()
    assert aggregator.get_common_events() == [c, a, b]


def test_nothing_that_was_given_is_changed() -> None:
    report = [stored(1), stored(2)]
    aggregator = interval(report, report)
    aggregator.get_all_events().append(stored(3))
    report.append(stored(4))
    assert aggregator.get_common_events() == [stored(1), stored(2)]
    aggregator.clear_events()
    assert len(report) == 3


def test_hashes_may_be_anything_hashable_and_structs_an_engine_s_own() -> None:
    class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
        block_hashes: list
        parent_block_hash: object
        token_ids: list
        block_size: int
        medium: str | None = None

    class AllBlocksCleared(msgspec.Struct, tag=True):
        pass

    one = [BlockStored(["x"], None, [1], 1), AllBlocksCleared(), BlockStored([(1, 2)], "x", [2], 1)]
    two = [AllBlocksCleared(), BlockStored(["x"], None, [1], 1), BlockStored([(1, 2)], "y", [2], 1)]
    assert interval(one, two).get_common_events() == one[:2]
    with pytest.raises(EventTypeError, match="hashable"):
        interval([BlockStored([[1]], None, [1], 1)], [BlockStored([[2]], None, [1], 1)]).get_common_events()


def test_metadata_does_not_vote_and_the_first_worker_s_wins() -> None:
    mine, theirs = stored(1), stored(1)
    mine.metadata, theirs.metadata = {"w": 0}, {"w": 1}
    (event,) = interval([mine], [theirs]).get_common_events()
    assert event.metadata == {"w": 0}


def test_named_workers_and_tagged_lists_keep_their_workers() -> None:
    aggregator = KVEventAggregator(2)
    aggregator.add_events([stored(1)], worker=1)
    aggregator.add_events([stored(1)], worker=1)
    assert aggregator.get_common_events() == []
    aggregator.add_events(EventList([stored(1)]).with_origin(worker=0))
    assert list(aggregator.get_common_events()) == [stored(1)]
    with pytest.raises(WorkerIndexError):
        aggregator.add_events([stored(2)], worker=2)


def test_adding_a_list_and_raising_the_number_is_one_worker_more() -> None:
    """The engine's own order of calls, starting from the first worker's container."""
    aggregator = KVEventAggregator(1)
    aggregator.add_events([stored(1)])
    aggregator.add_events([stored(2)])  # the same worker, later
    aggregator.add_events([stored(2), stored(1)])
    aggregator.increment_workers()
    aggregator.add_events([stored(1)])
    aggregator.increment_workers()
    assert aggregator.get_number_of_workers() == 3
    assert aggregator.get_common_events() == [stored(1)]


def test_a_flattened_list_is_counted_and_said_so_once(caplog) -> None:
    aggregator = KVEventAggregator(1)
    aggregator.add_events([stored(1), stored(2)])
    with caplog.at_level(logging.WARNING, "kvevents.aggregate"):
        aggregator.add_events([stored(1), stored(1), stored(2)])
        aggregator.increment_workers(2)
        aggregator.add_events([stored(1), stored(2), stored(1)])
        aggregator.increment_workers(2)
    assert len(caplog.records) == 1
    assert aggregator.get_number_of_workers() == 5
    assert aggregator.get_common_events() == [stored(1)]


def test_the_rest_of_vllm_s_methods() -> None:
    aggregator = interval(EventList([stored(1)]), EventList([stored(2)]))
    everything = aggregator.get_all_events()
    assert [everything.origin(i)[1] for i in range(2)] == [0, 1]
    aggregator.reset_workers()
    assert aggregator.get_number_of_workers() == 1
    assert list(aggregator.get_common_events()) == [stored(1), stored(2)]
    aggregator.clear_events()
    assert len(aggregator) == 0
    assert repr(aggregator) == "<KVEventAggregator workers=1, events=0>"
    for bad in (0, -1, 1.5, True, 1025):
        with pytest.raises(ValueError):
            KVEventAggregator(bad)
        with pytest.raises(ValueError):
            aggregator.increment_workers(bad)
    with pytest.raises(TypeError):
        aggregator.add_events("events")
    with pytest.raises(TypeError):
        aggregator.add_events(5)
