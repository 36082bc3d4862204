"""The queue in front of the sender: numbers, overflow, waking."""

from __future__ import annotations

import threading

import pytest

from kvevents.errors import PublisherClosedError
from kvevents.publish.outbox import END_SEQUENCE, Outbox


def drain(outbox):
    taken = []
    while (item := outbox.take()) is not None:
        taken.append(item)
    return taken


def test_numbers_in_order_from_zero():
    outbox = Outbox(10, "drop_oldest")
    for name in "abc":
        outbox.put(name)
    assert drain(outbox) == [(0, "a"), (1, "b"), (2, "c")]


def test_a_full_queue_drops_the_oldest_which_leaves_a_hole_at_its_place():
    outbox = Outbox(2, "drop_oldest")
    outbox.put("a")
    assert outbox.take() == (0, "a")
    for name in "bcde":
        outbox.put(name)
    assert drain(outbox) == [(3, "d"), (4, "e")]
    assert outbox.dropped == 2
    assert outbox.next_sequence == 5


def test_a_full_queue_can_drop_the_newest_which_leaves_a_hole_at_its_place():
    outbox = Outbox(2, "drop_newest")
    for name in "abcd":
        outbox.put(name)
    assert len(outbox) == 3, "one mark for all that were dropped together"
    assert outbox.take() == (0, "a")
    assert outbox.take() == (1, "b")
    outbox.put("e")
    assert drain(outbox) == [(4, "e")]
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
    assert outbox.take() == (0, "a")
    while len(outbox) == 0:
        thread.join(0.001)
    outbox.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(errors) == 1
    assert outbox.take() == (1, "b"), "what is queued can still be taken"
    assert outbox.dropped == 0


def test_the_reserved_number_is_never_given():
    outbox = Outbox(10, "drop_oldest", first=2**64 - 3)
    for name in "abcde":
        outbox.put(name)
    assert drain(outbox) == [(2**64 - 3, "a"), (2**64 - 2, "b")]
    assert outbox.dropped == 3
    assert outbox.number_if_empty() is None
    assert outbox.next_sequence == END_SEQUENCE


def test_a_skipped_number_is_a_hole():
    outbox = Outbox(10, "drop_oldest")
    outbox.put("a")
    outbox.put("b")
    assert outbox.take() == (0, "a")
    outbox.skip()
    assert outbox.number_if_empty() is None, "while batches wait, nothing else takes a number"
    assert outbox.take() == (2, "b")
    assert outbox.number_if_empty() == 3


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
    numbers = [n for n, _ in taken]
    assert numbers == sorted(set(numbers))
    assert len(taken) + outbox.dropped == each * putters
    assert outbox.next_sequence == each * putters
    for k in range(putters):
        mine = [i for _, (p, i) in taken if p == k]
        assert mine == sorted(set(mine))
    if overflow == "block":
        assert outbox.dropped == 0
