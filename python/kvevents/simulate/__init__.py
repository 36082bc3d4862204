"""A mock engine with realistic traffic and no GPU: for demos, tests, routers and load on readers.

Requests come from :mod:`kvevents.simulate.workloads` (generated, seeded) or
:mod:`kvevents.simulate.trace` (recorded traffic in Mooncake's format);
:mod:`kvevents.simulate.engine` serves them on a :class:`kvevents.BlockPool` the way vLLM's scheduler does and
publishes what happens.
"""

from __future__ import annotations

from kvevents.simulate.engine import EngineConfig, EngineStats, MockEngine
from kvevents.simulate.trace import TraceRecord, TraceTokens, read_trace, trace_requests
from kvevents.simulate.workloads import WORKLOADS, Request, chat, mixed, shared_prefix

__all__ = [
    "WORKLOADS",
    "EngineConfig",
    "EngineStats",
    "MockEngine",
    "Request",
    "TraceRecord",
    "TraceTokens",
    "chat",
    "mixed",
    "read_trace",
    "shared_prefix",
    "trace_requests",
]
