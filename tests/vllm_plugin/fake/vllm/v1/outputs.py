from dataclasses import dataclass
from typing import Any


@dataclass
class KVConnectorOutput:
    kv_cache_events: Any = None
    kv_connector_worker_meta: Any = None
    invalid_block_ids: frozenset = frozenset()
