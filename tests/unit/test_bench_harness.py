"""The harness itself: figures are only as good as what measures them."""

from __future__ import annotations

import pytest
from benches import harness, workloads
from benches.harness import Absent, Result, Row, Work


def row(make, measure="speedup", floor=2.0, aim=4.0, **rest) -> Row:
    fields = {
        "unit": "x",
        "per": "call",
        "against": "",
        "clock": "thread",
        "pairs": 3,
        "more_is_better": False,
    }
    return Row("name", "concept", make, measure, floor, aim, **{**fields, **rest})


def spin(n: int):
    def call() -> None:
        for _ in range(n):
            pass

    return call


def test_seeds_give_the_published_numbers() -> None:
    """The Rust side asserts the same constants, so the two workloads are one."""
    rng = workloads.SplitMix64(0)
    assert (rng.next(), rng.next(), rng.next()) == workloads.FIRST


def test_a_faster_side_is_seen_as_faster() -> None:
    work = Work(ours=spin(2_000), theirs=spin(20_000), n=1, check=lambda: None)
    result = harness.measure(row(lambda: work))
    assert result.figure is not None
    assert 5 < result.figure < 20
    assert result.verdict == "aim"


def test_a_wrong_answer_fails_the_row_before_anything_is_timed() -> None:
    def wrong() -> None:
        raise AssertionError("17 is not 18")

    def timed() -> None:
        pytest.fail("was timed")

    result = harness.measure(row(lambda: Work(ours=timed, theirs=timed, n=1, check=wrong)))
    assert result.verdict == "failed"
    assert "17 is not 18" in result.note


def test_an_absent_competitor_says_not_run_and_ours_is_still_measured() -> None:
    work = Work(ours=spin(100), theirs=Absent("vLLM is not installed"), n=1, check=lambda: None)
    result = harness.measure(row(lambda: work))
    assert result.verdict == "not run"
    assert result.note == "vLLM is not installed"
    assert result.ours is not None


@pytest.mark.parametrize(
    ("measure", "figure", "verdict"),
    [
        ("speedup", 5, "aim"),
        ("speedup", 3, "floor"),
        ("speedup", 1, "missed"),
        ("fraction", 5, "missed"),
        ("value", 1, "aim"),
    ],
)
def test_verdicts_know_their_direction(measure: str, figure: float, verdict: str) -> None:
    aims = {"speedup": 4.0, "fraction": 0.5, "value": 1.0}
    assert Result(row(None, measure, aim=aims[measure]), figure=figure).verdict == verdict


def test_what_is_prepared_before_a_sample_is_not_timed() -> None:
    prepared: list[int] = []
    work = Work(
        ours=prepared.clear,
        theirs=Absent(""),
        n=1,
        check=lambda: None,
        before_ours=lambda: prepared.append(1),
    )
    ours, _ = harness.time_pairs(work, pairs=4)
    assert len(ours.cpu) == 4
    assert not prepared
