"""A complete connector: blocks in CPU memory, least recently used out first, told in events."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from kvevents import EventList, ResidentSet
from kvevents.connectors import KVConnectorBase, KVConnectorMetadata, KVConnectorRole


@dataclass
class Step(KVConnectorMetadata):
    """The scheduler half's word to the worker halves: what to load, then what to store."""

    loads: list[tuple[bytes, int]] = field(default_factory=list)  # hash, block id
    stores: list[tuple[Any, ...]] = field(default_factory=list)  # begin_store's first four, block ids


class MemoryConnector(KVConnectorBase):
    """`config`: `capacity` in blocks, `num_workers`. A request: `request_id`, `tokens` (`TokenBlocks`)."""

    def __init__(self, config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(config, role, kv_cache_config)
        self._capacity = config["capacity"]
        self._tier: OrderedDict[bytes, list[bytes]] = OrderedDict()  # in a worker: the bytes of every layer
        self._failed: set[int] = set()
        self._usable = ResidentSet()  # in the scheduler: what enough workers hold
        self._matched: dict[str, int] = {}
        self._step = Step()

    def register_kv_caches(self, kv_caches: Any) -> None:
        self._layers = list(kv_caches.values())  # worker half; a writable buffer a block each

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for block_hash, block in self._connector_metadata.loads:  # type: ignore[union-attr]
            if block_hash not in self._tier:
                self._failed.add(block)  # evicted since the scheduler looked: the engine computes it
                continue
            self._tier.move_to_end(block_hash)
            for layer, part in zip(self._layers, self._tier[block_hash], strict=True):
                layer[block][:] = part

    def wait_for_save(self) -> None:
        for hashes, parent, tokens, size, blocks in self._connector_metadata.stores:  # type: ignore[union-attr]
            ticket = self.kv_events.begin_store(hashes, parent, tokens, size, medium="CPU")
            fits = min(len(hashes), self._capacity)
            gone = [self._tier.popitem(last=False)[0] for _ in range(len(self._tier) + fits - self._capacity)]
            if gone:
                self.kv_events.removed(gone, medium="CPU")  # before the store that it makes room for
            for block_hash, block in zip(hashes[:fits], blocks, strict=False):
                self._tier[block_hash] = [bytes(layer[block]) for layer in self._layers]
            self.kv_events.complete(ticket, stored=fits)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens, size = request.tokens, request.tokens.block_size
        first = end = num_computed_tokens // size
        last = (tokens.num_tokens - 1) // size  # a token is always computed, so that there is an answer
        while end < last and tokens.block_hashes[end] in self._usable:
            end += 1
        self._matched[request.request_id] = first
        return (end - first) * size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        first = self._matched.pop(request.request_id, 0)
        for i in range(first, first + num_external_tokens // request.tokens.block_size):
            self._step.loads.append((request.tokens.block_hashes[i], blocks[i]))

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        self._step.stores += scheduler_output  # what became full in this step, as the engine says it
        step, self._step = self._step, Step()
        return step

    def take_events(self) -> EventList:
        self._usable.apply(events := super().take_events())  # what became usable by the rule, or ceased to be
        return events
