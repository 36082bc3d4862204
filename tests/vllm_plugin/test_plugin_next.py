"""vLLM 0.33's differences. Run against its sources by `make test-vllm`; here, without them, skipped."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from test_plugin_aggregation import Workers, make_container, stored

import kvevents


@pytest.fixture
def newer(engine):
    if not engine.vllm.__version__.startswith("0.33"):
        pytest.skip(f"this is vLLM {engine.vllm.__version__}, not 0.33 from its sources")
    return engine


def looking_ahead(engine, number):
    return engine.events.BlockStored(
        block_hashes=[number], parent_block_hash=None, token_ids=[1, 2], block_size=2, lora_id=None,
        medium="GPU", lora_name=None, group_idx=0, lookahead_token_ids=[[3]],
    )  # fmt: skip


def test_everything_is_plugged_in_and_the_dialect_is_its_own(newer):
    report = newer.register()
    assert {p.name: p.state for p in report.parts if p.state != "off"} == dict.fromkeys(
        ("publisher", "aggregator", "multi"), "on"
    )
    assert "dialect vllm-map-0.33" in report.line()


def test_the_pool_is_vllms_own_with_a_warning(newer, caplog):
    report = newer.register("pool")
    assert {p.name: p.state for p in report.parts}["pool"] == "fallback"
    assert caplog.text.count("part pool is not plugged in") == 1


def test_lookahead_and_the_wide_header_are_on_the_wire_as_vllm_writes_them(newer):
    newer.register()
    config = newer.config.KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://*:0", replay_endpoint="tcp://*:0"
    )
    publisher = newer.events.EventPublisherFactory.create(config, 0)
    try:
        with zmq.Context.instance().socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(publisher.get_publisher_config().endpoint)
            deadline = time.monotonic() + 20
            while not socket.poll(50):
                assert time.monotonic() < deadline
                batch = newer.events.KVEventBatch(ts=1.5, events=[looking_ahead(newer, 7)])
                publisher.publish(batch)
            payload = socket.recv_multipart()[2]
    finally:
        publisher.shutdown()
    assert payload == msgspec.msgpack.encode(batch)
    # Sixteen fields with the tag: too many for the one-byte header, though most of them are left out.
    assert b"\xde\x00" in payload
    event = kvevents.decode(payload).events[0]
    assert event.lookahead_token_ids == [[3]]
    assert kvevents.encode(kvevents.decode(payload), dialect="vllm-map-0.33") == payload


def test_votes_keep_what_a_block_looks_ahead_to(newer):
    newer.register("aggregator")
    box, workers = make_container(newer), Workers(newer)
    agreed = workers.step(box([looking_ahead(newer, 1)]), box([looking_ahead(newer, 1)]))
    assert agreed.get_all_events() == [looking_ahead(newer, 1)]


def failed_step(engine, workers, *containers):
    parts = []
    for container in containers:
        parts.append(engine.outputs.KVConnectorOutput())
        parts[-1].kv_cache_events = container
    workers.aggregator.ft_defer_kv_connector_outputs(parts)


def test_events_of_a_step_in_which_a_worker_failed_wait_for_the_next(newer, caplog):
    newer.register("aggregator")
    box, workers = make_container(newer), Workers(newer)
    failed_step(newer, workers, box([stored(newer, 1)]), None)
    got = workers.step(None, box([stored(newer, 1)]))
    assert got.get_all_events() == [stored(newer, 1)]
    for _ in range(2):
        failed_step(newer, workers, box([stored(newer, 2)]))  # whose?
    assert caplog.text.count("not said whose") == 1
    assert workers.step(None, box([stored(newer, 2)])) is None


def test_the_connectors_own_output_of_a_failed_step_is_salvaged_as_vllm_does(newer):
    newer.register("aggregator")
    workers = Workers(newer)
    part = newer.outputs.KVConnectorOutput(finished_sending={"a"})
    workers.aggregator.ft_defer_kv_connector_outputs([part, newer.outputs.KVConnectorOutput()])
    outputs = [SimpleNamespace(kv_connector_output=newer.outputs.KVConnectorOutput()) for _ in range(2)]
    outputs[1].kv_connector_output.finished_sending = {"a"}
    result = workers.aggregator.aggregate(outputs, 0)
    assert result.kv_connector_output.finished_sending == {"a"}
