"""Publishing: batches to sockets, and the replay of what was sent."""

from kvevents.publish.endpoints import Endpoint, parse

__all__ = ["Endpoint", "parse"]
