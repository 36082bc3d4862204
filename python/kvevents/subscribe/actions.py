"""The vocabulary of the sequence state machine: what it is told, what it answers, its bounds."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

__all__ = ["Action", "Apply", "Ask", "Limits", "Lose", "Message", "Skip", "Wipe"]


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


class Lose(NamedTuple):
    """Numbers ``first`` to ``last`` will not come."""

    first: int
    last: int
    reason: str


class Wipe(NamedTuple):
    """A new life: forget the source's state. ``restart`` or ``unsure``."""

    reason: Literal["restart", "unsure"]


Action: TypeAlias = Apply | Skip | Ask | Lose | Wipe


class Limits(NamedTuple):
    """Bounds of one source's memory and patience."""

    remember: int = 1024
    """Numbers of which the digest is kept, to know them again."""
    hold_batches: int = 4096
    """Messages kept while a repair runs."""
    hold_bytes: int = 64 << 20
    """Their bytes."""
    attempts: int = 3
    """Requests without progress before numbers are lost."""
    slack_s: float = 1.0
    """Stamps of one life may be out of order by so much: batches of several threads, small steps of a
    clock."""
    late_run: int = 8
    """So many late messages with consecutive numbers are no late messages."""
