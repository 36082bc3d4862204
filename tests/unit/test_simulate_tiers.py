"""The mock engine's lower tiers: late, in pieces, failing; and their truth from the workers' own books."""

from __future__ import annotations

import os
import pickle
import signal

import pytest

from kvevents import BlockRemoved, BlockStored, EventList, ResidentSet
from kvevents.connectors import KVConnectorRole
from kvevents.simulate.ledger import LedgerTruth, LedgerWriter, ledger_path
from kvevents.simulate.tier import TierConfig, TierConnector, TierMetadata
from kvevents.simulate.workers import WorkerError, WorkerGroup


def name(n):
    return bytes([n]) * 32


def stored(first, count):
    """A run of `count` blocks of two tokens."""
    hashes = [name(n) for n in range(first, first + count)]
    return BlockStored(hashes, None, list(range(2 * count)), 2, None, "GPU", None, group_idx=0)


def worker_half(**config):
    return TierConnector(TierConfig(**config), KVConnectorRole.WORKER)


def run(tier, step, *events):
    """One step of a worker: what it recorded, and what its book says."""
    tier.bind_connector_metadata(TierMetadata(step, EventList(events)))
    tier.wait_for_save()
    tier.clear_connector_metadata()
    container = tier.get_kv_connector_kv_cache_events()
    return [] if container is None else list(container.get_all_events()), tier.take_ledger()


def test_stores_come_within_three_steps_in_pieces_and_the_book_agrees_with_the_events():
    tier = worker_half(fail_rate=0.0)
    events, book = [], []
    for step in range(23):
        e, b = run(tier, step, *([stored(10 * step, 10)] if step < 20 else []))
        events += e
        book += b
    assert sum(len(e.block_hashes) for e in events) == len(book) == 200
    assert sorted(h[0] for _, h in book) == list(range(200))
    stats = tier.get_kv_connector_stats()
    assert stats.data["late"] > 0
    assert stats.data["stores"] > 20
    assert tier.get_kv_connector_stats() is None


def test_a_failed_store_is_in_neither_or_with_its_part_in_both():
    tier = worker_half(fail_rate=1.0, max_delay=0)
    events, book = run(tier, 0, stored(0, 16))
    assert [h for e in events for h in e.block_hashes] == [h for _, h in book]
    assert len(book) < 16


def test_a_full_tier_evicts_before_it_stores():
    tier = worker_half(capacity=4, fail_rate=0.0, max_delay=0)
    run(tier, 0, stored(0, 4))
    events, book = run(tier, 1, stored(10, 1))
    assert [type(e) for e in events] == [BlockRemoved, BlockStored]
    assert book == [("-", name(0)), ("+", name(10))]


# ---------------------------------------------------------------- the truth


def truth_of(tmp_path, lines, *, media=("CPU",), workers=2, rule="all"):
    for worker in range(workers):
        with LedgerWriter(ledger_path(tmp_path, worker)) as book:
            for step, connector, changes in lines.get(worker, ()):
                if changes is None:
                    book.restarted(step)
                else:
                    book.write(step, connector, [(c[0], name(int(c[1:]))) for c in changes])
    return LedgerTruth(tmp_path, [TierConfig(medium=m, num_workers=workers, rule=rule) for m in media])


def held(truth):
    keys = truth.resident.keys()
    return sorted((k.hash[0], k.medium) for k in keys)


@pytest.mark.parametrize(("rule", "expected"), [("all", [1]), ("any", [1, 2, 3]), (2, [1, 2])])
def test_a_block_counts_when_the_rule_says_so(tmp_path, rule, expected):
    lines = {0: [(0, 0, ["+1", "+2"])], 1: [(0, 0, ["+1", "+2"])], 2: [(0, 0, ["+3", "+1"])]}
    with truth_of(tmp_path, lines, workers=3, rule=rule) as truth:
        truth.advance(0)
        assert [h for h, _ in held(truth)] == expected


def test_the_books_are_read_up_to_the_step_that_is_asked_for(tmp_path):
    lines = {0: [(1, 0, ["+1"]), (2, 0, ["-1", "+2"])], 1: [(1, 0, ["+1"]), (3, 0, ["+2"])]}
    with truth_of(tmp_path, lines) as truth:
        seen = []
        for step in range(4):
            truth.advance(step)
            seen.append([h for h, _ in held(truth)])
    assert seen == [[], [1], [], [2]]


def test_a_restarted_worker_holds_nothing(tmp_path):
    lines = {0: [(0, 0, ["+1"])], 1: [(0, 0, ["+1"]), (1, 0, None), (2, 0, ["+1"])]}
    with truth_of(tmp_path, lines) as truth:
        seen = []
        for step in range(3):
            truth.advance(step)
            seen.append(len(held(truth)))
    assert seen == [1, 0, 1]


def test_tiers_of_one_medium_are_one_and_others_are_apart(tmp_path):
    lines = {0: [(0, 0, ["+1"]), (0, 1, ["+1", "+2"]), (1, 0, ["-1"])]}
    with truth_of(tmp_path, lines, media=("CPU", "CPU"), workers=1) as truth:
        truth.advance(0)
        assert held(truth) == [(1, "CPU"), (2, "CPU")]
        before = truth.digest()
        truth.advance(1)
        assert truth.digest() == before
    same = ResidentSet()
    keys = [BlockStored([name(n)], None, [], 0, None, "CPU", None, group_idx=0) for n in (2, 1)]
    same.apply(EventList(keys))
    assert same.digest() == before


def test_a_book_that_contradicts_itself_is_no_truth(tmp_path):
    with truth_of(tmp_path, {0: [(0, 0, ["-1"])]}) as truth, pytest.raises(ValueError, match="drops what"):
        truth.advance(0)


# ---------------------------------------------------------------- the processes


def group(tmp_path, workers=2):
    return WorkerGroup([[TierConfig(num_workers=workers, worker=w)] for w in range(workers)], tmp_path)


def metadata(workers, step, *events):
    from kvevents.simulate.workers import make_connector

    scheduler = make_connector([TierConfig(num_workers=workers)], KVConnectorRole.SCHEDULER)
    return scheduler.build_connector_meta((step, EventList(events)))


@pytest.mark.timeout(60)
def test_a_worker_that_dies_is_named_with_the_step_and_nothing_stays_behind(tmp_path):
    with group(tmp_path) as workers:
        pids = [p.pid for p, _ in workers._workers]
        assert len(workers.step(0, metadata(2, 0, stored(0, 4)))) == 2
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"worker 1 ended in step 1 \(exit code -9\)"):
            workers.step(1, metadata(2, 1))
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.timeout(60)
def test_a_worker_that_raises_says_why(tmp_path):
    with group(tmp_path, 1) as workers, pytest.raises(WorkerError, match="worker 0 failed in step 0: Connec"):
        workers.step(0, TierMetadata(0, EventList()))  # not what a MultiConnector takes


@pytest.mark.timeout(60)
def test_a_restarted_worker_answers_again_and_its_book_says_that_all_is_gone(tmp_path):
    with group(tmp_path, 1) as workers:
        for step in range(5):
            workers.step(step, metadata(1, step, stored(10 * step, 4)))
        workers.restart(0, 5)
        output = workers.step(5, metadata(1, 5))[0]
        assert output.kv_connector_output.kv_cache_events is None
    with LedgerTruth(tmp_path, [TierConfig(num_workers=1)]) as truth:
        truth.advance(4)
        assert len(truth.resident) > 0
        truth.advance(5)
        assert len(truth.resident) == 0


def test_metadata_of_a_step_is_small():
    meta = metadata(2, 7, *[BlockRemoved([name(1)], "GPU"), stored(0, 16)])
    assert len(pickle.dumps(meta, protocol=5)) < 2_000
    assert [type(e) for e in meta.metadata[0].stored] == [BlockStored]
