"""Media of which a publisher says that what leaves them is never announced."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["StoreOnlyMedia"]


class StoreOnlyMedia:
    """A set that grows; written by the engine's threads, read by the replay server's."""

    def __init__(self, media: Iterable[str] = ()) -> None:
        self._lock = threading.Lock()
        self._media = tuple(dict.fromkeys(media))

    def add(self, media: Iterable[str]) -> None:
        """Say it of more media."""
        with self._lock:
            self._media = tuple(dict.fromkeys((*self._media, *media)))

    @property
    def media(self) -> tuple[str, ...]:
        """All of them, in the order in which they came."""
        return self._media
