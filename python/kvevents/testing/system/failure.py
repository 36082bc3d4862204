"""What a simulation finds: an invariant that does not hold."""

from __future__ import annotations

from kvevents.errors import KVEventsError

__all__ = ["SimulationError", "check"]


class SimulationError(KVEventsError, AssertionError):
    """An invariant does not hold; says which, where, and what was seen."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant
        """Its name. Shrinking keeps to failures of the same one."""
        self.what = what


def check(invariant: str, holds: bool, what: str, *values: object) -> None:
    """Raise :class:`SimulationError` unless it holds; ``what`` is formatted only then."""
    if not holds:
        raise SimulationError(invariant, what.format(*values))
