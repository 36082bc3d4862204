"""No publisher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvevents.publish.base import EventPublisher

if TYPE_CHECKING:
    from kvevents.events import EventBatch

__all__ = ["NullEventPublisher"]


class NullEventPublisher(EventPublisher):
    """Takes batches and forgets them: what an engine gets while events are off."""

    def publish(self, events: EventBatch) -> None:
        """Forget the batch."""

    def shutdown(self) -> None:
        """Nothing to stop."""
