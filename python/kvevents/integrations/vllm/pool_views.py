"""What vLLM's own modules and tests find at a pool's attributes: live views of the native pool.

Reading is a view. Whoever writes through one (no module of vLLM does, its tests do) gets vLLM's own object:
the pool is handed over to vLLM's own code first, and a view that somebody kept leads there from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

__all__ = ["BlockMap", "Cache", "FreeQueue", "HashesByBlock"]


class FreeQueue:
    """``free_block_queue``: free blocks in the order in which they are given out."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def _own(self, why: str) -> Any:
        self._pool._hand_over(f"free_block_queue.{why} was used")
        return self._pool.free_block_queue

    @property
    def num_free_blocks(self) -> int:
        """How many there are."""
        found: int = self._pool.get_num_free_blocks()
        return found

    @num_free_blocks.setter
    def num_free_blocks(self, value: int) -> None:
        self._own("num_free_blocks").num_free_blocks = value

    def get_all_free_blocks(self) -> list[Any]:
        """All of them."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]:
        """Those behind ``cursor``, or all."""
        pool = self._pool
        if pool.free_block_queue.__class__ is not FreeQueue:
            yield from pool.free_block_queue.iter_blocks_after(cursor)
            return
        while (cursor := pool._next_free(cursor)) is not None:
            yield cursor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._own(name), name)


class Cache(MutableMapping[Any, Any]):
    """``_cache``: the block of a hash and group, or ``{id: block}`` where several hold it."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def _dict(self) -> Any:
        """The dict of vLLM, if the pool was handed over."""
        found = self._pool.cached_block_hash_to_block
        return None if isinstance(found, BlockMap) else found._cache

    def _own(self) -> Any:
        self._pool._hand_over("cached_block_hash_to_block._cache was written to")
        return self._pool.cached_block_hash_to_block._cache

    def __getitem__(self, key: Any) -> Any:
        own = self._dict()
        if own is not None:
            return own[key]
        blocks = self._pool.to_copies(key)
        if not blocks:
            raise KeyError(key)
        return blocks[0] if len(blocks) == 1 else {b.block_id: b for b in blocks}

    def __iter__(self) -> Iterator[Any]:
        own = self._dict()
        return iter(self._pool.to_keys() if own is None else own)

    def __len__(self) -> int:
        own = self._dict()
        return len(own) if own is not None else int(self._pool._num_keys())

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._own()[key]

    def __copy__(self) -> dict[Any, Any]:
        return dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))


class BlockMap:
    """``cached_block_hash_to_block``: which blocks hold a hash."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @property
    def _cache(self) -> Cache:
        return Cache(self._pool)

    def get_one_block(self, key: Any) -> Any:
        """The block that a hit takes, or ``None``."""
        found = self._cache.get(key)
        return next(iter(found.values())) if isinstance(found, dict) else found

    def contain(self, key: Any, block_id: int) -> bool:
        """Whether this block holds the hash."""
        found = self._cache.get(key)
        if isinstance(found, dict):
            return block_id in found
        return found is not None and found.block_id == block_id

    def insert(self, key: Any, block: Any) -> None:
        """Only in vLLM's own pool."""
        self._own("insert").insert(key, block)

    def pop(self, key: Any, block_id: int) -> Any:
        """Only in vLLM's own pool."""
        return self._own("pop").pop(key, block_id)

    def _own(self, why: str) -> Any:
        self._pool._hand_over(f"cached_block_hash_to_block.{why} was used")
        return self._pool.cached_block_hash_to_block

    def __len__(self) -> int:
        return len(self._cache)


class HashesByBlock(Mapping[int, "set[bytes]"]):
    """``cached_block_hashes_by_block``: hashes of a block beside its own, for blocks that have some."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getitem__(self, block_id: int) -> set[bytes]:
        held = self._pool.to_keys_of(block_id)[1:]
        if not held:
            raise KeyError(block_id)
        return {key for key, _ in held}

    def __iter__(self) -> Iterator[int]:
        return (b.block_id for b in self._pool.blocks if self._pool.to_keys_of(b.block_id)[1:])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))
