"""The soak's instruments: slopes, warm-ups, lives, and the verdict's conditions."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from kvevents.demo.soak import SoakOptions, memory
from kvevents.demo.soak.memory import Growth, MemoryLog, resident_bytes, slope
from kvevents.demo.soak.verdict import QuietReport, ReaderReport, VisitorReport, judge
from kvevents.errors import ConfigError


def test_the_slope_is_that_of_the_best_line():
    assert slope([(0.0, 5.0), (10.0, 25.0)]) == pytest.approx(2.0)
    wobbly = [(float(t), 3.0 * t + (1 if t % 2 else -1)) for t in range(100)]
    assert slope(wobbly) == pytest.approx(3.0, abs=0.01)
    assert slope([]) == slope([(1.0, 7.0)]) == slope([(1.0, 7.0), (1.0, 9.0)]) == 0.0


def test_memory_that_a_process_takes_is_seen_and_a_process_that_has_gone_is_passed_over():
    talk = [
        sys.executable,
        "-c",
        "import sys; input(); b = bytearray(b'x') * 50_000_000; print(1, flush=True); input()",
    ]
    child = subprocess.Popen(talk, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    before = resident_bytes(child.pid)
    child.stdin.write("\n")
    child.stdin.flush()
    child.stdout.readline()
    after = resident_bytes(child.pid)
    child.communicate("\n", timeout=20)
    assert 40e6 < after - before < 80e6
    assert resident_bytes(child.pid) is None
    log = MemoryLog(1.0)
    log.take(0.0, {"gone": child.pid, "this": os.getpid()})
    assert list(log.latest) == ["this"]


def test_without_proc_the_size_comes_from_ps(monkeypatch):
    monkeypatch.setattr(memory, "_PROC", "/no/proc")
    said = subprocess.CompletedProcess([], 0, stdout="  2048\n")
    monkeypatch.setattr(memory.subprocess, "run", lambda *_, **__: said)
    assert resident_bytes(123) == 2048 * 1024
    said.stdout = ""
    assert resident_bytes(123) is None


def test_each_life_has_a_warm_up_of_its_own_and_short_ones_are_not_judged(monkeypatch):
    sizes = {1: 0.0, 2: 0.0}
    monkeypatch.setattr(memory, "resident_bytes", lambda pid: sizes[pid])
    log = MemoryLog(warm_up_s=60.0)
    for t in range(300):
        # Grows fast at first, then by 0.6 MB a minute; the second life begins late.
        sizes[1] = 1e6 * (100 + min(t, 60) + 0.01 * t)
        sizes[2] = 1e6 * 50
        log.take(float(t), {"engine": 1 if t < 220 else 2})
    first, second = log.growth()
    assert (first.process, first.life, second.life) == ("engine", 0, 1)
    assert first.mb_per_minute == pytest.approx(0.6, abs=0.01)
    assert first.seconds == pytest.approx(159.0)
    assert second.mb_per_minute is None


def quiet(*, behind=(), different=(), equal=10):
    return QuietReport(sources=4, behind=list(behind), different=list(different), answers=10, equal=equal)


FINE = {
    "seconds": 600.0,
    "happened": {"restarts": 3, "outages": 5, "dropped": 9},
    "link": {"dropped": 1, "reconnects": 1},
    "reader": ReaderReport(batches=9, repaired=1, gaps=1, resets=1, snapshots=1),
    "visitor": VisitorReport(plain=1, snapshots=1, subscribers=1),
    "quiet": [quiet()],
    "memory": [
        Growth(process="reader", life=0, seconds=400, first_mb=40, last_mb=41, mb_per_minute=0.15),
        Growth(process="engine a", life=4, seconds=9, first_mb=40, last_mb=41, mb_per_minute=None),
    ],
}


def test_a_sound_run_has_no_reasons():
    assert judge(SoakOptions(), **FINE).reasons == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"quiet": []}, "there was no quiet point"),
        (
            {"quiet": [quiet(behind=["a (next is 3, its is 5)"])]},
            "quiet point 1: not at the end of a (next is 3, its is 5)",
        ),
        ({"quiet": [quiet(different=["b"])]}, "quiet point 1: different from b"),
        ({"quiet": [quiet(equal=9)]}, "quiet point 1: 1 of 10 answers are not the pools'"),
        (
            {"reader": ReaderReport(batches=9, repaired=1, resets=1)},
            "did not happen: a snapshot that healed a hole",
        ),
        ({"link": {"dropped": 0}}, "did not happen: dropped messages"),
        (
            {"memory": [msgspec.structs.replace(FINE["memory"][0], mb_per_minute=1.0)]},
            "reader grew by 1.00 MB a minute over 400 s (40.0 to 41.0 MB)",
        ),
        (
            {"memory": [msgspec.structs.replace(FINE["memory"][0], mb_per_minute=None)]},
            "reader was sampled too shortly to be judged",
        ),
    ],
)  # fmt: skip
def test_whatever_is_wrong_is_named(changed, reason):
    result = judge(SoakOptions(), **(FINE | changed))
    assert result.verdict == "failed"
    assert result.reasons[0].startswith(reason)


def test_memory_is_not_judged_where_it_is_not_asked_for():
    memory_log = [msgspec.structs.replace(FINE["memory"][0], mb_per_minute=99.0)]
    assert judge(SoakOptions(memory=False), **(FINE | {"memory": memory_log})).verdict == "sound"


@pytest.mark.parametrize("field", ["seconds", "rate", "every_s", "quiet_s", "limit_mb"])
def test_numbers_that_cannot_run_are_refused(field):
    with pytest.raises(ConfigError, match=f"{field} is 0, more than 0 is needed"):
        SoakOptions(**{field: 0})
