"""The side file: what the engine says of itself, batch by batch. Never on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["TruthReader", "TruthWriter", "add_digests"]


def add_digests(a: bytes, b: bytes) -> bytes:
    """The digest of two sets without a common key, from theirs: digests are sums modulo 2^128."""
    total = int.from_bytes(a, "big") + int.from_bytes(b, "big")
    return (total % (1 << 128)).to_bytes(16, "big")


class TruthWriter:
    """Appends ``sequence digest step`` lines; each is in the file before its batch is published."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def write(self, seq: int, digest: bytes, step: int) -> None:
        """One line, unbuffered: another process sees it when this returns."""
        self._file.write(b"%d %s %d\n" % (seq, digest.hex().encode(), step))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._file.close()


class TruthReader:
    """Digest and engine step by sequence, read on as the file grows."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._lines: list[tuple[bytes, int]] = []
        self._rest = b""

    def digest(self, seq: int) -> bytes | None:
        """The digest after batch ``seq``, ``None`` where the engine wrote none."""
        line = self._line(seq)
        return None if line is None else line[0]

    def step(self, seq: int) -> int | None:
        """The engine's step that made batch ``seq``."""
        line = self._line(seq)
        return None if line is None else line[1]

    def _line(self, seq: int) -> tuple[bytes, int] | None:
        if seq >= len(self._lines):
            lines = (self._rest + self._file.read()).split(b"\n")
            self._rest = lines.pop()
            for line in lines:
                number, digest, step = line.split(b" ")
                if int(number) != len(self._lines):
                    raise ValueError(f"line {len(self._lines)} of the side file is of sequence {number!r}")
                self._lines.append((bytes.fromhex(digest.decode()), int(step)))
        return self._lines[seq] if 0 <= seq < len(self._lines) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._file.close()
