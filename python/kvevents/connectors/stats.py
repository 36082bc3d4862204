"""Transfer statistics of connectors, in vLLM's shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

__all__ = ["KVConnectorStats", "MultiKVConnectorStats"]


@dataclass
class KVConnectorStats(ABC):
    """What a connector observed since it was last asked.

    Made in the workers, sent to the scheduler by pickle, aggregated over workers and steps, and reduced
    to a few figures for a log line.
    """

    data: dict[Any, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the data as plain values."""
        return self.data

    @abstractmethod
    def reset(self) -> None:
        """Forget everything observed."""

    @abstractmethod
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what ``other`` observed; returns the sum, which may be ``self``."""

    @abstractmethod
    def reduce(self) -> dict[str, int | float]:
        """Return a few representative figures."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing was observed."""


@dataclass
class MultiKVConnectorStats(KVConnectorStats):
    """The statistics of several connectors, by their position in the ``MultiConnector``.

    ``data`` maps a position to the child's :class:`KVConnectorStats`; children without any are absent.
    vLLM keys by class name, under which two children of one class would share an entry.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return each child's values under ``"<position>:<class>"``."""
        return {f"{i}:{type(s).__name__}": s.to_dict() for i, s in sorted(self.data.items())}

    def reset(self) -> None:
        """Reset every child's statistics."""
        for stats in self.data.values():
            stats.reset()

    def aggregate(self, other: KVConnectorStats) -> MultiKVConnectorStats:
        """Aggregate child by child."""
        if not isinstance(other, MultiKVConnectorStats):
            msg = f"MultiKVConnectorStats aggregates its own kind only, not {type(other).__name__}"
            raise TypeError(msg)
        for i, stats in other.data.items():
            self.data[i] = self.data[i].aggregate(stats) if i in self.data else stats
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return every child's figures, each name prefixed with the child's position."""
        return {f"{i}.{k}": v for i, s in sorted(self.data.items()) for k, v in s.reduce().items()}

    def is_empty(self) -> bool:
        """Whether no child observed anything."""
        return all(s.is_empty() for s in self.data.values())
