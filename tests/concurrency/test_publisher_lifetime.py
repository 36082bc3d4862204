"""Ends of a publisher: shutdown, garbage, exit, fork; and what it costs other Python threads."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import zmq

from kvevents import BlockStored, EventList, KVEventBatch
from kvevents.codec import decode
from kvevents.errors import ForkError
from kvevents.publish import ZmqEventPublisher

ANY = "tcp://127.0.0.1:0"


def batch(i=0, events=1):
    return KVEventBatch(
        ts=float(i),
        events=EventList(
            [BlockStored([2**40 + k], None, list(range(16)), 16, None, "GPU", None) for k in range(events)]
        ),
    )


@pytest.fixture
def held(monkeypatch):
    """Holds every sender inside its first batch; the returned event lets it go."""
    entered, go = threading.Event(), threading.Event()
    from kvevents.publish.sender import Sender

    real = Sender._send_batch

    def send(self, number, item):
        entered.set()
        assert go.wait(30)
        real(self, number, item)

    monkeypatch.setattr(Sender, "_send_batch", send)
    go.entered = entered
    yield go
    go.set()


def run(code, timeout=30):
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr, time.monotonic() - start


PRELUDE = """
import os, sys, time, zmq
from kvevents import EventList, KVEventBatch
from kvevents.publish import ZmqEventPublisher
def batch(i=0):
    return KVEventBatch(ts=float(i), events=EventList())
"""


def test_shutdown_with_a_full_queue_ends_in_time_frees_the_port_and_reports(held, free_port):  # R02, R41
    endpoint = f"tcp://127.0.0.1:{free_port}"
    publisher = ZmqEventPublisher(endpoint=endpoint, max_queue_size=1)
    publisher.publish(batch(0))
    assert held.entered.wait(10)
    publisher.publish(batch(1))
    threading.Timer(0.3, held.set).start()
    start = time.monotonic()
    assert publisher.shutdown(timeout=0.1) == 1
    assert time.monotonic() - start < 3
    assert publisher.stats().unsent == 1
    assert publisher.shutdown() == 1, "a second call only says the same"
    again = ZmqEventPublisher(endpoint=endpoint)
    assert again.shutdown() == 0


def test_shutdown_never_closes_a_socket_that_the_sender_still_uses(held, monkeypatch):  # R41
    monkeypatch.setattr("kvevents.publish.zmq.GRACE_S", 0.05)
    publisher = ZmqEventPublisher(endpoint=ANY, replay_endpoint=ANY)
    publisher.publish(batch(0))
    assert held.entered.wait(10)
    publisher.shutdown(timeout=0)
    assert publisher._sender.thread.is_alive()
    assert not publisher._sender._socket.closed
    held.set()
    publisher._sender.thread.join(10)
    assert publisher._sender._socket.closed
    assert publisher.stats().failed == 0


def test_shutdown_sends_what_is_queued(sockets):
    publisher = ZmqEventPublisher(endpoint=ANY)
    sub = sockets(zmq.SUB, connect=publisher.get_publisher_config().endpoint, subscribe=b"")
    while not sub.poll(20):
        publisher.publish(batch())
    for i in range(2000):
        publisher.publish(batch(i, events=8))
    last = publisher.stats().next_sequence + publisher.stats().queued - 1
    assert publisher.shutdown(20) == 0
    number = -1
    while number < publisher.stats().next_sequence - 1:
        number = int.from_bytes(sub.recv_multipart()[1], "big")
    assert number >= last


def test_shutdown_from_many_threads_at_once():
    publisher = ZmqEventPublisher(endpoint=ANY, replay_endpoint=ANY)
    publisher.publish(batch())
    results = []
    threads = [threading.Thread(target=lambda: results.append(publisher.shutdown())) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    assert results == [0] * 8


def test_shutdown_is_bounded_while_a_client_does_not_read_its_replay(sockets):  # R07, R42
    publisher = ZmqEventPublisher(endpoint=ANY, replay_endpoint=ANY)
    for i in range(3000):
        publisher.publish(batch(i, events=4))
    config = publisher.get_publisher_config()
    sub = sockets(zmq.SUB, connect=config.endpoint, subscribe=b"", rcvhwm=1, rcvbuf=4096)
    dealer = sockets(zmq.DEALER, connect=config.replay_endpoint, rcvhwm=1, rcvbuf=4096)
    dealer.send_multipart([b"", bytes(8)])
    while not publisher.stats().replay.batches or not sub.poll(20):
        publisher.publish(batch(0, events=100))
    for i in range(3000):
        publisher.publish(batch(i, events=100))
    start = time.monotonic()
    publisher.shutdown(timeout=0.5)
    assert time.monotonic() - start < 2.5


def test_dropping_the_last_reference_ends_the_threads():
    publisher = ZmqEventPublisher(endpoint=ANY, replay_endpoint=ANY)
    threads = [publisher._sender.thread, publisher._server.thread]
    gone = weakref.ref(publisher)
    del publisher
    gc.collect()
    assert gone() is None
    for t in threads:
        t.join(5)
        assert not t.is_alive()


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "p.shutdown()", "keep = p; keep.self = keep", "del p"])
def test_exit_without_shutdown_is_safe_and_sends_what_was_published(ending, sockets):  # R137
    sub = sockets(zmq.SUB, bind=ANY, subscribe=b"")
    code = (
        PRELUDE
        + f"""
import select
p = ZmqEventPublisher(endpoint={sub.last_endpoint.decode()!r}, bind=False, replay_endpoint={ANY!r})
while not select.select([sys.stdin], [], [], 0.01)[0]:
    p.publish(batch(-1))
for i in range(100):
    p.publish(batch(i))
{ending}
"""
    )
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        sub.recv_multipart()  # the subscription has arrived
        _, err = child.communicate("go\n", timeout=10)
    finally:
        child.kill()
    assert (child.returncode, err) == (0, "")
    if ending != "del p":  # there nobody waits for the sender
        while (number := decode(sub.recv_multipart()[2]).ts) < 99:
            assert number >= -1


def test_exit_with_a_peer_that_is_gone_is_quick(free_port):  # R42
    code, _, err, seconds = run(
        PRELUDE
        + f"""
p = ZmqEventPublisher(endpoint="tcp://127.0.0.1:{free_port}", bind=False)
p.publish(batch())
"""
    )
    assert (code, err) == (0, "")
    assert seconds < 6


def test_a_forked_child_is_refused_and_the_parent_goes_on(sockets):  # R43
    publisher = ZmqEventPublisher(endpoint=ANY, replay_endpoint=ANY)
    sub = sockets(zmq.SUB, connect=publisher.get_publisher_config().endpoint, subscribe=b"")
    while not sub.poll(20):
        publisher.publish(batch())
    code, out, err, _ = run(
        PRELUDE
        + """
from kvevents.errors import ForkError
p = ZmqEventPublisher(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
p.publish(batch())
pid = os.fork()
if pid == 0:
    try:
        p.publish(batch())
    except ForkError as e:
        ok = "parent process" in str(e) and p.shutdown() == 0
    else:
        ok = False
    # A new one in the child works, also while the parent's lives.
    mine = ZmqEventPublisher(endpoint="tcp://127.0.0.1:0")
    mine.publish(batch())
    ok = ok and mine.shutdown() == 0 and mine.stats().sent == 1
    del p, mine
    sys.exit(0 if ok else 1)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
p.publish(batch())
assert p.shutdown() == 0
print("child", status, "sent", p.stats().sent)
"""
    )
    assert (code, out.strip(), err) == (0, "child 0 sent 2", "")
    assert publisher.shutdown() == 0
    assert isinstance(ForkError("x"), RuntimeError)


def test_import_then_fork_then_create_in_the_child():  # R43
    code, out, err, _ = run(
        PRELUDE
        + """
pid = os.fork()
p = ZmqEventPublisher(endpoint="tcp://127.0.0.1:0")
p.publish(batch())
ok = p.shutdown() == 0 and p.stats().sent == 1
if pid:
    ok = ok and os.waitpid(pid, 0)[1] == 0
sys.exit(0 if ok else 1)
"""
    )
    assert (code, err) == (0, "")
    assert out == ""


def test_the_sender_leaves_the_interpreter_to_others():
    """Batches of 64 events of 16 hashes and 256 tokens, back to back, beside a thread of pure Python."""
    events = EventList(
        [
            BlockStored(
                [2**50 + 100 * k + j for j in range(16)], None, list(range(256)), 16, None, "GPU", None
            )
            for k in range(64)
        ]
    )
    stop = threading.Event()
    progress = [0]

    def count():
        while not stop.is_set():
            for _ in range(100):
                progress[0] += 1

    def rate(seconds):
        before, start = progress[0], time.perf_counter()
        time.sleep(seconds)
        return (progress[0] - before) / (time.perf_counter() - start)

    with ZmqEventPublisher(endpoint=ANY, max_queue_size=64) as publisher:
        thread = threading.Thread(target=count)
        thread.start()
        try:
            ratios = []
            for _ in range(3):
                alone = rate(0.3)
                feeding = threading.Event()

                def feed(feeding=feeding):
                    while not feeding.is_set():
                        if publisher.stats().queued < 32:
                            publisher.publish(KVEventBatch(ts=0.0, events=events))
                        time.sleep(0.001)

                feeder = threading.Thread(target=feed)
                feeder.start()
                ratios.append(rate(0.5) / alone)
                feeding.set()
                feeder.join()
        finally:
            stop.set()
            thread.join()
        assert publisher.stats().sent > 5
    assert max(ratios) > 0.5, ratios


def test_publishing_from_several_threads(sockets):
    publisher = ZmqEventPublisher(endpoint=ANY, replay_endpoint=ANY)

    def work(k):
        for i in range(500):
            publisher.publish(KVEventBatch(ts=float(k * 1000 + i), events=EventList()))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert publisher.shutdown(10) == 0
    assert publisher.stats().sent == 2000
    assert publisher.stats().next_sequence == 2000


def test_pid_is_not_asked_for_every_batch(monkeypatch):
    publisher = ZmqEventPublisher(endpoint=ANY)
    monkeypatch.setattr(os, "getpid", lambda: pytest.fail("a system call a batch"))
    publisher.publish(batch())
    monkeypatch.undo()
    publisher.shutdown()
