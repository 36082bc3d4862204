"""A link between publisher and subscriber that loses, repeats, delays and reorders messages, and breaks.

Live messages suffer every fault; the replay path passes through unchanged, but is cut along with the rest.
Which message suffers what is a pure function of the seed and of its position in the stream; only how long
things take is up to the machine.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import msgspec
import zmq

from kvevents.errors import ConfigError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from types import TracebackType

__all__ = ["FaultyLink", "LinkConfig", "LinkCounters", "plan_faults", "run_link"]

Fault = Literal["drop", "duplicate", "delay", "reorder"]


class LinkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where a link sits and how bad it is. Rates are probabilities a message, 0 to 1."""

    upstream: str
    """The publisher's live endpoint."""
    upstream_replay: str | None = None
    """The publisher's replay endpoint; ``None``: the link has no replay side."""
    listen: str = "tcp://127.0.0.1:0"
    """Where subscribers connect; port 0 lets the system choose."""
    listen_replay: str = "tcp://127.0.0.1:0"
    """Where their replay clients connect."""
    seed: int = 0
    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    delay_s: float = 0.03
    """A delayed message is held for up to so many seconds."""
    reorder_depth: int = 3
    """A reordered message lets up to so many later ones pass."""
    cut_every: int = 0
    """The connections are cut once in about so many messages; 0: never."""
    cut_s: float = 0.05
    """A cut lasts so long; live messages that arrive meanwhile are lost, and counted as ``cut_off``."""

    def __post_init__(self) -> None:
        """Check the rates."""
        for name in ("drop", "duplicate", "delay", "reorder"):
            rate = getattr(self, name)
            if not 0 <= rate <= 1:
                raise ConfigError(f"{name}: {rate} (a rate from 0 to 1)")
        if self.cut_every < 0 or self.reorder_depth < 1 or self.delay_s < 0 or self.cut_s < 0:
            raise ConfigError("cut_every, delay_s and cut_s are 0 or more, reorder_depth is 1 or more")


class LinkCounters(msgspec.Struct):
    """What a link did so far."""

    received: int = 0
    sent: int = 0
    dropped: int = 0
    duplicated: int = 0
    delayed: int = 0
    reordered: int = 0
    reconnects: int = 0
    cut_off: int = 0
    replay_requests: int = 0
    replay_answers: int = 0


class Plan(NamedTuple):
    """What happens to one message."""

    fault: Fault | None
    size: float
    """From 0 to 1: how long, or how far."""
    cut: bool
    """Whether the connections break after it."""


class plan_faults:  # noqa: N801 - reads as the function it stands for
    """Endless iterator over what happens to message 0, 1, 2, ... of a link; equal seeds give equal plans."""

    def __init__(self, config: LinkConfig) -> None:
        self._config = config
        self._random = random.Random(config.seed)  # noqa: S311 - repeatable, not secret

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Plan:
        c, rnd = self._config, self._random
        u, size, v = rnd.random(), rnd.random(), rnd.random()
        fault: Fault | None = None
        kinds: tuple[tuple[Fault, float], ...] = (
            ("drop", c.drop),
            ("duplicate", c.duplicate),
            ("delay", c.delay),
            ("reorder", c.reorder),
        )
        for kind, rate in kinds:
            if u < rate:
                fault = kind
                break
            u -= rate
        return Plan(fault, size, c.cut_every > 0 and v * c.cut_every < 1)


class _Waiting(NamedTuple):
    """A message that lets ``passes`` others by, or waits until ``due``."""

    due: float
    order: int
    frames: list[bytes]


class _Proxy:
    """The sockets and the loop; lives in one thread."""

    REORDER_FLUSH_S = 0.05
    CLIENT_IDLE_S = 30.0

    def __init__(self, config: LinkConfig, counters: LinkCounters) -> None:
        self.config = config
        self.counters = counters
        self.context = zmq.Context()
        self.poller = zmq.Poller()
        self.plans = plan_faults(config)
        self.delayed: list[_Waiting] = []
        self.passed: list[list[Any]] = []
        self.order = 0
        self.cut_until: float | None = None
        self.clients: dict[bytes, tuple[zmq.Socket[bytes], float]] = {}
        self.owners: dict[zmq.Socket[bytes], bytes] = {}
        self.pub: zmq.Socket[bytes] | None = None
        self.router: zmq.Socket[bytes] | None = None
        self.sub = self._socket(zmq.SUB)
        self.sub.subscribe(b"")
        self.sub.connect(config.upstream)
        self.poller.register(self.sub, zmq.POLLIN)
        self.live_endpoint, self.replay_endpoint = config.listen, config.listen_replay
        self._open()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        s: zmq.Socket[bytes] = self.context.socket(kind)
        s.linger = 0
        s.ipv6 = True
        s.set_hwm(1_000_000)
        return s

    def _bind(self, kind: int, endpoint: str) -> tuple[zmq.Socket[bytes], str]:
        """A bound socket; after a cut the address may be taken for a moment by the socket before."""
        s = self._socket(kind)
        deadline = time.monotonic() + 5
        while True:
            try:
                s.bind(endpoint.replace("://127.0.0.1:0", "://127.0.0.1:*"))
                return s, s.getsockopt_string(zmq.LAST_ENDPOINT)
            except zmq.ZMQError as e:
                if e.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    s.close()
                    raise
                time.sleep(0.005)

    def _open(self) -> None:
        self.pub, self.live_endpoint = self._bind(zmq.PUB, self.live_endpoint)
        if self.config.upstream_replay is not None:
            self.router, self.replay_endpoint = self._bind(zmq.ROUTER, self.replay_endpoint)
            self.poller.register(self.router, zmq.POLLIN)

    def _cut(self, lasts_s: float | None = None) -> None:
        self.counters.reconnects += 1
        self.cut_until = time.monotonic() + (self.config.cut_s if lasts_s is None else lasts_s)
        if self.pub is not None:
            self.pub.close()
            self.pub = None
        for client in list(self.clients):
            self._forget(client)
        if self.router is not None:
            self.poller.unregister(self.router)
            self.router.close()
            self.router = None

    def step(self, timeout_s: float) -> None:
        """Wait for something for so long, and do it."""
        now = time.monotonic()
        due = [w.due for w in self.delayed[:1]] + [w[1] for w in self.passed]
        if self.cut_until is not None:
            due.append(self.cut_until)
        wait = min([timeout_s, *(d - now for d in due)])
        ready = dict(self.poller.poll(max(0, wait) * 1000))
        now = time.monotonic()
        if self.cut_until is not None and now >= self.cut_until:
            self.cut_until = None
            self._open()
        if self.sub in ready:
            self._forward_live()
        if self.router is not None and self.router in ready:
            self._forward_requests(now)
        for s in [s for s in ready if s in self.owners]:
            self._forward_answers(s)
        self._release(time.monotonic())
        if len(self.clients) > 8:
            for client in [c for c, (_, used) in self.clients.items() if now - used > self.CLIENT_IDLE_S]:
                self._forget(client)

    def _forward_live(self) -> None:
        for _ in range(256):
            try:
                frames = self.sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.counters.received += 1
            plan = next(self.plans)
            self._suffer(frames, plan)
            if plan.cut and self.cut_until is None:
                self._cut()

    def _suffer(self, frames: list[bytes], plan: Plan) -> None:
        c, config = self.counters, self.config
        for waiting in self.passed:
            waiting[0] -= 1
        if plan.fault == "drop":
            c.dropped += 1
        elif plan.fault == "delay":
            c.delayed += 1
            self.order += 1
            due = time.monotonic() + plan.size * config.delay_s
            heapq.heappush(self.delayed, _Waiting(due, self.order, frames))
        elif plan.fault == "reorder":
            c.reordered += 1
            passes = 1 + int(plan.size * config.reorder_depth)
            self.passed.append([passes, time.monotonic() + self.REORDER_FLUSH_S, frames])
        else:
            self._send(frames)
            if plan.fault == "duplicate":
                c.duplicated += 1
                self._send(frames)

    def _release(self, now: float, *, everything: bool = False) -> None:
        while self.delayed and (everything or self.delayed[0].due <= now):
            self._send(heapq.heappop(self.delayed).frames)
        still = []
        for waiting in self.passed:
            if everything or waiting[0] <= 0 or waiting[1] <= now:
                self._send(waiting[2])
            else:
                still.append(waiting)
        self.passed = still

    def _send(self, frames: list[bytes]) -> None:
        if self.pub is None:
            self.counters.cut_off += 1
            return
        self.pub.send_multipart(frames)
        self.counters.sent += 1

    def _forward_requests(self, now: float) -> None:
        # vLLM's server takes three frames and no more, so each client has a connection of its own.
        assert self.router is not None  # noqa: S101 - polled, so it is there
        upstream = self.config.upstream_replay
        assert upstream is not None  # noqa: S101 - else there is no router
        while True:
            try:
                client, *request = self.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if client not in self.clients:
                dealer = self._socket(zmq.DEALER)
                dealer.connect(upstream)
                self.owners[dealer] = client
                self.poller.register(dealer, zmq.POLLIN)
            else:
                dealer = self.clients[client][0]
            self.clients[client] = (dealer, now)
            self.counters.replay_requests += 1
            dealer.send_multipart(request)

    def _forward_answers(self, dealer: zmq.Socket[bytes]) -> None:
        client = self.owners[dealer]
        for _ in range(1000):
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.counters.replay_answers += 1
            if self.router is not None:
                self.router.send_multipart([client, *frames])

    def _forget(self, client: bytes) -> None:
        dealer, _ = self.clients.pop(client)
        del self.owners[dealer]
        self.poller.unregister(dealer)
        dealer.close()

    def close(self) -> None:
        """Send what waits, and close everything."""
        self._release(0, everything=True)
        for s in [self.sub, self.pub, self.router, *self.owners]:
            if s is not None:
                s.close(linger=200)
        self.context.term()


class FaultyLink:
    """A link that runs in a thread of its own, as a context manager.

    ``live_endpoint`` and ``replay_endpoint`` say where a :class:`~kvevents.subscribe.Subscriber` connects;
    ``counters`` is what was done so far. For a link in a process of its own see :func:`run_link`.
    """

    def __init__(self, config: LinkConfig) -> None:
        self.config = config
        self.counters = LinkCounters()
        self._wake, wake = socket.socketpair()
        self._proxy = _Proxy(config, self.counters)
        self._proxy.poller.register(wake, zmq.POLLIN)
        self._theirs = wake
        self._broken = threading.Event()
        self._cut_s: float | None = None
        self._stop = threading.Event()
        self.live_endpoint = self._proxy.live_endpoint
        self.replay_endpoint = self._proxy.replay_endpoint if config.upstream_replay is not None else None
        self._thread = threading.Thread(target=self._run, name="kvevents-link", daemon=True)
        self._thread.start()

    def cut(self, lasts_s: float | None = None) -> None:
        """Break the connections now, for ``lasts_s`` seconds (``None``: ``cut_s``); from any thread."""
        self._cut_s = lasts_s
        self._broken.set()
        self._wake.send(b"c")

    def close(self) -> None:
        """Pass on what waits and end; may be called again."""
        if self._thread.is_alive():
            self._stop.set()
            with contextlib.suppress(OSError):
                self._wake.send(b"s")
            self._thread.join(10)
        self._wake.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        proxy = self._proxy
        try:
            while not self._stop.is_set():
                proxy.step(1.0)
                self._theirs.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    self._theirs.recv(64)
                if self._broken.is_set() and proxy.cut_until is None:
                    self._broken.clear()
                    proxy._cut(self._cut_s)
        finally:
            proxy.close()
            self._theirs.close()


def run_link(config: LinkConfig, control: Connection) -> None:
    """Run a link in this process until the other end of ``control`` says something or is gone.

    Sends ``("ready", live_endpoint, replay_endpoint or None)`` first and ``("done", counters as a dict)``
    last; a link that cannot listen sends ``("failed", message)``. For
    ``multiprocessing.Process(target=run_link, args=(config, child_end))`` with any start method.
    """
    counters = LinkCounters()
    try:
        proxy = _Proxy(config, counters)
    except zmq.ZMQError as e:
        control.send(("failed", f"{config.listen}: {os.strerror(e.errno or 0)}"))
        return
    control.send(("ready", proxy.live_endpoint, proxy.replay_endpoint if config.upstream_replay else None))
    proxy.poller.register(control.fileno(), zmq.POLLIN)
    try:
        while not control.poll():
            proxy.step(1.0)
    finally:
        proxy.close()
        with contextlib.suppress(OSError):
            control.send(("done", msgspec.structs.asdict(counters)))
