"""Token ids cut into blocks with chained hashes.

`TokenBlocks` is the request handle: a pool, a router or an index reads its tokens and hashes without a
Python object a token or a block. ``docs/hashes.md`` defines the algorithms and holds test vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from kvevents._core import BlockHashes, TokenBlocks
from kvevents.errors import ConfigError, EventError, EventTypeError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ALGORITHMS", "BlockHashes", "TokenBlocks", "hash_blocks", "narrow_hash"]

Sequence.register(BlockHashes)

ALGORITHMS = ("sha256", "sha256_cbor", "xxh3_64")
"""What ``algorithm=`` takes. The first two are vLLM's, the last is this package's own."""


def hash_blocks(
    token_ids: Sequence[int] | Buffer,
    block_size: int,
    *,
    algorithm: str = "sha256_cbor",
    lora_name: str | None = None,
    lora_path: str | None = None,
    cache_salt: str | None = None,
    mm: Sequence[tuple[str, int, int]] = (),
    seed: str | None = None,
) -> BlockHashes:
    """Hash the full blocks of ``token_ids``; what is left after the last full block is not hashed.

    The options and the errors are those of `TokenBlocks`. Pure: safe from any thread.
    """
    blocks = TokenBlocks(
        block_size,
        algorithm=algorithm,
        lora_name=lora_name,
        lora_path=lora_path,
        cache_salt=cache_salt,
        mm=mm,
        seed=seed,
    )
    blocks.extend(token_ids)
    return blocks.block_hashes


def narrow_hash(block_hash: bytes | int, rule: Literal["vllm", "sglang"] = "vllm") -> int:
    """Narrow a hash to the unsigned 64 bits that an engine would put into its events.

    Engines cut the same digest at different ends:

    - ``"vllm"``: the low (last) 8 bytes, big endian; bytes shorter than 8 are read as a number
      (`maybe_convert_block_hash` of vLLM 0.32);
    - ``"sglang"``: the first 8 bytes, big endian (SGLang, which then writes it as a signed integer).

    An integer is its own 64 bits, so that -1 and 2**64 - 1 give the same key, which is how this package
    compares integer hashes everywhere. `EventError` for an integer beyond 64 bits, `EventTypeError` for
    what is no hash, `ConfigError` for another rule.
    """
    if rule not in {"vllm", "sglang"}:
        raise ConfigError(f"rule: 'vllm' or 'sglang' was expected, saw {rule!r}")
    if isinstance(block_hash, int):
        if not -(1 << 63) <= block_hash < 1 << 64:
            raise EventError(f"block_hash: a 64-bit integer or bytes was expected, saw {block_hash}")
        return block_hash & (1 << 64) - 1
    if not isinstance(block_hash, bytes):
        raise EventTypeError(f"block_hash: a 64-bit integer or bytes was expected, saw {block_hash!r:.60}")
    return int.from_bytes(block_hash[-8:] if rule == "vllm" else block_hash[:8], "big")
