"""Run by an engine's interpreter: vLLM's own publisher class, told by lines of JSON what to do.

`["ipc://live", "ipc://replay"]` ends the publisher that there is and begins one at these addresses;
`{"events": [[class, {field: value}], ...]}` publishes a batch. Each line, and the start, is answered with the
number of batches of the present life.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from vllm.distributed import kv_events


def plain(value: Any) -> Any:
    """Digests travel as `{"hex": ...}`."""
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return [plain(v) for v in value] if isinstance(value, list) else value


def event(name: str, fields: dict[str, Any]) -> Any:
    cls = getattr(kv_events, name)
    return cls(**{k: plain(v) for k, v in fields.items() if k in cls.__struct_fields__})


def main() -> None:
    publisher: Any = None
    published = 0
    answer(published)
    for line in sys.stdin:
        said = json.loads(line)
        if isinstance(said, list):
            if publisher is not None:
                publisher.shutdown()
            publisher, published = kv_events.ZmqEventPublisher(0, said[0], said[1]), 0
        else:
            events = [event(*e) for e in said["events"]]
            publisher.publish(kv_events.KVEventBatch(ts=time.time(), events=events))
            published += 1
        answer(published)
    if publisher is not None:
        publisher.shutdown()


def answer(published: int) -> None:
    sys.stdout.write(f"{published}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
