"""Recordings: what was written is read, a cut tail is told, damage in the middle is an error."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import pytest

from kvevents import BlockStored, EventList
from kvevents.errors import EventTypeError, RecordingError
from kvevents.recording import MAGIC, Begin, Mark, Message, RecordingWriter, read_recording
from kvevents.subscribe import Batch, Gap, Reset, Snapshot

if TYPE_CHECKING:
    from pathlib import Path

EVENTS = EventList([BlockStored([7], None, [1, 2, 3, 4], 4, None, "GPU", None)])


def batch(seq: int, payload: bytes = b"payload", *, replayed: bool = False) -> Batch:
    return Batch("s", seq, None, replayed, payload)


def write(path: Path, n: int = 5, **options: Any) -> list[Any]:
    with RecordingWriter(path, "s", **options) as out:
        for seq in range(n):
            out.write_item(batch(seq, b"p" * seq, replayed=seq == 2), b"topic")
    return list(read_recording(path))


def test_every_item_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "r"
    items = [
        batch(0, b"\x00\xff" * 100),
        batch(2**64 - 2, b"", replayed=True),
        Gap("s", 3, 9, "too old"),
        Reset("s", "restart"),
        Snapshot("s", 17, EVENTS),
    ]
    with RecordingWriter(path, "tcp://x") as out:
        for item in items:
            out.write_item(item, b"t\xff")
        with pytest.raises(EventTypeError, match="keep_payload"):
            out.write_item(Batch("s", 1, None, False), b"")
    begin, first, second, gap, reset, snapshot = read_recording(path)
    assert isinstance(begin, Begin)
    assert begin.source == "tcp://x"
    assert first == Message(first.time, 0, b"t\xff", b"\x00\xff" * 100, replayed=False)
    assert second == Message(second.time, 2**64 - 2, b"t\xff", b"", replayed=True)
    assert begin.time <= first.time <= second.time < begin.time + 60
    assert gap == Mark(gap.time, "gap", "too old", 3, 9)
    assert reset == Mark(reset.time, "reset", "restart")
    assert (snapshot.kind, snapshot.first) == ("snapshot", 17)
    assert EventList.from_bytes(snapshot.payload) == EVENTS


def test_a_recording_is_appended_to_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "r"
    before = write(path)
    with pytest.raises(FileExistsError):
        RecordingWriter(path, "s")
    after = write(path, append=True)
    assert after[: len(before)] == before
    assert [type(r) for r in after[len(before) :]] == [Begin] + [Message] * 5
    fresh = tmp_path / "fresh"
    (tmp_path / "empty").touch()
    assert len(write(fresh, append=True)) == len(write(tmp_path / "empty", append=True)) == 6


def test_a_file_cut_anywhere_is_read_up_to_its_last_whole_record(tmp_path: Path) -> None:
    path, cut = tmp_path / "r", tmp_path / "cut"
    records = write(path)
    data = path.read_bytes()
    whole = 0
    for size in range(1, len(data)):
        cut.write_bytes(data[:size])
        told: list[tuple[int, int]] = []
        got = list(read_recording(cut, lambda *at, told=told: told.append(at)))
        assert got == records[: len(got)]
        assert len(got) >= whole
        whole = len(got)
        if told:
            ((offset, missing),) = told
            assert offset + missing == size
        else:
            assert size >= len(MAGIC)
        if size % 7 == 0:
            with RecordingWriter(cut, "again", append=True) as out:
                assert out.removed == (told[0][1] if told else 0)
            assert list(read_recording(cut))[:-1] == got
    assert whole == len(records) - 1


def test_damage_in_the_middle_is_an_error_that_says_where(tmp_path: Path) -> None:
    path = tmp_path / "r"
    write(path)
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<I", data, len(MAGIC))
    second = len(MAGIC) + 8 + length
    data[second + 9] ^= 1
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=f"byte {second}: the record is damaged"):
        list(read_recording(path))
    with pytest.raises(RecordingError, match="damaged"):
        RecordingWriter(path, "s", append=True)
    assert path.read_bytes() == data
    for other in (b"", b"something else", b"KVEREC2\n"):
        path.write_bytes(other)
        with pytest.raises(RecordingError, match="no recording"):
            list(read_recording(path))


def test_a_damaged_last_record_is_a_cut_one(tmp_path: Path) -> None:
    path = tmp_path / "r"
    records = write(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    told: list[tuple[int, int]] = []
    assert list(read_recording(path, lambda *at: told.append(at))) == records[:-1]
    assert len(told) == 1


def test_a_length_that_is_only_claimed_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_bytes(MAGIC + struct.pack("<II", 2**32 - 1, 0) + b"x" * 10)
    told: list[tuple[int, int]] = []
    assert list(read_recording(path, lambda *at: told.append(at))) == []
    assert told == [(8, 18)]
