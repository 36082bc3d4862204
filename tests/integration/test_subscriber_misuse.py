"""The subscriber in the hands of users: interrupted, left alone, given too much."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from kvevents import Source, Subscriber
from kvevents.errors import ConfigError
from kvevents.subscribe import Reset, Timing
from kvevents.subscribe.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

QUICK = Timing(replay_timeout_s=0.3, backoff_s=0.02, jitter_s=0, silence_s=0.15, cooldown_s=0.2)


@pytest.mark.timeout(20)
def test_no_time_limit_spins_or_is_too_long() -> None:
    with Subscriber("tcp://127.0.0.1:5") as subscriber:
        for wrong in (math.nan, "5"):
            with pytest.raises(ConfigError, match="timeout: seconds"):
                subscriber.poll(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="digest: 16 bytes"):
            subscriber.check("tcp://127.0.0.1:5", 0, "00" * 16)  # type: ignore[arg-type]
        closer = threading.Timer(0.2, subscriber.close)
        closer.start()
        assert subscriber.poll(1e300) is None
        closer.join()


def test_an_interrupt_between_socket_and_item_is_no_silent_loss(
    publisher: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pub = publisher()
    for _ in range(5):
        pub.publish()
    live = Session.live
    interrupts = iter([True])

    def interrupted(self: Session, frames: list[bytes], now: float) -> Any:
        items = live(self, frames, now)
        if items and next(interrupts, False):
            raise KeyboardInterrupt
        return items

    monkeypatch.setattr(Session, "live", interrupted)
    with Subscriber(Source(pub.live, pub.replay, name="it"), timing=QUICK) as subscriber:
        got: list[Any] = []
        while not got or got[-1].seq != 4:
            got.append(subscriber.poll(5))
        pub.publish()
        with pytest.raises(KeyboardInterrupt):
            subscriber.poll(5)
        got = [subscriber.poll(5)]
        assert got[0] == Reset("it", "unsure")
        while got[-1] == got[0] or got[-1].seq != 5:
            got.append(subscriber.poll(5))
        assert [item.seq for item in got[1:]] == [0, 1, 2, 3, 4, 5]


RESTED = """
import socket, sys, time
from kvevents import Source, Subscriber

subscriber = Subscriber(Source(sys.argv[1], bind=True))
subscriber.poll(0.05)
port = int(subscriber.endpoints[0].rsplit(":", 1)[1])
hello = b"\\xff" + bytes(8 - 1) + b"\\x01\\x7f\\x03\\x00NULL" + bytes(16 + 1 + 31)
ready = b"\\x05READY\\x0bSocket-Type\\x00\\x00\\x00\\x03PUB"
count = 0
try:
    while count < 3000:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5) as peer:
            peer.settimeout(0.5)
            peer.sendall(hello + bytes([4, len(ready)]) + ready)
            while len(peer.recv(4096)) and not peer.recv(4096):
                pass
        count += 1
except TimeoutError:
    pass
print(count, flush=True)
subscriber.close()
print("closed", flush=True)
"""


def test_a_reader_that_rested_while_peers_came_and_went_can_be_closed() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", RESTED, "tcp://127.0.0.1:0"],
        capture_output=True, timeout=60, text=True, check=False,
    )  # fmt: skip
    assert ended.stdout.split()[-1:] == ["closed"], ended


def test_more_sources_than_one_context_has_sockets_by_itself() -> None:
    with Subscriber([Source(f"ipc:///nowhere/{i}", name=str(i)) for i in range(600)]) as subscriber:
        assert len(subscriber.stats()) == 600


def test_a_source_too_many_is_said_and_costs_no_other(publisher: Callable[..., Any]) -> None:
    pub = publisher()
    with zmq.Context() as context:
        context.max_sockets = 5
        with Subscriber(Source(pub.live, pub.replay, name="a"), context=context, timing=QUICK) as subscriber:
            with pytest.raises(ConfigError, match="b: no socket for it"):
                subscriber.add_source(Source("tcp://127.0.0.1:5", name="b"))
            pub.publish()
            item = subscriber.poll(5)
            assert item is not None
            assert item.source == "a"
