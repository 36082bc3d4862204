"""Sockets and sessions over ZeroMQ: what is done in one round, and in which order things are looked at."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import socket
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, get_args

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvevents.errors import ConfigError, EndpointInUseError, EventTypeError, ForkError, KVEventsError
from kvevents.subscribe.actions import Limits, Policy
from kvevents.subscribe.checks import checked
from kvevents.subscribe.files import FileSources
from kvevents.subscribe.log import RateLimitedLog
from kvevents.subscribe.session import Session
from kvevents.subscribe.source import Source
from kvevents.subscribe.timing import Timing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kvevents.subscribe.items import Item, Resume
    from kvevents.subscribe.stats import SourceStats

__all__ = ["Driver", "unwatch"]

_ROUND = 256
"""Messages of one socket that are taken before the others get their turn."""
_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_MAX_SOCKETS = 65_535
"""Of one context: ZeroMQ's own default is enough for three hundred sources."""
_MAX_WAIT_S = 3600.0
"""ZeroMQ counts milliseconds in 32 bits."""
_SOON_S = 1.0
"""When a socket that could not be had is tried for again."""


class _Wires:
    """The sockets of one source."""

    def __init__(self, session: Session, live: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        self.session = session
        self.live = live
        self.monitor = monitor
        self.replay: zmq.Socket[bytes] | None = None
        self.request: object = None


class _Watch:
    """A file of sources, and what it said when it was last read."""

    def __init__(self, file: FileSources) -> None:
        self.file = file
        self.sources: list[Source] = []
        self.due = 0.0


class Driver:
    """Sockets and sessions of all sources, and what is done in one round; a subclass waits for rounds.

    See :class:`Subscriber` for the parameters.
    """

    _new_poller: type[zmq.Poller] = zmq.Poller

    def __init__(
        self,
        sources: str | Source | FileSources | Iterable[str | Source | FileSources],
        *,
        policy: Policy = "snapshot",
        digest_of: Callable[[str], bytes | None] | None = None,
        decode: bool = True,
        keep_payload: bool = False,
        resume: Mapping[str, Resume] | None = None,
        hwm: int = 100_000,
        max_replays: int = 4,
        max_message_bytes: int = 256 << 20,
        timing: Timing | None = None,
        limits: Limits | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        seed: int | None = None,
    ) -> None:
        for name, value, most in (
            ("hwm", hwm, 2**31 - 1),
            ("max_replays", max_replays, 2**31 - 1),
            ("max_message_bytes", max_message_bytes, 2**63 - 1),
        ):
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(
                    f"{name}: a number from 1 to {most} was expected, saw {value!r}: "
                    "without a bound a slow reader costs memory without end"
                )
        for name, given, kind in (("timing", timing, Timing), ("limits", limits, Limits)):
            if given is not None and not isinstance(given, kind):
                raise ConfigError(f"{name}: a {kind.__name__} was expected, saw {given!r}")
        if policy not in get_args(Policy):
            raise ConfigError(f"policy: {policy!r} is none of {', '.join(get_args(Policy))}")
        try:
            listed = [sources] if isinstance(sources, (str, Source, FileSources)) else list(sources)
        except TypeError:
            raise ConfigError(
                f"sources: addresses, Source or FileSources objects were expected, saw {sources!r}"
            ) from None
        if not listed:
            raise ConfigError("a subscriber needs at least one source")
        self._watches = [_Watch(s) for s in listed if isinstance(s, FileSources)]
        wanted = [s if isinstance(s, Source) else Source(s) for s in listed if not isinstance(s, FileSources)]
        for watch in self._watches:
            watch.sources = watch.file.read()
            wanted += watch.sources
        if digest_of is not None and not callable(digest_of):
            raise ConfigError(f"digest_of: a function was expected, saw {digest_of!r}")
        points = checked(timing or Timing(), limits or Limits(), resume)
        if twice := {n for n, count in Counter(s.label for s in wanted).items() if count > 1}:
            raise ConfigError(f"two sources are named {', '.join(map(repr, sorted(twice)))}; give them names")
        self._pid = os.getpid()
        self._clock = time.monotonic
        self._digest_of = digest_of
        self._hwm = hwm
        self._max_replays = max_replays
        self._max_message = max_message_bytes
        self._lock = threading.RLock()
        # Who holds no lock and wants one, between two rounds of the thread that iterates.
        self._turn = threading.Condition(self._lock)
        self._claims: deque[None] = deque()
        self._closing = False
        self._closed = False
        self._items: deque[Item] = deque()
        self._own_context = context is None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context() if context is None else context
        if context is None:
            self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        # Whose session is being fed. In the next round still: it was broken off, by Ctrl-C for example.
        self._feeding: _Wires | None = None
        self._again_at = math.inf
        self._poller = self._new_poller()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._poller.register(self._woken, zmq.POLLIN)
        self._wires: dict[zmq.Socket[bytes], _Wires] = {}
        self._all: list[_Wires] = []
        self._log = RateLimitedLog("kvevents.subscribe", self._clock)
        rng = random.Random(seed)  # noqa: S311 - jitter

        def session(source: Source) -> Session:
            return Session(
                source,
                timing=timing or Timing(),
                limits=limits or Limits(),
                rng=rng,
                log=self._log,
                policy=policy,
                decode_batches=decode,
                keep_payload=keep_payload,
                # Once: a source that is taken out and comes again begins anew.
                resume=points.pop(source.label, None),
            )

        self._new_session = session
        try:
            for source in wanted:
                self._open(session(source))
        except BaseException:
            self._shut()
            raise

    # ------------------------------------------------------------ what users call

    def stats(self) -> list[SourceStats]:
        """The state of every source, in the given order. Never waits for the iterating thread."""
        now = self._clock()
        return [w.session.statistics(now) for w in self._all]

    def add_source(self, source: str | Source) -> None:
        """Read one more publisher from now on. From any thread, also while another one iterates.

        :raises ConfigError: a source of this name is read already, or the subscriber is closed.
        :raises EndpointInUseError: a source with ``bind`` cannot have its address.
        """
        added = source if isinstance(source, Source) else Source(source)
        with self._between_rounds():
            self._add(added)

    def remove_source(self, name: str) -> None:
        """Read a source no longer, and forget its state: nothing of it is yielded after this returns.

        From any thread, also while another one iterates. What a
        :class:`~kvevents.subscribe.FileSources` lists is opened again when the file changes.

        :raises ConfigError: no source has this name, or the subscriber is closed.
        """
        with self._between_rounds():
            self._remove(name)

    def check(self, source: str, seq: int, digest: bytes) -> bool:
        """Have the publisher say whether this is the digest of its set behind batch ``seq``.

        That is for a set to which everything was applied that was yielded so far, the last of it ``seq``. The
        answer is waited for by whoever iterates. Where it differs, what follows is what the policy says: a
        snapshot, or a reset, or a gap of the reason ``drift``. ``stats()`` counts ``checks`` and ``drifts``.

        To be called by whoever iterates, between two items.

        :returns: whether the publisher is asked. It is not while something is being repaired, where ``seq``
            is not the last number, or where the publisher knows no digests.
        :raises ConfigError: there is no such source.
        :raises EventTypeError: ``digest`` is not of 16 bytes.
        """
        if not isinstance(digest, bytes) or len(digest) != 16:
            raise EventTypeError(f"digest: 16 bytes were expected, saw {digest!r:.80}")
        return self._named(source).session.check(seq, digest, self._clock())

    def topic(self, name: str) -> bytes:
        """The topic that the source of this name was heard with last; empty before anything was heard.

        :raises ConfigError: there is no such source.
        """
        return self._named(name).session.topic

    def _named(self, name: str) -> _Wires:
        for w in self._all:
            if w.session.name == name:
                return w
        there = ", ".join(repr(w.session.name) for w in self._all[:10])
        raise ConfigError(f"no source is named {name!r}; there are: {there or 'none'}")

    @property
    def endpoints(self) -> list[str]:
        """The live address of every source as it is, with the port where the system chose one."""
        with self._lock:
            return [w.live.getsockopt_string(zmq.LAST_ENDPOINT) for w in self._all if not self._closed]

    # ------------------------------------------------------------ sources that come and go

    @contextlib.contextmanager
    def _between_rounds(self) -> Iterator[None]:
        self._check_fork()
        self._claims.append(None)
        try:
            self._wake_up()
            with self._turn:
                if self._closing:
                    raise ConfigError("the subscriber is closed; make another one")
                yield
        finally:
            self._claims.pop()
            with self._turn:
                self._turn.notify_all()

    def _wake_up(self) -> None:
        # Where the pipe is full it is going to wake up anyway; where it is closed nobody waits.
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def _add(self, source: Source) -> None:
        if any(w.session.name == source.label for w in self._all):
            raise ConfigError(f"a source is named {source.label!r} already; give the new one a name")
        self._open(self._new_session(source))

    def _remove(self, name: str) -> None:
        wires = self._named(name)
        self._items = deque(i for i in self._items if i.source != name)
        for watch in self._watches:
            watch.sources = [s for s in watch.sources if s.label != name]
        self._forget(wires)

    def _forget(self, wires: _Wires) -> None:
        if self._feeding is wires:
            self._feeding = None
        self._all = [w for w in self._all if w is not wires]
        sockets = [s for s, w in self._wires.items() if w is wires]
        for s in sockets:
            del self._wires[s]
            self._poller.unregister(s)
        self._discard(wires, sockets)

    def _discard(self, wires: _Wires, sockets: list[zmq.Socket[bytes]]) -> None:
        unwatch(wires)
        for s in sockets:
            s.close(linger=0)

    def _look_at_files(self, now: float) -> None:
        for watch in self._watches:
            if now < watch.due:
                continue
            watch.due = now + watch.file.every_s
            try:
                if not watch.file.changed():
                    continue
                wanted = watch.file.read()
            except (ConfigError, OSError) as e:
                self._log.warning(str(watch.file.path), "sources", "the sources stay as they are: %s", e)
                continue
            self._follow(watch, wanted)

    def _follow(self, watch: _Watch, wanted: list[Source]) -> None:
        """From the sources of a file as it was to those as it is; what did not change is not touched."""
        left = [s for s in watch.sources if s not in wanted]
        came = [s for s in wanted if s not in watch.sources]
        for source in left:
            self._remove(source.label)
        for source in list(came):
            try:
                self._add(source)
            except KVEventsError as e:
                came.remove(source)
                self._log.warning(source.label, "sources", "this source cannot be read: %s", e)
        watch.sources += came
        if watch.file.on_change is not None and (left or came):
            watch.file.on_change(came, left)

    # ------------------------------------------------------------ sockets

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        s = self._context.socket(kind)
        try:
            # All of these only work before connect.
            s.linger = 0
            s.ipv6 = True
            s.set_hwm(self._hwm)
            s.maxmsgsize = self._max_message
            s.reconnect_ivl = 50
            s.reconnect_ivl_max = 2000
            s.tcp_keepalive = 1
        except BaseException:
            # A context with an open socket never ends.
            s.close()
            raise
        return s

    def _open(self, session: Session) -> None:
        source = session.source
        live = monitor = None
        try:
            live = self._socket(zmq.SUB)
            monitor = live.get_monitor_socket(_EVENTS)
        except zmq.ZMQError as e:
            if live is not None:
                live.close(linger=0)
            if e.errno not in {errno.EMFILE, errno.ENFILE}:
                raise
            raise ConfigError(
                f"{source.label}: no socket for it beside those of {len(self._all)} sources: "
                f"{e.strerror or e}; allow more open files (ulimit -n) or sockets of the context"
            ) from e
        wires = _Wires(session, live, monitor)
        # A new list: statistics are read by other threads.
        self._all = [*self._all, wires]
        for s in (live, monitor):
            self._wires[s] = wires
            self._poller.register(s, zmq.POLLIN)
        live.subscribe(source.topic.encode())
        try:
            if source.bind:
                live.bind(source.endpoint)
            else:
                live.connect(source.endpoint)
        except zmq.ZMQError as e:
            self._forget(wires)
            if e.errno == zmq.EADDRINUSE:
                raise EndpointInUseError(
                    f"{source.endpoint} is in use: does another reader listen there?"
                ) from e
            raise ConfigError(f"endpoint {source.endpoint!r}: {e.strerror or e}") from e
        if source.endpoint.startswith("inproc:"):
            # ZeroMQ tells nothing of connections inside a process.
            self._items.extend(session.connected(self._clock()))

    def _start_replays(self, now: float) -> None:
        running = 0
        for wires in self._all:
            # A socket of its own for each request: what an old one still brings cannot be mistaken.
            if wires.replay is not None and wires.session.request is not wires.request:
                self._end_replay(wires)
            elif wires.replay is not None and wires.session.wants(now):
                self._send(wires, now)
            running += wires.replay is not None
        for wires in self._all:
            if running >= self._max_replays:
                return
            endpoint = wires.session.source.replay_endpoint
            if endpoint is None or not wires.session.wants(now):
                continue
            try:
                dealer = self._socket(zmq.DEALER)
                try:
                    dealer.connect(endpoint)
                except zmq.ZMQError:
                    dealer.close(linger=0)
                    raise
            except zmq.ZMQError as e:
                # It is due still; meanwhile others may have closed theirs.
                self._again_at = now + _SOON_S
                self._log.warning(wires.session.name, "socket", "%s: %s", endpoint, e.strerror or e)
                continue
            wires.replay, wires.request = dealer, wires.session.request
            self._wires[dealer] = wires
            self._poller.register(dealer, zmq.POLLIN)
            self._send(wires, now)
            running += 1

    def _send(self, wires: _Wires, now: float) -> None:
        assert wires.replay is not None  # noqa: S101 - the caller's condition
        for message in wires.session.take(now):
            wires.replay.send_multipart(message)

    def _end_replay(self, wires: _Wires) -> None:
        dealer = wires.replay
        if dealer is not None:
            # Whatever breaks this off, it can be done again.
            if dealer in self._poller:
                self._poller.unregister(dealer)
            self._wires.pop(dealer, None)
            dealer.close(linger=0)
        wires.replay = wires.request = None

    # ------------------------------------------------------------ one round

    def _begin(self, end: float) -> int:
        """What is due now; how many milliseconds to wait for the sockets (-1: without end)."""
        now = self._clock()
        if self._feeding is not None:
            self._items.extend(self._feeding.session.broken_off(now))
            self._feeding = None
        self._again_at = math.inf
        self._look_at_files(now)
        if self._digest_of is not None and not self._items:
            self._compare(self._digest_of, now)
        self._start_replays(now)
        due = [
            end,
            self._again_at,
            *(w.session.deadline(now) for w in self._all),
            *(w.due for w in self._watches),
        ]
        wait_s = min(due) - now
        return -1 if wait_s == math.inf else math.ceil(min(max(0.0, wait_s), _MAX_WAIT_S) * 1000)

    def _compare(self, digest_of: Callable[[str], bytes | None], now: float) -> None:
        """Everything that was yielded has been applied: the user's digests are of the last numbers."""
        for wires in self._all:
            session = wires.session
            seq = session.sequence.last_seq
            if seq is not None and session.check_due(now):
                digest = digest_of(session.name)
                if digest is not None:
                    self.check(session.name, seq, digest)

    def _handle(self, ready: list[tuple[Any, int]]) -> None:
        """What the sockets have, and what time has brought."""
        touched: dict[int, _Wires] = {}
        for s, _ in ready:
            wires = self._wires.get(s)
            if wires is not None:
                touched[id(wires)] = wires
            elif s == self._woken.fileno() or s is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(256)
        for wires in touched.values():
            self._feeding = wires
            self._read(wires)
            self._feeding = None
        now = self._clock()
        for wires in self._all:
            if now >= wires.session.deadline(now):
                self._feeding = wires
                self._items.extend(wires.session.tick(now))
                self._feeding = None

    def _shut(self) -> None:
        """Close everything; the caller holds the lock."""
        self._closing = True
        if self._closed:
            return
        self._closed = True
        for wires in self._all:
            self._end_replay(wires)
            unwatch(wires)
            wires.monitor.close(linger=0)
            wires.live.close(linger=0)
        self._wake.close()
        self._woken.close()
        if self._own_context:
            self._context.term()

    def _read(self, wires: _Wires) -> None:
        session, items = wires.session, self._items
        messages = _take(wires.live)
        # A new connection is told of before its first message is here, so it is looked at in between.
        while True:
            try:
                event = parse_monitor_message(wires.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                break
            except RuntimeError:
                # A round was broken off between its two frames.
                continue
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                items.extend(session.connected(self._clock()))
            elif event == zmq.EVENT_DISCONNECTED:
                session.disconnected()
        now = self._clock()
        # Answers first: what they bring is older than what is live.
        if wires.replay is not None and session.request is wires.request:
            for frames in _take(wires.replay):
                items.extend(session.answer(frames, now))
                if session.request is not wires.request:
                    break
        for frames in messages:
            items.extend(session.live(frames, now))

    def _check_fork(self) -> None:
        if self._pid != os.getpid():
            raise ForkError(
                f"this Subscriber belongs to process {self._pid}, this is its fork {os.getpid()}: "
                "make one after the fork"
            )


def unwatch(wires: _Wires) -> None:
    """End the monitor.

    Where a reader rested while peers came and went its queue is full, and ZeroMQ's thread waits for room with
    a lock that ending it needs.
    """
    with contextlib.suppress(zmq.ZMQError):
        for _ in range(100 * _ROUND):
            wires.monitor.recv_multipart(zmq.NOBLOCK)
    wires.live.disable_monitor()


def _take(s: zmq.Socket[bytes]) -> list[list[bytes]]:
    # Without the layer above, which asks for an option behind every frame: half the time of a small message.
    receive: Callable[[int, bool], zmq.Frame] = zmq.backend.Socket.recv.__get__(s)
    taken: list[list[bytes]] = []
    with contextlib.suppress(zmq.Again):
        while len(taken) < _ROUND:
            frame = receive(_NOBLOCK, False)
            frames = [frame.bytes]
            while frame.more:
                frame = receive(_NOBLOCK, False)
                frames.append(frame.bytes)
            taken.append(frames)
    return taken
