"""Settings: defaults, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from kvevents.config import KVEventsConfig
from kvevents.errors import ConfigError


def test_defaults_are_loopback_and_vllms():
    config = KVEventsConfig()
    assert config.endpoint == "tcp://127.0.0.1:5557"
    assert (config.buffer_steps, config.hwm, config.max_queue_size, config.topic) == (
        10_000,
        100_000,
        100_000,
        "",
    )
    assert config.replay_endpoint is None
    assert config.overflow == "drop_oldest"


@pytest.mark.parametrize(("enabled", "publisher"), [(True, "zmq"), (False, "null")])
def test_the_publisher_follows_the_switch(enabled, publisher):
    assert KVEventsConfig(enable_kv_cache_events=enabled).publisher == publisher
    assert KVEventsConfig(enable_kv_cache_events=enabled, publisher="mine").publisher == "mine"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hwm", 0),
        ("hwm", -1),
        ("hwm", "many"),
        ("max_queue_size", 0),
        ("buffer_steps", -1),
        ("buffer_steps", True),
        ("buffer_bytes", 1.5),
        ("data_parallel_size", 0),
        ("endpoint", None),
        ("topic", b"kv"),
        ("topic", "\ud800"),
        ("endpoint", "ipc:///tmp/\ud800"),
        ("overflow", "drop"),
        ("overflow", None),
        ("heartbeat_s", 0),
        ("heartbeat_s", float("nan")),
        ("bind", "yes"),
        ("extra", ["x"]),
        ("extra", {1: 2}),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        KVEventsConfig(**{field: value})


def test_immutable_and_copied_with_changes():
    config = KVEventsConfig(enable_kv_cache_events=True)
    with pytest.raises(AttributeError):
        config.topic = "x"
    moved = msgspec.structs.replace(config, endpoint="tcp://*:1")
    assert (moved.endpoint, moved.publisher) == ("tcp://*:1", "zmq")
    assert config.endpoint == "tcp://127.0.0.1:5557"


def test_travels_as_json():
    config = KVEventsConfig(extra={"x": 1}, heartbeat_s=2.5)
    assert msgspec.json.decode(msgspec.json.encode(config), type=KVEventsConfig) == config
