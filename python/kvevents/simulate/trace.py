"""Recorded traffic in the format of Mooncake's traces.

One JSON object a line: ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` (tokens) and
``hash_ids``. An id stands for 512 tokens: equal ids are equal tokens behind equal prefixes; the last id of a
request is cut to ``input_length``. The trace holds no text, so tokens are made up: token j of id k is word j
of SHAKE-128 over (seed, k), cut to the vocabulary. It depends on nothing else, so prefixes that were
shared when the trace was recorded are shared again.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvevents.errors import TraceError
from kvevents.simulate.workloads import Request, tokens_from_bytes

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["TOKENS_PER_ID", "TraceRecord", "TraceTokens", "read_trace", "trace_requests"]

TOKENS_PER_ID = 512
"""Tokens that one id of a trace stands for."""

_PREVIEW = 80


class TraceRecord(msgspec.Struct, frozen=True):
    """One line of a trace."""

    timestamp: float
    """Arrival in milliseconds from the start of the trace."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def parse_record(line: bytes) -> TraceRecord:
    """One line of a trace file.

    :raises ValueError: says what is wrong and what was seen; nothing of the line is used.
    """
    record = msgspec.json.decode(line, type=TraceRecord)
    if record.input_length < 1:
        raise ValueError(f"input_length is {record.input_length}, at least 1 is needed")
    if record.output_length < 0:
        raise ValueError(f"output_length is {record.output_length}, it cannot be negative")
    if record.timestamp < 0:
        raise ValueError(f"timestamp is {record.timestamp}, it cannot be negative")
    needed = -(-record.input_length // TOKENS_PER_ID)
    if len(record.hash_ids) != needed:
        raise ValueError(
            f"{len(record.hash_ids)} hash_ids for input_length {record.input_length}, "
            f"which needs {needed} of {TOKENS_PER_ID} tokens"
        )
    for k in record.hash_ids:
        if not 0 <= k < 1 << 64:
            raise ValueError(f"hash id {k} is outside 0..2^64-1")
    return record


def read_trace(
    path: str | Path,
    *,
    skip_bad: bool = False,
    on_skip: Callable[[TraceError], None] | None = None,
) -> Iterator[TraceRecord]:
    """The records of a trace file, in file order; blank lines are no records.

    With ``skip_bad`` a broken line is left out and given to ``on_skip``, and the rest is used.

    :raises TraceError: on a broken line (without ``skip_bad``), with its number and what was seen.
    :raises OSError: where the file cannot be read.
    """
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = parse_record(line)
            except ValueError as e:
                seen = line.rstrip(b"\r\n")
                shown = repr(seen[:_PREVIEW].decode("utf-8", "replace")) + (
                    "..." if len(seen) > _PREVIEW else ""
                )
                error = TraceError(f"{path}: line {number}: {e}; seen: {shown}")
                if not skip_bad:
                    raise error from e
                if on_skip is not None:
                    on_skip(error)
                continue
            yield record


class TraceTokens:
    """The tokens behind the ids of a trace: a fixed function of ``seed``, id and position.

    Holds no state but the seed; any thread may use it.
    """

    def __init__(self, seed: int = 0) -> None:
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed is {seed}, it must be within 0..2^64-1")
        self._seed = seed

    def prompt(self, hash_ids: Iterable[int], input_length: int) -> array[int]:
        """The ``input_length`` tokens of a request; the last id is cut to it."""
        seed = self._seed
        parts = [
            hashlib.shake_128(struct.pack("<8sQQ", b"prompt", seed, k)).digest(4 * TOKENS_PER_ID)
            for k in hash_ids
        ]
        return tokens_from_bytes(b"".join(parts)[: 4 * input_length])

    def output(self, request: int, output_length: int) -> array[int]:
        """Tokens that no other request of the trace has: those that the model answered with."""
        packed = struct.pack("<8sQQ", b"output", self._seed, request)
        return tokens_from_bytes(hashlib.shake_128(packed).digest(4 * output_length))


def trace_requests(records: Iterable[TraceRecord], *, seed: int = 0) -> Iterator[Request]:
    """The requests of a trace, tokens filled in, in the order of the records.

    A record with ``output_length`` 0 still samples one token: an engine always does.
    """
    tokens = TraceTokens(seed)
    for n, record in enumerate(records):
        yield Request(
            f"trace-{n}",
            tokens.prompt(record.hash_ids, record.input_length),
            tokens.output(n, max(1, record.output_length)),
            record.timestamp / 1000.0,
        )
