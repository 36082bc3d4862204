"""The faulty link: faults by seed, counters, replay that passes through, cuts, a process of its own."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from typing import Any

import pytest
import zmq
import zmq.utils.monitor

from kvevents.errors import ConfigError
from kvevents.testing.link import FaultyLink, LinkConfig, plan_faults, run_link


def subscribed(sockets: Any, endpoint: str, pub: Any) -> Any:
    """A SUB behind the link that surely hears: messages marked as warm-up are sent until one arrives."""
    sub = sockets(zmq.SUB, connect=endpoint, subscribe=b"")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        pub.send_multipart([b"warm"])
        if sub.poll(20):
            break
    while sub.poll(100):
        sub.recv_multipart()
    return sub


def drain(sub: Any, quiet_ms: int = 300) -> list[int]:
    got = []
    while sub.poll(quiet_ms):
        got.append(int(sub.recv_multipart()[0]))
    return got


def test_equal_seeds_give_equal_faults_and_rates_hold() -> None:
    config = LinkConfig(
        upstream="inproc://x", seed=5, drop=0.1, duplicate=0.1, delay=0.1, reorder=0.2, cut_every=100
    )
    a = list(itertools.islice(plan_faults(config), 4000))
    assert a == list(itertools.islice(plan_faults(config), 4000))
    share = {
        kind: sum(p.fault == kind for p in a) / 4000 for kind in ("drop", "duplicate", "delay", "reorder")
    }
    assert share == pytest.approx({"drop": 0.1, "duplicate": 0.1, "delay": 0.1, "reorder": 0.2}, abs=0.03)
    assert 20 <= sum(p.cut for p in a) <= 70


def test_a_perfect_link_passes_everything_in_order(sockets: Any) -> None:
    pub = sockets(zmq.PUB, bind="tcp://127.0.0.1:*")
    with FaultyLink(LinkConfig(upstream=pub.last_endpoint.decode())) as link:
        sub = subscribed(sockets, link.live_endpoint, pub)
        for i in range(200):
            pub.send_multipart([b"%d" % i])
        assert drain(sub) == list(range(200))


def test_every_fault_happens_and_is_counted(sockets: Any) -> None:
    pub = sockets(zmq.PUB, bind="tcp://127.0.0.1:*")
    config = LinkConfig(
        upstream=pub.last_endpoint.decode(),
        seed=3,
        drop=0.1,
        duplicate=0.1,
        delay=0.1,
        reorder=0.1,
        delay_s=0.01,
    )
    with FaultyLink(config) as link:
        sub = subscribed(sockets, link.live_endpoint, pub)
        before = link.counters.dropped, link.counters.duplicated
        for i in range(300):
            pub.send_multipart([b"%d" % i])
        got = drain(sub)
        c = link.counters
        assert len(set(got)) == 300 - (c.dropped - before[0])
        assert len(got) - len(set(got)) == c.duplicated - before[1]
        assert got != sorted(got)
        assert min(c.dropped, c.duplicated, c.delayed, c.reordered) > 5


def test_replay_passes_through_with_three_frames_at_the_server(sockets: Any) -> None:
    pub = sockets(zmq.PUB, bind="tcp://127.0.0.1:*")
    router = sockets(zmq.ROUTER, bind="tcp://127.0.0.1:*")
    config = LinkConfig(
        upstream=pub.last_endpoint.decode(), upstream_replay=router.last_endpoint.decode(), drop=1.0
    )
    with FaultyLink(config) as link:
        assert link.replay_endpoint is not None
        clients = [sockets(zmq.DEALER, connect=link.replay_endpoint) for _ in range(2)]
        for i, client in enumerate(clients):
            client.send_multipart([b"", b"%d" % i])
        for _ in clients:
            identity, *rest = router.recv_multipart()
            assert len(rest) == 2
            router.send_multipart([identity, b"", b"answer " + rest[1]])
        assert [c.recv_multipart()[1] for c in clients] == [b"answer 0", b"answer 1"]


def test_a_cut_breaks_the_connection_and_heals(sockets: Any) -> None:
    pub = sockets(zmq.PUB, bind="tcp://127.0.0.1:*")
    with FaultyLink(LinkConfig(upstream=pub.last_endpoint.decode(), cut_s=0.02)) as link:
        sub = subscribed(sockets, link.live_endpoint, pub)
        monitor = sub.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED)
        link.cut()
        try:
            seen = [zmq.utils.monitor.recv_monitor_message(monitor)["event"] for _ in range(2)]
        finally:
            sub.disable_monitor()
            monitor.close()
        assert seen == [zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECTED]
        assert link.counters.reconnects == 1
        deadline = time.monotonic() + 10
        while not sub.poll(20):
            pub.send_multipart([b"7"])
            assert time.monotonic() < deadline


def test_a_link_runs_in_a_process_of_its_own(sockets: Any) -> None:
    pub = sockets(zmq.PUB, bind="tcp://127.0.0.1:*")
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=run_link, args=(LinkConfig(upstream=pub.last_endpoint.decode()), theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(30)
        kind, live, replay = ours.recv()
        assert (kind, replay) == ("ready", None)
        sub = subscribed(sockets, live, pub)
        pub.send_multipart([b"5"])
        assert drain(sub) == [5]
        ours.send("stop")
        assert ours.poll(10)
        kind, counters = ours.recv()
        assert kind == "done"
        assert counters["sent"] >= 1
    finally:
        process.join(10)
        assert process.exitcode == 0


def test_impossible_rates_are_refused() -> None:
    with pytest.raises(ConfigError, match="drop: 1"):
        LinkConfig(upstream="inproc://x", drop=1.5)
