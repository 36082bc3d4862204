"""What the tiers of a mock engine really hold, from the workers' own books.

A worker writes a line for every block that came or went; nothing here has ever been an event. From all
workers' lines :class:`LedgerTruth` works out, by the plainest means, what the engine holds by the rule.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias

from kvevents._core import EventList
from kvevents.events import BlockRemoved, BlockStored
from kvevents.resident import ResidentSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path
    from types import TracebackType

    from kvevents.simulate.tier import Change, TierConfig

__all__ = ["LedgerTruth", "LedgerWriter", "ledger_path"]

_GROUP = 0  # the mock engine's pool has one group


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


_Key: TypeAlias = tuple[bytes | int, str]


class LedgerTruth:
    """The tiers' resident set by the rule, read on as the ledgers grow.

    A block counts for a connector when enough workers hold it, and for a medium when it counts for any of
    the connectors with that medium.
    """

    def __init__(self, folder: Path, tiers: Sequence[TierConfig]) -> None:
        """``tiers`` are the connectors of any one worker."""
        workers = tiers[0].num_workers
        self._files = [ledger_path(folder, w).open("rb") for w in range(workers)]
        self._rest = [b""] * workers
        self._lines: list[deque[_Line]] = [deque() for _ in range(workers)]
        self._media = [tier.medium for tier in tiers]
        self._needed = [
            {"all": workers, "any": 1}.get(str(tier.rule)) or int(str(tier.rule)) for tier in tiers
        ]
        self._holders: list[dict[bytes | int, set[int]]] = [{} for _ in tiers]
        self._accepting: dict[_Key, set[int]] = {}
        self._changed: dict[_Key, bool] = {}
        """Keys that came (True) or went, and how it was before."""
        self._resident = ResidentSet()

    def advance(self, step: int) -> None:
        """Take in everything up to and with ``step``."""
        for worker, lines in enumerate(self._lines):
            self._read(worker)
            while lines and lines[0].step <= step:
                self._take(worker, lines.popleft())
        gone = [key for key, before in self._changed.items() if before and key not in self._accepting]
        come = [key for key, before in self._changed.items() if not before and key in self._accepting]
        self._changed.clear()
        # The set is used for its digest only: each key goes in and out once.
        self._resident.apply(EventList([BlockRemoved([h], m, group_idx=_GROUP) for h, m in gone]))
        self._resident.apply(
            EventList([BlockStored([h], None, [], 0, None, m, None, group_idx=_GROUP) for h, m in come])
        )

    def digest(self) -> bytes:
        """Digest of the set; sums with that of other keys modulo 2^128."""
        return self._resident.digest()

    @property
    def resident(self) -> ResidentSet:
        """The set itself; not to be changed."""
        return self._resident

    def _read(self, worker: int) -> None:
        data = self._rest[worker] + self._files[worker].read()
        *whole, self._rest[worker] = data.split(b"\n")
        for line in whole:
            step, connector, sign, text = line.decode().split(" ")
            block_hash = None if sign == "!" else _from_text(text)
            self._lines[worker].append(_Line(int(step), int(connector), sign, block_hash))

    def _take(self, worker: int, line: _Line) -> None:
        if line.hash is None:
            for connector, holders in enumerate(self._holders):
                for block_hash in [h for h, w in holders.items() if worker in w]:
                    self._vote(connector, block_hash, worker, holds=False)
        else:
            self._vote(line.connector, line.hash, worker, holds=line.sign == "+")

    def _vote(self, connector: int, block_hash: bytes | int, worker: int, *, holds: bool) -> None:
        workers = self._holders[connector].setdefault(block_hash, set())
        if holds == (worker in workers):
            raise ValueError(f"worker {worker} has {block_hash!r} twice, or drops what it has not")
        (workers.add if holds else workers.discard)(worker)
        key = (block_hash, self._media[connector])
        accepting = self._accepting.setdefault(key, set())
        self._changed.setdefault(key, bool(accepting))
        (accepting.add if len(workers) >= self._needed[connector] else accepting.discard)(connector)
        if not accepting:
            del self._accepting[key]
        if not workers:
            del self._holders[connector][block_hash]

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
