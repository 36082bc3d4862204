"""Part ``publisher``: the configuration ``publisher="zmq"`` gets this package's publisher.

The engine's step only appends its batch to a queue. The sender's thread reads the events into columns and
encodes those without the interpreter lock (the measurement is in the decisions); what columns do not know is
encoded by vLLM's own encoder.
"""

from __future__ import annotations

import functools
import logging
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed import kv_events

from kvevents.errors import PublisherClosedError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EventList, KVEventBatch
from kvevents.integrations.vllm.names import release
from kvevents.publish import endpoints
from kvevents.publish.sender import Sender
from kvevents.publish.zmq import ZmqEventPublisher

if TYPE_CHECKING:
    from kvevents.config import ExactFor
    from kvevents.integrations.vllm.settings import Options, Settings
    from kvevents.publish.base import PublisherStats

__all__ = ["EnginePublisher", "EngineSender", "install"]

log = logging.getLogger("vllm.kvevents")

NATIVE = {"0.32": "vllm-map-0.32", "0.33": "vllm-map-0.33"}
NO_LIMIT = 2**31 - 1
"""For vLLM's 0, which means no limit."""


def install(settings: Settings) -> str:
    """Take over the name ``zmq``; returns how it runs, for the log line."""
    kv_events.EventPublisherFactory._registry["zmq"] = functools.partial(_create, settings.options)
    _warn_through(log)
    options = settings.options
    full = "a full queue waits, as in vLLM" if options.overflow == "block" else (
        f"overflow={options.overflow}: never waits, where vLLM's waits on a full queue"
    )  # fmt: skip
    return (
        f"{full}; replay bounded by {options.buffer_bytes >> 20} MiB; dialect {options.dialect or native()}"
    )


def _warn_through(engine: logging.Logger) -> None:
    """What the package warns of goes where the engine's own warnings go; its start is told only once."""
    package = logging.getLogger("kvevents")
    package.parent = engine
    if package.level == logging.NOTSET:
        package.setLevel(logging.WARNING)


def native() -> str:
    """The dialect that this vLLM writes itself."""
    import vllm  # noqa: PLC0415

    return NATIVE[release(vllm.__version__)]


def _create(options: Options, **config: Any) -> Any:
    """What the factory calls: ours, or vLLM's own where ours cannot start with this configuration.

    An error that vLLM's own start raises for the same configuration is vLLM's to raise; only a port that
    somebody else has does not stop the engine: it is bound as soon as it is free.
    """
    try:
        return EnginePublisher(**config, options=options)
    except Exception as e:
        log.warning("kvevents: vLLM's own publisher runs, ours does not start: %s: %s", type(e).__name__, e)
        return kv_events.ZmqEventPublisher(**config)


class EngineSender(Sender):
    """Sends what vLLM would send, byte for byte, unless another dialect is asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pack = msgspec.msgpack.Encoder().encode
        self._native = self._dialect == native()
        self._known = _known_classes()

    def _send_batch(self, seq: int, batch: Any) -> None:
        _join(batch)
        columns = self._columns(batch)
        if columns is not None:
            # Reading the Structs takes the interpreter lock for half the time that encoding them does; the
            # rest runs without it.
            super()._send_batch(seq, KVEventBatch(batch.ts, columns, batch.data_parallel_rank))
            return
        payload = self._packed(batch)
        if payload is None:
            super()._send_batch(seq, batch)
            return
        self._log.append(seq, payload)
        if self._mirror is not None:
            # From the very bytes that readers get: reading them back needs no interpreter lock.
            self._mirror.record_payload(seq, payload)
        self._send(seq, payload)

    def _mirror_batch(self, seq: int, batch: Any) -> None:
        if hasattr(batch, "events"):
            _join(batch)
        super()._mirror_batch(seq, batch)

    def _columns(self, batch: Any) -> EventList | None:
        """Columns, where they give what vLLM's encoder would: its own events, with fields that are known."""
        if not self._native or type(batch) is not kv_events.KVEventBatch or type(batch.ts) is not float:
            return None
        events = batch.events
        if type(events) is EventList:
            return events
        if type(events) is not list or not self._known.issuperset(map(type, events)):
            return None
        try:
            return EventList(events)
        except Exception:
            return None

    def _packed(self, batch: Any) -> bytes | None:
        """``None`` where the columns have to do it.

        That is another dialect, events that come in columns (part ``pool``), or one that cannot be encoded.
        One such event must not cost the others; through columns they are sorted out one by one.
        """
        if not self._native or not isinstance(batch.events, list):
            return None
        try:
            return self._pack(batch)
        except Exception:
            return None


def _join(batch: Any) -> None:
    """Columns of the pool (part ``pool``) among Structs of connectors: all in columns, in their order."""
    events = batch.events
    if not isinstance(events, list) or not any(type(part) is EventList for part in events):
        return
    try:
        joined = EventList()
        for columns, parts in groupby(events, lambda part: type(part) is EventList):
            for part in parts if columns else (list(parts),):
                joined += part
        batch.events = joined
    except Exception:  # one that cannot be put into columns: they are sorted out one by one
        batch.events = tuple(e for part in events for e in (part if type(part) is EventList else (part,)))


def _known_classes() -> frozenset[type]:
    """The classes of this vLLM of which this package knows every field."""
    pairs = (
        (kv_events.BlockStored, BlockStored),
        (kv_events.BlockRemoved, BlockRemoved),
        (kv_events.AllBlocksCleared, AllBlocksCleared),
    )
    return frozenset(
        engine for engine, ours in pairs if set(engine.__struct_fields__) <= set(ours.__struct_fields__)
    )


class _Publisher(ZmqEventPublisher):
    sender_class = EngineSender
    awaits_address = True


class EnginePublisher(kv_events.ZmqEventPublisher):  # type: ignore[misc]
    """vLLM's interface over this package's publisher.

    Arguments, addresses of ranks, the rule of binding and ``get_publisher_config()`` are vLLM's. Numbers,
    replay, overflow and errors are those of :class:`kvevents.publish.ZmqEventPublisher`; ``stats()`` has its
    counts. ``publish()`` raises only after ``shutdown()``.
    """

    def __init__(  # noqa: PLR0917 - vLLM's positions
        self,
        data_parallel_rank: int,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
        *,
        options: Options,
    ) -> None:
        # Neither sockets nor thread of the class that it stands in for: only its base.
        kv_events.EventPublisher.__init__(self, data_parallel_rank)
        mine = self.offset_endpoint_port(endpoint, data_parallel_rank)
        self.offset_endpoint_port(replay_endpoint, data_parallel_rank)  # raises what vLLM's raises
        bind = self._is_bind_endpoint(mine) if options.bind is None else options.bind
        if not bind and options.bind is None:
            _warn_of_connect(mine)
        self._ours = _Publisher(
            data_parallel_rank,
            _of_this_node(endpoint) or endpoint,
            _of_this_node(replay_endpoint),
            buffer_steps,
            hwm or NO_LIMIT,
            max_queue_size if max_queue_size > 0 else NO_LIMIT,
            topic,
            overflow=options.overflow,
            buffer_bytes=options.buffer_bytes,
            dialect=options.dialect or native(),
            bind=bind,
        )
        resolved = self._ours.get_publisher_config()
        self._resolved = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=resolved.endpoint,
            replay_endpoint=resolved.replay_endpoint,
            buffer_steps=buffer_steps,
            hwm=hwm,
            max_queue_size=max_queue_size,
            topic=topic,
        )
        self._shut = self._told = False
        self._queue = self._ours.publish
        log.info(
            "kvevents: rank %d publishes at %s (%s), replay at %s, overflow=%s%s",
            data_parallel_rank, resolved.endpoint, "bound" if bind else "connected",
            resolved.replay_endpoint or "no address", options.overflow,
            "" if options.overflow == "block" else " (vLLM's own waits on a full queue)",
        )  # fmt: skip

    def publish(self, events: Any) -> None:
        """Queue a batch; the sender's thread encodes and sends it. The engine's step never fails here."""
        try:
            self._queue(events)
        except PublisherClosedError as e:
            if self._shut:
                raise
            if not self._told:
                self._told = True
                log.warning("kvevents: events are lost from here on: %s", e)

    def shutdown(self) -> None:
        """Send what is queued, within vLLM's time limit, and end."""
        self._shut = True
        self._ours.shutdown(self.SHUTDOWN_TIMEOUT)

    def get_publisher_config(self) -> Any:
        """The engine's configuration with this rank's real addresses, which the engine tells its clients."""
        return self._resolved

    def exact_for(self, what: ExactFor) -> None:
        """What the mirror is exact for, as readers are told: the scheduler knows it after this was made."""
        msgspec.structs.force_setattr(self._ours.get_publisher_config(), "exact_for", what)

    def stats(self) -> PublisherStats:
        """Counts since the start."""
        return self._ours.stats()


def _of_this_node(endpoint: str | None) -> str | None:
    """A port that the system chooses, by vLLM's rule: bound to, and reported as, this node's address."""
    if endpoint != "tcp://*:0":
        return endpoint
    ip = kv_events.get_ip()
    if ip in {"0.0.0.0", "::"}:  # noqa: S104 - compared with
        raise ValueError("tcp://*:0 needs this node's address; set VLLM_HOST_IP")
    return f"tcp://[{ip}]:0" if ":" in ip else f"tcp://{ip}:0"


def _warn_of_connect(endpoint: str) -> None:
    try:
        surprising = endpoints.binds(endpoints.parse(endpoint))
    except Exception:
        return  # said when the publisher starts
    if surprising:
        log.warning(
            "kvevents: %s is an address of this machine without a *, so by the rule of vLLM it connects "
            "to it and the reader has to bind there; write tcp://*:PORT, or set KVEVENTS_VLLM_OPTIONS="
            "'{\"bind\": true}', to let readers connect",
            endpoint,
        )
