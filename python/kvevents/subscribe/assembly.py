"""A snapshot while its pieces come: bounded, resumed where it was, compared with its digest at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvevents._core import ResidentSet
from kvevents.codec import decode
from kvevents.errors import DecodeError
from kvevents.events import EventList
from kvevents.subscribe.extended import AnswerError, request

if TYPE_CHECKING:
    from kvevents.subscribe.extended import Answer

__all__ = ["Assembly", "Whole"]

_COUNT = 8
"""Pieces that are asked for at once."""


class Whole(NamedTuple):
    """A snapshot that is what its publisher says."""

    epoch: bytes
    resume_seq: int
    digest: bytes
    events: EventList


class Assembly:
    """The pieces of one snapshot."""

    def __init__(self, at_least: int, max_bytes: int) -> None:
        self._at_least = at_least
        self._max_bytes = max_bytes
        self._first: Answer | None = None
        self._pieces: list[EventList] = []
        self._number = 0
        self._set = ResidentSet()
        self._asked = 0
        self.nbytes = 0

    def helps(self, epoch: bytes | None, at_least: int) -> bool:
        """Whether to go on with it, rather than to begin anew."""
        first = self._first
        if first is None or first.resume_seq is None:
            return at_least == self._at_least
        return first.epoch == epoch and first.resume_seq >= at_least

    def request(self) -> tuple[bytes, ...]:
        """Ask for the pieces that come next."""
        self._asked = self._number + _COUNT
        if self._first is None:
            return request(op="snapshot", at_least=self._at_least, count=_COUNT)
        return request(op="snapshot", resume_seq=self._first.resume_seq, piece=self._number, count=_COUNT)

    def add(self, answer: Answer, payload: bytes) -> Whole | None:
        """Take one piece; the snapshot, when this was the last.

        :raises AnswerError: it is not the piece that was expected, too much, or not what its digest says.
        """
        first = self._first or answer
        if answer.resume_seq is None or answer.piece != self._number or answer.more is None:
            raise AnswerError(f"piece {answer.piece} of {answer.resume_seq}, not {self._number}")
        same = (answer.resume_seq, answer.digest, answer.epoch) == (
            first.resume_seq,
            first.digest,
            first.epoch,
        )
        if not same or answer.digest is None:
            raise AnswerError("a piece of another snapshot")
        self.nbytes += len(payload)
        if self.nbytes > self._max_bytes:
            raise AnswerError(f"more than {self._max_bytes} bytes")
        try:
            events = decode(payload, strict=True).events
        except DecodeError as e:
            raise AnswerError(f"piece {self._number}: {e}") from None
        assert isinstance(events, EventList)  # noqa: S101 - what decode gives
        stores, removals = events.num_blocks
        if self._set.apply(events) or removals:
            raise AnswerError(f"piece {self._number} has more than stores")
        if not stores and answer.more:
            raise AnswerError(f"piece {self._number} is empty, and more are to follow")
        self._first = first
        self._number += 1
        self._pieces.append(events)
        # Pieces of like size are joined, so that each event is copied a few times only.
        while len(self._pieces) > 1 and len(self._pieces[-2]) <= len(self._pieces[-1]):
            last = self._pieces.pop()
            self._pieces[-1] += last
        if answer.more:
            return None
        if self._set.digest() != answer.digest or (answer.blocks or 0) != len(self._set):
            raise AnswerError(f"{len(self._set)} blocks that are not those of the digest")
        events = EventList()
        for piece in reversed(self._pieces):
            events = piece + events
        return Whole(first.epoch, answer.resume_seq, answer.digest, events)

    @property
    def wants_more(self) -> bool:
        """Whether all that was asked for has come."""
        return self._number >= self._asked
