"""Seeded workloads, the same as in `rust/core/benches/workloads.rs`: the difference of two figures is the
seam.

Both sides draw from SplitMix64, so that equal seeds give equal numbers in both languages; `FIRST` pins it.
"""

from __future__ import annotations

from array import array
from functools import cache

from kvevents import BlockStored

__all__ = ["BLOCK", "FIRST", "VOCABULARY", "SplitMix64", "hashes", "requests", "stored_events", "token_ids"]

VOCABULARY = 128_000
BLOCK = 16
FIRST = (0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4, 0x06C4_5D18_8009_454F)
"""The first numbers of seed 0, as the inventors of SplitMix64 print them."""

_MASK = (1 << 64) - 1


class SplitMix64:
    """A small generator that is the same in every language."""

    def __init__(self, seed: int) -> None:
        self.state = seed & _MASK

    def next(self) -> int:
        """64 random bits."""
        self.state = z = (self.state + 0x9E37_79B9_7F4A_7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
        return z ^ (z >> 31)

    def below(self, n: int) -> int:
        """A number below `n`, by the high bits of a product."""
        return (self.next() * n) >> 64


def token_ids(seed: int, n: int) -> list[int]:
    """Ids over a vocabulary of 128,000: most take five bytes on the wire, as real ones do."""
    rng = SplitMix64(seed)
    return [rng.below(VOCABULARY) for _ in range(n)]


def hashes(seed: int, n: int, form: str = "bytes") -> list[int] | list[bytes]:
    """Block hashes: 64-bit integers (`int`), or digests of 32 bytes (`bytes`)."""
    rng = SplitMix64(seed ^ 0x5EED)
    if form == "int":
        return [rng.next() for _ in range(n)]
    return [b"".join(rng.next().to_bytes(8, "little") for _ in range(4)) for _ in range(n)]


@cache
def requests(n: int, blocks: int = 128, block_size: int = BLOCK, seed: int = 1) -> tuple[array[int], ...]:
    """Token ids of `n` requests without shared prefixes, each filling `blocks` blocks, as int32 arrays."""
    size = blocks * block_size
    return tuple(array("i", token_ids(seed * 1_000_003 + i, size)) for i in range(n))


def stored_events(
    events: int, per_event: int, *, block_size: int = BLOCK, seed: int = 1, form: str = "int"
) -> list[BlockStored]:
    """Stores of `per_event` hashes each, filled as by vLLM 0.32; every event continues the one before."""
    digests = hashes(seed, events * per_event, form)
    ids = token_ids(seed, events * per_event * block_size)
    width = per_event * block_size
    return [
        BlockStored(
            block_hashes=list(digests[e * per_event : (e + 1) * per_event]),
            parent_block_hash=digests[e * per_event - 1] if e else None,
            token_ids=ids[e * width : (e + 1) * width],
            block_size=block_size,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[None] * per_event,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
        for e in range(events)
    ]
