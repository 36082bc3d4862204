"""Several engines and readers under restarts, outages and overflow: equal when they are, told when not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvevents.demo.chaos import ChaosOptions, run_chaos
from kvevents.demo.children import ChildError, ChildGroup

pytestmark = pytest.mark.timeout(150)


def test_every_digest_and_every_answer_is_the_engines_whatever_happens():
    result = run_chaos(ChaosOptions(stretch_s=1.2, prompts=300))
    assert result.reasons == []
    assert result.verdict == "identical"
    assert result.identical == result.compared > 1000
    # Readers 1 and 3 at the first quiet point, all three at the others; four sources.
    assert result.answers_equal == result.answers == 8 * 4 * 300
    assert [(r.role, r.life) for r in result.readers] == [
        ("first", 0), ("late", 0), ("killed", 0), ("killed", 1),
    ]  # fmt: skip
    assert result.dropped > 0
    assert (result.restarts, result.outages) == (2, 2)


def test_a_reader_that_leaves_a_removal_out_is_named_with_the_source():
    result = run_chaos(
        ChaosOptions(readers=1, faults=False, stretch_s=1.0, rate=300, prompts=50, break_reader=True)
    )
    assert result.verdict == "different"
    reports = result.readers[0].sources
    assert reports["a"].different > 0
    assert result.reasons[0].startswith("reader 1 (first) differs from a at ")
    assert all(r.different == 0 for name, r in reports.items() if name != "a")


def test_options_of_the_other_demo_are_refused_by_name():
    run = subprocess.run(
        [sys.executable, "-m", "kvevents", "demo", "--chaos", "--workers", "2", "--requests", "5"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1] == (
        "kvevents: --requests, --workers: not together with --readers or --chaos"
    )


def _talker(pipe):
    pipe.send(("hello", 1))
    pipe.recv()


def test_a_child_that_was_ended_can_be_started_again_under_its_name():
    heard = []
    with ChildGroup(20.0) as group:
        for kill in (True, False):
            group.start("talker", _talker)
            assert group.expect("talker", "hello") == 1
            group.end("talker", kill=kill)
        group.start("talker", _talker)
        while not heard:
            group.listen(0.1, lambda *said: heard.append(said))
    assert heard == [("talker", "hello", 1)]


def _dies(pipe):
    raise SystemExit(7)


def test_a_child_that_dies_uninvited_is_told_while_listening():
    with ChildGroup(20.0) as group:
        group.start("mortal", _dies)
        with pytest.raises(ChildError, match=r"exit code 7"):
            group.listen(20.0, lambda *_: None)
