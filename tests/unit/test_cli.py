"""The command line as a whole: help, one line a failure, exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvevents.cli import main

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ["demo", "simulate", "tail", "index", "record", "replay", "conform"]


def test_every_command_and_every_option_has_help(capsys):
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"^\s+{command}\s+\S", overview, re.MULTILINE), command
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        options = text[text.index("Options:") :]
        for entry in re.split(r"\n  (?=-)", options)[1:]:
            words = entry.split()
            assert len([w for w in words if not w.startswith(("-", "[")) and w != w.upper()]) >= 2, entry


def test_the_docs_name_every_option(capsys):
    docs = (ROOT / "docs" / "cli.md").read_text()
    for command in COMMANDS:
        main([command, "--help"])
        section = docs[docs.index(f"## `kvevents {command}") :].split("\n## ")[0]
        for option in re.findall(r"^\s+(?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE):
            if option != "--help":
                assert f"`{option}" in section, (command, option)


def test_no_arguments_shows_the_help_and_is_usage(capsys):
    assert main([]) == 2
    assert "simulate" in capsys.readouterr().out


def test_version(capsys):
    import kvevents

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvevents {kvevents.__version__}\n"


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["nonsense"], 2, "nonsense"),
        (["demo", "--nonsense"], 2, "--nonsense"),
        (["demo", "--requests", "many"], 2, "--requests"),
        (["demo", "--requests", "0"], 2, "--requests"),
        (["demo", "--drop", "1.5"], 2, "--drop"),
        (["demo", "--trace", "/nothing/here"], 3, "/nothing/here"),
        (["simulate", "--dialect", "klingon"], 2, "vllm-map-0.33"),
        (["simulate", "--workload", "poetry"], 2, "shared-prefix"),
        (["simulate", "--endpoint", "tcp://127.0.0.1"], 2, "tcp://127.0.0.1"),
        (["simulate", "--trace", "/nothing/here", "--endpoint", "tcp://127.0.0.1:0"], 3, "/nothing/here"),
        (["tail"], 2, "ENDPOINT"),
        (["tail", "tcp://nowhere"], 2, "tcp://nowhere"),
        (["tail", "tcp://0.0.0.0:5557"], 2, "0.0.0.0"),
        (["conform"], 2, "FILE"),
        (["conform", "/nothing/here"], 3, "/nothing/here"),
    ],
)
def test_a_failure_is_one_line_and_a_code(args, code, says, capsys):
    assert main(args) == code
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.count("\n") == 1
    assert seen.err.startswith("kvevents: ")
    assert says.lower() in seen.err.lower()


def test_a_bug_is_one_line_too(monkeypatch, capsys):
    from kvevents.cli import app

    def broken(**_):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(app, "app", broken)
    assert main(["demo"]) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_typer_and_rich_load_only_with_the_command_line():
    code = (
        "import sys, kvevents, kvevents.simulate; print(sorted({'typer', 'rich', 'zmq'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_python_dash_m_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "kvevents", "conform", "/nothing/here"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "args", [["--rule", "2"], ["--same-medium"], ["--workers", "2", "--rule", "3"], ["--workers", "0"]]
)
def test_workers_that_cannot_be_are_usage(args, capsys):
    assert main(["demo", *args]) == 2
    assert capsys.readouterr().out == ""
