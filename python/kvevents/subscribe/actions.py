"""The vocabulary of the sequence state machines: what they are told, what they answer, their bounds."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

__all__ = [
    "Action",
    "Apply",
    "Ask",
    "Compare",
    "Fetch",
    "Head",
    "Hello",
    "Limits",
    "Lose",
    "Message",
    "Policy",
    "Range",
    "Request",
    "Restore",
    "Skip",
    "Wipe",
]

Policy: TypeAlias = Literal["replay", "snapshot", "wipe", "keep_and_flag"]
"""What to do about a hole, see ``docs/subscriber.md``."""


class Message(NamedTuple):
    """One message as the driver received it."""

    seq: int
    digest: int
    """Any digest of the payload bytes that is equal for equal bytes; 64 bits or more."""
    ts: float | None
    """The publisher's time stamp, where the payload has one."""
    nbytes: int = 0
    """What holding it costs."""
    content: Any = None
    """Handed through untouched."""
    poisoned: bool = False
    """The payload is no batch."""
    partial: bool = False
    """Events of the batch could not be decoded."""


class Head(NamedTuple):
    """What every answer of an extended server says of its publisher."""

    epoch: bytes
    """This life of the publisher."""
    oldest: int | None = None
    """The oldest number that can be replayed."""
    newest: int | None = None
    """The newest number that was sent."""
    resume_seq: int | None = None
    """What a snapshot made now would not contain; ``None``: there are none."""
    next_sequence: int | None = None
    """The number of the next batch; in answers to ``hello``."""
    holes: tuple[tuple[int, int], ...] = ()
    """Numbers that were never sent; in answers to ``hello``."""


class Apply(NamedTuple):
    """Deliver this message."""

    message: Message
    replayed: bool


class Skip(NamedTuple):
    """Count this message and forget it: ``duplicate``, ``late`` or ``poisoned``."""

    message: Message
    why: Literal["duplicate", "late", "poisoned"]


class Ask(NamedTuple):
    """Ask the replay socket for everything from ``start`` on; replaces a request that is under way.

    Report what comes by :meth:`Sequence.replayed`, the end marker by :meth:`Sequence.replay_ended`, anything
    else by
    :meth:`Sequence.replay_failed`.
    """

    start: int
    attempt: int
    """1 for the first try without progress; wait longer from 2 on."""
    why: Literal["connect", "gap", "tail", "probe"]


class Hello(NamedTuple):
    """Ask an extended server who it is. Answer: :meth:`Sequence.hello`."""

    attempt: int
    why: Literal["connect", "doubt", "look", "heal"]


class Range(NamedTuple):
    """Ask for the batches ``first`` to ``last``.

    Answers: :meth:`Sequence.replayed` for each, then :meth:`Sequence.replay_ended`; or
    :meth:`Sequence.too_old`.
    """

    first: int
    last: int
    attempt: int
    anchor: bool = False
    """One batch of this life is wanted, not what it says."""


class Fetch(NamedTuple):
    """Ask for a snapshot that contains everything below ``at_least``. Answer: :meth:`Sequence.restored`."""

    at_least: int
    attempt: int


class Compare(NamedTuple):
    """Ask for the digest behind ``seq``. Answer: :meth:`Sequence.digested`."""

    seq: int
    digest: bytes
    attempt: int


class Restore(NamedTuple):
    """Replace what is known by a snapshot."""

    resume_seq: int
    content: Any


class Lose(NamedTuple):
    """Numbers ``first`` to ``last`` will not come."""

    first: int
    last: int
    reason: str


class Wipe(NamedTuple):
    """Forget the source's state: a new life (``restart``, ``unsure``), or what was known is not kept."""

    reason: Literal["restart", "unsure", "gap", "drift"]


Request: TypeAlias = Ask | Hello | Range | Fetch | Compare
Action: TypeAlias = Apply | Skip | Lose | Wipe | Restore | Request


class Limits(NamedTuple):
    """Bounds of one source's memory and patience."""

    remember: int = 1024
    """Numbers of which the digest is kept, to know them again."""
    hold_batches: int = 4096
    """Messages kept while a repair runs."""
    hold_bytes: int = 64 << 20
    """Their bytes."""
    snapshot_bytes: int = 1 << 30
    """Payload bytes of one snapshot."""
    attempts: int = 3
    """Requests without progress before numbers are lost."""
    slack_s: float = 1.0
    """Stamps of one life may be out of order by so much: batches of several threads, small steps of a
    clock."""
    late_run: int = 8
    """So many late messages with consecutive numbers are no late messages."""
