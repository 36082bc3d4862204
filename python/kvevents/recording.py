"""A stream in a file: messages byte for byte, when they came, and what was missed.

A file is eight bytes (:data:`MAGIC`) and then records: length and CRC-32 of the body (four bytes each,
little endian) and the body, a msgpack array that begins with its kind. A file can be appended to; one that
was cut (a full disk, a killed recorder) is read up to its last whole record.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self, TypeAlias

import msgspec

from kvevents.errors import EventTypeError, RecordingError
from kvevents.subscribe.items import Batch, Gap, Reset, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from kvevents.subscribe.items import Item

__all__ = ["MAGIC", "Begin", "Mark", "Message", "Record", "RecordingWriter", "read_recording"]

MAGIC = b"KVEREC1\n"
_HEAD = struct.Struct("<II")


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """A recorder began, or went on, to write."""

    time: float
    """Of the recorder's clock, in seconds since 1970, as in every record."""
    source: str
    """What the recorder calls the source."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag="message"):
    """One message of the stream."""

    time: float
    """When it was received."""
    seq: int
    topic: bytes
    payload: bytes
    replayed: bool
    """Whether it came from the replay socket."""


class Mark(msgspec.Struct, frozen=True, array_like=True, tag="mark"):
    """Something that is no message: ``gap`` (``first`` to ``last`` will not come), ``reset`` or ``snapshot``.

    A snapshot holds everything below ``first``; its payload is for :meth:`kvevents.EventList.from_bytes`.
    """

    time: float
    kind: str
    reason: str
    first: int | None = None
    last: int | None = None
    payload: bytes | None = None


Record: TypeAlias = Begin | Message | Mark


class RecordingWriter:
    """Appends to a recording. Not thread-safe. Use it as a context manager.

    What was written is handed to the system by :meth:`flush` and by :meth:`close`.

    :param append: go on in a file that is there; a cut record at its end is taken off (see
        :attr:`removed`).
    :raises FileExistsError: it is there and ``append`` was not asked for.
    :raises RecordingError: with ``append``: it is no recording, or is damaged in its middle.
    """

    def __init__(self, path: str | os.PathLike[str], source: str, *, append: bool = False) -> None:
        self.path = Path(path)
        self.removed = 0
        """Bytes of a cut record that were taken off the end."""
        if append and self.path.exists() and self.path.stat().st_size:
            end = _end_of_whole_records(self.path)
            self._file: BinaryIO = self.path.open("r+b")
            self.removed = self._file.seek(0, os.SEEK_END) - end
            self._file.truncate(end)
            self._file.seek(end)
        else:
            self._file = self.path.open("ab" if append else "xb")
        if self._file.tell() == 0:
            self._file.write(MAGIC)
        self._encode = msgspec.msgpack.Encoder().encode
        self.write(Begin(time.time(), source))
        self.flush()

    def write(self, record: Record) -> None:
        """Append one record."""
        body = self._encode(record)
        self._file.write(_HEAD.pack(len(body), zlib.crc32(body)))
        self._file.write(body)

    def write_item(self, item: Item, topic: bytes) -> None:
        """Append what a subscriber with ``keep_payload=True`` or ``decode=False`` yields.

        :raises EventTypeError: a batch without its bytes.
        """
        now = time.time()
        match item:
            case Batch():
                if item.payload is None:
                    raise EventTypeError(
                        f"batch {item.seq} of {item.source!r} has no bytes: subscribe with keep_payload=True"
                    )
                self.write(Message(now, item.seq, topic, item.payload, item.replayed))
            case Gap():
                self.write(Mark(now, "gap", item.reason, item.first, item.last))
            case Reset():
                self.write(Mark(now, "reset", item.reason))
            case Snapshot():
                self.write(Mark(now, "snapshot", "", item.resume_seq, payload=item.events.to_bytes()))

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close; may be called again."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_recording(
    path: str | os.PathLike[str], on_cut: Callable[[int, int], object] | None = None
) -> Iterator[Record]:
    """Read the records of a file, in the order in which they were written.

    :param on_cut: called at the end with offset and number of bytes, where the file ends inside a record.
    :raises RecordingError: it is no recording, or a record in its middle is damaged; what stands before was
        yielded.
    """
    decoder = msgspec.msgpack.Decoder(Record)
    for offset, body in _bodies(Path(path), on_cut):
        try:
            record: Record = decoder.decode(body)
        except msgspec.DecodeError as e:
            raise RecordingError(f"{path}: byte {offset}: a record of another version: {e}") from e
        yield record


def _bodies(path: Path, on_cut: Callable[[int, int], object] | None) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        magic = file.read(len(MAGIC))
        offset = len(magic)
        if not magic or not MAGIC.startswith(magic):
            raise RecordingError(f"{path}: no recording: begins with {magic!r}, not with {MAGIC!r}")
        if offset < len(MAGIC):
            offset = 0
        while 0 < offset < size:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                break
            length, checksum = _HEAD.unpack(head)
            end = offset + _HEAD.size + length
            # A claim is not believed before the file is seen to be so long.
            if end > size:
                break
            body = file.read(length)
            if zlib.crc32(body) != checksum or not body:
                if end == size:
                    break
                raise RecordingError(
                    f"{path}: byte {offset}: the record is damaged (its checksum differs) and "
                    f"{size - end} bytes follow; what stands before it can be read"
                )
            yield offset, body
            offset = end
        if offset < size and on_cut is not None:
            on_cut(offset, size - offset)


def _end_of_whole_records(path: Path) -> int:
    end = path.stat().st_size

    def cut(offset: int, _count: int) -> None:
        nonlocal end
        end = offset

    for _ in _bodies(path, cut):
        pass
    return end
