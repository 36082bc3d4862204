"""The subscriber over ZeroMQ, for threads."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Self

from kvevents.subscribe.checks import check_timeout
from kvevents.subscribe.driver import Driver
from kvevents.subscribe.stats import SourceStats
from kvevents.subscribe.timing import Timing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from kvevents.subscribe.items import Item

__all__ = ["SourceStats", "Subscriber", "Timing"]


class Subscriber(Driver):
    """Reads one or several publishers and yields what happened, in order and without silent loss.

    For each source every sequence number of a publisher's life comes exactly once: as a
    :class:`~kvevents.subscribe.Batch`, or inside a :class:`~kvevents.subscribe.Gap` when nothing can bring
    it back. A :class:`~kvevents.subscribe.Reset` comes before the first batch of a new life. Missing batches
    are asked of the replay socket; batches that arrive meanwhile are held and follow in order. After a
    silence, and after each new connection, the replay socket is asked too, since the loss of the last
    message cannot be seen otherwise and since a publisher may have been restarted.

    All work is done in the thread that iterates (or calls :meth:`poll`), one at a time; nothing runs in the
    background. :meth:`close`, :meth:`stats`, :meth:`add_source` and :meth:`remove_source` may be called from
    any thread. Iteration ends when the subscriber is closed. Use it as a context manager.

    Memory is bounded: ``hwm`` messages a socket inside ZeroMQ, ``limits.hold_batches`` and
    ``limits.hold_bytes`` a source during a repair, and the items of one round.

    :param sources: addresses, :class:`Source` objects (each gets a socket of its own) or
        :class:`FileSources`, which are looked at again and again.
    :param policy: what to do about a hole: ``snapshot``, ``replay``, ``wipe`` or ``keep_and_flag``, see
        ``docs/subscriber.md``. Without extended replay ``snapshot`` is ``replay``.
    :param digest_of: the digest of what the caller rebuilt of the named source, or ``None`` where it is not
        to be compared, for example :meth:`ResidentSet.valid_digest <kvevents.ResidentSet.valid_digest>`.
        Called by the thread that iterates, every ``timing.check_s`` seconds, when everything that was yielded
        is applied; without it nothing is compared.
    :param decode: ``False``: batches carry their bytes (``payload``) and are not decoded.
    :param keep_payload: batches carry their bytes too.
    :param hwm: messages that ZeroMQ queues for a reader that is slow, on each socket; what is beyond is lost
    and
        then repaired.
    :param max_replays: replays that run at the same time over all sources.
    :param max_message_bytes: a larger message ends the connection that brings it.
    :param timing: what is waited for, and how long.
    :param limits: bounds of each source's memory and patience.
    :param context: of pyzmq, for ``inproc`` endpoints; it is left open.
    :param seed: of the jitter, for repeatable tests.
    :raises ConfigError: no sources, two of one name, or an address that cannot be.
    :raises EndpointInUseError: a source with ``bind`` cannot have its address.
    """

    def poll(self, timeout: float | None = None) -> Item | None:
        """The next item; ``None`` after ``timeout`` seconds (``None``: wait for ever) or when closed."""
        self._check_fork()
        check_timeout(timeout)
        with self._turn:
            if self._items and not self._closing and not self._claims:
                return self._items.popleft()
            end = math.inf if timeout is None else self._clock() + timeout
            while not self._items or self._closing or self._claims:
                if self._closing:
                    return None
                if self._claims:
                    self._turn.wait()
                    continue
                ready = self._poller.poll(self._begin(end))
                if self._closing:
                    return None
                self._handle(ready)
                if self._clock() >= end and not self._items:
                    return None
            return self._items.popleft()

    def run(self, callback: Callable[[Item], object]) -> None:
        """Call ``callback`` with every item until the subscriber is closed, in the calling thread.

        What the callback raises ends the loop and is raised here; the subscriber stays usable.
        """
        for item in self:
            callback(item)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        item = self.poll()
        if item is None:
            raise StopIteration
        return item

    def close(self) -> None:
        """End: iteration stops, sockets are closed. May be called again, and from any thread."""
        if self._pid != os.getpid():
            # The sockets belong to the parent; closing them here would break its connections.
            return
        self._closing = True
        self._wake_up()
        with self._turn:
            self._shut()
            self._turn.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
