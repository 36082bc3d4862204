"""A block pool that anybody can check by reading it: lists and dicts, searched from end to end.

It behaves as `kvevents.BlockPool` does and makes the same events, one object each; tests drive both with the
same calls. It is slow on purpose: no queue but a list, no table but a dict.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvevents.resident import ResidentSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["NaiveBlockPool", "NaiveRequest"]


@dataclass(frozen=True)
class NaiveRequest:
    """What a pool needs of a request."""

    hashes: Sequence[bytes]
    tokens: Sequence[int]


@dataclass
class NaiveBlockPool:
    """See the module. ``group_sizes`` are the block sizes of the groups."""

    num_blocks: int
    block_size: int
    group_sizes: Sequence[int] = ()
    every_copy: bool = False
    report_hits: bool = False

    refs: dict[int, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    owned: dict[int, list[tuple[bytes, int]]] = field(default_factory=dict)
    """The keys (hash and group) of a block, its first one first."""
    own_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens of the prefix that a block's first key names."""
    holders: dict[tuple[bytes, int], list[int]] = field(default_factory=dict)
    """The blocks of a key, in the order in which they were stored."""
    events: list[KVCacheEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Every block but the null block is free."""
        self.group_sizes = self.group_sizes or (self.block_size,)
        self.free = list(range(1, self.num_blocks))
        self.refs = dict.fromkeys(range(self.num_blocks), 0)

    # ------------------------------------------------------------ what leaves

    def _forget(self, block: int) -> None:
        """Remove all keys of a block, and say so."""
        self.own_tokens.pop(block, None)
        for key in self.owned.pop(block, []):
            self.holders[key].remove(block)
            last = not self.holders[key]
            if last:
                del self.holders[key]
            if last or self.every_copy:
                self._removed(key)

    def _removed(self, key: tuple[bytes, int]) -> None:
        block_hash, group = key
        last = self.events[-1] if self.events else None
        if (
            not self.every_copy
            and self._may_join
            and isinstance(last, BlockRemoved)
            and last.group_idx == group
        ):
            last.block_hashes.append(block_hash)
        else:
            self.events.append(BlockRemoved([block_hash], medium="GPU", group_idx=group))
        self._may_join = True

    _may_join = False
    """Removals of one call are one event."""

    # ------------------------------------------------------------ blocks

    def get_new_blocks(self, n: int) -> list[int]:
        """Take blocks from the head of the free list."""
        self._may_join = False
        taken, self.free = self.free[:n], self.free[n:]
        for block in taken:
            self.refs[block] = 1
            self._forget(block)
        return taken

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a user to each block."""
        for block in blocks:
            if block:
                if block in self.free:
                    self.free.remove(block)
                self.refs[block] += 1

    def free_blocks(self, blocks: Iterable[int]) -> None:
        """Take a user from each block."""
        front: list[int] = []
        for block in blocks:
            if block:
                self.refs[block] -= 1
                if not self.refs[block]:
                    (self.free if block in self.owned else front).append(block)
        self.free = front + self.free

    def evict_blocks(self, blocks: Iterable[int]) -> None:
        """Remove the keys of these blocks."""
        self._may_join = False
        for block in blocks:
            self._forget(block)

    def reset_prefix_cache(self) -> bool:
        """Forget all keys, unless blocks are in use."""
        if len(self.free) != self.num_blocks - 1:
            return False
        self.owned, self.holders, self.own_tokens = {}, {}, {}
        self.events.append(AllBlocksCleared())
        return True

    # ------------------------------------------------------------ hashes

    def _key(self, request: NaiveRequest, index: int, group: int) -> tuple[bytes, int]:
        """Key of a block of the group: the last hash inside it."""
        scale = self.group_sizes[group] // self.block_size
        return request.hashes[(index + 1) * scale - 1], group

    def _own(self, block: int, key: tuple[bytes, int], tokens: int) -> bool:
        """Give a block a key; whether it is the only one that has it."""
        self.owned.setdefault(block, []).append(key)
        self.own_tokens.setdefault(block, tokens)
        self.holders.setdefault(key, []).append(block)
        return len(self.holders[key]) == 1

    def get_cached_block(self, block_hash: bytes, group: int = 0) -> int | None:
        """Find the block that was stored first with this hash."""
        blocks = self.holders.get((block_hash, group))
        return blocks[0] if blocks else None

    def find_longest_cache_hit(self, request: NaiveRequest, max_blocks: int, group: int = 0) -> list[int]:
        """Find the blocks of the longest cached prefix."""
        hits: list[int] = []
        scale = self.group_sizes[group] // self.block_size
        for i in range(min(max_blocks, len(request.hashes) // scale)):
            block = self.get_cached_block(*self._key(request, i, group))
            if block is None:
                break
            hits.append(block)
        return hits

    def _stored(
        self, request: NaiveRequest, group: int, tokens: range, hashes: list[bytes], size: int
    ) -> BlockStored:
        """Describe these tokens of the request."""
        start, end = tokens.start, tokens.stop
        parent = request.hashes[start // self.block_size - 1] if start else None
        return BlockStored(
            block_hashes=list(hashes),
            parent_block_hash=parent,
            token_ids=list(request.tokens[start:end]),
            block_size=size,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[None] * len(hashes) or None,
            group_idx=group,
            kv_cache_spec_kind="full_attention",
        )

    def cache_full_blocks(
        self, request: NaiveRequest, blocks: Sequence[int], cached: int, full: int, group: int = 0
    ) -> None:
        """Give full blocks their hashes."""
        if cached >= full:
            return
        self._may_join = False
        size = self.group_sizes[group]
        run: list[int] = []
        stored: list[int] = []
        for i in range(cached, full):
            block, key = blocks[i], self._key(request, i, group)
            new = False
            if block and self.owned.get(block, [None])[0] != key:
                if block in self.owned:
                    self._announce(request, group, run)
                    run = []
                    self._forget(block)
                new = self._own(block, key, (i + 1) * size)
                stored.append(i)
            if new:
                run.append(i)
            else:
                self._announce(request, group, run)
                run = []
        self._announce(request, group, run)
        if self.every_copy:
            hashes = [self._key(request, i, group)[0] for i in stored]
            self.events.append(self._stored(request, group, range(cached * size, full * size), hashes, size))

    def _announce(self, request: NaiveRequest, group: int, run: list[int]) -> None:
        """Announce a run of blocks whose hashes were not resident before."""
        if run and not self.every_copy:
            size = self.group_sizes[group]
            hashes = [self._key(request, i, group)[0] for i in run]
            self.events.append(
                self._stored(request, group, range(run[0] * size, (run[-1] + 1) * size), hashes, size)
            )
            self._may_join = False

    def cache_partial_block(
        self, request: NaiveRequest, block: int, num_tokens: int, group: int = 0, *, replace: bool = False
    ) -> bytes | None:
        """Give a block the hash of a boundary inside it."""
        if not block:
            return None
        self._may_join = False
        last = num_tokens // self.block_size - 1
        key = request.hashes[last], group
        if block in self.owned:
            if key in self.owned[block] and not replace:
                return key[0]
            if replace or self.own_tokens[block] < num_tokens:
                self._forget(block)
            elif not self.every_copy:
                return None
        new = self._own(block, key, num_tokens)
        if self.every_copy:
            start = last * self.block_size
        else:
            resident = [i for i in range(last) if (request.hashes[i], group) in self.holders]
            start = (resident[-1] + 1) * self.block_size if resident else 0
        if new or self.every_copy:
            self.events.append(
                self._stored(request, group, range(start, num_tokens), [key[0]], num_tokens - start)
            )
        return key[0]

    def move_block_hashes(self, src: int, dst: int) -> None:
        """Move the keys of one block to another; no event."""
        if src in self.owned:
            keys, tokens = self.owned.pop(src), self.own_tokens.pop(src)
            for key in keys:
                self.holders[key].remove(src)
                self.holders[key].append(dst)
            self.owned[dst], self.own_tokens[dst] = keys, tokens

    # ------------------------------------------------------------ what is known

    def take_events(self) -> list[KVCacheEvent]:
        """Return all events since the last call."""
        events, self.events, self._may_join = self.events, [], False
        return events

    def digest(self) -> bytes:
        """Digest of the resident set."""
        removals: list[KVCacheEvent] = [
            BlockStored([h], None, [], 0, None, "GPU", None, group_idx=g) for h, g in self.holders
        ]
        return ResidentSet(removals).digest()
