"""The reader's side: sources, the sequence state machine, the subscriber.

pyzmq is imported with the first use of a name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvevents.subscribe.items import Batch, Gap, Item, Reset, Resume, Resumed, Snapshot, StoreOnly

if TYPE_CHECKING:
    from kvevents.subscribe.actions import Limits
    from kvevents.subscribe.aio import AsyncSubscriber
    from kvevents.subscribe.files import FileSources
    from kvevents.subscribe.source import Source
    from kvevents.subscribe.stats import SourceStats
    from kvevents.subscribe.timing import Timing
    from kvevents.subscribe.zmq import Subscriber

__all__ = [
    "AsyncSubscriber",
    "Batch",
    "FileSources",
    "Gap",
    "Item",
    "Limits",
    "Reset",
    "Resume",
    "Resumed",
    "Snapshot",
    "Source",
    "SourceStats",
    "StoreOnly",
    "Subscriber",
    "Timing",
]

_LAZY = {
    "AsyncSubscriber": "aio",
    "FileSources": "files",
    "Limits": "actions",
    "Source": "source",
    "SourceStats": "stats",
    "Subscriber": "zmq",
    "Timing": "timing",
}


def __getattr__(name: str) -> Any:
    """Names whose modules import pyzmq, or take long to import."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'kvevents.subscribe' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kvevents.subscribe.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lazy names too."""
    return sorted(globals().keys() | _LAZY.keys())
