"""What the documentation shows can be run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# Examples that need a peer or an engine, each with what gives it one.
WITH_PEER = {"kve1_client.py": "tests/integration/test_extended.py", "vllm_demo.py": "make demo-vllm"}
# A file without a main part is a module that another one imports.
EXAMPLES = sorted(
    p for p in (ROOT / "examples").glob("*.py") if p.name not in WITH_PEER and "__main__" in p.read_text()
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages whose programs are only compiled, each with its reason.
NOT_RUN = {
    "README.md": "has a test of its own, in which two processes talk",
    "subscriber.md": "reads an engine elsewhere until somebody closes it",
}
PROGRAMS = [p for p in PAGES if "```python\n" in p.read_text()]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    assert run(str(example), cwd=tmp_path)


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    """The blocks of a page are one program; one that cannot run alone is marked `text`."""
    program = tmp_path / "page.py"
    text = "\n".join(BLOCK.findall(page.read_text()))
    compile(text, page.name, "exec")
    if page.name in NOT_RUN:
        return
    assert not re.search(r"tcp://(?!127\.)[\w*.]+:\d", text), "a page that is run stays on this machine"
    # The usual ports may be taken on the machine that runs the tests.
    usual = sorted(set(re.findall(r"127\.0\.0\.1:(\d+)", text)))
    for port, other in zip(usual, free_ports(len(usual)), strict=True):
        text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{other}")
    program.write_text(text)
    run(str(program), cwd=tmp_path)


LINK = re.compile(r"\[[^\]]*\]\(([^)#:\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    missing = [t for t in LINK.findall(page.read_text()) if not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_tests_that_a_page_names_exist(page: Path) -> None:
    """A row of evidence is worth what the test behind it is."""
    text = page.read_text()
    files = set(re.findall(r"`(tests/[\w/]+\.py)", text))
    assert all((ROOT / f).is_file() for f in files), [f for f in files if not (ROOT / f).is_file()]
    for row in text.splitlines():
        inside = re.findall(r"`(tests/[\w/]+\.py)", row)
        sources = "".join((ROOT / f).read_text() for f in inside)
        for name in re.findall(r"::(\w+)", row) if inside else []:
            assert re.search(rf"(def|class) {name}\b", sources), f"{name} of {inside}"
