"""Opening the publisher's sockets: every failure at start is one clear exception."""

from __future__ import annotations

import errno
import threading
import time
from typing import TYPE_CHECKING, Any

import zmq
import zmq.backend

from kvevents.errors import ConfigError, EndpointInUseError, PublisherError
from kvevents.publish.endpoints import Endpoint, check_ipc_path, in_use, node_address, numeric

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NOBLOCK", "NOBLOCK_MORE", "AwaitedAddress", "SharedContext", "open_socket", "send_of"]

# Plain integers: `|` on pyzmq's enums costs more than the send itself.
NOBLOCK = int(zmq.NOBLOCK)
NOBLOCK_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)


def send_of(socket: zmq.Socket[bytes]) -> Callable[[bytes, int], object]:
    """``send(frame, flags)`` without the layer that looks at routing ids and groups: half the time."""
    bound: Callable[[bytes, int], object] = zmq.backend.Socket.send.__get__(socket)
    return bound


class SharedContext:
    """A context that the last of its users ends, in that user's thread.

    A publisher has its own, so that ending it waits until what was sent is with the system (each socket's
    linger bounds that). Only inproc needs the process's shared context; that one is never ended here.
    """

    def __init__(self, *, shared: bool) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance() if shared else zmq.Context()
        self._shared = shared
        self._users = 0
        self._lock = threading.Lock()

    def use(self) -> None:
        """Count one more user."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """One user less, whose sockets are closed; the last ends the context."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last and not self._shared:
            self.context.term()


def open_socket(
    context: SharedContext, kind: int, endpoint: Endpoint, *, bind: bool, rank: int, options: dict[int, Any]
) -> tuple[zmq.Socket[bytes], Endpoint]:
    """A socket with its options set before it is bound or connected, and the address that it really has."""
    if not bind and endpoint.port == 0:
        raise ConfigError(f"{endpoint}: port 0 is for binding; a port to connect to must be named")
    socket = context.context.socket(kind)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        for option, value in options.items():
            socket.setsockopt(option, value)
        if not bind:
            if endpoint.ipv6:
                socket.setsockopt(zmq.IPV6, 1)
            socket.connect(str(endpoint))
            return socket, endpoint
        return socket, _bind(socket, endpoint, rank)
    except zmq.ZMQError as e:
        socket.close(linger=0)
        raise _explained(e, endpoint, rank) from e
    except BaseException:
        socket.close(linger=0)
        raise


class AwaitedAddress:
    """An address that somebody else has, and the socket that gets it as soon as it is free.

    Until then what is sent on the socket goes nowhere; it stays in the replay log. :meth:`bound` belongs to
    the thread that owns the socket.
    """

    RETRY_S = 1.0

    def __init__(self, context: SharedContext, kind: int, endpoint: Endpoint, rank: int) -> None:
        self.socket = context.context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._endpoint = endpoint
        self._rank = rank
        self._next = 0.0

    def bound(self) -> bool:
        """Try again, at most once in :attr:`RETRY_S`; whether the socket has its address."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self.RETRY_S
        try:
            _bind(self.socket, self._endpoint, self._rank)
        except (zmq.ZMQError, EndpointInUseError):
            return False
        return True


def _bind(socket: zmq.Socket[bytes], endpoint: Endpoint, rank: int) -> Endpoint:
    if endpoint.scheme == "ipc":
        check_ipc_path(endpoint, rank)
    target = numeric(endpoint)
    if target.ipv6:
        socket.setsockopt(zmq.IPV6, 1)
    socket.bind(str(target))
    if endpoint.scheme != "tcp" or endpoint.port:
        return endpoint
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    # As vLLM reports it: a port that only the system knew, with an address to which a reader can connect.
    host = node_address() if endpoint.wildcard and not endpoint.ipv6 else target.host
    return Endpoint("tcp", host, int(bound.rpartition(":")[2]))


def _explained(error: zmq.ZMQError, endpoint: Endpoint, rank: int) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return in_use(endpoint, rank)
    if error.errno in {errno.ENODEV, errno.EADDRNOTAVAIL}:
        return ConfigError(
            f"{endpoint}: this machine has no such address to bind; use one of its own, "
            "tcp://*:PORT for all of them, or bind=False to connect to a reader that listens there"
        )
    if error.errno in {errno.EACCES, errno.EPERM}:
        return ConfigError(f"{endpoint}: no permission to bind it ({error.strerror})")
    if error.errno == errno.EINVAL:
        return ConfigError(f"{endpoint}: ZeroMQ takes no such address")
    return PublisherError(f"{endpoint}: {error.strerror} (errno {error.errno})")
