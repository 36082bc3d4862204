"""The queue in front of the sender: numbers, overflow, waking."""

from __future__ import annotations

import threading

import pytest

from kvevents.errors import PublisherClosedError
from kvevents.publish.outbox import END_SEQUENCE, LOST, Outbox


def drain(outbox):
    taken = []
    while (item := outbox.take()) is not None:
        taken.append(item)
    return taken


def test_numbers_in_order_from_zero():
    outbox = Outbox(10, "drop_oldest")
    for name in "abc":
        outbox.put(name)
    assert drain(outbox) == [(0, "a", True), (1, "b", True), (2, "c", True)]


def test_a_full_queue_drops_the_oldest_which_leaves_a_hole_at_its_place():
    outbox = Outbox(2, "drop_oldest")
    outbox.put("a")
    assert outbox.take() == (0, "a", True)
    for name in "bcde":
        outbox.put(name)
    assert drain(outbox) == [(3, "d", True), (4, "e", True)]
    assert outbox.dropped == 2
    assert outbox.next_sequence == 5


def test_a_full_queue_can_drop_the_newest_which_leaves_a_hole_at_its_place():
    outbox = Outbox(2, "drop_newest")
    for name in "abcd":
        outbox.put(name)
    assert len(outbox) == 3, "one mark for all that were dropped together"
    assert outbox.take() == (0, "a", True)
    assert outbox.take() == (1, "b", True)
    outbox.put("e")
    assert drain(outbox) == [(4, "e", True)]
    assert outbox.dropped == 2


def test_dropping_the_newest_keeps_the_queue_bounded():
    outbox = Outbox(3, "drop_newest")
    for i in range(1000):
        outbox.put(i)
        if i % 7 == 0:
            outbox.take()
        assert len(outbox) <= 4
    last = drain(outbox)[-1]
    assert last[0] <= last[1], "a number stands for the place in the order of the calls"


def test_block_waits_for_room_and_ends_with_the_publisher():
    outbox = Outbox(1, "block")
    outbox.put("a")
    errors = []

    def put():
        outbox.put("b")
        try:
            outbox.put("c")
        except PublisherClosedError as e:
            errors.append(e)

    thread = threading.Thread(target=put)
    thread.start()
    assert outbox.take() == (0, "a", True)
    while len(outbox) == 0:
        thread.join(0.001)
    outbox.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(errors) == 1
    assert outbox.take() == (1, "b", True), "what is queued can still be taken"
    assert outbox.dropped == 0


def test_the_reserved_number_is_never_given():
    outbox = Outbox(10, "drop_oldest", first=2**64 - 3)
    for name in "abcde":
        outbox.put(name)
    assert drain(outbox) == [(2**64 - 3, "a", True), (2**64 - 2, "b", True)]
    assert outbox.dropped == 3
    assert outbox.number_if_empty() is None
    assert outbox.next_sequence == END_SEQUENCE


def test_a_skipped_number_is_a_hole():
    outbox = Outbox(10, "drop_oldest")
    outbox.put("a")
    outbox.put("b")
    assert outbox.take() == (0, "a", True)
    outbox.skip()
    assert outbox.number_if_empty() is None, "while batches wait, nothing else takes a number"
    assert outbox.take() == (2, "b", True)
    assert outbox.number_if_empty() == 3


def test_for_a_mirror_what_was_dropped_comes_in_its_turn_with_its_number():
    outbox = Outbox(2, "drop_oldest", keep_dropped=True)
    outbox.put("a")
    assert outbox.take() == (0, "a", True)
    for name in "bcde":
        outbox.put(name)
    outbox.skip()
    assert outbox.number_if_empty() is None, "what was dropped comes first"
    assert drain(outbox) == [
        (1, "b", False),
        (2, "c", False),
        (3, None, False),
        (4, "d", True),
        (5, "e", True),
    ]
    assert outbox.holes.ranges() == [(1, 3)]


def test_for_a_mirror_the_newest_too():
    outbox = Outbox(2, "drop_newest", keep_dropped=True)
    for name in "abcd":
        outbox.put(name)
    assert outbox.take() == (0, "a", True)
    assert outbox.take() == (1, "b", True)
    outbox.put("e")
    assert drain(outbox) == [(2, "c", False), (3, "d", False), (4, "e", True)]
    assert outbox.holes.ranges() == [(2, 3)]


@pytest.mark.parametrize("overflow", ["drop_oldest", "drop_newest"])
def test_what_waits_for_the_mirror_is_bounded_and_its_loss_is_said(overflow, monkeypatch):
    monkeypatch.setattr("kvevents.publish.outbox.ASIDE", 10)
    outbox = Outbox(2, overflow, keep_dropped=True)
    for i in range(100):
        outbox.put(i)
    assert len(outbox._aside) <= 10
    taken = drain(outbox)
    assert len(taken) <= 14
    assert LOST in [batch for _, batch, _ in taken]
    numbers = [n for n, _, _ in taken]
    assert numbers == sorted(set(numbers))
    assert outbox.next_sequence == 100


def test_wait_sees_what_came_before_and_what_comes_later():
    outbox = Outbox(10, "drop_oldest")
    assert outbox.wait(0.001) is False
    outbox.put("a")
    assert outbox.wait(None) is True
    outbox.take()
    threading.Timer(0.01, outbox.put, ["b"]).start()
    while outbox.take() is None:
        outbox.wait(None)
    outbox.close()
    assert outbox.wait(None) is True


@pytest.mark.parametrize("overflow", ["drop_oldest", "drop_newest", "block"])
def test_many_putters_lose_and_repeat_nothing(overflow):
    outbox = Outbox(100, overflow)
    each, putters = 2000, 4

    def put(k):
        for i in range(each):
            outbox.put((k, i))

    threads = [threading.Thread(target=put, args=(k,)) for k in range(putters)]
    for t in threads:
        t.start()
    taken = []
    while any(t.is_alive() for t in threads) or len(outbox):
        item = outbox.take()
        if item is None:
            outbox.wait(0.01)
        else:
            taken.append(item)
    numbers = [n for n, _, _ in taken]
    assert numbers == sorted(set(numbers))
    assert len(taken) + outbox.dropped == each * putters
    assert outbox.next_sequence == each * putters
    for k in range(putters):
        mine = [i for _, (p, i), _ in taken if p == k]
        assert mine == sorted(set(mine))
    if overflow == "block":
        assert outbox.dropped == 0
