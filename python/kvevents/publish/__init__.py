"""Publishing: batches to sockets, and the replay of what was sent."""

from kvevents.publish.base import EventPublisher, MirrorStats, PublisherStats, ReplayStats
from kvevents.publish.factory import EventPublisherFactory
from kvevents.publish.null import NullEventPublisher
from kvevents.publish.zmq import ZmqEventPublisher

__all__ = [
    "EventPublisher",
    "EventPublisherFactory",
    "MirrorStats",
    "NullEventPublisher",
    "PublisherStats",
    "ReplayStats",
    "ZmqEventPublisher",
]
