"""The publisher behind vLLM's configuration `publisher="zmq"`."""

from __future__ import annotations

import contextlib
import logging
import sys
import time

import msgspec
import pytest
import zmq

import kvevents


@contextlib.contextmanager
def publisher(engine, rank=0, **config):
    fields = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:0"} | config
    made = engine.events.EventPublisherFactory.create(engine.config.KVEventsConfig(**fields), rank)
    try:
        yield made
    finally:
        made.shutdown()


@contextlib.contextmanager
def reader(address, bind=False):
    with zmq.Context.instance().socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        socket.setsockopt(zmq.LINGER, 0)
        (socket.bind if bind else socket.connect)(address)
        yield socket


def until(done, seconds=10):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stored(engine, number, **fields):
    return engine.events.BlockStored(
        block_hashes=[number], parent_block_hash=None, token_ids=[1, 2], block_size=2, lora_id=None,
        medium="GPU", lora_name=None, **fields,
    )  # fmt: skip


def send_until_heard(engine, pub, socket, events):
    """Publishes until the subscription is there; returns the payload, and its batch."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        batch = engine.events.KVEventBatch(ts=1.5, events=events)
        pub.publish(batch)
        if socket.poll(50):
            return socket.recv_multipart(), batch
    pytest.fail("nothing arrived")


def test_the_stock_configuration_gets_it_and_the_bytes_are_vllms(engine):
    engine.register()
    with publisher(engine, topic="kv") as pub, reader(pub.get_publisher_config().endpoint) as socket:
        assert isinstance(pub, engine.events.ZmqEventPublisher)
        assert type(pub).__name__ == "EnginePublisher"
        events = [stored(engine, 7, group_idx=0), engine.events.BlockRemoved([7], "GPU")]
        (topic, number, payload), batch = send_until_heard(engine, pub, socket, events)
        assert topic == b"kv"
        assert batch.data_parallel_rank == 0
        assert payload == msgspec.msgpack.encode(batch)
        assert int.from_bytes(number, "big") < pub.stats().next_sequence


SHAPES = [
    {"block_hashes": [0, 2**64 - 1, 2**30, 2**32]},
    {"block_hashes": [-1, 5]},
    {"block_hashes": [b"x" * 32, b"y" * 32], "parent_block_hash": b"p" * 32},
    {"block_hashes": [b"x", 3], "parent_block_hash": -4},
    {"block_hashes": [], "token_ids": []},
    {"block_size": 0, "token_ids": []},
    {"token_ids": [0, 127, 128, 255, 256, 65535, 65536, 2**31, 2**32 - 1]},
    {"token_ids": [1, 2**40], "lora_id": 0, "lora_name": ""},
    {"extra_keys": [None]},
    {"extra_keys": []},
    {"extra_keys": [("salt", ("mm", 3), 1.5, None, b"z")]},
    {"group_idx": 0, "medium": None, "locality": "REMOTE"},
    {"lora_name": "é" * 40, "lora_id": 2**40, "group_idx": -1},
]


@pytest.mark.parametrize("fields", SHAPES, ids=str)
def test_the_bytes_are_vllms_for_every_shape(engine, fields):
    engine.register()
    sender = object.__new__(sys.modules["kvevents.integrations.vllm.publisher"].EngineSender)
    sender._native, sender._known = True, sys.modules["kvevents.integrations.vllm.publisher"]._known_classes()
    event = stored(engine, 7)
    for name, value in fields.items():
        setattr(event, name, value)
    gone = engine.events.BlockRemoved([7, 8], "CPU", 3)
    events = [event, gone, engine.events.AllBlocksCleared(), stored(engine, 8), event]
    batch = engine.events.KVEventBatch(ts=1.25, events=events, data_parallel_rank=3)
    columns = sender._columns(batch)
    assert columns is not None
    mine = kvevents.KVEventBatch(batch.ts, columns, 3)
    assert kvevents.encode(mine, dialect="vllm-map-0.32") == msgspec.msgpack.encode(batch)


def test_a_class_with_a_field_that_is_not_known_is_left_to_vllms_encoder(engine, monkeypatch):
    engine.register()
    module = sys.modules["kvevents.integrations.vllm.publisher"]

    class BlockRemoved(engine.events.BlockRemoved, tag="BlockRemoved"):
        newer: int = 0

    monkeypatch.setattr(engine.events, "BlockRemoved", BlockRemoved)
    with publisher(engine) as pub, reader(pub.get_publisher_config().endpoint) as socket:
        assert BlockRemoved not in module._known_classes()
        (_, _, payload), batch = send_until_heard(engine, pub, socket, [BlockRemoved([7], "GPU", newer=4)])
        assert payload == msgspec.msgpack.encode(batch)
        assert b"newer" in payload


def test_events_switched_off_start_nothing(engine):
    engine.register()
    made = engine.events.EventPublisherFactory.create(
        engine.config.KVEventsConfig(enable_kv_cache_events=False, publisher="zmq"), 0
    )
    assert isinstance(made, engine.events.NullEventPublisher)


def test_ranks_get_ports_and_suffixes_as_in_vllm(engine):
    engine.register()
    with publisher(engine, 3, endpoint="inproc://kvevents-rank") as pub:
        assert pub.get_publisher_config().endpoint == "inproc://kvevents-rank_dp3"
        assert pub.offset_endpoint_port("tcp://*:5557", 2) == "tcp://*:5559"


def test_inproc_is_on_the_shared_context(engine):
    engine.register()
    with (
        publisher(engine, endpoint="inproc://kvevents-shared") as pub,
        reader("inproc://kvevents-shared") as s,
    ):
        send_until_heard(engine, pub, s, [stored(engine, 1)])


def test_an_address_without_a_star_connects_with_a_warning(engine, caplog):
    engine.register()
    with zmq.Context.instance().socket(zmq.SUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        with publisher(engine, endpoint=f"tcp://127.0.0.1:{port}") as pub:
            send_until_heard(engine, pub, socket, [stored(engine, 1)])
        socket.close(0)
    texts = [
        r.getMessage() for r in caplog.records if r.name == "vllm.kvevents" and r.levelno == logging.WARNING
    ]
    assert len(texts) == 1
    assert '"bind": true' in texts[0]


def test_the_option_bind_overrides_the_rule(engine, caplog):
    engine.register(bind=True)
    with publisher(engine, endpoint="tcp://127.0.0.1:0") as pub:
        address = pub.get_publisher_config().endpoint
        with reader(address) as socket:
            send_until_heard(engine, pub, socket, [stored(engine, 1)])
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("which", ["endpoint", "replay_endpoint"])
def test_a_port_that_is_taken_is_bound_once_it_is_free(engine, caplog, which):
    """The engine starts and publishes; readers then get from the replay log what was published before."""
    engine.register()
    with zmq.Context.instance().socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://*")
        free = "replay_endpoint" if which == "endpoint" else "endpoint"
        with publisher(engine, **{which: f"tcp://*:{port}", free: "tcp://*:0"}) as pub:
            assert type(pub).__name__ == "EnginePublisher"
            pub.publish(engine.events.KVEventBatch(ts=1.0, events=[stored(engine, 1)]))
            until(lambda: pub.stats().sent == 1)
            other.close(0)
            addresses = pub.get_publisher_config()
            live, replay = (
                a.replace("*", "127.0.0.1") for a in (addresses.endpoint, addresses.replay_endpoint)
            )
            with reader(live) as s:
                (_, number, _), _ = send_until_heard(engine, pub, s, [stored(engine, 2)])
                assert int.from_bytes(number, "big") >= 1
            with zmq.Context.instance().socket(zmq.DEALER) as asked:
                asked.setsockopt(zmq.LINGER, 0)
                asked.connect(replay)
                asked.send_multipart([b"", (0).to_bytes(8, "big")])
                assert asked.poll(10_000)
                assert kvevents.decode(asked.recv_multipart()[3]).events[0].block_hashes == [1]
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 1
    assert str(port) in told[0]


def test_a_publisher_that_waits_for_its_ports_ends_in_time(engine):
    engine.register()
    with zmq.Context.instance().socket(zmq.PUB) as one, zmq.Context.instance().socket(zmq.PUB) as two:
        live, replay = (f"tcp://*:{s.bind_to_random_port('tcp://*')}" for s in (one, two))
        start = time.monotonic()
        with publisher(engine, endpoint=live, replay_endpoint=replay) as pub:
            pub.publish(engine.events.KVEventBatch(ts=1.0, events=[stored(engine, 1)]))
        assert time.monotonic() - start < 10
        one.close(0)
        two.close(0)


def test_a_configuration_that_cannot_work_is_vllms_error_to_raise(engine, caplog):
    engine.register()
    same = {"endpoint": "tcp://*:29999", "replay_endpoint": "tcp://*:29999"}
    if engine.fake:
        with publisher(engine, **same) as pub:
            assert pub.stock
            assert type(pub).__name__ == "ZmqEventPublisher"
    else:
        with pytest.raises(zmq.ZMQError), publisher(engine, **same):
            pass
    assert "vLLM's own publisher runs" in caplog.text


def test_an_event_that_cannot_be_encoded_costs_only_itself(engine, caplog):
    engine.register()
    with publisher(engine) as pub, reader(pub.get_publisher_config().endpoint) as socket:
        send_until_heard(engine, pub, socket, [stored(engine, 1)])
        bad = stored(engine, 2)
        bad.token_ids = [object()]
        pub.publish(engine.events.KVEventBatch(ts=2.0, events=[stored(engine, 3), bad, stored(engine, 4)]))
        while True:
            _, number, payload = socket.recv_multipart()
            batch = kvevents.decode(payload)
            if batch.ts == 2.0:
                break
        assert [e.block_hashes for e in batch.events] == [[3], [4]]
        pub.publish(engine.events.KVEventBatch(ts=3.0, events=[stored(engine, 5)]))
        _, after, _ = socket.recv_multipart()
        # The hole in the numbers says that something was lost.
        assert int.from_bytes(after, "big") == int.from_bytes(number, "big") + 2
    assert "cannot be encoded" in caplog.text


def test_what_vllm_can_encode_is_sent_even_if_it_is_no_event_that_we_know(engine):
    class Other(msgspec.Struct, tag=True, array_like=True):
        number: int

    engine.register()
    with publisher(engine) as pub, reader(pub.get_publisher_config().endpoint) as socket:
        (_, _, payload), batch = send_until_heard(engine, pub, socket, [Other(1)])
        assert payload == msgspec.msgpack.encode(batch)


def test_a_sender_that_ended_does_not_stop_the_engine(engine, caplog):
    engine.register()
    with publisher(engine) as pub:
        pub._ours._outbox.close()
        for _ in range(3):
            pub.publish(engine.events.KVEventBatch(ts=1.0, events=[]))
    assert caplog.text.count("events are lost") == 1
    with pytest.raises(RuntimeError):
        pub.publish(engine.events.KVEventBatch(ts=1.0, events=[]))


def test_another_dialect_goes_through_columns(engine):
    engine.register(dialect="vllm-map-0.33")
    with publisher(engine) as pub, reader(pub.get_publisher_config().endpoint) as socket:
        (_, _, payload), _ = send_until_heard(engine, pub, socket, [stored(engine, 9)])
        assert kvevents.decode(payload).events[0].block_hashes == [9]


def test_no_limit_is_written_as_in_vllm(engine):
    engine.register()
    with publisher(engine, max_queue_size=0, hwm=0) as pub:
        assert type(pub).__name__ == "EnginePublisher"
        assert pub.get_publisher_config().max_queue_size == 0


def test_a_snapshot_holds_what_vllms_structs_said(engine):
    engine.register()
    with publisher(engine, replay_endpoint="tcp://*:0") as pub:
        with reader(pub.get_publisher_config().endpoint) as socket:
            events = [stored(engine, 1), stored(engine, 2), engine.events.BlockRemoved([1], "GPU")]
            send_until_heard(engine, pub, socket, events)
        expected = kvevents.ResidentSet([kvevents.BlockStored([2], None, [1, 2], 2, None, "GPU", None)])
        mirror = pub.stats().mirror
        assert mirror.blocks == 1
        assert pub._ours._mirror.digest()[1] == expected.digest()


def test_events_that_cannot_be_read_back_leave_no_wrong_snapshot(engine):
    engine.register()
    with publisher(engine, replay_endpoint="tcp://*:0") as pub:
        with reader(pub.get_publisher_config().endpoint) as socket:
            send_until_heard(engine, pub, socket, [stored(engine, "text")])
        assert pub._ours._mirror.digest() is None
