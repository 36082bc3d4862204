"""The sequence machine that knows lives, input by input. Every interleaving: ``test_sequence_model.py``."""

from __future__ import annotations

from kvevents.subscribe.actions import (
    Action,
    Apply,
    Compare,
    Fetch,
    Head,
    Hello,
    Limits,
    Lose,
    Message,
    Policy,
    Range,
    Restore,
    Skip,
    Wipe,
)
from kvevents.subscribe.sequence import Sequence

A, B = b"a" * 16, b"b" * 16


def msg(seq: int, life: int = 0, *, poisoned: bool = False, partial: bool = False) -> Message:
    ts = None if poisoned else life * 1000.0 + seq
    return Message(seq, hash((seq, life)), ts, 1, (life, seq), poisoned, partial)


def head(newest: int | None, epoch: bytes = A, oldest: int = 0, *, mirror: bool = True) -> Head:
    count = 0 if newest is None else newest + 1
    return Head(epoch, None if newest is None else oldest, newest, count if mirror else None, count)


def numbers(actions: list[Action]) -> list[int]:
    return [a.message.seq for a in actions if isinstance(a, Apply)]


def followed(n: int, policy: Policy = "snapshot", **limits: int) -> Sequence:
    """One that has replayed ``n`` batches and trusts what comes next."""
    s = Sequence(limits=Limits(**limits), policy=policy)
    assert s.connected() == [Hello(1, "connect")]
    assert s.hello(head(n - 1)) == [Range(0, n - 1, 1)]
    for i in range(n):
        assert s.replayed(head(n - 1), msg(i)) == [Apply(msg(i), replayed=True)]
    assert s.replay_ended(head(n - 1), n) == []
    assert s.trusted
    return s


def test_what_is_expected_is_delivered_at_once() -> None:
    s = followed(3)
    assert s.live(msg(3)) == [Apply(msg(3), replayed=False)]
    assert s.live(msg(3)) == [Skip(msg(3), "duplicate")]


def test_nothing_live_is_delivered_before_the_server_has_answered() -> None:
    s = Sequence()
    s.connected()
    assert s.live(msg(0)) == []
    assert s.hello(head(0)) == [Range(0, 0, 1)]
    assert numbers(s.replayed(head(0), msg(0))) == [0]


def test_the_first_batch_of_a_life_is_had_from_the_server_once() -> None:
    s = Sequence()
    s.connected()
    assert s.hello(head(None)) == []
    assert s.live(msg(0)) == [Range(0, 0, 1)]
    assert numbers(s.replayed(head(0), msg(0))) == [0]
    assert s.replay_ended(head(0), 1) == []
    assert numbers(s.live(msg(1))) == [1]


def test_a_gap_asks_for_what_is_missing_and_nothing_else() -> None:
    s = followed(3)
    assert s.live(msg(5)) == [Range(3, 5, 1)]
    assert numbers(s.replayed(head(5), msg(3))) == [3]
    assert numbers(s.replayed(head(5), msg(4))) == [4]
    assert numbers(s.replayed(head(5), msg(5))) == [5]
    assert s.replay_ended(head(5), 3) == []


def test_another_epoch_is_a_restart_though_the_numbers_go_on() -> None:
    s = followed(3)
    s.connected()
    assert s.live(msg(3, 1)) == []
    assert s.hello(head(3, B)) == [Wipe("restart"), Range(0, 3, 1)]


def test_another_epoch_in_any_answer_is_a_restart() -> None:
    s = followed(3)
    s.live(msg(5))
    assert s.replayed(head(1, B), msg(0, 1)) == [Wipe("restart"), Range(0, 1, 1)]


def test_a_stamp_that_goes_back_is_asked_about_and_dropped_if_the_server_never_sent_it() -> None:
    s = followed(3)
    stranger = msg(3)._replace(ts=-5.0, digest=1)
    assert s.live(stranger) == [Range(3, 3, 1)]
    assert s.replay_ended(head(2), 0) == [Skip(stranger, "late")]
    assert numbers(s.live(msg(3))) == [3]


def test_what_the_log_no_longer_has_is_fetched_and_live_batches_wait() -> None:
    s = Sequence()
    s.connected()
    assert s.hello(head(9, oldest=7)) == [Fetch(7, 1)]
    assert s.live(msg(10)) == []
    restored = s.restored(head(9, oldest=7), 10, "all")
    assert restored == [Restore(10, "all"), Range(10, 10, 1)]
    assert numbers(s.replayed(head(10, oldest=7), msg(10))) == [10]


def test_a_snapshot_moves_the_cursor_forward_only() -> None:
    s = followed(3)
    s.live(msg(5))
    assert s.replayed(head(5), msg(5)) == [Fetch(5, 1)]
    assert s.restored(head(5), 4, "old") == [Range(3, 5, 2)]
    assert s.next == 3


def test_a_number_that_was_never_sent_is_healed_also_where_nothing_follows() -> None:
    s = followed(3)
    s.look()
    hole = Head(A, 0, 2, 4, 4, ((3, 3),))
    assert s.hello(hole) == [Fetch(4, 1)]


def test_policies_differ_in_what_a_hole_says() -> None:
    said = {}
    for policy in ("replay", "wipe", "keep_and_flag"):
        s = followed(3, policy) if policy != "keep_and_flag" else followed(1)
        s.policy = policy
        s.live(msg(s.next + 1))
        last = s.next
        said[policy] = s.failed("not asked", retry=False)
        assert s.incomplete
        assert next(a for a in said[policy] if isinstance(a, Lose)).last == last
    assert not any(isinstance(a, Wipe) for a in said["replay"] + said["keep_and_flag"])
    assert said["wipe"][0] == Wipe("gap")


def test_a_batch_that_lacks_events_is_delivered_and_healed() -> None:
    s = followed(3)
    assert s.live(msg(3, partial=True)) == [Apply(msg(3, partial=True), replayed=False), Fetch(4, 1)]
    s = followed(3, "wipe")
    assert s.live(msg(3, partial=True)) == [Wipe("gap"), Lose(3, 3, "poisoned")]


def test_a_clear_makes_good_what_was_missing() -> None:
    s = followed(3, "replay")
    s.live(msg(4))
    s.failed("unreachable", retry=False)
    assert s.incomplete
    s.cleared()
    assert not s.incomplete


def test_digests_are_compared_where_things_stand_and_nowhere_else() -> None:
    s = followed(3)
    assert s.check(1, b"d") == []
    assert s.check(2, b"d") == [Compare(2, b"d", 1)]
    assert s.digested(head(2), b"d") == []
    s.check(2, b"d")
    assert s.digested(head(2), b"other") == [Fetch(3, 1)]


def test_a_server_that_counts_less_than_was_delivered_is_not_believed_and_nor_is_the_rest() -> None:
    s = followed(3)
    s.look()
    assert s.hello(head(0))[0] == Wipe("unsure")


def test_a_life_that_comes_back_is_counted() -> None:
    s = followed(1)
    for epoch in (B, A, B):
        s.look()
        s.hello(head(0, epoch))
        s.failed("unreachable", retry=False)
    assert s.returned == 2


def test_what_waits_is_bounded_and_had_again() -> None:
    s = followed(1, hold_batches=3)
    for i in range(5, 30):
        s.live(msg(i))
    assert [m.seq for m in s.held] == [5, 6, 7]
    assert s.high == 29


def test_a_newest_batch_that_the_log_could_not_keep_is_no_reason_to_ask_without_end() -> None:
    s = Sequence()
    s.connected()
    s.hello(head(9, oldest=4))
    assert s.restored(head(9, oldest=4), 10, None) == [Restore(10, None), Range(9, 9, 1, anchor=True)]
    assert s.replay_ended(head(9, oldest=4), 0) == [Range(4, 4, 1, anchor=True)]
    s.replayed(head(9, oldest=4), msg(4))
    assert s.replay_ended(head(9, oldest=4), 1) == []
    assert s.trusted
    assert numbers(s.live(msg(10))) == [10]


def test_a_server_that_gives_nothing_of_what_it_says_it_has_is_not_asked_without_end() -> None:
    s = Sequence(limits=Limits(attempts=3))
    s.connected()
    s.hello(head(9, oldest=9))
    s.restored(head(9, oldest=9), 10, None)
    for _ in range(4):
        if s.request is not None:
            s.replay_ended(head(9, oldest=9), 0)
    assert s.request is None
