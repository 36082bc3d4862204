"""``kvevents conform``: captures of real engines and golden vectors against this build."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvevents.cli.exits import EXIT_DIFFERENT
from kvevents.testing.captures import reproduce_capture
from kvevents.testing.vectors import check_frames, check_vectors, is_vector_file

__all__ = ["conform"]


def conform(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Captures and vector files, told apart by their content."),
    ],
) -> None:
    """Check captures and golden vectors against this build.

    Every vector must decode, and encode to the same bytes where its dialect can be written; every captured
    frame must decode and encode to the same bytes; and where the capture says enough, the same requests
    through this build's pool must give the same events. Exit code 1 when anything differs.
    """
    failed = False
    for path in files:
        ok, counts, difference = _check(path)
        failed |= not ok
        typer.echo(f"{path}: {'ok' if ok else 'FAILED'} {counts}")
        if difference is not None:
            typer.echo("\n".join(f"    {line}" for line in difference.splitlines()))
    if failed:
        raise typer.Exit(EXIT_DIFFERENT)


def _check(path: Path) -> tuple[bool, str, str | None]:
    if is_vector_file(path):
        vectors = check_vectors(path)
        return vectors.ok, str(vectors), vectors.first_difference
    frames = check_frames(path)
    pool = reproduce_capture(path)
    differs = pool.reproduced is False
    return (
        frames.ok and not differs,
        f"{frames} reproduced={pool.text}",
        frames.first_difference or (pool.reason if differs else None),
    )
