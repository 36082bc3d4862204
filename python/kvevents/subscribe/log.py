"""Warnings that cannot flood a log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RateLimitedLog"]

_LENGTH = 1000


class RateLimitedLog:
    """Warns once in ``every_s`` about each kind of trouble; the next time it says how many were left out."""

    def __init__(self, name: str, clock: Callable[[], float], every_s: float = 10.0) -> None:
        self._log = logging.getLogger(name)
        self._clock = clock
        self._every_s = every_s
        self._next: dict[tuple[str, str], float] = {}
        self._left_out: dict[tuple[str, str], int] = {}

    def warning(self, source: str, kind: str, message: str, *args: object) -> None:
        """Warn about ``kind`` of trouble with ``source``."""
        key = (source, kind)
        now = self._clock()
        if now < self._next.get(key, now):
            self._left_out[key] = self._left_out.get(key, 0) + 1
            return
        self._next[key] = now + self._every_s
        left_out = self._left_out.pop(key, 0)
        more = f" ({left_out} more of this kind since the last time)" if left_out else ""
        self._log.warning("%s: %s%s", source, _short(message % args), more)


def _short(text: str) -> str:
    """What others sent may be in it, of any length."""
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}..."
