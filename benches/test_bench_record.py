"""Recording in a connector's worker half, beside building an event object and appending it."""

from __future__ import annotations

from array import array

import msgspec

from benches import workloads
from benches.harness import Work, as_tests, compare
from kvevents._core import EventList, KVEventRecorder

BLOCKS = 16
STORES = 64
AGAINST = "building a 16-block Struct of vLLM's shape from slices, and appending it"


class BlockStored(
    msgspec.Struct,
    array_like=True,
    omit_defaults=True,
    gc=False,
    tag=True,  # type: ignore[call-arg]
):
    """The fields and options of vLLM's event."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list | None = None
    group_idx: int | None = None


def work(as_buffer: bool) -> Work:
    """A request of 64 times 16 blocks; every store is announced as soon as it began."""
    size = workloads.BLOCK
    hashes = workloads.hashes(11, STORES * BLOCKS)
    ids = list(workloads.token_ids(11, STORES * BLOCKS * size))
    tokens = array("i", ids) if as_buffer else ids
    starts = range(0, STORES * BLOCKS, BLOCKS)
    recorder = KVEventRecorder()

    def ours() -> EventList:
        begin, complete = recorder.begin_store, recorder.complete
        for start in starts:
            complete(begin(hashes, None, tokens, size, start=start, end=start + BLOCKS, group_idx=0))
        return recorder.take()

    def theirs() -> list[BlockStored]:
        events: list[BlockStored] = []
        for start in starts:
            end = start + BLOCKS
            parent = hashes[start - 1] if start else None
            event = BlockStored(
                block_hashes=hashes[start:end],
                parent_block_hash=parent,
                token_ids=ids[start * size : end * size],
                block_size=size,
                lora_id=None,
                medium="CPU",
                lora_name=None,
                group_idx=0,
            )
            events.append(event)
        return events

    def check() -> None:
        mine, built = ours(), theirs()
        assert [h for e in mine for h in e.block_hashes] == [h for e in built for h in e.block_hashes]
        assert [t for e in mine for t in e.token_ids] == [t for e in built for t in e.token_ids]
        assert len(built) == STORES

    return Work(ours, theirs, STORES, check)


@compare(
    "one 16-block store, begin and complete, token ids as list", per="store", floor=1, aim=2, against=AGAINST
)
def store_of_lists() -> Work:
    """256 ids in a Python list, hashes in a list of bytes."""
    return work(as_buffer=False)


@compare("the same, token ids as int32 buffer", per="store", floor=2, aim=5, against=AGAINST)
def store_of_buffers() -> Work:
    """The competitor slices a list, as an engine's request holds one."""
    return work(as_buffer=True)


test_rows = as_tests(__name__)
