"""The side file: what the engine's pool says of itself, batch by batch. Never on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["TruthReader", "TruthWriter"]


class TruthWriter:
    """Appends ``sequence digest`` lines; each is in the file before its batch is published."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def write(self, seq: int, digest: bytes) -> None:
        """One line, unbuffered: another process sees it when this returns."""
        self._file.write(b"%d %s\n" % (seq, digest.hex().encode()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._file.close()


class TruthReader:
    """The digests by sequence, read on as the file grows."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._digests: list[bytes] = []
        self._rest = b""

    def digest(self, seq: int) -> bytes | None:
        """The digest after batch ``seq``, ``None`` where the engine wrote none."""
        if seq >= len(self._digests):
            lines = (self._rest + self._file.read()).split(b"\n")
            self._rest = lines.pop()
            for line in lines:
                number, _, digest = line.partition(b" ")
                if int(number) != len(self._digests):
                    raise ValueError(f"line {len(self._digests)} of the side file is of sequence {number!r}")
                self._digests.append(bytes.fromhex(digest.decode()))
        return self._digests[seq] if 0 <= seq < len(self._digests) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._file.close()
