"""Child processes that fail, die or fall silent are told as such, and none outlives the group."""

from __future__ import annotations

import os
import time

import pytest

from kvevents.demo.children import ChildError, ChildGroup

pytestmark = pytest.mark.timeout(60)


def says(pipe, *words):
    for word in words:
        pipe.send((word, word.upper()))


def fails(pipe):
    raise ValueError("no\ngood")


def dies(pipe):
    os._exit(7)


def silent(pipe):
    pipe.recv()


def stubborn(pipe):
    pipe.send(("ready", None))
    while True:
        time.sleep(60)


def test_other_words_go_to_the_listener_and_leaving_early_is_no_failure():
    heard = []
    with ChildGroup(20) as group:
        group.start("short", says, "one", "two")
        assert group.expect("short", "two", lambda *message: heard.append(message)) == "TWO"
        group.start("long", says, "three")
        # By now the first may be gone: it has done its part.
        assert group.expect("long", "three") == "THREE"
    assert heard == [("short", "one", "ONE")]


@pytest.mark.parametrize(
    ("main", "message"),
    [
        (fails, "the worker process failed: ValueError: no"),
        (dies, r"the worker process ended early \(exit code 7\)"),
        (says, r"the worker process ended early \(exit code 0\)"),
    ],
)
def test_a_child_that_ends_early_is_named(main, message):
    with ChildGroup(20) as group:
        group.start("worker", main)
        with pytest.raises(ChildError, match=message):
            group.expect("worker", "ready")


def test_silence_is_bounded():
    with ChildGroup(0.5) as group:
        group.start("worker", silent)
        with pytest.raises(ChildError, match="no process of worker reported anything for 0.5 s"):
            group.expect("worker", "ready")


def test_a_child_that_does_not_listen_is_ended():
    with ChildGroup(20) as group:
        group.start("worker", stubborn)
        group.expect("worker", "ready")
        process = group._processes["worker"]
    assert process.exitcode is not None
    assert process.exitcode < 0
