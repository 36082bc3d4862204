"""Sinks beside the wire: objects in the engine's process that are given every batch.

A sink is made by a factory ``(config, engine_index)``, once per engine, like vLLM's stat loggers. Sinks
run on a thread of their own: a slow one loses its oldest batches (counted), one that raises is counted
and goes on, and neither costs the engine or another sink anything.
"""

from __future__ import annotations

import importlib
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from kvevents.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvevents.events import KVEventBatch

__all__ = ["EventSink", "EventSinkFactory", "SinkRunner"]

logger = logging.getLogger(__name__)


class EventSink(ABC):
    """Base of sinks."""

    @abstractmethod
    def record(self, batch: KVEventBatch, counters: Mapping[str, int]) -> None:
        """Take one batch, with its metadata, and the collector's counters so far."""

    def shutdown(self) -> None:  # noqa: B027 - most sinks hold nothing
        """Let go of what the sink holds."""


class EventSinkFactory:
    """Sinks by registered name, or by path ``"package.module:factory"``."""

    _registry: ClassVar[dict[str, Callable[[Any, int], EventSink]]] = {}

    @classmethod
    def register_sink(cls, name: str, factory: Callable[[Any, int], EventSink]) -> None:
        """Register ``factory(config, engine_index)`` under ``name``; a taken name is a ``ConfigError``."""
        if name in cls._registry:
            raise ConfigError(f"sink {name!r} is already registered")
        cls._registry[name] = factory

    @classmethod
    def create(cls, name: str, config: Any, engine_index: int) -> EventSink:
        """Make the sink of one engine. Raises :class:`ConfigError` that lists the known names."""
        factory = cls._registry.get(name) or cls._load(name)
        return factory(config, engine_index)

    @classmethod
    def _load(cls, name: str) -> Callable[[Any, int], EventSink]:
        module_path, colon, attribute = name.partition(":")
        if not colon:
            known = ", ".join(sorted(cls._registry)) or "none"
            raise ConfigError(
                f"unknown sink {name!r}; registered are: {known}. A path is 'package.module:factory'"
            )
        factory: Callable[[Any, int], EventSink]
        try:
            factory = getattr(importlib.import_module(module_path), attribute)
        except (ImportError, AttributeError) as e:
            raise ConfigError(f"sink {name!r} cannot be loaded: {e}") from e
        return factory


class SinkRunner:
    """Feeds sinks from a thread of its own; ``put`` never waits."""

    def __init__(self, sinks: Sequence[EventSink], *, max_queued: int = 1_000) -> None:
        self._sinks = list(sinks)
        self._queue: deque[tuple[KVEventBatch, Mapping[str, int]]] = deque()
        self._max_queued = max_queued
        self._wake = threading.Condition()
        self._closing = False
        self._dropped = 0
        self._failed = [0] * len(self._sinks)
        self._thread = threading.Thread(target=self._run, name="kvevents-sinks", daemon=True)
        self._thread.start()

    def put(self, batch: KVEventBatch, counters: Mapping[str, int]) -> None:
        """Queue a batch for all sinks; drops the oldest where the queue is full."""
        with self._wake:
            if len(self._queue) >= self._max_queued:
                self._queue.popleft()
                self._dropped += 1
            self._queue.append((batch, counters))
            self._wake.notify()

    def shutdown(self, timeout: float = 2.0) -> None:
        """Give the sinks what is queued, within ``timeout`` seconds, and shut them down. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout)

    def stats(self) -> dict[str, int]:
        """Return what was dropped, and how often sinks raised."""
        return {"sink_batches_dropped": self._dropped, "sink_failures": sum(self._failed)}

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                if not self._queue:
                    break
                item = self._queue.popleft()
            for i, sink in enumerate(self._sinks):
                self._call(i, partial(sink.record, *item))
        for i, sink in enumerate(self._sinks):
            self._call(i, sink.shutdown)

    def _call(self, index: int, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            self._failed[index] += 1
            # The first, and then ever fewer: a sink that always fails must not flood the log.
            if self._failed[index] & (self._failed[index] - 1) == 0:
                name = type(self._sinks[index]).__name__
                logger.exception("sink %d (%s) failed, %d times so far", index, name, self._failed[index])
