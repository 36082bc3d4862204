"""A connector that never announces removals, from its class to a reader's answers, over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvevents import (
    BlockPool,
    EventList,
    KVEventCollector,
    KVEventsConfig,
    PrefixIndex,
    Source,
    Subscriber,
    TokenBlocks,
)
from kvevents.connectors import KVConnectorBase, KVConnectorRole, KVOutputAggregator, MultiConnector
from kvevents.connectors.output import KVConnectorOutput, ModelRunnerOutput
from kvevents.publish import EventPublisherFactory
from kvevents.subscribe import StoreOnly, Timing

pytestmark = pytest.mark.timeout(60)


class Disk(KVConnectorBase):
    """Writes every block and is emptied by somebody else."""

    emits_removals = False
    medium = "STORAGE"

    def kv_events_num_workers(self) -> int:
        return 1

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return None

    def keep(self, events: EventList) -> None:
        for e in events:
            ticket = self.kv_events.begin_store(
                e.block_hashes, e.parent_block_hash, e.token_ids, e.block_size,
                start=0, end=len(e.block_hashes), medium=self.medium, group_idx=0,
            )  # fmt: skip
            self.kv_events.complete(ticket)


class Host(Disk):
    """Announces what leaves it."""

    emits_removals = True
    medium = "CPU"


class _Pool:
    def __init__(self) -> None:
        self.events = EventList()

    def take_events(self) -> EventList:
        events, self.events = self.events, EventList()
        return events


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_store_only_tier_expires_in_the_reader_and_the_others_stay(
    free_ports: Callable[[int], list[int]], wrapped: bool
) -> None:
    live, replay = (f"tcp://127.0.0.1:{p}" for p in free_ports(2))
    publisher: Any = EventPublisherFactory.create(
        KVEventsConfig(enable_kv_cache_events=True, endpoint=live, replay_endpoint=replay), 0
    )
    roles = (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
    halves = [[Host(None, role), Disk(None, role)] for role in roles]
    scheduler, worker = halves
    if wrapped:
        scheduler = [MultiConnector(None, KVConnectorRole.SCHEDULER, connectors=halves[0])]
        worker = [MultiConnector(None, KVConnectorRole.WORKER, connectors=halves[1])]
    taken = _Pool()
    collector = KVEventCollector(
        taken, scheduler, publisher=publisher, data_parallel_rank=0, flush_interval_s=0
    )
    pool = BlockPool(8, 4)
    request = TokenBlocks(4)
    request.extend(range(12))
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(request, blocks, 0, 3)
    taken.events = pool.take_events()
    for child in halves[1]:
        child.keep(taken.events)
    for i, (s, w) in enumerate(zip(scheduler, worker, strict=True)):
        output = KVConnectorOutput(kv_cache_events=w.get_kv_connector_kv_cache_events())
        joined = KVOutputAggregator.from_connector(s, 1).aggregate([ModelRunnerOutput(output)])
        collector.update(joined.kv_connector_output, i)
    now = 0.0
    index = PrefixIndex(clock=lambda: now, expires_s=60)
    try:
        assert collector.step() is not None
        with Subscriber(Source(live, replay, name="w"), timing=Timing(silence_s=0.2, look_s=0.2)) as stream:
            end = time.monotonic() + 20
            items = []
            while not index.stats() or not index.find(range(12)):
                assert time.monotonic() < end, items
                if (item := stream.poll(0.1)) is not None:
                    items.append(item)
                    index.apply_item(item)
        assert StoreOnly("w", ("STORAGE",), 0) in items
        assert index.find(range(12))[0].alone == {"GPU": 12, "CPU": 12, "STORAGE": 12}
        now += 61
        assert index.find(range(12))[0].alone == {"GPU": 12, "CPU": 12, "STORAGE": 0}
        assert index.find(range(12))[0].complete
    finally:
        collector.close()
        publisher.shutdown()
