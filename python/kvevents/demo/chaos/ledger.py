"""The side file of one rank over all its lives: ``epoch sequence digest time-stamp``. Never on the wire."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Entry", "LedgerReader", "LedgerWriter", "ledger_path"]


def ledger_path(folder: str, source: str) -> Path:
    """Where a rank's side file is."""
    return Path(folder) / f"truth-{source.replace('/', '-')}"


class Entry(NamedTuple):
    """What an engine said of its pool as it was after one batch."""

    epoch: bytes
    seq: int
    digest: bytes


class LedgerWriter:
    """Appends lines; each is in the file before its batch is published."""

    def __init__(self, path: Path, epoch: bytes) -> None:
        self._file = path.open("ab", buffering=0)
        self._epoch = epoch.hex()

    def write(self, seq: int, digest: bytes, ts: float) -> None:
        """One line, unbuffered: another process sees it when this returns."""
        self._file.write(f"{self._epoch} {seq} {digest.hex()} {ts!r}\n".encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class LedgerReader:
    """Looks entries up while the file grows.

    A batch does not say of which life it is, its number and time stamp together do.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""
        self._by_stamp: dict[tuple[int, float], Entry] = {}
        self._by_epoch: dict[tuple[bytes, int], Entry] = {}

    def of_batch(self, seq: int, ts: float) -> Entry | None:
        """The entry of a batch that was received."""
        if (seq, ts) not in self._by_stamp:
            self._read()
        return self._by_stamp.get((seq, ts))

    def of_life(self, epoch: bytes, seq: int) -> Entry | None:
        """The entry of a number of a life that is known."""
        if (epoch, seq) not in self._by_epoch:
            self._read()
        return self._by_epoch.get((epoch, seq))

    def __len__(self) -> int:
        """Entries so far."""
        self._read()
        return len(self._by_epoch)

    def _read(self) -> None:
        lines = (self._rest + self._file.read()).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            epoch, seq, digest, ts = line.decode().split(" ")
            entry = Entry(bytes.fromhex(epoch), int(seq), bytes.fromhex(digest))
            self._by_stamp[entry.seq, float(ts)] = entry
            self._by_epoch[entry.epoch, entry.seq] = entry

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._file.close()
