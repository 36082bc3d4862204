from abc import ABC
from dataclasses import asdict
from typing import Any

import msgspec


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVEventBatch(EventBatch):
    pass


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list | None = None
    group_idx: int | None = None
    locality: str | None = None

    def __hash__(self):
        return hash((tuple(self.block_hashes), self.medium))


class BlockRemoved(Event):
    block_hashes: list
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None

    def __hash__(self):
        return hash((tuple(self.block_hashes), self.medium))


class AllBlocksCleared(Event):
    pass


class KVEventAggregator:
    def add_events(self, events):
        raise NotImplementedError


class KVConnectorKVEvents(ABC):  # noqa: B024
    pass


class EventPublisher:
    def __init__(self, data_parallel_rank=0):
        self._data_parallel_rank = data_parallel_rank

    def get_publisher_config(self):
        return None


class NullEventPublisher(EventPublisher):
    def publish(self, events):
        pass

    def shutdown(self):
        pass


class ZmqEventPublisher(EventPublisher):
    SHUTDOWN_TIMEOUT = 1.0
    stock = True

    def __init__(
        self,
        data_parallel_rank,
        endpoint="tcp://*:5557",
        replay_endpoint=None,
        buffer_steps=10_000,
        hwm=100_000,
        max_queue_size=100_000,
        topic="",
    ):
        super().__init__(data_parallel_rank)

    def shutdown(self):
        pass

    @staticmethod
    def _is_bind_endpoint(endpoint):
        return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))

    @staticmethod
    def offset_endpoint_port(endpoint, data_parallel_rank):
        if not endpoint or not data_parallel_rank:
            return endpoint
        if endpoint.startswith("inproc"):
            return f"{endpoint}_dp{data_parallel_rank}"
        head, _, port = endpoint.rpartition(":")
        return f"{head}:{int(port) + data_parallel_rank}" if int(port) else endpoint


def get_ip():
    return "127.0.0.1"


class EventPublisherFactory:
    _registry = {"null": NullEventPublisher, "zmq": ZmqEventPublisher}  # noqa: RUF012

    @classmethod
    def create(cls, config, data_parallel_rank=0):
        fields = asdict(config)
        if not fields.pop("enable_kv_cache_events"):
            return NullEventPublisher()
        return cls._registry[fields.pop("publisher")](data_parallel_rank=data_parallel_rank, **fields)
