"""`kvevents doctor`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from kvevents.cli import main
from kvevents.integrations.vllm.names import NAMES

FAKE = Path(__file__).resolve().parent.parent / "vllm_plugin" / "fake"


def test_without_vllm_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["doctor", "--vllm"]) == 3
    assert "no vLLM" in capsys.readouterr().err


def test_it_wants_to_know_what_to_look_at(capsys):
    assert main(["doctor"]) == 2
    assert "--vllm" in capsys.readouterr().err


@pytest.fixture
def fake_vllm(monkeypatch):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FAKE))
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("vllm", "kvevents.integrations.vllm.")):
            del sys.modules[name]


@pytest.mark.parametrize(("parts", "code"), [("publisher,aggregator,multi", 0), ("publisher,pool", 1)])
def test_one_line_a_part_and_why_one_is_not_plugged_in(fake_vllm, monkeypatch, capsys, parts, code):
    monkeypatch.setenv("KVEVENTS_VLLM", parts)
    from kvevents.integrations.vllm import plugin

    monkeypatch.setattr(plugin, "_reports", [])
    assert main(["doctor", "--vllm"]) == code
    shown = capsys.readouterr().out
    assert "vLLM 0.32.0 (run" in shown
    for part in NAMES:
        assert f"  {part} " in shown
    assert ("fallback" in shown) is ("pool" in parts)
