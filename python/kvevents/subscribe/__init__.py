"""The reader's side: what a subscriber yields, and how it is told what to do."""

from __future__ import annotations

from kvevents.subscribe.items import Batch, Gap, Item, Reset, Snapshot

__all__ = ["Batch", "Gap", "Item", "Reset", "Snapshot"]
