"""The oracle for resident sets: slow, plain, obviously right."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, TypeAlias

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvevents.events import ExternalBlockHash, KVCacheEvent

__all__ = ["NaiveResidentSet"]

Key: TypeAlias = "tuple[ExternalBlockHash, str | None, int | None, str | None, str | None]"


class NaiveResidentSet:
    """A Python set of keys, driven by events one at a time."""

    def __init__(self) -> None:
        self.keys: set[Key] = set()
        self.duplicate_stores = 0
        self.unknown_removals = 0

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        """Apply events in order."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.keys.clear()
            elif isinstance(event, (BlockStored, BlockRemoved)):
                for h in event.block_hashes:
                    self._one(event, h)

    def _one(self, event: BlockStored | BlockRemoved, h: ExternalBlockHash) -> None:
        bits = h % 2**64 if isinstance(h, int) else h
        key = (bits, event.medium, event.group_idx, event.locality, event.ownership)
        if isinstance(event, BlockStored):
            self.duplicate_stores += key in self.keys
            self.keys.add(key)
        else:
            self.unknown_removals += key not in self.keys
            self.keys.discard(key)

    def digest(self, xxh3_128: Callable[[bytes], int]) -> bytes:
        """Sum of the keys' digests; ``xxh3_128`` comes from any xxhash package."""
        return (sum(xxh3_128(_packed(k)) for k in self.keys) % 2**128).to_bytes(16, "big")


def _packed(key: Key) -> bytes:
    return b"\x95" + b"".join(map(_pack, key))


def _pack(value: bytes | str | int | None) -> bytes:
    """Shortest msgpack of what keys are made of."""
    if value is None:
        return b"\xc0"
    if isinstance(value, int):
        return _pack_int(value)
    data = value.encode() if isinstance(value, str) else value
    n = len(data)
    if isinstance(value, bytes):
        head = b"\xc4" + bytes([n])
    elif n < 32:
        head = bytes([0xA0 | n])
    elif n < 256:
        head = b"\xd9" + bytes([n])
    else:
        head = struct.pack(">BH", 0xDA, n)
    return head + data


def _pack_int(value: int) -> bytes:
    if 0 <= value < 128:
        return bytes([value])
    if -32 <= value < 0:
        return struct.pack(">b", value)
    tags = ((0xD0, "b"), (0xD1, "h"), (0xD2, "i"), (0xD3, "q"))
    if value >= 0:
        tags = ((0xCC, "B"), (0xCD, "H"), (0xCE, "I"), (0xCF, "Q"))
    for tag, code in tags:
        try:
            return bytes([tag]) + struct.pack(">" + code, value)
        except struct.error:
            continue
    raise ValueError(f"{value} does not fit 64 bits")
