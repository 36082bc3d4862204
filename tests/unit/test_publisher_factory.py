"""Publishers by name, and what their constructors get."""

from __future__ import annotations

import pytest

from kvevents.config import KVEventsConfig
from kvevents.errors import ConfigError
from kvevents.publish import EventPublisher, EventPublisherFactory, NullEventPublisher


class Memory(EventPublisher):
    def __init__(self, data_parallel_rank=0, topic="", x=0):
        super().__init__(data_parallel_rank)
        self.topic, self.x = topic, x
        self.batches = []

    def publish(self, events):
        self.batches.append(events)

    def shutdown(self):
        pass


@pytest.fixture
def factory(monkeypatch):
    monkeypatch.setattr(EventPublisherFactory, "_registry", dict(EventPublisherFactory._registry))
    return EventPublisherFactory


def config(**fields):
    return KVEventsConfig(enable_kv_cache_events=True, **fields)


def test_events_off_or_null_gives_a_publisher_that_forgets():
    for c in [None, KVEventsConfig(), KVEventsConfig(publisher="zmq"), config(publisher="null")]:
        publisher = EventPublisherFactory.create(c, 3)
        assert isinstance(publisher, NullEventPublisher)
        publisher.publish(None)
        publisher.shutdown()
        assert publisher.get_publisher_config() is None


def test_free_form_options_reach_a_registered_publisher(factory):
    factory.register_publisher("memory", Memory)
    made = factory.create(config(publisher="memory", topic="kv", extra={"x": 1}), data_parallel_rank=2)
    assert (made._data_parallel_rank, made.topic, made.x) == (2, "kv", 1)


def test_a_constructor_with_kwargs_gets_every_field(factory):
    seen = {}

    def ctor(**fields):
        seen.update(fields)
        return NullEventPublisher()

    factory.register_publisher("all", ctor)
    factory.create(config(publisher="all", extra={"brokers": "a,b"}))
    assert seen["brokers"] == "a,b"
    vllms = {
        "endpoint",
        "replay_endpoint",
        "buffer_steps",
        "hwm",
        "max_queue_size",
        "topic",
        "data_parallel_rank",
    }
    assert vllms <= seen.keys()
    assert not {"publisher", "enable_kv_cache_events", "extra"} & seen.keys()


def test_an_option_that_nobody_takes_is_refused_by_name(factory):
    factory.register_publisher("memory", Memory)
    with pytest.raises(ConfigError, match=r"'memory' takes no option y; it takes .*x"):
        factory.create(config(publisher="memory", extra={"y": 1}))


def test_an_unknown_name_lists_the_known_ones(factory):
    factory.register_publisher("memory", Memory)
    with pytest.raises(ConfigError, match="'kafka' is not known; known are memory, null, zmq"):
        factory.create(config(publisher="kafka"))
    with pytest.raises(KeyError, match="registered already"):
        factory.register_publisher("zmq", Memory)
