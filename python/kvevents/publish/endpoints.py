"""Addresses: parsed and checked once, alike for every rank, before any socket exists.

Port arithmetic is vLLM's (rank r publishes on port + r, inproc gets the suffix ``_dpr``), and ipc gets the
suffix too. Nothing here opens a socket of ZeroMQ.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from pathlib import Path

import msgspec

from kvevents.errors import ConfigError, EndpointInUseError

__all__ = ["Endpoint", "binds", "check_ipc_path", "check_ranges", "node_address", "offset", "parse", "ranks"]

IPC_PATH_MAX = 107
"""Bytes of a unix socket's path, without the end mark (Linux; 103 on macOS)."""
SCHEMES = ("tcp", "ipc", "inproc")
_WILDCARDS = frozenset({"*", "0.0.0.0", "::"})  # noqa: S104 - compared with, not bound
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?\Z")


class Endpoint(msgspec.Struct, frozen=True):
    """An address in parts: for tcp ``host`` (no brackets) and ``port``; else ``host`` is path or name."""

    scheme: str
    host: str
    port: int | None = None

    def __str__(self) -> str:
        """The address as ZeroMQ takes it."""
        if self.port is None:
            return f"{self.scheme}://{self.host}"
        return f"tcp://[{self.host}]:{self.port}" if self.ipv6 else f"tcp://{self.host}:{self.port}"

    @property
    def ipv6(self) -> bool:
        """Whether the host is an IPv6 address, for which a socket needs its IPv6 option."""
        return self.scheme == "tcp" and ":" in self.host

    @property
    def wildcard(self) -> bool:
        """Whether the host stands for all interfaces."""
        return self.scheme == "tcp" and self.host in _WILDCARDS


def parse(text: str, what: str = "endpoint") -> Endpoint:
    """Parts of an address; ``what`` names the setting in the error.

    Raises :class:`~kvevents.errors.ConfigError` that says what was seen and what would be right.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in SCHEMES:
        hint = f" (did you mean {scheme.lower()!r}?)" if separator and scheme.lower() in SCHEMES else ""
        raise ConfigError(
            f"{what} {text!r}: an address begins with tcp://, ipc:// or inproc://{hint}, "
            "for example tcp://127.0.0.1:5557"
        )
    if scheme != "tcp":
        if not rest or "\0" in rest:
            raise ConfigError(f"{what} {text!r}: {'a path' if scheme == 'ipc' else 'a name'} must follow ://")
        return Endpoint(scheme, rest)
    host, colon, port = rest.rpartition(":")
    if not colon or not port or (rest.startswith("[") and "]" not in host):
        raise ConfigError(f"{what} {text!r}: the port is missing, for example tcp://{rest.rstrip(':')}:5557")
    return Endpoint("tcp", _host(host, text, what), _port(port, text, what))


def _port(port: str, text: str, what: str) -> int:
    if port == "*":
        return 0
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{what} {text!r}: port {port!r} is not a number from 0 to 65535")
    return int(port)


def _host(host: str, text: str, what: str) -> str:
    if host == "*":
        return host
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ":" in bare:
        bare = bare.replace("%25", "%", 1)  # a zone as URLs write it
        try:
            ipaddress.IPv6Address(bare)
        except ValueError as e:
            raise ConfigError(f"{what} {text!r}: {host!r} is not an IPv6 address: {e}") from None
        return bare
    if bare != host or not _HOST.match(bare):
        raise ConfigError(f"{what} {text!r}: {host!r} is not a host name or address")
    if re.fullmatch(r"[0-9.]+", bare):
        try:
            ipaddress.IPv4Address(bare)
        except ValueError as e:
            raise ConfigError(f"{what} {text!r}: {host!r} is not an IPv4 address: {e}") from None
    return bare


def offset(endpoint: Endpoint, rank: int, what: str = "endpoint") -> Endpoint:
    """The address of one data-parallel rank. A tcp port of 0 stays: the system chooses for each rank."""
    if endpoint.scheme != "tcp":
        moved = endpoint if rank == 0 else Endpoint(endpoint.scheme, f"{endpoint.host}_dp{rank}")
        length = len(os.fsencode(moved.host))
        if moved.scheme == "ipc" and length > IPC_PATH_MAX:
            raise ConfigError(
                f"{what} {str(moved)!r}: the path has {length} bytes, the system allows {IPC_PATH_MAX}; "
                "use a shorter directory"
            )
        return moved
    if not endpoint.port or rank == 0:
        return endpoint
    port = endpoint.port + rank
    if port > 65535:
        raise ConfigError(f"{what} {str(endpoint)!r}: rank {rank} would need port {port}, above 65535")
    return Endpoint("tcp", endpoint.host, port)


def check_ranges(live: Endpoint, replay: Endpoint, size: int) -> None:
    """Refuse live and replay addresses that are the same for any two of ``size`` ranks.

    Raises :class:`~kvevents.errors.ConfigError` that shows the ranges.
    """
    if live.scheme != replay.scheme:
        return
    last_live, last_replay = offset(live, size - 1), offset(replay, size - 1, "replay_endpoint")
    if live.scheme != "tcp":
        clash = not _names(live, size).isdisjoint(_names(replay, size))
    else:
        same_host = live.host == replay.host or live.wildcard or replay.wildcard
        clash = bool(same_host and live.port and replay.port and abs(live.port - replay.port) < size)
    if clash:
        raise ConfigError(
            f"endpoint and replay_endpoint overlap: live is {live} to {last_live}, replay is {replay} to "
            f"{last_replay} for {size} rank(s); keep them at least {size} apart"
        )


def _names(endpoint: Endpoint, size: int) -> set[str]:
    return {offset(endpoint, rank).host for rank in range(size)}


def ranks(rank: int, size: int) -> int:
    """How many ranks share the addresses: ``size``, or more where only the rank was said.

    Raises :class:`~kvevents.errors.ConfigError` for a rank that cannot be.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ConfigError(f"data_parallel_rank: {rank!r} is not a number from 0")
    if size > 1 and rank >= size:
        raise ConfigError(f"data_parallel_rank: {rank}, but data_parallel_size is {size}")
    return max(size, rank + 1)


def binds(endpoint: Endpoint) -> bool:
    """Whether a live socket at this address listens: wildcard, loopback and this machine's own addresses.

    A host name is looked up, once.
    """
    if endpoint.scheme != "tcp" or endpoint.wildcard:
        return True
    return _own_interface(endpoint.host) or any(_is_own(address) for address in _lookup(endpoint.host))


def numeric(endpoint: Endpoint) -> Endpoint:
    """The same with a host that ZeroMQ can bind: it takes names of interfaces, not of hosts."""
    if endpoint.scheme != "tcp" or endpoint.wildcard or _own_interface(endpoint.host):
        return endpoint
    own = [address for address in _lookup(endpoint.host) if _is_own(address)]
    return Endpoint("tcp", own[0], endpoint.port) if own else endpoint


def _own_interface(host: str) -> bool:
    return any(host == name for _, name in socket.if_nameindex())


def _lookup(host: str) -> list[str]:
    """Numeric addresses of a host, IPv4 first; a zone is kept."""
    if ":" in host:
        return [host]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[4][0]) for address in sorted(found, key=lambda f: f[0] != socket.AF_INET)]


def _is_own(address: str) -> bool:
    """The system lets a socket have its own addresses only."""
    host, _, zone = address.partition("%")
    if ipaddress.ip_address(host).is_loopback:
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        scope = (0, socket.if_nametoindex(zone)) if zone else ()
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0, *scope))
    except OSError:
        return False
    return True


def node_address() -> str:
    """The address under which other machines most likely see this one; nothing is sent to find out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation: only the route is looked up
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def check_ipc_path(endpoint: Endpoint, rank: int) -> None:
    """Before an ipc bind: ZeroMQ replaces whatever is at the path, also a file or a live socket.

    A socket that a killed process left is fine. Raises :class:`~kvevents.errors.ConfigError` or
    :class:`~kvevents.errors.EndpointInUseError`.
    """
    if endpoint.host == "*" or endpoint.host.startswith("@"):
        return
    path = Path(endpoint.host)
    if not path.parent.is_dir():
        raise ConfigError(f"{endpoint}: there is no directory {str(path.parent)!r}")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{endpoint}: {str(path)!r} is there and is no socket; it would be replaced")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(endpoint.host)
        except OSError:
            return
    raise in_use(endpoint, rank)


def in_use(endpoint: Endpoint, rank: int) -> EndpointInUseError:
    """The error for an address that somebody has, with the likely cause."""
    if rank == 0:
        why = "is another engine running here, or do several data-parallel ranks say that they are rank 0?"
    else:
        why = f"is another engine running here, or is rank {rank} given twice?"
    return EndpointInUseError(f"{endpoint} (data_parallel_rank {rank}) is in use: {why}")
