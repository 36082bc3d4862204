"""Events in columns: build a list, look at it, take it to another process."""

from __future__ import annotations

import pickle

from kvevents import MEDIUM_GPU, BlockRemoved, BlockStored, EventList


def main() -> None:
    """Builds two events, pickles them as one `bytes` and reads them back."""
    events = EventList(
        [
            BlockStored(
                block_hashes=[101, 102],
                parent_block_hash=None,
                token_ids=list(range(32)),
                block_size=16,
                lora_id=None,
                medium=MEDIUM_GPU,
                lora_name=None,
            ),
            BlockRemoved(block_hashes=[102], medium=MEDIUM_GPU),
        ]
    )
    print(events)
    there_and_back = pickle.loads(pickle.dumps(events))
    assert there_and_back == events
    stored, removed = there_and_back.num_blocks
    print(f"{stored} blocks stored, {removed} removed, {events.nbytes} bytes in memory")


if __name__ == "__main__":
    main()
