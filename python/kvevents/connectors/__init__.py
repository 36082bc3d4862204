"""Connectors: what moves blocks to and from other tiers, and reports it from worker to scheduler."""

from __future__ import annotations

from kvevents.connectors.containers import KVConnectorKVEvents, LMCacheKVEvents, WorkerKVEvents

__all__ = ["KVConnectorKVEvents", "LMCacheKVEvents", "WorkerKVEvents"]
