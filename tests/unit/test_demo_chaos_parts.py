"""The chaos demo's parts: lives told apart, the verdict's conditions, the side file."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from kvevents import BlockStored, KVEventBatch, PrefixIndex, ResidentSet
from kvevents.demo.chaos.ledger import LedgerReader, LedgerWriter
from kvevents.demo.chaos.options import ChaosOptions
from kvevents.demo.chaos.prompts import Prompt, choose_prompts
from kvevents.demo.chaos.reader import Followed
from kvevents.demo.chaos.verdict import FollowReport, QuietPoint, ReaderLife, judge
from kvevents.errors import ConfigError
from kvevents.events import EventList
from kvevents.subscribe import Batch, Gap, Reset, Snapshot

OLD, NEW = b"o" * 16, b"n" * 16


def stored(*hashes):
    return [BlockStored([h], None, [h], 1, None, "GPU", None) for h in hashes]


def batch(seq, ts, *hashes):
    return Batch("a", seq, KVEventBatch(ts, EventList(stored(*hashes))), replayed=False)


def digest(*hashes):
    return ResidentSet(stored(*hashes)).digest()


def snapshot(epoch, resume_seq, *hashes):
    return Snapshot("a", resume_seq, EventList(stored(*hashes)), epoch, digest(*hashes))


@pytest.fixture
def follow(tmp_path):
    """A follower, and ``truth(epoch, seq, ts, *hashes)``."""
    path = tmp_path / "truth"
    path.touch()

    def truth(epoch, seq, ts, *hashes):
        writer = LedgerWriter(path, epoch)
        writer.write(seq, digest(*hashes), ts)
        writer.close()

    with LedgerReader(path) as ledger:
        yield Followed(PrefixIndex(), ledger, "a", 0), truth


def test_a_snapshot_and_every_batch_after_it_are_compared(follow):
    one, truth = follow
    truth(OLD, 4, 14.0, 1, 2)
    truth(OLD, 5, 15.0, 1, 2, 3)
    one.take(snapshot(OLD, 5, 1, 2))
    one.take(batch(5, 15.0, 3))
    assert one.report == FollowReport(applied=1, identical=2, snapshots=1)
    assert one.position == (OLD, 6)
    one.take(snapshot(OLD, 6, 1, 2))
    assert (one.report.different, one.report.first_difference) == (1, 5)


def test_a_new_life_is_compared_with_its_own_side_file(follow):
    one, truth = follow
    truth(OLD, 0, 10.0, 5)
    truth(NEW, 0, 20.0, 7)
    one.take(batch(0, 10.0, 5))
    one.take(Reset("a", "restart"))
    assert one.position is None
    one.take(snapshot(NEW, 0))
    assert one.position == (NEW, 0)
    one.take(batch(0, 20.0, 7))
    assert (one.report.identical, one.report.different, one.report.uncompared) == (2, 0, 0)


def test_without_a_snapshot_nothing_counts_as_compared(follow):
    one, truth = follow
    truth(OLD, 3, 13.0, 1)
    one.take(Gap("a", 0, 2, "too old"))
    one.take(batch(3, 13.0, 1))
    assert (one.report.uncompared, one.report.identical) == (1, 0)


def test_the_side_file_finds_a_batch_by_number_and_stamp_over_lives(tmp_path):
    path = tmp_path / "truth"
    for epoch, ts in ((OLD, 1.5), (NEW, 2.5)):
        writer = LedgerWriter(path, epoch)
        writer.write(0, epoch, ts)
        writer.close()
    with LedgerReader(path) as ledger:
        assert ledger.of_batch(0, 1.5).epoch == OLD
        assert ledger.of_batch(0, 2.5) == (NEW, 0, NEW)
        assert ledger.of_batch(0, 3.5) is None
        assert ledger.of_life(OLD, 0).digest == OLD
        assert len(ledger) == 2


def test_prompts_are_repeatable_and_varied():
    recent = [Prompt(array("I", range(i, i + 40)), "salt" if i % 2 else None) for i in range(20)]
    chosen = choose_prompts(recent, 60, seed=3)
    assert chosen == choose_prompts(recent, 60, seed=3)
    assert sum(prompt in recent for prompt in chosen) >= 20
    assert len({len(prompt.tokens) for prompt in chosen}) > 5
    assert all(prompt.tokens for prompt in chosen)


def result(options=None, *, dropped=1, link=1, quiet=None, **fields):
    report = FollowReport(applied=5, identical=5, resets=1, snapshots=1)
    readers = [
        ReaderLife(reader=i, role=role, life=life, sources={"a": report})
        for i, role, life in ((0, "first", 0), (1, "late", 0), (2, "killed", 0), (2, "killed", 1))
    ]
    readers[0] = msgspec.structs.replace(readers[0], sources={"a": msgspec.structs.replace(report, **fields)})
    point = QuietPoint(point=1, reader=0, behind=[], answers=4, equal=4, hits=2)
    return judge(
        options or ChaosOptions(),
        seconds=1.0,
        sequences=5,
        dropped=dropped,
        restarts=2,
        outages=2,
        link=dict.fromkeys(("dropped", "duplicated", "delayed", "reordered", "reconnects"), link),
        readers=readers,
        quiet=[msgspec.structs.replace(point, **(quiet or {}))],
    )


def test_a_run_in_which_everything_happened_and_was_equal_is_identical():
    good = result()
    assert (good.verdict, good.reasons) == ("identical", [])
    assert (good.compared, good.identical) == (20, 20)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"different": 2, "first_difference": 7}, "differs from a at 2 sequence number(s), first at 7"),
        ({"uncompared": 1}, "could not be compared with a 1 time(s)"),
        ({"identical": 0}, "never saw anything of a"),
        ({"resets": 0}, "did not happen: a restart that the first reader noticed"),
        ({"snapshots": 0}, "did not happen: an outage that only a snapshot could mend"),
        ({"dropped": 0}, "did not happen: an overflow of a publisher's queue"),
        ({"link": 0}, "did not happen: reordered messages"),
        ({"quiet": {"equal": 3}}, "1 of 4 answers are not the pools'"),
        ({"quiet": {"behind": ["a"]}}, "did not get to the end of a"),
        ({"quiet": {"hits": 0}}, "no prompt was found at all"),
    ],
)
def test_anything_unequal_or_absent_is_a_reason(wrong, reason):
    bad = result(**wrong)
    assert bad.verdict == "different"
    assert any(reason in line for line in bad.reasons), bad.reasons


def test_a_calm_run_asks_for_no_faults_but_the_links():
    assert result(ChaosOptions(faults=False), dropped=0, resets=0, snapshots=0).verdict == "identical"


def test_the_number_of_readers_is_bounded():
    with pytest.raises(ConfigError, match="readers is 17"):
        ChaosOptions(readers=17)
