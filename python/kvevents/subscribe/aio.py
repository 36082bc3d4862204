"""The subscriber for asyncio: the same sockets, sessions and rounds, waited for by the event loop."""

from __future__ import annotations

import asyncio
import functools
import math
import os
from typing import TYPE_CHECKING, Self

import zmq
import zmq.asyncio

from kvevents.subscribe.checks import check_timeout
from kvevents.subscribe.driver import Driver, unwatch

if TYPE_CHECKING:
    from types import TracebackType

    from kvevents.subscribe.driver import _Wires
    from kvevents.subscribe.items import Item

__all__ = ["AsyncSubscriber"]


class AsyncSubscriber(Driver):
    """:class:`~kvevents.subscribe.Subscriber` for asyncio: ``async with``, ``async for``, ``await poll()``.

    It yields the same items by the same rules and has the same parameters. All work is done in the event
    loop, by the task that iterates, while it waits for an item; several tasks take turns. A task that is
    cancelled while it waits loses nothing: what was received is yielded to the next.

    Everything but :meth:`stats` is to be called in the loop's thread.
    """

    _new_poller = zmq.asyncio.Poller
    _poller: zmq.asyncio.Poller
    _waiting = False

    @functools.cached_property
    def _one_at_a_time(self) -> asyncio.Lock:
        return asyncio.Lock()

    @functools.cached_property
    def _retired(self) -> list[zmq.Socket[bytes]]:
        return []

    async def poll(self, timeout: float | None = None) -> Item | None:  # noqa: ASYNC109 - as Subscriber.poll
        """The next item; ``None`` after ``timeout`` seconds (``None``: wait for ever) or when closed."""
        self._check_fork()
        check_timeout(timeout)
        end = math.inf if timeout is None else self._clock() + timeout
        while not self._items and not self._closing:
            try:
                async with asyncio.timeout(None if end == math.inf else end - self._clock()):
                    await self._one_at_a_time.acquire()
            except TimeoutError:
                break
            try:
                # Another task's turn may have brought something.
                if not self._items and not self._closing:
                    await self._round(end)
            finally:
                self._one_at_a_time.release()
            if self._clock() >= end:
                break
        return None if self._closing or not self._items else self._items.popleft()

    async def _round(self, end: float) -> None:
        wait_ms = self._begin(end)
        self._waiting = True
        try:
            ready = await self._poller.poll(0)
            if ready:
                # A stream that never pauses leaves the loop to others too.
                await asyncio.sleep(0)
            else:
                ready = await self._poller.poll(wait_ms)
        finally:
            self._waiting = False
            # What was given up meanwhile; nobody waits for it any more.
            for s in self._retired:
                s.close(linger=0)
            self._retired.clear()
            if self._closing:
                self._shut()
        if not self._closing:
            self._handle(ready)

    def close(self) -> None:
        """End: iteration stops, sockets are closed. May be called again; in the loop's thread."""
        if self._pid != os.getpid():
            return
        self._closing = True
        self._wake_up()
        if not self._waiting:
            self._shut()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        item = await self.poll()
        if item is None:
            raise StopAsyncIteration
        return item

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        # The task that waits closes the sockets when it wakes up.
        async with self._one_at_a_time:
            self._shut()

    def _discard(self, wires: _Wires, sockets: list[zmq.Socket[bytes]]) -> None:
        if self._waiting:
            # The loop watches their descriptors until the task that waits has woken up.
            unwatch(wires)
            self._retired += sockets
        else:
            super()._discard(wires, sockets)
