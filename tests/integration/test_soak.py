"""The soak in its short form: all of it but the verdict on memory."""

from __future__ import annotations

import pytest

from kvevents.demo.soak import SoakOptions, run_soak
from kvevents.demo.soak.__main__ import main

pytestmark = pytest.mark.timeout(150)


def test_everybody_holds_the_same_after_faults_restarts_and_overflows():
    told = []
    result = run_soak(SoakOptions(seconds=18, every_s=3, quiet_s=8, memory=False), told.append)
    assert result.reasons == []
    assert result.verdict == "sound"
    assert len(result.quiet) >= 2
    assert {g.process for g in result.memory} == {
        "parent", "engine a", "engine b", "engine c", "link", "reader", "visitor",
    }  # fmt: skip
    assert told[0].startswith("   0 s: ")


def test_arguments_that_cannot_run_are_one_line_and_a_code(capsys):
    assert main(["--seconds", "0"]) == 2
    assert capsys.readouterr().err == "soak: seconds is 0.0, more than 0 is needed\n"
