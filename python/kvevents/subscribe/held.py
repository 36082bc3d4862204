"""Messages that wait for the end of a repair, within bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvevents.subscribe.actions import Limits, Message

__all__ = ["Held"]


class Held:
    """Messages by number; when they are too many the highest goes, because the log has it for longest."""

    __slots__ = ("_limits", "_messages", "nbytes")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._messages: dict[int, Message] = {}
        self.nbytes = 0

    def add(self, m: Message) -> None:
        """Keep a message of a number that is not kept yet, if there is room for it or can be made."""
        limits = self._limits
        while self._messages and (
            len(self._messages) >= limits.hold_batches or self.nbytes + m.nbytes > limits.hold_bytes
        ):
            top = max(self._messages)
            if top < m.seq:
                return
            self.pop(top)
        if m.nbytes <= limits.hold_bytes:
            self._messages[m.seq] = m
            self.nbytes += m.nbytes

    def get(self, seq: int) -> Message | None:
        """The message of a number."""
        return self._messages.get(seq)

    def pop(self, seq: int) -> Message | None:
        """The message of a number, which is kept no longer."""
        m = self._messages.pop(seq, None)
        if m is not None:
            self.nbytes -= m.nbytes
        return m

    def drop_below(self, seq: int) -> None:
        """Keep nothing below ``seq``."""
        for number in [n for n in self._messages if n < seq]:
            self.pop(number)

    @property
    def lowest(self) -> int | None:
        """The lowest number."""
        return min(self._messages, default=None)

    @property
    def highest(self) -> int | None:
        """The highest number."""
        return max(self._messages, default=None)

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Message]:
        """In the order of their numbers."""
        return iter([self._messages[n] for n in sorted(self._messages)])
