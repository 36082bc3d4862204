"""Connectors for tests in a real engine, loaded by `kv_connector_module_path`: each shows one way to report.

Every half writes what it did into the directory `ledger` of its extra configuration, a JSON object a line.
Imports vLLM; only the engine's processes load it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from vllm_connector import CpuTierConnector


class PlainContainer(kv_events.KVConnectorKVEvents):
    """A third party's: knows vLLM's base class and nothing else, takes only a list."""

    def __init__(self, events=()):
        self.counts, self.workers = Counter(events), 1

    def add_events(self, events):
        if type(events) is not list:
            raise TypeError("a list was expected")
        self.counts.update(events)

    def aggregate(self):
        self.counts = Counter(e for e, n in self.counts.items() if n == self.workers)
        return self

    def increment_workers(self, count=1):
        self.workers += count

    def get_all_events(self):
        return list(self.counts.elements())

    def get_number_of_workers(self):
        return self.workers

    def clear_events(self):
        self.counts.clear()
        self.workers = 1


class CountingContainer(kv_events.KVConnectorKVEvents):
    """Counts through vLLM's aggregator class, as LMCache's does."""

    def __init__(self, events=()):
        self.counter = kv_events.KVEventAggregator(1)
        self.counter.add_events(list(events))

    def add_events(self, events):
        self.counter.add_events(events)

    def aggregate(self):
        common = self.counter.get_common_events()
        self.counter.clear_events()
        self.counter.add_events(list(common))
        self.counter.reset_workers()
        return self

    def increment_workers(self, count=1):
        self.counter.increment_workers(count)

    def get_all_events(self):
        return self.counter.get_all_events()

    def get_number_of_workers(self):
        return self.counter.get_number_of_workers()

    def clear_events(self):
        self.counter.clear_events()
        self.counter.reset_workers()


@dataclass
class Step(KVConnectorMetadata):
    """Blocks that this step may report: token ids, hash, parent."""

    blocks: list = field(default_factory=list)


class Base(KVConnectorBase_V1, SupportsHMA):
    """Moves no data; tells its workers about every block that a request fills."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.extra = self._kv_transfer_config.kv_connector_extra_config
        self.block_size = vllm_config.cache_config.block_size
        self.rank = vllm_config.parallel_config.rank
        self.seen = {}

    def note(self, **words):
        path = Path(self.extra["ledger"]) / f"{self.extra['medium']}-{self.role.name}-{self.rank}"
        with path.open("a") as f:
            f.write(json.dumps(words) + "\n")

    def event(self, tokens, block_hash, parent):
        return kv_events.BlockStored(
            [block_hash], parent, tokens, self.block_size, None, self.extra["medium"], None
        )

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.seen[request.request_id] = (request, 0)

    def build_connector_meta(self, scheduler_output):
        step, size = Step(), self.block_size
        for name, (request, done) in list(self.seen.items()):
            hashes = [maybe_convert_block_hash(h) for h in request.block_hashes]
            for i in range(done, len(hashes)):
                tokens = list(request.all_token_ids[i * size : (i + 1) * size])
                step.blocks.append((tokens, hashes[i], hashes[i - 1] if i else None))
            self.seen[name] = (request, len(hashes))
        return step

    def request_finished(self, request, block_ids):
        self.seen.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        return self.request_finished(request, block_ids)


class Quiet(Base):
    """Has no events."""


class Reporting(Base):
    """Reports from its workers. Extra configuration: `container`, `late` (rank that reports a step later),
    `silent` (rank that never does), `twice` (rank that says everything two times)."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.pending, self.ready, self.got = [], [], None

    def wait_for_save(self):
        if self.rank == self.extra.get("silent"):
            return
        self.ready, self.pending = (
            (self.pending, []) if self.rank == self.extra.get("late") else (self.ready, [])
        )
        blocks = [self.event(*block) for block in self._get_connector_metadata().blocks]
        if self.rank == self.extra.get("late"):
            self.pending = blocks
        else:
            self.ready += blocks * (2 if self.rank == self.extra.get("twice") else 1)

    def get_kv_connector_kv_cache_events(self):
        if not self.ready:
            return None
        kind = {"plain": PlainContainer, "counting": CountingContainer}[self.extra.get("container", "plain")]
        events, self.ready = self.ready, []
        self.note(reported=[h for event in events for h in event.block_hashes])
        return kind(events)

    def update_connector_output(self, connector_output):
        got = connector_output.kv_cache_events
        if got is None:
            return
        counter = type(getattr(got, "counter", None)).__module__
        self.note(kind=type(got).__name__, workers=got.get_number_of_workers(), counter=counter)
        self.got = got

    def take_events(self):
        if self.got is not None:
            got, self.got = self.got, None
            yield from got.aggregate().get_all_events()


class AnyWorker(Reporting):
    """One worker is enough, it says."""

    kv_events_rule = "any"


class FromScheduler(Base):
    """Makes its events in the scheduler's half."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.made = []

    def build_connector_meta(self, scheduler_output):
        step = super().build_connector_meta(scheduler_output)
        self.made += [self.event(*block) for block in step.blocks]
        if step.blocks:
            self.note(reported=[block_hash for _, block_hash, _ in step.blocks])
        return step

    def take_events(self):
        made, self.made = self.made, []
        return made


class SeenTier(CpuTierConnector):
    """The example's tier, which also writes down what arrives at its scheduler's half."""

    note = Base.note

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.extra = self._kv_transfer_config.kv_connector_extra_config
        self.rank = vllm_config.parallel_config.rank

    def wait_for_save(self):
        super().wait_for_save()
        self.note(held=list(self.held.values()))

    def update_connector_output(self, connector_output):
        got = connector_output.kv_cache_events
        if got is not None:
            self.note(kind=type(got).__name__, said=sorted(w for w, _ in got.by_worker()))
        super().update_connector_output(connector_output)
