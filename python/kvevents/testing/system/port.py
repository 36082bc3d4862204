"""One source at one reader: what a driver does around a session, with a link for sockets."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvevents.subscribe.session import Session
    from kvevents.testing.system.link import Dealer, Link
    from kvevents.testing.system.reader import Reader
    from kvevents.testing.system.schedule import Schedule

__all__ = ["Port"]


class Port:
    """Feeds a session from its link, calls it in time, and asks what it wants to ask."""

    link: Link

    def __init__(self, reader: Reader, session: Session, schedule: Schedule) -> None:
        self.session = session
        self._reader = reader
        self._schedule = schedule
        self._wake_at = math.inf
        self._dealer: Dealer | None = None
        self._request: object = None
        self._asked = 0
        self.closed = False

    # ------------------------------------------------------------ from the link

    def connected(self) -> None:
        """The connection stands."""
        self._reader.deliver(self, "connected", [])

    def disconnected(self) -> None:
        """The connection broke."""
        self._reader.deliver(self, "disconnected", [])

    def heard(self, frames: list[bytes]) -> None:
        """A live message."""
        self._reader.deliver(self, "live", frames)

    def answered(self, dealer: Dealer, frames: list[bytes]) -> None:
        """An answer of a replay server."""
        self._reader.deliver(self, "answer", frames, dealer)

    # ------------------------------------------------------------ what a driver does

    def process(self, what: str, frames: list[bytes], dealer: Dealer | None) -> None:
        """One thing that the sockets had."""
        session, now = self.session, self._schedule.now
        if self.closed:
            return
        if what == "connected":
            items = session.connected(now)
        elif what == "disconnected":
            session.disconnected()
            items = []
        elif what == "live":
            items = session.live(frames, now)
        else:
            assert dealer is not None  # noqa: S101 - answers come from one
            dealer.flying -= 1
            if dealer is not self._dealer or session.request is not self._request:
                return
            items = session.answer(frames, now)
        self._reader.take(self, items)
        self.look()

    def look(self) -> None:
        """Ask what is to be asked, and be called again when the session says."""
        if self.closed:
            return
        session, now = self.session, self._schedule.now
        if session.deadline(now) <= now:
            self._reader.take(self, session.tick(now))
        seq = session.sequence.last_seq
        if seq is not None and session.check_due(now):
            session.check(seq, self._reader.resident.digest(session.name), now)
        if self._dealer is not None and session.request is not self._request:
            self._hang_up()
        if session.wants(now):
            if self._dealer is None:
                self._asked += 1
                identity = f"{self._reader.identity}/{session.name}/{self._asked}"
                self._dealer = self.link.dealer(identity.encode())
                self._request = session.request
            for message in session.take(now):
                self.link.ask(self._dealer, list(message))
        due = session.deadline(now)
        if due < self._wake_at:
            self._wake_at = due
            self._schedule.at(due, self._wake)

    def _wake(self) -> None:
        if self._schedule.now >= self._wake_at:
            self._wake_at = math.inf
            if not self._reader.slow:
                self.look()

    def _hang_up(self) -> None:
        dealer, self._dealer, self._request = self._dealer, None, None
        if dealer is not None:
            self.link.close(dealer)

    def close(self) -> None:
        """The reader leaves."""
        self._hang_up()
        self.closed = True
        self.link.gone()
