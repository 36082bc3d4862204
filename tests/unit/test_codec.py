"""The codec on golden bytes, on what no vector holds, and on bytes that mean harm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvevents.testing import vectors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_every_vector_decodes_and_encodes_to_the_byte(golden: Callable[[str], Path]) -> None:
    report = vectors.check_vectors(golden("vectors.jsonl"))
    assert report.ok, report.first_difference
    assert str(report) == "vectors=454 decoded=454 encoded=448"


def test_every_captured_frame_comes_back_to_the_byte(golden: Callable[[str], Path]) -> None:
    frames = 0
    for path in sorted(golden("captures").glob("*.jsonl")):
        report = vectors.check_frames(path)
        assert report.ok, f"{path.name}: {report.first_difference}"
        frames += report.frames
    assert frames == 904
