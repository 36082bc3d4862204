"""Extended requests as frames, and their answers as values that can be relied on. See ``docs/wire.md``."""

from __future__ import annotations

from typing import Any

import msgspec

from kvevents.subscribe.actions import Head

__all__ = ["CODES", "EXTENDED", "FAR", "Answer", "AnswerError", "is_extended", "read_answer", "request"]

EXTENDED = b"KVE1"
FAR = (b"", (2**63 - 1).to_bytes(8, "big"))
"""A plain request that is answered by its end marker only, by servers of any kind."""
_MOST = 2**64 - 2
CODES = frozenset(
    {"too_old", "gone", "unknown_seq", "no_mirror", "mirror_lost", "busy", "bad_request", "unknown_op"}
)
"""What errors are called."""
_RANK = 2**32 - 1
_HEAD_BYTES = 64 * 1024
_HOLES = 256
_MEDIA = 64
_pack = msgspec.msgpack.Encoder().encode


class AnswerError(ValueError):
    """An answer that is not as the protocol says."""


class Answer(msgspec.Struct):
    """The head of an answer; fields that it did not have hold their defaults."""

    op: str
    epoch: bytes = b""
    oldest: int | None = None
    newest: int | None = None
    resume_seq: int | None = None
    next_sequence: int | None = None
    holes: list[tuple[int, int]] = []
    rank: int | None = None
    exact_for: str | None = None
    store_only: list[str] = []
    topic: str | None = None
    seq: int | None = None
    digest: bytes | None = None
    count: int | None = None
    piece: int | None = None
    more: bool | None = None
    blocks: int | None = None
    code: str | None = None

    @property
    def head(self) -> Head:
        """What it says of the publisher."""
        return Head(
            self.epoch, self.oldest, self.newest, self.resume_seq, self.next_sequence, tuple(self.holes)
        )


_decoder = msgspec.msgpack.Decoder(Answer)
_NUMBERS = ("oldest", "newest", "resume_seq", "next_sequence", "seq", "count", "piece", "blocks")


def is_extended(frames: list[bytes]) -> bool:
    """Whether this answers an extended request."""
    return len(frames) in {3, 4} and not frames[0] and frames[1] == EXTENDED


def request(**fields: Any) -> tuple[bytes, ...]:
    """Frames of a request; fields that are ``None`` are left out."""
    return (b"", EXTENDED, _pack({k: v for k, v in fields.items() if v is not None}))


def read_answer(frames: list[bytes]) -> Answer:
    """Read the head of an answer.

    :raises AnswerError: it has not the fields that it must have, or numbers that none can be.
    """
    if len(frames[2]) > _HEAD_BYTES:
        raise AnswerError(f"a head of {len(frames[2])} bytes")
    try:
        answer = _decoder.decode(frames[2])
    except (msgspec.DecodeError, RecursionError) as e:
        raise AnswerError(str(e)) from None
    for name in _NUMBERS:
        value = getattr(answer, name)
        # One past the last number is where a publisher would go on.
        most = _MOST + (name in {"resume_seq", "next_sequence"})
        if value is not None and not 0 <= value <= most:
            raise AnswerError(f"{name}: {value}")
    oldest, newest = answer.oldest, answer.newest
    if oldest is not None and (newest is None or newest < oldest):
        raise AnswerError(f"the oldest is {oldest}, the newest {newest}")
    if answer.rank is not None and not 0 <= answer.rank <= _RANK:
        raise AnswerError(f"rank: {answer.rank}")
    if len(answer.holes) > _HOLES or any(not 0 <= a <= b <= _MOST for a, b in answer.holes):
        raise AnswerError("holes")
    if len(answer.store_only) > _MEDIA:
        raise AnswerError(f"{len(answer.store_only)} media in store_only")
    if answer.op != "error" and len(answer.epoch) != 16:
        raise AnswerError(f"an epoch of {len(answer.epoch)} bytes")
    return answer
