"""A CPU tier for vLLM, with events: vLLM's connector base class and ``KVEventsMixin``.

Copies every full block to CPU memory within the step that computed it, loads a prefix from there, evicts the
oldest, and announces both as events of medium "CPU". Nothing but this file is needed, also with several
workers; with ``PYTHONPATH=examples``:

    vllm serve MODEL --kv-events-config '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}' \
        --kv-transfer-config '{"kv_connector": "CpuTierConnector", "kv_role": "kv_both",
            "kv_connector_module_path": "vllm_connector", "kv_connector_extra_config": {"cpu_blocks": 4096}}'

One KV cache group. The scheduler half decides (slots, the oldest first to go), the worker halves copy.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvevents.connectors import KVEventsMixin

if TYPE_CHECKING:
    import torch


@dataclass
class Store:
    """One block to copy to the CPU tier, with what its event says."""

    slot: int
    block_id: int
    block_hash: Any
    parent: Any
    token_ids: list[int]
    lora_name: str | None
    evicted: Any = None
    """Hash of the block that had the slot."""


@dataclass
class TierStep(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers do in one step."""

    loads: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of slot and block id."""
    stores: list[Store] = field(default_factory=list)


@dataclass
class Running:
    """A request, its blocks, and how many of them are in the tier."""

    request: Any
    block_ids: list[int]
    stored: int = 0


class CpuTierConnector(KVEventsMixin, KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The mixin comes first: its event hooks stand in for the base class's, which do nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise ValueError("this tier takes models with one KV cache group")
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.medium = extra.get("medium", "CPU")
        self.size = int(extra.get("cpu_blocks", 1024))
        self.block_size: int = vllm_config.cache_config.block_size
        # scheduler half
        self.slots: OrderedDict[bytes, int] = OrderedDict()
        self.running: dict[str, Running] = {}
        self.loads: list[tuple[int, int]] = []
        # worker half
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.held: dict[int, Any] = {}

    # ------------------------------------------------------------ worker half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """One CPU tensor a layer, of the layer's own shape but for the number of blocks."""
        import torch  # noqa: PLC0415 - only the workers need it

        for cache in kv_caches.values():
            if not isinstance(cache, torch.Tensor):
                raise TypeError(f"one tensor a layer was expected, saw {type(cache).__name__}")
            blocks = cache.new_empty((self.size, *cache.shape[1:]), device="cpu")
            self.layers.append((cache, blocks))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Before the step: blocks of the tier that this step builds on."""
        for slot, block_id in self._get_connector_metadata().loads:
            for cache, blocks in self.layers:
                cache[block_id].copy_(blocks[slot])

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done when they start."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are copied at the end of the step."""

    def wait_for_save(self) -> None:
        """At the end of the step: copy, and record what happened."""
        stores = self._get_connector_metadata().stores
        for store in stores:
            for cache, blocks in self.layers:
                blocks[store.slot].copy_(cache[store.block_id])
            if store.evicted is not None:
                self.kv_events.removed([store.evicted], medium=self.medium, group_idx=0)
            ticket = self.kv_events.begin_store(
                [store.block_hash],
                store.parent,
                store.token_ids,
                self.block_size,
                medium=self.medium,
                lora_name=store.lora_name,
                group_idx=0,
            )
            self.kv_events.complete(ticket)
            self.held[store.slot] = store.block_hash

    # ------------------------------------------------------------ scheduler half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens of the prompt that follow the computed ones in the tier; one is left to compute."""
        first = num_computed_tokens // self.block_size
        last = (request.num_tokens - 1) // self.block_size
        found = 0
        for block_hash in request.block_hashes[first:last]:
            if block_hash not in self.slots:
                break
            found += 1
        return found * self.block_size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks: note which of them are loaded."""
        block_ids = list(blocks.get_block_ids()[0])
        known = self.running[request.request_id] = Running(request, block_ids)
        if num_external_tokens:
            first = request.num_computed_tokens // self.block_size
            for i in range(first, first + num_external_tokens // self.block_size):
                self.loads.append((self.slots[request.block_hashes[i]], block_ids[i]))
                known.stored = i + 1

    def build_connector_meta(self, scheduler_output: Any) -> TierStep:
        """Which blocks this step completes, and where they go."""
        step = TierStep(loads=self.loads)
        self.loads = []
        scheduled = scheduler_output.num_scheduled_tokens
        busy = {slot for slot, _ in step.loads}
        for new in scheduler_output.scheduled_new_reqs:
            self.running[new.req_id].block_ids = list(new.block_ids[0])
            self._store(step, busy, new.req_id, new.num_computed_tokens + scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, new_ids, done in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            known = self.running[req_id]
            if req_id in cached.resumed_req_ids:
                known.block_ids = list(new_ids[0])
            elif new_ids is not None:
                known.block_ids.extend(new_ids[0])
            self._store(step, busy, req_id, done + scheduled[req_id])
        return step

    def _store(self, step: TierStep, busy: set[int], req_id: str, computed: int) -> None:
        known = self.running[req_id]
        request, size = known.request, self.block_size
        for i in range(known.stored, min(computed // size, len(request.block_hashes))):
            block_hash = request.block_hashes[i]
            known.stored = i + 1
            if block_hash in self.slots:
                self.slots.move_to_end(block_hash)
                continue
            slot, evicted = len(self.slots), None
            if slot == self.size:
                oldest = next((h for h, s in self.slots.items() if s not in busy), None)
                if oldest is None:
                    return  # the whole tier is read or written in this very step
                slot, evicted = self.slots.pop(oldest), maybe_convert_block_hash(oldest)
            self.slots[block_hash] = slot
            busy.add(slot)
            step.stores.append(
                Store(
                    slot,
                    known.block_ids[i],
                    maybe_convert_block_hash(block_hash),
                    maybe_convert_block_hash(request.block_hashes[i - 1]) if i else None,
                    list(request.all_token_ids[i * size : (i + 1) * size]),
                    request.lora_request.lora_name if request.lora_request else None,
                    evicted,
                )
            )

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Everything was copied within the steps: the blocks may go."""
        self.running.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """The same, for vLLM's hybrid cache."""
        return self.request_finished(request, block_ids)
