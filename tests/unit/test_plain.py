"""The sequence state machine, input by input."""

from __future__ import annotations

import pytest

from kvevents.subscribe.actions import Action, Apply, Ask, Limits, Lose, Message, Skip, Wipe
from kvevents.subscribe.plain import PlainSequence


def msg(
    seq: int, life: int = 0, *, ts: float | None = -1.0, poisoned: bool = False, nbytes: int = 1
) -> Message:
    """Message of a publisher's life; stamps grow with life and number."""
    if ts is not None and ts < 0:
        ts = life * 1000.0 + seq
    return Message(seq, hash((seq, life, poisoned)), None if poisoned else ts, nbytes, (life, seq), poisoned)


def fed(n: int, life: int = 0, **limits: int) -> PlainSequence:
    s = PlainSequence(limits=Limits(**limits))
    for i in range(n):
        assert s.live(msg(i, life)) == [Apply(msg(i, life), replayed=False)]
    return s


def numbers(actions: list[Action]) -> list[int]:
    return [a.message.seq for a in actions if isinstance(a, Apply)]


def test_contiguous_numbers_are_applied() -> None:
    s = fed(3)
    assert (s.next, s.last_seq, s.repairing) == (3, 2, False)


def test_the_first_number_above_zero_is_a_gap_from_zero() -> None:
    s = PlainSequence()
    assert s.live(msg(2)) == [Ask(0, 1, "gap")]
    assert numbers(s.replayed(msg(0))) == [0]
    assert numbers(s.replayed(msg(1))) == [1, 2]
    assert s.replay_ended() == []
    assert (s.next, len(s.held)) == (3, 0)


def test_a_publisher_that_counts_from_one_is_told_apart_by_configuration() -> None:
    s = PlainSequence(first_seq=1)
    assert numbers(s.live(msg(1))) == [1]


def test_a_gap_asks_from_the_last_applied_number_and_holds_what_comes() -> None:
    s = fed(3)
    assert s.live(msg(5)) == [Ask(2, 1, "gap")]
    assert s.live(msg(6)) == []
    assert len(s.held) == 2
    assert s.replayed(msg(2)) == []
    assert s.replayed(msg(3)) == [Apply(msg(3), replayed=True)]
    assert s.replayed(msg(4)) == [
        Apply(msg(4), replayed=True),
        Apply(msg(5), replayed=False),
        Apply(msg(6), replayed=False),
    ]
    assert s.replayed(msg(5)) == []
    assert s.replay_ended() == []
    assert not s.repairing


def test_a_late_message_fills_its_gap_without_the_replay() -> None:
    s = fed(2)
    s.live(msg(3))
    assert numbers(s.live(msg(2))) == [2, 3]
    assert s.replay_failed("unreachable") == []


def test_the_same_bytes_again_are_a_duplicate() -> None:
    s = fed(3)
    assert s.live(msg(1)) == [Skip(msg(1), "duplicate")]
    s.live(msg(7))
    assert s.live(msg(7)) == [Skip(msg(7), "duplicate")]


def test_other_bytes_and_a_newer_stamp_are_a_restart() -> None:
    s = fed(3)
    assert s.live(msg(0, life=1)) == [Wipe("restart"), Apply(msg(0, life=1), replayed=False)]
    assert s.lives == 1


def test_a_restart_that_is_heard_late_asks_for_its_beginning() -> None:
    s = fed(5)
    assert s.live(msg(2, life=1)) == [Wipe("restart"), Ask(0, 1, "gap")]
    assert numbers(s.replayed(msg(0, life=1))) == [0]
    assert numbers(s.replayed(msg(1, life=1))) == [1, 2]


def test_other_bytes_and_an_older_stamp_are_late() -> None:
    s = fed(5)
    s.live(msg(0, life=1))
    assert s.live(msg(0, life=0)) == [Skip(msg(0, life=0), "late")]
    assert s.live(msg(9, life=0)) == [Skip(msg(9, life=0), "late")]
    assert s.next == 1


def test_a_stream_of_late_messages_is_looked_into() -> None:
    s = fed(3, life=1, late_run=3)
    assert s.live(msg(0, life=0)) == [Skip(msg(0, life=0), "late")]
    assert s.live(msg(1, life=0)) == [Skip(msg(1, life=0), "late")]
    assert s.live(msg(2, life=0)) == [Ask(2, 1, "probe")]
    actions = s.replayed(msg(2, life=0))
    assert actions == [Wipe("restart"), Ask(0, 1, "gap")]
    assert numbers(s.replayed(msg(0, life=0))) == [0]


def test_undecided_is_decided_by_the_replay_log() -> None:
    same_ts = msg(1, life=1, ts=1.0)
    s = fed(3)
    assert s.live(same_ts) == [Ask(1, 1, "probe")]
    assert s.replayed(msg(1)) == []
    assert s.replayed(msg(2)) == []
    assert s.replay_ended() == [Skip(same_ts, "late")]
    assert s.live(same_ts) == [Ask(1, 1, "probe")]
    assert s.replayed(same_ts) == [Wipe("restart"), Ask(0, 1, "gap")]


def test_undecided_without_a_replay_log_is_unsure() -> None:
    same_ts = msg(0, life=1, ts=0.0)
    s = fed(3)
    s.live(same_ts)
    assert s.replay_failed("no replay", retry=False) == [Wipe("unsure"), Apply(same_ts, replayed=False)]


def test_a_restart_that_counted_past_the_old_number_is_found_when_the_connection_comes_back() -> None:
    s = fed(3)
    assert s.connected() == [Ask(2, 1, "connect")]
    assert s.live(msg(3, life=1)) == []
    assert s.replayed(msg(2, life=1)) == [Wipe("restart"), Ask(0, 1, "gap")]
    out = [a for i in range(4) for a in s.replayed(msg(i, life=1))]
    assert [a.message.content for a in out if isinstance(a, Apply)] == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert s.replay_ended() == []


def test_a_reconnection_to_the_same_life_applies_what_was_missed() -> None:
    s = fed(3)
    s.connected()
    assert s.live(msg(5)) == []
    got = [a for i in range(2, 6) for a in s.replayed(msg(i))]
    assert numbers(got) == [3, 4, 5]
    assert s.replay_ended() == []


def test_a_reconnection_without_an_answer_goes_on_with_what_was_held() -> None:
    s = fed(3)
    s.connected()
    s.live(msg(3))
    assert s.replay_failed("unreachable") == [Apply(msg(3), replayed=False)]


def test_silence_asks_for_the_tail() -> None:
    s = fed(3)
    assert s.look() == [Ask(2, 1, "tail")]
    assert s.look() == []
    assert s.replayed(msg(2)) == []
    assert numbers(s.replayed(msg(3))) == [3]
    assert s.replay_ended() == []


def test_a_log_that_ends_before_what_was_applied_is_another_life() -> None:
    s = fed(5)
    s.look()
    assert s.replay_ended() == [Ask(0, 1, "probe")]
    assert s.replayed(msg(0, life=1))[0] == Wipe("restart")


def test_a_log_that_was_full_and_is_empty_is_another_life() -> None:
    s = fed(2)
    s.look()
    s.replayed(msg(1))
    s.replay_ended()
    s.look()
    assert s.replay_ended() == [Ask(0, 1, "probe")]
    assert s.replay_ended() == [Wipe("restart")]


def test_a_log_that_never_held_anything_decides_nothing() -> None:
    s = fed(2)
    s.look()
    s.replay_ended()
    assert s.replay_ended() == []
    assert s.next == 2


def test_too_old_is_said_once_and_the_rest_is_applied() -> None:
    s = PlainSequence()
    s.live(msg(9))
    assert s.replayed(msg(4)) == [Lose(0, 3, "too old"), Apply(msg(4), replayed=True)]
    for i in range(5, 9):
        s.replayed(msg(i))
    assert s.next == 10


def test_a_hole_in_the_log_is_asked_for_once_more_then_lost() -> None:
    s = fed(2)
    s.live(msg(4))
    for _ in range(2):
        s.replayed(msg(1))
        s.replayed(msg(3))
        s.replayed(msg(4))
        last = s.replay_ended()
    assert last == [Lose(2, 2, "missing"), Apply(msg(3), replayed=True), Apply(msg(4), replayed=True)]


def test_attempts_without_progress_end_in_a_gap() -> None:
    s = fed(1)
    s.live(msg(3))
    assert s.replay_failed("unreachable") == [Ask(0, 2, "gap")]
    assert s.replay_failed("unreachable") == [Ask(0, 3, "gap")]
    assert s.replay_failed("unreachable") == [Lose(1, 2, "unreachable"), Apply(msg(3), replayed=False)]


def test_an_interrupted_answer_goes_on_from_the_next_number() -> None:
    s = PlainSequence()
    s.live(msg(9))
    s.replay_failed("unreachable")
    for i in range(5):
        s.replayed(msg(i))
    assert s.replay_failed("unreachable") == [Ask(4, 2, "gap")]


def test_a_poisoned_message_is_asked_for_once_and_may_arrive_whole() -> None:
    s = fed(2)
    assert s.live(msg(2, poisoned=True)) == [Ask(1, 1, "gap")]
    s.live(msg(3))
    assert numbers(s.replayed(msg(2))) == [2, 3]


def test_a_poisoned_message_that_stays_poisoned_is_a_gap_and_the_stream_goes_on() -> None:
    s = fed(2)
    s.live(msg(2, poisoned=True))
    s.live(msg(3))
    s.replayed(msg(1))
    assert s.replayed(msg(2, poisoned=True)) == [Lose(2, 2, "poisoned"), Apply(msg(3), replayed=False)]
    assert s.replay_ended() == []
    assert numbers(s.live(msg(4))) == [4]


def test_a_poisoned_message_without_replay_is_a_gap() -> None:
    s = fed(1)
    s.live(msg(1, poisoned=True))
    assert s.replay_failed("no replay", retry=False) == [Lose(1, 1, "poisoned")]


def test_held_messages_are_bounded_and_the_rest_is_asked_for_again() -> None:
    s = fed(1, hold_batches=2)
    for i in range(2, 8):
        s.live(msg(i))
    assert len(s.held) == 2
    s.replayed(msg(0))
    assert numbers(s.replayed(msg(1))) == [1, 2, 3]
    assert s.replay_ended() == [Ask(3, 1, "gap")]
    assert numbers([a for i in range(3, 8) for a in s.replayed(msg(i))]) == [4, 5, 6, 7]
    assert s.replay_ended() == []


def test_held_bytes_are_bounded() -> None:
    s = fed(1, hold_bytes=100)
    for i in range(2, 8):
        s.live(msg(i, nbytes=40))
    assert (len(s.held), s.held_bytes) == (2, 80)


def test_a_number_from_nowhere_heals() -> None:
    s = fed(2)
    s.live(msg(2**60, ts=5.0))
    s.replay_failed("no replay", retry=False)
    assert s.next == 2**60 + 1
    assert s.live(msg(2, ts=6.0)) == [Wipe("restart"), Ask(0, 1, "gap")]


@pytest.mark.parametrize("n", [1, 3000])
def test_memory_of_seen_numbers_is_bounded(n: int) -> None:
    s = fed(n, remember=100)
    assert len(s._seen) == min(n, 100)
    if n > 100:
        assert s.live(msg(5)) == [Skip(msg(5), "late")]
        assert s.live(msg(5, life=9))[0] == Wipe("restart")


def test_stamps_that_are_a_little_out_of_order_cost_nothing() -> None:
    s = PlainSequence()
    stamps = [10.0, 9.9, 10.5, 9.7, 10.6]
    for i, ts in enumerate(stamps):
        assert numbers(s.live(msg(i, ts=ts))) == [i]
    s.live(msg(6, ts=10.4))
    s.live(msg(7, ts=10.2))
    assert numbers(s.live(msg(5, ts=10.3))) == [5, 6, 7]


def test_a_clock_that_went_back_within_a_life_is_found_out_by_the_log() -> None:
    early = [msg(3 + i, ts=float(i)) for i in range(3)]
    s = PlainSequence(limits=Limits(late_run=2))
    for i in range(3):
        s.live(msg(i, ts=1000.0 + i))
    assert s.live(early[0]) == [Skip(early[0], "late")]
    assert s.live(early[1]) == [Ask(2, 1, "probe")]
    s.replayed(msg(2, ts=1002.0))
    got = [a for m in early[:2] for a in s.replayed(m)]
    assert numbers(got) == [3, 4]
    s.replay_ended()
    assert numbers(s.live(early[2])) == [5]


def test_a_hole_that_only_the_log_shows_is_a_gap_though_nothing_live_follows() -> None:
    s = PlainSequence()
    (ask,) = s.connected()
    assert isinstance(ask, Ask)
    taken: list[Action] = []
    for _ in range(6):
        for n in (0, 1, 4, 5):
            taken += s.replayed(msg(n))
        asked = s.replay_ended()
        taken += asked
        if not any(isinstance(a, Ask) for a in asked):
            break
    assert numbers(taken) == [0, 1, 4, 5]
    assert [a for a in taken if isinstance(a, Lose)] == [Lose(2, 3, "missing")]
    assert (s.next, s.held, s.repairing) == (6, [], False)


def test_what_waited_on_an_earlier_connection_is_not_applied_in_the_life_after_it() -> None:
    """A restart within a second: stamps cannot tell, so what waits is had from the log or not at all."""
    s = PlainSequence()
    s.live(msg(2, ts=0.1))
    assert s.connected() == [Skip(msg(2, ts=0.1), "late"), Ask(0, 1, "connect")]
    new = [msg(i, 1, ts=0.5 + i / 10) for i in range(2)]
    assert [a for m in new for a in s.replayed(m)] == [Apply(m, replayed=True) for m in new]
    assert numbers(s.replay_ended()) == []
    assert numbers(s.live(msg(2, 1, ts=0.7))) == [2]
