"""The publisher over ZeroMQ: live batches on a PUB socket, their replay on a ROUTER socket."""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import msgspec
import zmq

from kvevents._core import Mirror, ReplayLog, dialects
from kvevents.config import KVEventsConfig
from kvevents.errors import (
    ConfigError,
    EndpointInUseError,
    EventTypeError,
    ForkError,
    PublisherClosedError,
)
from kvevents.publish import endpoints
from kvevents.publish.base import EventPublisher, MirrorStats, PublisherStats
from kvevents.publish.extended import Extended
from kvevents.publish.outbox import END_SEQUENCE, Outbox
from kvevents.publish.replay import ReplayServer, router_options
from kvevents.publish.sender import Sender
from kvevents.publish.snapshots import Snapshots
from kvevents.publish.sockets import AwaitedAddress, SharedContext, open_socket
from kvevents.publish.store_only import StoreOnlyMedia

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvevents.config import ExactFor, Overflow
    from kvevents.events import EventBatch

__all__ = ["ZmqEventPublisher"]

_log = logging.getLogger("kvevents.publish")
_DEFAULT = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq")

SHUTDOWN_S = 1.0
"""How long ``shutdown()`` may take if nobody says otherwise."""
GRACE_S = 1.0
"""What a thread may need beyond that to notice (one batch being encoded)."""


class ZmqEventPublisher(EventPublisher):
    """Publishes the batches of one data-parallel rank, on the wire as vLLM's does, without ever waiting.

    ``publish()`` appends to a queue; a thread numbers from 0, encodes without the interpreter lock, keeps the
    bytes for replay and sends ``[topic, number (8 bytes, big endian), payload]``. Replays are served by
    another thread and socket. A hole in the numbers says that something was lost on the way out.

    Arguments are vLLM's, and the fields of :class:`~kvevents.KVEventsConfig` by the same names, with the
    same defaults; ``first_sequence`` is the number of the first batch. Everything that can go wrong at start
    is raised here: :class:`~kvevents.errors.ConfigError` for an address or setting that cannot work,
    :class:`~kvevents.errors.EndpointInUseError` for an address that somebody has.

    ``publish()``, ``stats()`` and ``shutdown()`` are safe from any thread. In a forked child the publisher
    refuses to work; the parent's goes on. Dropping the last reference, or exiting without ``shutdown()``,
    ends the threads.
    """

    sender_class: ClassVar[type[Sender]] = Sender
    """The thread that encodes and sends; an engine's plug-in has one that writes what the engine writes."""
    awaits_address: ClassVar[bool] = False
    """Whether an address that somebody else has is waited for, in the threads, instead of raised at start."""

    def __init__(  # noqa: PLR0917 - vLLM's positions
        self,
        data_parallel_rank: int = 0,
        endpoint: str = _DEFAULT.endpoint,
        replay_endpoint: str | None = _DEFAULT.replay_endpoint,
        buffer_steps: int = _DEFAULT.buffer_steps,
        hwm: int = _DEFAULT.hwm,
        max_queue_size: int = _DEFAULT.max_queue_size,
        topic: str = _DEFAULT.topic,
        *,
        data_parallel_size: int = _DEFAULT.data_parallel_size,
        overflow: Overflow = _DEFAULT.overflow,
        buffer_bytes: int = _DEFAULT.buffer_bytes,
        dialect: str = _DEFAULT.dialect,
        bind: bool | None = _DEFAULT.bind,
        heartbeat_s: float | None = _DEFAULT.heartbeat_s,
        mirror: bool = _DEFAULT.mirror,
        mirror_tokens: bool = _DEFAULT.mirror_tokens,
        exact_for: ExactFor = _DEFAULT.exact_for,
        store_only: tuple[str, ...] = _DEFAULT.store_only,
        first_sequence: int = 0,
    ) -> None:
        config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            buffer_steps=buffer_steps,
            hwm=hwm,
            max_queue_size=max_queue_size,
            topic=topic,
            data_parallel_size=data_parallel_size,
            overflow=overflow,
            buffer_bytes=buffer_bytes,
            dialect=dialect,
            bind=bind,
            heartbeat_s=heartbeat_s,
            mirror=mirror,
            mirror_tokens=mirror_tokens,
            exact_for=exact_for,
            store_only=store_only,
        )
        if dialect not in dialects():
            raise ConfigError(f"dialect: {dialect!r} is not known; known are {', '.join(dialects())}")
        if not 0 <= first_sequence < END_SEQUENCE:
            raise ConfigError(f"first_sequence: {first_sequence} is not from 0 to 2^64-2")
        live, replay = _addresses(config, data_parallel_rank)
        super().__init__(data_parallel_rank)
        self._forked: bool = False
        self._unsent = 0
        self._epoch = os.urandom(16)
        self._store_only = StoreOnlyMedia(store_only)
        # Snapshots are asked for at the replay address: without one a mirror would be of no use.
        self._mirror = Mirror(first_sequence, keep_tokens=mirror_tokens) if mirror and replay else None
        self._outbox = Outbox(max_queue_size, overflow, first_sequence, keep_dropped=self._mirror is not None)
        self._put = self._outbox.put
        self._replay_log = ReplayLog(buffer_steps if replay else 0, buffer_bytes)
        self._start(config, live, replay)
        self._let_go = weakref.finalize(self, _signal, self._sender, self._server)
        self._let_go.atexit = False
        _living.add(self)

    def _start(
        self, config: KVEventsConfig, live: endpoints.Endpoint, replay: endpoints.Endpoint | None
    ) -> None:
        """Open both sockets, then start the threads that own them from then on."""
        rank = self._data_parallel_rank
        schemes = {live.scheme, replay.scheme if replay else None}
        context = SharedContext(shared="inproc" in schemes)
        bind = endpoints.binds(live) if config.bind is None else config.bind
        context.use()
        pub = router = awaited_replay = None
        try:
            pub, live, awaited_live = self._open(
                context, zmq.PUB, live, bind=bind, options={zmq.SNDHWM: config.hwm}
            )
            if replay is not None:
                router, replay, awaited_replay = self._open(
                    context, zmq.ROUTER, replay, bind=True, options=router_options()
                )
        except BaseException:
            if pub is not None:
                pub.close(linger=0)
            context.leave()
            raise
        self._config = msgspec.structs.replace(
            config, endpoint=str(live), replay_endpoint=None if replay is None else str(replay), bind=bind
        )
        self._sender = self.sender_class(
            config,
            rank,
            outbox=self._outbox,
            log=self._replay_log,
            mirror=self._mirror,
            socket=pub,
            context=context,
        )
        self._server = None if router is None else self._make_server(router, context)
        self._sender.awaited = awaited_live
        if self._server is not None:
            self._server.awaited = awaited_replay
        context.leave()
        self._sender.thread.start()
        if self._server is not None:
            self._server.thread.start()
        _log.info(
            "rank %d: events are published at %s (%s), replay at %s",
            rank, live, "bound" if bind else "connected", replay or "no address",
        )  # fmt: skip

    def _open(
        self,
        context: SharedContext,
        kind: int,
        endpoint: endpoints.Endpoint,
        *,
        bind: bool,
        options: dict[int, Any],
    ) -> tuple[zmq.Socket[bytes], endpoints.Endpoint, AwaitedAddress | None]:
        """A socket, its address, and what waits for that address if somebody else has it."""
        rank = self._data_parallel_rank
        try:
            return *open_socket(context, kind, endpoint, bind=bind, rank=rank, options=options), None
        except EndpointInUseError as e:
            if not self.awaits_address:
                raise
            awaited = AwaitedAddress(context, kind, endpoint, rank)
            for option, value in options.items():
                awaited.socket.setsockopt(option, value)
            _log.warning(
                "%s; it is taken as soon as it is free, what is published until then can be replayed", e
            )
            return awaited.socket, endpoint, awaited

    def _make_server(self, router: zmq.Socket[bytes], context: SharedContext) -> ReplayServer:
        rank, config = self._data_parallel_rank, self._config
        log, mirror, outbox = self._replay_log, self._mirror, self._outbox
        snapshots = None if mirror is None else Snapshots(mirror, log, outbox.holes, config.dialect, rank)
        extended = Extended(
            config, rank, self._epoch,
            log=log, outbox=outbox, sender=self._sender, mirror=mirror, snapshots=snapshots,
            store_only=self._store_only,
        )  # fmt: skip
        return ReplayServer(
            log, config.topic.encode(), extended, snapshots, socket=router, context=context, rank=rank
        )

    # ------------------------------------------------------------ the engine's step

    def publish(self, events: EventBatch) -> None:
        """Queue one batch; fills in its ``data_parallel_rank`` where it has none.

        Takes the same few microseconds whatever the batch holds and however full the queue is (only
        ``overflow="block"`` waits). The batch belongs to the publisher from then on: do not change it.

        Raises :class:`~kvevents.errors.PublisherClosedError` after ``shutdown()``,
        :class:`~kvevents.errors.ForkError` in a forked child, :class:`~kvevents.errors.EventTypeError` for
        what is not a batch.
        """
        if self._outbox.closed:
            self._refuse()
        try:
            if events.data_parallel_rank is None:
                events.data_parallel_rank = self._data_parallel_rank
            events.ts, events.events  # noqa: B018 - what is not a batch is found here, not by the sender
        except AttributeError:
            raise EventTypeError(
                f"publish() takes a KVEventBatch, saw {type(events).__name__}; "
                "wrap events as KVEventBatch(ts=time.time(), events=events)"
            ) from None
        self._put(events)

    def _refuse(self) -> NoReturn:
        if self._forked:
            raise ForkError(
                "this publisher belongs to the parent process; create one after the fork, in the child"
            )
        ended_by = self._sender.ended_by
        why = "" if ended_by is None else f" because the sender ended: {ended_by!r}"
        raise PublisherClosedError(f"the publisher was shut down{why}; nothing more can be published")

    # ------------------------------------------------------------ the rest

    def declare_store_only(self, media: Iterable[str]) -> None:
        """Say of more media that nobody announces what leaves them; ``hello`` tells readers from now on."""
        self._store_only.add(media)

    def shutdown(self, timeout: float | None = None) -> int:
        """Send what is queued, close the sockets and end the threads, within ``timeout`` seconds.

        Returns the number of batches that were never sent (0 is the normal end). Bytes that a reader has not
        taken yet are given the rest of the time to leave. Calling it again, also from another thread, only
        returns the number.
        """
        if self._forked:
            return 0
        deadline = time.monotonic() + (SHUTDOWN_S if timeout is None else max(0.0, timeout))
        _living.discard(self)
        self._let_go.detach()
        self._sender.stop(deadline)
        late = _join(self._sender.thread, deadline)
        if self._server is not None:
            self._server.stop()
            late |= _join(self._server.thread, deadline)
        self._unsent = len(self._outbox)
        if self._unsent or late:
            _log.warning(
                "rank %d: shut down with %d batch(es) unsent%s",
                self._data_parallel_rank, self._unsent, "; a thread is still ending" if late else "",
            )  # fmt: skip
        return self._unsent

    def stats(self) -> PublisherStats:
        """Counts since the start; from any thread."""
        sender, outbox, log = self._sender, self._outbox, self._replay_log
        return PublisherStats(
            next_sequence=outbox.next_sequence,
            sent=sender.sent,
            bytes_sent=sender.bytes_sent,
            queued=len(outbox),
            dropped=outbox.dropped,
            failed=sender.failed,
            events_lost=sender.events_lost,
            heartbeats=sender.heartbeats,
            unsent=self._unsent,
            log_batches=len(log),
            log_bytes=log.payload_bytes,
            oldest=log.oldest,
            epoch=self._epoch,
            mirror=None if self._mirror is None else _mirror_stats(self._mirror),
            replay=None if self._server is None else self._server.stats(),
        )

    def get_publisher_config(self) -> KVEventsConfig:
        """The configuration with this rank's real addresses (the port that the system chose for port 0)."""
        return self._config

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
        """The address of one rank; ``None`` stays ``None``. vLLM's name for it."""
        if not endpoint:
            return endpoint
        return str(endpoints.offset(endpoints.parse(endpoint), data_parallel_rank))


def _mirror_stats(mirror: Mirror) -> MirrorStats:
    found = mirror.digest()
    return MirrorStats(
        blocks=len(mirror),
        nbytes=mirror.nbytes,
        resume_seq=mirror.resume_seq,
        digest=None if found is None else found[1],
        longest_wait_ns=mirror.longest_wait_ns,
    )


def _addresses(config: KVEventsConfig, rank: int) -> tuple[endpoints.Endpoint, endpoints.Endpoint | None]:
    """Addresses of this rank, after checks that are the same for every rank."""
    size = endpoints.ranks(rank, config.data_parallel_size)
    live = endpoints.parse(config.endpoint)
    endpoints.offset(live, size - 1)
    if config.replay_endpoint is None:
        return endpoints.offset(live, rank), None
    replay = endpoints.parse(config.replay_endpoint, "replay_endpoint")
    endpoints.check_ranges(live, replay, size)
    return endpoints.offset(live, rank), endpoints.offset(replay, rank, "replay_endpoint")


def _join(thread: Any, deadline: float) -> bool:
    """Whether the thread is still running, some grace after the deadline. Never waits for itself."""
    try:
        thread.join(max(0.0, deadline - time.monotonic()) + GRACE_S)
    except RuntimeError:
        return True  # called in that very thread, by a finalizer
    return bool(thread.is_alive())


def _signal(sender: Sender, server: ReplayServer | None) -> None:
    """Nobody holds the publisher any more: end the threads, but wait for nothing (this may be any thread)."""
    sender.stop(time.monotonic() + SHUTDOWN_S)
    if server is not None:
        server.stop()


_living: weakref.WeakSet[ZmqEventPublisher] = weakref.WeakSet()


def _at_exit() -> None:
    for publisher in list(_living):
        publisher.shutdown()


def _in_child() -> None:
    """Sockets and threads stay with the parent: the child has only the objects."""
    for publisher in list(_living):
        publisher._let_go.detach()
        publisher._outbox.closed = True
        publisher._forked = True
    _living.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
