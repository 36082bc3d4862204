"""Numbers that arrive in the wrong place, or are none, never make an object."""

from __future__ import annotations

import math

import pytest

import kvevents
from kvevents import BlockPool, EventList, KVCacheGroup, KVEventsConfig, TokenBlocks, hash_blocks

TAKES_A_NUMBER = {
    "TokenBlocks block_size": TokenBlocks,
    "hash_blocks block_size": lambda v: hash_blocks([1, 2], v),
    "BlockPool num_blocks": lambda v: BlockPool(v, 16),
    "BlockPool block_size": lambda v: BlockPool(16, v),
    "BlockPool max_queued_events": lambda v: BlockPool(16, 16, max_queued_events=v),
    "BlockPool groups": lambda v: BlockPool(16, 16, groups=[KVCacheGroup(v)]),
    "BlockPool get_new_blocks": lambda v: BlockPool(8, 16).get_new_blocks(v),
    "EventList with_origin": lambda v: EventList().with_origin(worker=v),
    "KVEventsConfig hwm": lambda v: KVEventsConfig(hwm=v),
    "KVEventsConfig buffer_steps": lambda v: KVEventsConfig(buffer_steps=v),
    "KVEventsConfig max_queue_size": lambda v: KVEventsConfig(max_queue_size=v),
    "KVEventsConfig data_parallel_size": lambda v: KVEventsConfig(data_parallel_size=v),
}
REFUSED = (kvevents.errors.KVEventsError, TypeError, OverflowError)


@pytest.mark.parametrize("value", [1.5, math.nan, math.inf, "16", b"16", [16], -1, -(2**40), 2**70], ids=repr)
@pytest.mark.parametrize("name", TAKES_A_NUMBER)
def test_what_is_no_fitting_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(REFUSED):
        TAKES_A_NUMBER[name](value)


def test_options_are_known_by_name_only() -> None:
    """What once was a block size must not become a number of tokens when a parameter is added."""
    for call in (
        lambda: TokenBlocks(16, "sha256"),
        lambda: hash_blocks([1], 16, "sha256"),
        lambda: BlockPool(16, 16, True),
        lambda: kvevents.encode(kvevents.KVEventBatch(0.0, EventList()), "vllm-map-0.33"),
        lambda: kvevents.decode(b"\x93", True),
    ):
        with pytest.raises(TypeError, match="positional"):
            call()
