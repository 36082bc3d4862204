"""The events that the rows use: vLLM's Structs, as its pool makes them."""

from __future__ import annotations

from vllm.distributed import kv_events

EVENTS, HASHES, TOKENS = 64, 16, 256


def stores(seed, events=EVENTS, hashes=HASHES, tokens=TOKENS, medium="GPU"):
    """A batch's stores: integer hashes of 64 bits, token ids that are objects of their own."""
    step = 0x9E3779B97F4A7C15
    return [
        kv_events.BlockStored(
            block_hashes=[(seed * 1_000_003 + e * hashes + i) * step % 2**64 for i in range(hashes)],
            parent_block_hash=None, token_ids=[(seed + e + i) % 32_000 for i in range(tokens)],
            block_size=tokens // hashes, lora_id=None, medium=medium, lora_name=None, group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
        for e in range(events)
    ]  # fmt: skip


def batches(count):
    """Batches of 64 stores of 16 hashes and 256 tokens."""
    return [kv_events.KVEventBatch(ts=float(n), events=stores(n)) for n in range(count)]
