"""What lies between one engine and one reader: a live connection, replay requests, all faults of both."""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from kvevents.publish.desk import ClientGoneError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvevents.publish.jobs import Frames
    from kvevents.testing.system.engine import Engine
    from kvevents.testing.system.plan import Step
    from kvevents.testing.system.port import Port
    from kvevents.testing.system.schedule import Schedule

__all__ = ["Dealer", "Link"]

LATENCY_S = 0.001
GARBAGE = b"\xc1 this is no batch"


class _Overtaken:
    """A message that waits until some others have passed it."""

    def __init__(self, by: int, frames: list[bytes]) -> None:
        self.by = by
        self.frames = frames


class Dealer:
    """A reader's end of a replay conversation: as a DEALER socket, gone when it is closed."""

    def __init__(self, link: Link, identity: bytes) -> None:
        self.link = link
        self.identity = identity
        self.open = True
        self.broken = False
        """Nothing comes any more, as where a connection broke unnoticed."""
        self.unsent: list[list[bytes]] = []
        """Requests that wait for a connection."""
        self.flying = 0
        """Answers that were sent and are not taken yet."""

    def take(self, messages: Sequence[Frames]) -> int:
        """The replay server sends; returns how many the pipe has room for."""
        link = self.link
        if not self.open or not link.up:
            raise ClientGoneError
        taken = messages[: max(0, link.pipe - self.flying)]
        for frames in taken:
            if self.broken or link.loses_answer(self):
                continue
            self.flying += 1
            link.schedule.after(LATENCY_S, partial(self._arrive, link.generation, list(frames)))
        return len(taken)

    def _arrive(self, generation: int, frames: list[bytes]) -> None:
        if self.open and generation == self.link.generation:
            self.link.port.answered(self, frames)
        else:
            self.flying -= 1


class Link:
    """Between one engine and one reader, for as long as both are there; engines may restart behind it."""

    def __init__(self, schedule: Schedule, engine: Engine, port: Port, pipe: int) -> None:
        self.schedule = schedule
        self.port = port
        self.pipe = pipe
        """Answers that may be on their way."""
        self.up = False
        self.generation = 0
        """Counts connections."""
        self.faults: deque[Step] = deque()
        """What happens to the next messages, one each."""
        self.mute = 0
        self.deaf = 0
        self._engine = engine
        self._down_until = -math.inf
        self._dark_until = -math.inf
        self._overtaken: list[_Overtaken] = []
        self._dealers: list[Dealer] = []
        self._gone = False

    @property
    def dark(self) -> bool:
        """Whether everything is lost though the connection seems to stand."""
        return self.schedule.now < self._dark_until

    # ------------------------------------------------------------ faults

    def cut(self, seconds: float) -> None:
        """Break the connection; it is made again after some time, if the engine lives then."""
        self._down_until = max(self._down_until, self.schedule.now + seconds)
        self.broken()
        self.schedule.at(self._down_until, self.connect)

    def partition(self, seconds: float) -> None:
        """Lose everything for some time, and tell nobody."""
        self._dark_until = max(self._dark_until, self.schedule.now + seconds)

    def heal(self) -> None:
        """No more faults from now on."""
        self.faults.clear()
        self.mute = self.deaf = 0
        self._dark_until = self._down_until = -math.inf
        for late in self._overtaken:
            self._deliver(late.frames)
        self._overtaken.clear()
        self.connect()

    def broken(self) -> None:
        """The connection is lost, with all that is on its way."""
        if self.up:
            self.up = False
            self.generation += 1
            self._overtaken.clear()
            for dealer in self._dealers:
                # What the engine knew of it went with the connection.
                self._engine.dealers.pop(dealer.identity, None)
            self.port.disconnected()

    def connect(self) -> None:
        """Stand again, if nothing speaks against it."""
        if self.up or self._gone or not self._engine.alive or self.schedule.now < self._down_until:
            return
        self.up = True
        self.port.connected()
        for dealer in [d for d in self._dealers if d.open]:
            self._engine.dealers[dealer.identity] = dealer
            unsent, dealer.unsent = dealer.unsent, []
            for frames in unsent:
                self.ask(dealer, frames)

    def gone(self) -> None:
        """The reader left."""
        self._gone = True
        self.up = False
        self.generation += 1
        for dealer in list(self._dealers):
            self.close(dealer)

    def loses_answer(self, dealer: Dealer) -> bool:
        """Whether this answer is lost: by itself, as vLLM's server does it, or with all that follow."""
        plain, muted = self._engine.spec.server == "plain", self.mute > 0
        self.mute -= muted
        lost = self.dark or (muted and (plain or self.mute == 0))
        dealer.broken = lost and not plain
        return lost

    # ------------------------------------------------------------ the live stream

    def send(self, frames: list[bytes]) -> None:
        """A message of the engine: on its way, late, or lost."""
        if not self.up or self.dark:
            return
        fault = self.faults.popleft() if self.faults else None
        kind = None if fault is None else fault.kind
        if fault is None or kind in {"garble", "duplicate"}:
            if kind == "garble":
                frames = [frames[0], frames[1], GARBAGE]
            self._deliver(frames)
            if fault is not None and kind == "duplicate":
                self._deliver_late(frames, fault.amount)
            self._overtake()
        elif kind == "delay":
            self._deliver_late(frames, fault.amount)
        elif kind == "reorder":
            self._overtaken.append(_Overtaken(fault.amount, frames))

    def _overtake(self) -> None:
        for late in self._overtaken:
            late.by -= 1
            if late.by == 0:
                self._deliver(late.frames)
        self._overtaken = [late for late in self._overtaken if late.by]

    def _deliver(self, frames: list[bytes]) -> None:
        self.schedule.after(LATENCY_S, partial(self._arrive, self.generation, frames))

    def _deliver_late(self, frames: list[bytes], power: int) -> None:
        """Whatever becomes of the connection: as a proxy would that held it back."""
        self.schedule.after(LATENCY_S + 0.001 * 2**power, partial(self._arrive, None, frames))

    def _arrive(self, generation: int | None, frames: list[bytes]) -> None:
        if generation in {None, self.generation} and self.up:
            self.port.heard(frames)

    # ------------------------------------------------------------ replay

    def dealer(self, identity: bytes) -> Dealer:
        """A new conversation."""
        dealer = Dealer(self, identity)
        self._dealers.append(dealer)
        if self.up:
            self._engine.dealers[identity] = dealer
        return dealer

    def close(self, dealer: Dealer) -> None:
        """The reader wants no more of it."""
        dealer.open = False
        self._dealers.remove(dealer)
        self._engine.dealers.pop(dealer.identity, None)

    def ask(self, dealer: Dealer, frames: list[bytes]) -> None:
        """A request of the reader; it waits for the connection, like one in a DEALER's pipe."""
        if not self.up:
            dealer.unsent.append(frames)
        elif dealer.broken or self.deaf or self.dark:
            # What follows in the same conversation does not arrive either.
            self.deaf -= self.deaf > 0 and not dealer.broken
            dealer.broken = True
        else:
            self.schedule.after(LATENCY_S, partial(self._asked, self.generation, dealer, frames))

    def _asked(self, generation: int, dealer: Dealer, frames: list[bytes]) -> None:
        if dealer.open and generation == self.generation and self._engine.publisher is not None:
            self._engine.publisher.request(dealer.identity, list(frames))
