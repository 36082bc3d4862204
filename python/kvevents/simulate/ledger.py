"""What the tiers of a mock engine really hold, from the workers' own books.

A worker writes a line for every block that came or went; nothing here has ever been an event. From all
workers' lines :class:`LedgerTruth` works out what the engine holds by the rule.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Self

from kvevents.simulate.truth import TierTruth

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path
    from types import TracebackType

    from kvevents.simulate.tier import Change, TierConfig

__all__ = ["LedgerTruth", "LedgerWriter", "ledger_path"]


def ledger_path(folder: Path, worker: int) -> Path:
    """Where a worker's ledger is."""
    return folder / f"ledger-{worker}"


class LedgerWriter:
    """Appends lines ``step connector sign hash``; another process sees them when the call returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, step: int, connector: int, changes: Iterable[Change]) -> None:
        """What one connector gained and lost in a step."""
        lines = [f"{step} {connector} {sign} {_to_text(block_hash)}\n" for sign, block_hash in changes]
        if lines:
            self._file.write("".join(lines).encode())

    def restarted(self, step: int) -> None:
        """Everything that the worker held is gone, before step ``step``."""
        self._file.write(b"%d 0 ! -\n" % step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._file.close()


class _Line(NamedTuple):
    step: int
    connector: int
    sign: str
    hash: bytes | int | None


class LedgerTruth(TierTruth):
    """The tiers' resident set by the rule, read on as the ledgers of all workers grow."""

    def __init__(self, folder: Path, tiers: Sequence[TierConfig]) -> None:
        """``tiers`` are the connectors of any one worker."""
        super().__init__(tiers)
        workers = tiers[0].num_workers
        self._files = [ledger_path(folder, w).open("rb") for w in range(workers)]
        self._rest = [b""] * workers
        self._lines: list[deque[_Line]] = [deque() for _ in range(workers)]

    def advance(self, step: int) -> None:
        """Take in everything up to and with ``step``."""
        for worker, lines in enumerate(self._lines):
            self._read(worker)
            while lines and lines[0].step <= step:
                line = lines.popleft()
                if line.hash is None:
                    self.restarted(worker)
                else:
                    self.vote(line.connector, line.hash, worker, holds=line.sign == "+")
        self.settle()

    def _read(self, worker: int) -> None:
        data = self._rest[worker] + self._files[worker].read()
        *whole, self._rest[worker] = data.split(b"\n")
        for line in whole:
            step, connector, sign, text = line.decode().split(" ")
            block_hash = None if sign == "!" else _from_text(text)
            self._lines[worker].append(_Line(int(step), int(connector), sign, block_hash))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()


def _to_text(block_hash: bytes | int) -> str:
    return block_hash.hex() if isinstance(block_hash, bytes) else f"i{block_hash}"


def _from_text(text: str) -> bytes | int:
    return int(text[1:]) if text[0] == "i" else bytes.fromhex(text)
