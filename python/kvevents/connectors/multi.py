"""Several connectors at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvevents._core import EventList
from kvevents.connectors.base import (
    KVConnectorBase,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from kvevents.connectors.multi_events import MultiConnectorKVEvents, split_container
from kvevents.connectors.output import KVConnectorOutput
from kvevents.connectors.stats import KVConnectorStats, MultiKVConnectorStats
from kvevents.errors import ConfigError, ConnectorError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvevents.connectors.containers import KVConnectorKVEvents

__all__ = ["MultiConnector", "MultiKVConnectorMetadata", "MultiKVConnectorWorkerMetadata"]


@dataclass
class MultiKVConnectorMetadata(KVConnectorMetadata):
    """The children's metadata, by position."""

    metadata: tuple[KVConnectorMetadata, ...]
    extra_async_saves: dict[str, int] | None = None
    """Requests that more than one child saves asynchronously: how many beyond the first."""


@dataclass
class MultiKVConnectorWorkerMetadata(KVConnectorWorkerMetadata):
    """The children's worker metadata, by position; ``None`` where a child had none."""

    metadata: tuple[KVConnectorWorkerMetadata | None, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MultiKVConnectorWorkerMetadata:
        """Aggregate child by child."""
        if not isinstance(other, MultiKVConnectorWorkerMetadata) or len(other.metadata) != len(self.metadata):
            raise ConnectorError(
                "worker metadata of MultiConnectors with different children cannot be joined"
            )
        pairs = zip(self.metadata, other.metadata, strict=True)
        joined = tuple(b if a is None else a if b is None else a.aggregate(b) for a, b in pairs)
        return MultiKVConnectorWorkerMetadata(joined)


class MultiConnector(KVConnectorBase):
    """Loads from the first child that has a prefix, saves to all, and keeps their events apart.

    A child is known by its position: two of one class never mix. Each child's rule aggregates its own
    events in its own scheduler half; children without events are fine, and a child may itself be a
    ``MultiConnector``. One child's failure in a step's hook names the child and costs the others nothing.
    """

    def __init__(
        self,
        vllm_config: Any,
        role: KVConnectorRole,
        kv_cache_config: Any = None,
        *,
        connectors: Sequence[KVConnectorBase],
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._connectors = list(connectors)
        for i, c in enumerate(self._connectors):
            if getattr(c, "role", role) is not role:
                raise ConfigError(
                    f"child {i} ({type(c).__name__}) has the role {c.role.name}, not {role.name}"
                )
        telling = [c for c in self._connectors if getattr(c, "emits_kv_events", False)]
        self.emits_kv_events = bool(telling)
        # What any child leaves out, a reader of the whole has to expire.
        self.emits_removals = all(getattr(c, "emits_removals", True) for c in telling)
        self._loads_from: dict[str, int] = {}
        self._extra_async_saves: dict[str, int] = {}

    @property
    def sub_connectors(self) -> list[KVConnectorBase]:
        """The children, in order."""
        return list(self._connectors)

    def _each(self, hook: str, call: Callable[[int, KVConnectorBase], Any]) -> list[Any]:
        """Call every child; failures are raised when all were called, each naming its child."""
        results, failed = [], []
        for i, c in enumerate(self._connectors):
            try:
                results.append(call(i, c))
            except Exception as e:
                results.append(None)
                failed.append((i, e))
        if failed:
            names = "; ".join(
                f"child {i} ({type(self._connectors[i]).__name__}): {type(e).__name__}: {e}"
                for i, e in failed
            )
            raise ConnectorError(f"{hook}() failed in {names}") from failed[0][1]
        return results

    # ---------------------------------------------------------------- worker half

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Give every child its own part."""
        if not isinstance(connector_metadata, MultiKVConnectorMetadata):
            kind = type(connector_metadata).__name__
            raise ConnectorError(f"MultiConnector needs MultiKVConnectorMetadata, not {kind}")
        parts = connector_metadata.metadata
        if len(parts) != len(self._connectors):
            raise ConnectorError(f"metadata for {len(parts)} connectors, there are {len(self._connectors)}")
        self._extra_async_saves.update(connector_metadata.extra_async_saves or {})
        self._each("bind_connector_metadata", lambda i, c: c.bind_connector_metadata(parts[i]))
        super().bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        """Clear every child's."""
        super().clear_connector_metadata()
        self._each("clear_connector_metadata", lambda _, c: c.clear_connector_metadata())

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Give every child the engine's memory."""
        self._each("register_kv_caches", lambda _, c: c.register_kv_caches(kv_caches))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start every child's loads."""
        self._each("start_load_kv", lambda _, c: c.start_load_kv(forward_context, **kwargs))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for every child's loads of the layer."""
        self._each("wait_for_layer_load", lambda _, c: c.wait_for_layer_load(layer_name))

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Save the layer in every child."""
        self._each(
            "save_kv_layer", lambda _, c: c.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        )

    def wait_for_save(self) -> None:
        """Wait for every child's saves."""
        self._each("wait_for_save", lambda _, c: c.wait_for_save())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Unite what the children finished; a send counts when the last child that saves it is done."""
        sending: set[str] = set()
        recving: set[str] = set()
        for result in self._each("get_finished", lambda _, c: c.get_finished(finished_req_ids)):
            sent, received = result
            recving |= received or set()
            for request in sent or ():
                left = self._extra_async_saves.get(request, 0)
                if left == 0:
                    sending.add(request)
                elif left == 1:
                    del self._extra_async_saves[request]
                else:
                    self._extra_async_saves[request] = left - 1
        return sending or None, recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Unite the children's."""
        found = self._each("get_block_ids_with_load_errors", lambda _, c: c.get_block_ids_with_load_errors())
        return set().union(*found)

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        """Collect the children's, by position."""
        found = self._each("get_kv_connector_stats", lambda _, c: c.get_kv_connector_stats())
        data: dict[int, KVConnectorStats] = {i: s for i, s in enumerate(found) if s is not None}
        return MultiKVConnectorStats(data=data) if data else None

    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        """Collect the children's containers, by position. A child that raises loses nobody else's.

        What the others recorded is kept and handed over, with this step's failure, at the next call.
        """
        collected = MultiConnectorKVEvents(len(self._connectors))
        if self._kept is not None:
            collected.merge(self._kept)
            self._kept = None

        def take(i: int, c: KVConnectorBase) -> None:
            hook = getattr(c, "get_kv_connector_kv_cache_events", None)
            container = hook() if hook is not None else None
            if container is not None:
                collected.set_child(i, container)

        try:
            self._each("get_kv_connector_kv_cache_events", take)
        except ConnectorError:
            self._kept = collected
            raise
        return collected or None

    _kept: MultiConnectorKVEvents | None = None

    def build_connector_worker_meta(self) -> MultiKVConnectorWorkerMetadata | None:
        """Collect the children's, by position."""
        found = self._each("build_connector_worker_meta", lambda _, c: c.build_connector_worker_meta())
        return MultiKVConnectorWorkerMetadata(tuple(found)) if any(m is not None for m in found) else None

    # ---------------------------------------------------------------- scheduler half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Ask the children in order; the first that has tokens loads them.

        Every child is asked, since each keeps its own books. ``None`` (ask again later) of a child before
        the one chosen stands.
        """
        answers = self._each(
            "get_num_new_matched_tokens",
            lambda _, c: c.get_num_new_matched_tokens(request, num_computed_tokens),
        )
        for i, (tokens, is_async) in enumerate(answers):
            if tokens is None:
                return None, False
            if tokens > 0:
                self._loads_from[request.request_id] = i
                return tokens, is_async
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Tell the child that loads how many tokens come from it, and the others that none do."""
        chosen = self._loads_from.get(request.request_id)
        self._each(
            "update_state_after_alloc",
            lambda i, c: c.update_state_after_alloc(
                request, blocks, num_external_tokens if i == chosen else 0
            ),
        )

    def build_connector_meta(self, scheduler_output: Any) -> MultiKVConnectorMetadata:
        """Build the children's, by position."""
        parts = self._each("build_connector_meta", lambda _, c: c.build_connector_meta(scheduler_output))
        extra, self._extra_async_saves = self._extra_async_saves, {}
        return MultiKVConnectorMetadata(tuple(parts), extra or None)

    def get_finished_count(self) -> int | None:
        """Return the children's common count. Raises :class:`ConfigError` where they differ."""
        counts = self._each("get_finished_count", lambda _, c: c.get_finished_count())
        known = {c for c in counts if c is not None}
        if len(known) > 1 or (known and None in counts):
            raise ConfigError(f"the children expect different numbers of finished workers: {counts}")
        return next(iter(known), None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Tell all; blocks are freed later when any child asks for it, and parameters are united."""
        saves = 0
        params: dict[str, Any] = {}
        answers = self._each("request_finished", lambda _, c: c.request_finished(request, block_ids))
        for later, extra in answers:
            saves += bool(later)
            clash = params.keys() & (extra or {}).keys()
            if clash:
                raise ConnectorError(f"several children set the transfer parameters {sorted(clash)}")
            params.update(extra or {})
        if saves > 1:
            self._extra_async_saves[request.request_id] = saves - 1
        self._loads_from.pop(request.request_id, None)
        return saves > 0, params or None

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Give every child its own events, statistics and worker metadata, and the common rest."""
        containers = split_container(connector_output.kv_cache_events, len(self._connectors))
        stats, meta = connector_output.kv_connector_stats, connector_output.kv_connector_worker_meta

        def update(i: int, c: KVConnectorBase) -> None:
            part = KVConnectorOutput(
                finished_sending=connector_output.finished_sending,
                finished_recving=connector_output.finished_recving,
                kv_connector_stats=stats.data.get(i) if isinstance(stats, MultiKVConnectorStats) else None,
                kv_cache_events=containers[i],
                kv_connector_worker_meta=(
                    meta.metadata[i] if isinstance(meta, MultiKVConnectorWorkerMetadata) else None
                ),
                invalid_block_ids=connector_output.invalid_block_ids,
                failed_recving=connector_output.failed_recving,
                expected_finished_count=connector_output.expected_finished_count,
            )
            c.update_connector_output(part)

        self._each("update_connector_output", update)

    def forget_worker(self, worker: int) -> None:
        """Take the worker's votes from every child that has votes."""

        def forget(_: int, c: KVConnectorBase) -> None:
            hook = getattr(c, "forget_worker", None)
            if hook is not None and getattr(c, "emits_kv_events", True):
                hook(worker)

        self._each("forget_worker", forget)

    def take_events(self) -> EventList:
        """Join the children's events, in child order, each with its child's position as its source.

        A child that raises loses nobody else's events: they are in the exception's ``events``.
        """
        joined = EventList()

        def take(i: int, c: KVConnectorBase) -> None:
            nonlocal joined
            hook = getattr(c, "take_events", None)
            events = EventList(hook()) if hook is not None else EventList()
            if len(events):
                joined += events.with_source(str(i), nest=True)

        try:
            self._each("take_events", take)
        except ConnectorError as e:
            e.events = joined
            raise
        return joined

    def reset_cache(self) -> bool | None:
        """Reset all; ``None`` where no child supports it, else whether all did."""
        answers = [a for a in self._each("reset_cache", lambda _, c: c.reset_cache()) if a is not None]
        return all(answers) if answers else None

    def shutdown(self) -> None:
        """Shut all down."""
        self._each("shutdown", lambda _, c: c.shutdown())
