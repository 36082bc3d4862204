"""vLLM's own classes and functions, taken before the plug-in replaces them. Import this first."""

from __future__ import annotations

from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core import block_pool

Publisher = kv_events.ZmqEventPublisher
BlockPool = block_pool.BlockPool
EventAggregator = kv_events.KVEventAggregator
aggregate = KVOutputAggregator.aggregate
