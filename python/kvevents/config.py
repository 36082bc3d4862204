"""Settings of event publishing: the only place where their defaults are written."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import msgspec

from kvevents._settings import check_types
from kvevents.errors import ConfigError

__all__ = ["ExactFor", "KVEventsConfig", "Overflow"]

ExactFor: TypeAlias = Literal["engine", "stream"]
"""What the mirror is exact for: the engine's cache, or no more than the stream that was published."""

Overflow: TypeAlias = Literal["drop_oldest", "drop_newest", "block"]
"""What ``publish()`` does when ``max_queue_size`` batches wait for the sender."""


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine's publishers; every data-parallel rank gets the same object.

    The first eight fields are vLLM's, with its meaning; ``endpoint`` differs in its default (loopback, not
    all interfaces: prompts travel in the clear). Values are checked at construction; addresses when the
    publisher of a rank is made, alike for every rank. Immutable, so it can be shared between threads.

    Raises :class:`~kvevents.errors.ConfigError`, which names the field and what was seen.
    """

    enable_kv_cache_events: bool = False
    """Whether events are made and published at all."""
    publisher: str | None = None
    """``"null"``, ``"zmq"`` or a registered name; ``None``: zmq if events are enabled, else null."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Address of rank 0's live stream; rank r has port + r, or the suffix ``_dpr`` for ipc and inproc."""
    replay_endpoint: str | None = None
    """Address of rank 0's replay server; ``None``: no replay."""
    buffer_steps: int = 10_000
    """Batches kept for replay; 0 keeps none."""
    hwm: int = 100_000
    """Batches that ZeroMQ queues for one slow reader before it drops (at that reader a visible gap)."""
    max_queue_size: int = 100_000
    """Batches that may wait for the sender's thread."""
    topic: str = ""
    """First frame of every message."""
    data_parallel_size: int = 1
    """Ranks that share these addresses: live and replay ports of all of them must not overlap."""
    overflow: Overflow = "drop_oldest"
    """At ``max_queue_size``: drop the oldest or the newest batch (a visible hole in the numbers, counted),
    or ``"block"``: let ``publish()`` wait, as vLLM does. With the first two it never waits."""
    buffer_bytes: int = 256 * 1024 * 1024
    """Payload bytes kept for replay, whatever ``buffer_steps`` says."""
    dialect: str = "vllm-map-0.33"
    """Wire dialect of the payloads, see ``kvevents.DIALECTS``."""
    bind: bool | None = None
    """Bind or connect the live socket. ``None``: wildcard, loopback and this machine's addresses, ipc and
    inproc bind, the rest connects. The replay socket always binds."""
    heartbeat_s: float | None = None
    """After so many seconds without a batch an empty one is sent, so that readers notice the loss of the
    last message; ``None``: never."""
    mirror: bool = True
    """Keep what the stream says is resident, for snapshots and digests. Only with a replay address, which is
    where they are asked for; ``False`` costs nothing."""
    mirror_tokens: bool = True
    """Keep the token ids too. Without them snapshots hold hashes and parents only."""
    exact_for: ExactFor = "stream"
    """``"engine"`` says that the events come from this package's pool with ``report="residency"`` and nothing
    else, so that the mirror equals the engine's cache; readers are told so in ``hello``."""
    store_only: tuple[str, ...] = ()
    """Media that hold blocks of which nobody announces that they leave; said in ``hello``, so that readers
    let them expire. A collector adds those of connectors with ``emits_removals = False`` by itself."""
    extra: dict[str, Any] = {}
    """Options of a registered publisher, passed to it as keyword arguments."""

    def __post_init__(self) -> None:
        """Check every value, and choose the publisher where none is named."""
        check_types(self, _CHECKED_HERE)
        for name, low in _LEAST.items():
            value = getattr(self, name)
            if value < low:
                raise ConfigError(f"{name}: {value} (at least {low}){_WHY_NOT_ZERO.get(name, '')}")
            high = 2**63 - 1 if name == "buffer_bytes" else 2**31 - 1
            if value > high:
                raise ConfigError(f"{name}: {value} (at most {high})")
        if self.heartbeat_s is not None and not 0.001 <= self.heartbeat_s <= 86_400:
            raise ConfigError(f"heartbeat_s: {self.heartbeat_s} (0.001 to 86400 seconds, or None)")
        if not isinstance(self.extra, dict) or not all(isinstance(key, str) for key in self.extra):
            raise ConfigError(f"extra: a dict of keyword arguments was expected, saw {self.extra!r}")
        if self.overflow not in get_args(Overflow):
            known = ", ".join(map(repr, get_args(Overflow)))
            raise ConfigError(f"overflow: {self.overflow!r} is none of {known}")
        if self.exact_for not in get_args(ExactFor):
            known = ", ".join(map(repr, get_args(ExactFor)))
            raise ConfigError(f"exact_for: {self.exact_for!r} is none of {known}")
        if not isinstance(self.store_only, tuple) or not all(isinstance(m, str) for m in self.store_only):
            raise ConfigError(f"store_only: a tuple of media was expected, saw {self.store_only!r}")
        if self.publisher is None:
            msgspec.structs.force_setattr(self, "publisher", "zmq" if self.enable_kv_cache_events else "null")


_CHECKED_HERE = frozenset({"overflow", "exact_for", "extra", "store_only"})
_LEAST = {
    "buffer_steps": 0,
    "hwm": 1,
    "max_queue_size": 1,
    "data_parallel_size": 1,
    "buffer_bytes": 0,
}
_WHY_NOT_ZERO = {
    "hwm": ": to ZeroMQ 0 means no limit, and a reader that stopped would cost memory without end",
    "max_queue_size": ": a queue without a limit would cost memory without end",
}
