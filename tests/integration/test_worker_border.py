"""Connectors of eight spawned workers: what they record arrives whole, and is agreed on once."""

from __future__ import annotations

import multiprocessing
import pickle

import pytest

from kvevents import BlockStored, ResidentSet
from kvevents.connectors import (
    KVConnectorBase,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVOutputAggregator,
    ModelRunnerOutput,
    MultiConnector,
)

WORKERS, EVENTS = 8, 1000


class Metadata(KVConnectorMetadata):
    pass


class Recording(KVConnectorBase):
    """A connector that is defined here: the workers import this module to have it."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return Metadata()

    def kv_events_num_workers(self):
        return WORKERS


class Any(Recording):
    kv_events_rule = "any"


def build(role):
    return MultiConnector(None, role, connectors=[Recording(None, role), Any(None, role)])


def event(n, medium):
    hashes = [(n * 16 + i).to_bytes(32, "big") for i in range(16)]
    return BlockStored(hashes, None, list(range(n, n + 256)), 16, None, medium, None, group_idx=0)


def work(conn, rank):
    connector = build(KVConnectorRole.WORKER)
    everywhere, somewhere = connector.sub_connectors
    for n in range(EVENTS):
        everywhere.kv_events.append(event(n, "CPU"))
    somewhere.kv_events.append(event(rank, "STORAGE"))
    output = KVConnectorOutput(kv_cache_events=connector.get_kv_connector_kv_cache_events())
    conn.send_bytes(pickle.dumps(ModelRunnerOutput(output), protocol=5))
    conn.close()


@pytest.mark.timeout(120)
def test_eight_spawned_workers_with_a_thousand_events_each_agree():
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(WORKERS):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(theirs, rank))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    messages = []
    for pipe in pipes:
        assert pipe.poll(90)
        messages.append(pipe.recv_bytes())
        pipe.close()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    outputs = [pickle.loads(m) for m in messages]
    scheduler = build(KVConnectorRole.SCHEDULER)
    joined = KVOutputAggregator.from_connector(scheduler, WORKERS).aggregate(outputs)
    scheduler.update_connector_output(joined.kv_connector_output)
    events = scheduler.take_events()
    assert events.num_blocks == ((EVENTS + WORKERS) * 16, 0)
    expected = ResidentSet([event(n, "CPU") for n in range(EVENTS)])
    expected.apply([event(n, "STORAGE") for n in range(WORKERS)])
    assert ResidentSet(events).digest() == expected.digest()
    # Columns are about as large as what they hold: 32 bytes a hash and 4 a token id.
    assert max(map(len, messages)) < (EVENTS + 1) * (16 * 32 + 256 * 4 + 64)
