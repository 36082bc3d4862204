"""The publisher over real sockets, read with plain ZeroMQ as vLLM's clients do."""

from __future__ import annotations

import logging
import socket
import threading
import time

import msgspec
import pytest
import zmq

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, EventList, KVEventBatch
from kvevents.codec import decode
from kvevents.config import KVEventsConfig
from kvevents.errors import ConfigError, EndpointInUseError, EventTypeError, PublisherClosedError
from kvevents.publish import EventPublisherFactory, ZmqEventPublisher, desk

END = b"\xff" * 8
ANY = "tcp://127.0.0.1:0"


def stored(i, blocks=1):
    hashes = [2**40 + i * 1000 + k for k in range(blocks)]
    return BlockStored(hashes, None, list(range(16 * blocks)), 16, None, "GPU", None)


def batch(i=0, events=None):
    return KVEventBatch(ts=float(i), events=[stored(i)] if events is None else events)


def seq(frame):
    return int.from_bytes(frame, "big")


@pytest.fixture
def make():
    """Publishers that are shut down whatever happens."""
    made = []

    def factory(rank=0, **options):
        publisher = ZmqEventPublisher(rank, **{"endpoint": ANY, **options})
        made.append(publisher)
        return publisher

    yield factory
    for publisher in made:
        publisher.shutdown()


@pytest.fixture
def live(sockets):
    """A SUB socket that is known to be subscribed."""

    def connect(publisher, topic=b"", **options):
        sub = sockets(zmq.SUB, connect=publisher.get_publisher_config().endpoint, subscribe=topic, **options)
        # An empty batch until one arrives; then drop what is still on its way.
        while not sub.poll(20):
            publisher.publish(KVEventBatch(ts=0.0, events=EventList()))
        settle(publisher)
        last = publisher.stats().next_sequence - 1
        while seq(sub.recv_multipart()[1]) != last:
            pass
        return sub

    return connect


def ask(sockets, publisher, start, *, delimiter=True, **options):
    dealer = sockets(zmq.DEALER, connect=publisher.get_publisher_config().replay_endpoint, **options)
    dealer.send_multipart([b"", start.to_bytes(8, "big")] if delimiter else [start.to_bytes(8, "big")])
    return dealer


def answers(dealer):
    """All frames of a replay as (topic, seq, payload), up to the end marker."""
    found = []
    while True:
        empty, topic, number, payload = dealer.recv_multipart()
        assert empty == b""
        if number == END:
            assert (topic, payload) == (b"", b"")
            return found
        found.append((topic, number, payload))


def wait_for(condition, seconds=10):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "timed out"
        time.sleep(0.002)


def settle(publisher):
    """Until everything that was published has been sent."""
    wait_for(lambda: publisher.stats().queued == 0)  # only then have all of them a number
    wait_for(lambda: publisher.stats().sent == publisher.stats().next_sequence)


# ---------------------------------------------------------------- live


@pytest.mark.parametrize("topic", ["", "kv@pod@model"])
def test_always_three_frames_with_an_eight_byte_number(make, live, topic):  # R38
    publisher = make(topic=topic)
    sub = live(publisher)
    first = publisher.stats().next_sequence
    for i in range(3):
        publisher.publish(batch(i))
    for i in range(3):
        frames = sub.recv_multipart()
        assert len(frames) == 3
        assert frames[0] == topic.encode()
        assert frames[1] == (first + i).to_bytes(8, "big")
        assert decode(frames[2]) == KVEventBatch(
            ts=float(i), events=EventList([stored(i)]), data_parallel_rank=0
        )


def test_numbers_start_at_zero_and_the_rank_is_filled_in(make, sockets):
    publisher = make(2, replay_endpoint=ANY)
    mine, given = batch(0), batch(1)
    given.data_parallel_rank = 7
    publisher.publish(mine)
    publisher.publish(given)
    assert mine.data_parallel_rank == 2
    wait_for(lambda: publisher.stats().sent == 2)
    got = answers(ask(sockets, publisher, 0))
    assert [(seq(n), decode(p).data_parallel_rank) for _, n, p in got] == [(0, 2), (1, 7)]


def test_an_engines_own_structs_are_taken(make, sockets):
    class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
        ts: float
        events: list
        data_parallel_rank: int | None = None

    publisher = make(replay_endpoint=ANY)
    publisher.publish(EventBatch(1.5, [stored(1), AllBlocksCleared()]))
    wait_for(lambda: publisher.stats().sent == 1)
    ((_, _, payload),) = answers(ask(sockets, publisher, 0))
    assert decode(payload).events == [stored(1), AllBlocksCleared()]


def test_publish_refuses_what_is_no_batch_and_after_shutdown(make):
    publisher = make()
    for wrong in [None, [stored(1)], stored(1), EventList()]:
        with pytest.raises(EventTypeError, match="KVEventBatch"):
            publisher.publish(wrong)
    assert publisher.shutdown() == 0
    with pytest.raises(PublisherClosedError, match="shut down"):
        publisher.publish(batch())
    with pytest.raises(RuntimeError):
        publisher.publish(batch())


def test_an_event_that_cannot_be_encoded_costs_that_event_and_a_visible_hole(make, sockets, caplog):
    publisher = make(replay_endpoint=ANY)
    bad = BlockStored([2**70], None, list(range(16)), 16, None, "GPU", None)
    publisher.publish(batch(0, [stored(0), bad, BlockRemoved([1], "GPU"), "no event"]))
    publisher.publish(batch(1))
    wait_for(lambda: publisher.stats().sent == 2)
    (_, first, a), (_, second, b) = answers(ask(sockets, publisher, 0))
    assert (seq(first), seq(second)) == (0, 2)
    assert decode(a).events == [stored(0), BlockRemoved([1], "GPU")]
    assert decode(b).events == [stored(1)]
    assert publisher.stats().events_lost == 2
    assert "number 1 is skipped" in caplog.text


def test_an_event_that_raises_when_it_is_read_costs_that_event(make, sockets):
    class Hostile(BlockRemoved):
        def __getattribute__(self, name):
            if name == "block_hashes":
                raise RuntimeError("no")
            return super().__getattribute__(name)

    publisher = make(replay_endpoint=ANY)
    hostile = [Hostile([1], "GPU"), BlockRemoved([2], "\ud800"), BlockRemoved(5, "GPU")]
    publisher.publish(batch(0, [stored(0), *hostile, BlockRemoved([1], "GPU")]))
    wait_for(lambda: publisher.stats().sent == 1)
    ((_, _, payload),) = answers(ask(sockets, publisher, 0))
    assert decode(payload).events == [stored(0), BlockRemoved([1], "GPU")]
    assert publisher.stats().events_lost == 3


def test_events_that_can_be_read_only_once_are_not_lost_with_the_bad_one(make, sockets):
    publisher = make(replay_endpoint=ANY)
    publisher.publish(batch(0, iter([stored(0), "no event", stored(1)])))
    wait_for(lambda: publisher.stats().sent == 1)
    ((_, _, payload),) = answers(ask(sockets, publisher, 0))
    assert decode(payload).events == [stored(0), stored(1)]
    assert publisher.stats().events_lost == 1


def test_a_batch_that_cannot_be_sent_costs_its_number_not_the_thread(make, sockets, caplog):
    publisher = make(replay_endpoint=ANY)
    publisher.publish(KVEventBatch(ts="noon", events=[stored(0)]))
    publisher.publish(KVEventBatch(ts=0.0, events=5))
    publisher.publish(batch(2))
    wait_for(lambda: publisher.stats().sent == 1)
    ((_, number, _),) = answers(ask(sockets, publisher, 0))
    assert seq(number) == 2
    assert publisher.stats().failed == 2
    assert "could not be sent" in caplog.text


@pytest.mark.parametrize(("overflow", "arrived"), [("drop_oldest", [0, 3, 4]), ("drop_newest", [0, 1, 2])])
def test_publish_never_waits_and_a_full_queue_leaves_a_visible_hole(
    make, sockets, monkeypatch, overflow, arrived
):
    # R01: the sender is held inside the first batch.
    entered, go = threading.Event(), threading.Event()
    real = ZmqEventPublisher.__init__.__globals__["Sender"]._send_batch

    def held(self, number, item):
        entered.set()
        assert go.wait(10)
        real(self, number, item)

    monkeypatch.setattr("kvevents.publish.sender.Sender._send_batch", held)
    publisher = make(replay_endpoint=ANY, max_queue_size=2, overflow=overflow)
    publisher.publish(batch(0))
    assert entered.wait(10)
    slowest = 0.0
    for i in range(1, 5):
        start = time.perf_counter()
        publisher.publish(batch(i))
        slowest = max(slowest, time.perf_counter() - start)
    assert slowest < 0.1
    assert publisher.stats().dropped == 2
    go.set()
    wait_for(lambda: publisher.stats().sent == 3)
    assert [seq(n) for _, n, _ in answers(ask(sockets, publisher, 0))] == arrived
    publisher.publish(batch(9))
    wait_for(lambda: publisher.stats().sent == 4)
    assert seq(answers(ask(sockets, publisher, 0))[-1][1]) == 5


def test_a_reader_at_its_high_water_mark_sees_the_gap_and_memory_is_bounded(make):  # R46
    publisher = make(endpoint="inproc://kv-hwm", hwm=10)  # inproc: no buffers of the system between
    sub = zmq.Context.instance().socket(zmq.SUB)
    try:
        sub.rcvtimeo = 10_000
        sub.rcvhwm = 10
        sub.subscribe(b"")
        sub.connect("inproc://kv-hwm")
        while not sub.poll(20):
            publisher.publish(batch(0))
        for i in range(200):
            publisher.publish(batch(i))
        settle(publisher)
        got = []
        while sub.poll(0):
            got.append(seq(sub.recv_multipart()[1]))
        assert len(got) <= 20, "the limits hold because they were set before the bind"
        while not sub.poll(20):  # the pipe is opened again by what the reader took
            publisher.publish(batch(0))
        assert seq(sub.recv_multipart()[1]) > got[-1] + 1, "the next number shows the gap"
    finally:
        sub.close(0)


def test_a_heartbeat_takes_a_number_of_its_own(make, sockets):
    publisher = make(3, heartbeat_s=0.01, replay_endpoint=ANY)
    wait_for(lambda: publisher.stats().heartbeats >= 2)
    publisher.publish(batch(1))
    wait_for(lambda: publisher.stats().sent > publisher.stats().heartbeats)
    got = answers(ask(sockets, publisher, 0))
    assert [seq(n) for _, n, _ in got] == list(range(len(got)))
    empty = decode(got[0][2])
    assert (len(empty.events), empty.data_parallel_rank) == (0, 3)


@pytest.mark.parametrize("dialect", ["vllm-map-0.32", "vllm-array-7", "sglang-map"])
def test_an_older_dialect_leaves_out_what_its_readers_do_not_know(make, sockets, dialect):
    publisher = make(replay_endpoint=ANY, dialect=dialect)
    full = BlockStored([1], None, list(range(16)), 16, None, "GPU", None, [None], 0, "full_attention")
    publisher.publish(batch(0, [full]))
    wait_for(lambda: publisher.stats().sent == 1)
    ((_, _, payload),) = answers(ask(sockets, publisher, 0))
    assert decode(payload).events[0].block_hashes == [1]
    assert publisher.stats().events_lost == 0


# ---------------------------------------------------------------- start


def test_a_port_in_use_is_one_clear_error_naming_rank_and_cause(make, free_port):  # R30
    endpoint = f"tcp://127.0.0.1:{free_port}"
    make(endpoint=endpoint)
    before = threading.active_count()
    with pytest.raises(EndpointInUseError, match=rf"{free_port}.*rank 0.*several data-parallel ranks") as e:
        ZmqEventPublisher(0, endpoint=endpoint)
    assert isinstance(e.value, OSError)
    with pytest.raises(EndpointInUseError, match="in use"):
        ZmqEventPublisher(0, endpoint=ANY, replay_endpoint=endpoint)
    assert threading.active_count() == before


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
@pytest.mark.parametrize(
    "address", ["tcp://*:", "tcp://*:70000", "tcp://host", "", "ipc:///" + "x" * 120, "kv"]
)
def test_a_bad_address_is_the_same_error_on_every_rank(rank, field, address):  # R33
    with pytest.raises(ConfigError, match=field):
        ZmqEventPublisher(rank, **{"endpoint": ANY, field: address})


@pytest.mark.parametrize("scheme", ["tcp://127.0.0.1:5557", "ipc://kv", "inproc://kv"])
def test_live_and_replay_that_overlap_are_refused_by_every_rank(scheme):  # R32
    for rank in range(2):
        with pytest.raises(ConfigError, match="overlap"):
            ZmqEventPublisher(rank, endpoint=scheme, replay_endpoint=scheme, data_parallel_size=2)
        with pytest.raises(ConfigError, match=r"5557 to .*5558.*5558 to .*5559"):
            ZmqEventPublisher(
                rank, endpoint="tcp://127.0.0.1:5557", replay_endpoint="tcp://*:5558", data_parallel_size=2
            )


def test_an_address_of_another_machine_cannot_be_bound():
    with pytest.raises(ConfigError, match="bind=False"):
        ZmqEventPublisher(0, endpoint="tcp://198.51.100.7:5557", bind=True)
    with pytest.raises(ConfigError, match="port 0"):
        ZmqEventPublisher(0, endpoint=ANY, bind=False)
    with pytest.raises(ConfigError, match=r"known are vllm-map-0.33"):
        ZmqEventPublisher(0, endpoint=ANY, dialect="vllm")


def test_the_real_port_is_reported(make, sockets):
    for endpoint in (ANY, "tcp://*:0"):
        config = make(endpoint=endpoint, replay_endpoint=ANY).get_publisher_config()
        for address in (config.endpoint, config.replay_endpoint):
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            assert int(port) > 0
            socket.create_connection((host, int(port)), 5).close()


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "localhost", "*"])
def test_wildcard_and_loopback_listen(make, free_port, host):  # R27
    publisher = make(endpoint=f"tcp://{host}:{free_port}")
    assert publisher.get_publisher_config().bind is True
    socket.create_connection(("127.0.0.1", free_port), 5).close()


def test_the_default_address_is_loopback(monkeypatch):  # R48
    bound = []
    monkeypatch.setattr(
        "kvevents.publish.zmq.open_socket",
        lambda *a, **k: bound.append(a[2]) or (_ for _ in ()).throw(OSError()),
    )
    with pytest.raises(OSError):
        ZmqEventPublisher()
    assert str(bound[0]) == "tcp://127.0.0.1:5557"


def ipv6():
    try:
        with socket.socket(socket.AF_INET6) as s:
            s.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("host", ["[::1]", "[::]"])
def test_ipv6_addresses_bind_with_their_option_set(make, live, free_port, host):  # R28
    publisher = make(1, endpoint=f"tcp://{host}:{free_port - 1}")
    assert publisher.get_publisher_config().endpoint == f"tcp://{host}:{free_port}"
    socket.create_connection(("::1", free_port), 5).close()


def test_ipc_works_for_every_rank_and_after_a_killed_process(make, live, tmp_path, monkeypatch):  # R31
    monkeypatch.chdir(tmp_path)
    stale = socket.socket(socket.AF_UNIX)
    stale.bind("tcp-events.sock_dp1")
    stale.close()
    publisher = make(1, endpoint="ipc://tcp-events.sock", replay_endpoint="ipc://replay.sock")
    sub = live(publisher)
    publisher.publish(batch(5))
    assert decode(sub.recv_multipart()[2]).ts == 5.0
    with pytest.raises(EndpointInUseError, match=r"rank 1 given twice|rank 1.*in use"):
        ZmqEventPublisher(1, endpoint="ipc://tcp-events.sock")
    publisher.publish(batch(6))
    assert decode(sub.recv_multipart()[2]).ts == 6.0


def test_inproc_uses_the_process_context(make):
    publisher = make(1, endpoint="inproc://kv-test", replay_endpoint="inproc://kv-test-replay")
    sub = zmq.Context.instance().socket(zmq.SUB)
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    try:
        sub.subscribe(b"")
        sub.rcvtimeo = dealer.rcvtimeo = 10_000
        sub.connect("inproc://kv-test_dp1")
        dealer.connect("inproc://kv-test-replay_dp1")
        while not sub.poll(20):
            publisher.publish(batch(1))
        dealer.send_multipart([b"", bytes(8)])
        assert answers(dealer)
    finally:
        sub.close(0)
        dealer.close(0)


def test_connect_mode_reaches_a_reader_that_listens(make, sockets):
    sub = sockets(zmq.SUB, bind=ANY, subscribe=b"")
    publisher = make(endpoint=sub.last_endpoint.decode(), bind=False)
    while not sub.poll(20):
        publisher.publish(batch(1))
    assert len(sub.recv_multipart()) == 3


def test_the_factory_passes_the_configuration_on(sockets):
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=ANY, replay_endpoint=ANY, topic="t", buffer_steps=2
    )
    with EventPublisherFactory.create(config, 1) as publisher:
        for i in range(5):
            publisher.publish(batch(i))
        wait_for(lambda: publisher.stats().sent == 5)
        got = answers(ask(sockets, publisher, 0))
        assert [(t, seq(n)) for t, n, _ in got] == [(b"t", 3), (b"t", 4)]
        real = publisher.get_publisher_config()
        assert (real.topic, real.buffer_steps, real.enable_kv_cache_events) == ("t", 2, True)


# ---------------------------------------------------------------- replay


@pytest.mark.parametrize("delimiter", [True, False])
def test_replayed_frames_equal_the_live_frames_for_both_forms_of_request(make, live, sockets, delimiter):
    # R03, R05
    publisher = make(topic="kv@a@m", replay_endpoint=ANY)
    sub = live(publisher, b"kv@")
    start = publisher.stats().next_sequence
    for i in range(3):
        publisher.publish(batch(i))
    sent = [tuple(sub.recv_multipart()) for _ in range(3)]
    assert answers(ask(sockets, publisher, start, delimiter=delimiter)) == sent


@pytest.mark.parametrize(
    "frames",
    [
        [b"", b"\0" * 7],
        [b"", b"\0" * 9],
        [b""],
        [b"", b""],
        [b"", b"\0" * 8, b"\0" * 8],
        [b"replay"],
        [b"", b"KVE1", b"\x80"],
    ],
)
def test_a_bad_request_is_answered_with_an_explicit_error(make, sockets, frames, caplog):  # R05
    caplog.set_level(logging.WARNING)
    publisher = make(replay_endpoint=ANY)
    publisher.publish(batch(0))
    wait_for(lambda: publisher.stats().sent == 1)
    dealer = sockets(zmq.DEALER, connect=publisher.get_publisher_config().replay_endpoint)
    dealer.send_multipart(frames)
    empty, kind, answer = dealer.recv_multipart()
    assert (empty, kind) == (b"", b"KVE1")
    assert msgspec.msgpack.decode(answer)["op"] == "error"
    dealer.send_multipart([b"", bytes(8)])
    assert len(answers(dealer)) == 1
    assert publisher.stats().replay.refused == 1


def test_a_long_replay_to_a_client_that_reads_late_loses_nothing(make, sockets):  # R06
    publisher = make(replay_endpoint=ANY)
    payloads = 5000
    for i in range(payloads):
        publisher.publish(batch(i))
    wait_for(lambda: publisher.stats().sent == payloads)
    dealer = ask(sockets, publisher, 0, rcvhwm=10)
    wait_for(lambda: publisher.stats().replay.batches > 0)
    held_back = publisher.stats().replay.batches
    assert held_back < payloads, "the client's pipe is full: flow control is at work"
    got = answers(dealer)
    assert [seq(n) for _, n, _ in got] == list(range(payloads))
    assert decode(got[-1][2]).ts == payloads - 1
    wait_for(lambda: publisher.stats().replay.active == 0)
    assert publisher.stats().replay.completed == 1


def test_a_client_that_stops_reading_delays_neither_live_batches_nor_other_clients(
    make, live, sockets
):  # R07
    publisher = make(replay_endpoint=ANY)
    for i in range(3000):
        publisher.publish(batch(i, [stored(i, blocks=200)]))
    wait_for(lambda: publisher.stats().sent == 3000)
    ask(sockets, publisher, 0, rcvhwm=1, rcvbuf=4096)
    wait_for(lambda: publisher.stats().replay.batches > 0)
    sub = live(publisher)
    for i in range(50):
        start = time.monotonic()
        publisher.publish(batch(i))
        assert decode(sub.recv_multipart()[2]).ts == i
        assert time.monotonic() - start < 1
    got = answers(ask(sockets, publisher, 0))
    assert [seq(n) for _, n, _ in got[:3000]] == list(range(3000))
    assert publisher.stats().replay.active == 1, "the first client still stands there"
    assert publisher.shutdown(2) == 0


def test_a_client_that_takes_nothing_is_given_up(make, sockets, monkeypatch, caplog):
    monkeypatch.setattr(desk, "PATIENCE_S", 0.05)
    publisher = make(replay_endpoint=ANY)
    for i in range(3000):
        publisher.publish(batch(i, [stored(i, blocks=200)]))
    wait_for(lambda: publisher.stats().sent == 3000)
    ask(sockets, publisher, 0, rcvhwm=1, rcvbuf=4096)
    wait_for(lambda: publisher.stats().replay.given_up == 1)
    assert publisher.stats().replay.active == 0
    assert publisher.stats().replay.completed == 0, "no end marker: the replay was not whole"


def test_a_client_that_leaves_in_the_middle_is_forgotten(make, sockets):
    publisher = make(replay_endpoint=ANY)
    for i in range(3000):
        publisher.publish(batch(i, [stored(i, blocks=200)]))
    wait_for(lambda: publisher.stats().sent == 3000)
    dealer = ask(sockets, publisher, 0, rcvhwm=1, rcvbuf=4096)
    dealer.recv_multipart()
    dealer.close(linger=0)
    wait_for(lambda: publisher.stats().replay.active == 0)
    assert len(answers(ask(sockets, publisher, 2990))) == 10


def test_a_position_that_left_the_log_is_counted_and_shows_in_the_first_number(make, sockets):  # R08
    publisher = make(replay_endpoint=ANY, buffer_steps=3)
    for i in range(10):
        publisher.publish(batch(i))
    wait_for(lambda: publisher.stats().sent == 10)
    assert publisher.stats().oldest == 7
    got = answers(ask(sockets, publisher, 2))
    assert [seq(n) for _, n, _ in got] == [7, 8, 9]
    assert publisher.stats().replay.too_old == 1
    answers(ask(sockets, publisher, 7))
    assert answers(ask(sockets, publisher, 10)) == []
    assert publisher.stats().replay.too_old == 1


def test_requests_of_one_client_are_answered_one_after_the_other(make, sockets):
    publisher = make(replay_endpoint=ANY)
    for i in range(20):
        publisher.publish(batch(i))
    wait_for(lambda: publisher.stats().sent == 20)
    dealer = ask(sockets, publisher, 0)
    dealer.send_multipart([b"", (15).to_bytes(8, "big")])
    dealer.send_multipart([(18).to_bytes(8, "big")])
    assert [len(answers(dealer)) for _ in range(3)] == [20, 5, 2]


def test_numbers_near_the_end_and_requests_for_the_reserved_one(make, sockets):  # R39
    publisher = make(replay_endpoint=ANY, first_sequence=2**64 - 3)
    for i in range(5):
        publisher.publish(batch(i))
    wait_for(lambda: publisher.stats().dropped == 3)
    wait_for(lambda: publisher.stats().sent == 2)
    assert [seq(n) for _, n, _ in answers(ask(sockets, publisher, 0))] == [2**64 - 3, 2**64 - 2]
    assert [seq(n) for _, n, _ in answers(ask(sockets, publisher, 2**64 - 2))] == [2**64 - 2]
    assert answers(ask(sockets, publisher, 2**64 - 1)) == []
    with pytest.raises(ConfigError, match="first_sequence"):
        make(first_sequence=2**64 - 1)


def test_a_req_client_gets_the_first_batch_only(make, sockets):
    publisher = make(replay_endpoint=ANY)
    for i in range(3):
        publisher.publish(batch(i))
    wait_for(lambda: publisher.stats().sent == 3)
    req = sockets(zmq.REQ, connect=publisher.get_publisher_config().replay_endpoint)
    req.send(bytes(8))
    assert seq(req.recv_multipart()[1]) == 0
    with pytest.raises(zmq.ZMQError):
        req.recv_multipart(zmq.NOBLOCK)


def test_the_log_is_bounded_by_bytes(make, sockets):
    publisher = make(replay_endpoint=ANY, buffer_bytes=2000)
    for i in range(100):
        publisher.publish(batch(i))
    wait_for(lambda: publisher.stats().sent == 100)
    stats = publisher.stats()
    assert 0 < stats.log_bytes <= 2000
    assert len(answers(ask(sockets, publisher, 0))) == stats.log_batches


def test_stats_without_a_replay_server(make):
    publisher = make()
    publisher.publish(batch(0))
    wait_for(lambda: publisher.stats().sent == 1)
    stats = publisher.stats()
    assert (stats.replay, stats.oldest, stats.log_bytes) == (None, None, 0)
