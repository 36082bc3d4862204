"""The set that a reader rebuilds from a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvevents import _core
from kvevents.errors import EventTypeError
from kvevents.events import BlockRemoved, EventList, ExternalBlockHash, KVCacheEvent, KVEventBatch
from kvevents.subscribe.items import Batch, Gap, Item, Reset, Resumed, Snapshot, StoreOnly

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import EllipsisType

__all__ = ["ResidentKey", "ResidentSet"]


class ResidentKey(NamedTuple):
    """What makes two resident blocks the same. Integer hashes are given unsigned."""

    hash: ExternalBlockHash
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


_Which: TypeAlias = "str | EllipsisType | None"
"""A source by its name, ``None`` for that of bare events, ``...`` (left out) for the only one."""

Applicable: TypeAlias = "Item | KVEventBatch | EventList | Iterable[KVCacheEvent]"


class ResidentSet:
    """The resident keys of one or several sources, with a digest that proves them.

    Stores add keys, removals take them out, a clear empties the source's set; a key is the hash with
    ``medium, group_idx, locality, ownership``. Storing a key twice changes nothing.

    :meth:`apply` takes what a :class:`~kvevents.subscribe.Subscriber` yields, or bare events. Items are
    kept apart by source; bare events belong to the source ``None``. The argument ``source`` may be left
    out while there is at most one source; ``None`` names that of the bare events.

    Integers are one key by their 64 bits: -1 and 2^64-1 are the same block. Safe from several threads as
    far as single calls go; a large apply lets other threads run.
    """

    def __init__(self, events: Iterable[KVCacheEvent] | EventList | None = None) -> None:
        self._sets: dict[str | None, _core.ResidentSet] = {}
        self._unsure: dict[str | None, str] = {}
        self._next: dict[str | None, int] = {}
        if events is not None:
            self.apply(events)

    def apply(self, item: Applicable) -> None:
        """Apply one item of a subscriber, one batch, or events.

        A :class:`Gap`, or a batch of which the decoder skipped events, changes no key but makes
        :meth:`why_invalid` say so, until a reset, a snapshot or a clear makes the set known again. A snapshot
        older than what was applied is left alone.

        :raises EventTypeError: it is none of these; nothing was changed.
        """
        match item:
            case Batch():
                if item.batch is None:
                    raise EventTypeError(
                        f"Batch {item.seq} of {item.source!r} was not decoded: "
                        "use a Subscriber with decode=True, or decode(item.payload)"
                    )
                self._apply_events(item.source, _columns(item.batch.events), f"batch {item.seq}")
                self._next[item.source] = item.seq + 1
            case Gap():
                self._set(item.source)
                self._unsure[item.source] = f"gap {item.first} to {item.last}: {item.reason}"
                self._next[item.source] = item.last + 1
            case Reset():
                self._wipe(item.source)
            case Snapshot():
                if item.resume_seq < self._next.get(item.source, 0):
                    return
                events = _columns(item.events)
                self._wipe(item.source)
                self._apply_events(item.source, events, "snapshot")
                self._next[item.source] = item.resume_seq
            case Resumed() | StoreOnly():
                return
            case KVEventBatch():
                self._apply_events(None, _columns(item.events), "a batch")
            case _:
                self._apply_events(None, _columns(item), "events")

    def digest(self, source: _Which = ...) -> bytes:
        """Sixteen bytes: the sum of the keys' XXH3-128, as publishers and pools give it.

        Compare it only while :meth:`why_invalid` is ``None``.

        :raises EventTypeError: several sources and none named, or an unknown one.
        """
        return self._one(source).digest()

    def valid_digest(self, source: _Which = ...) -> bytes | None:
        """The digest, or ``None`` where it cannot be compared: what ``Subscriber(digest_of=)`` wants."""
        if self._name(source) not in self._sets or self.why_invalid(source) is not None:
            return None
        return self.digest(source)

    def why_invalid(self, source: _Which = ...) -> str | None:
        """Why the set may differ from the source's, or ``None`` when everything was applied."""
        self._one(source)
        return self._unsure.get(self._name(source))

    @property
    def sources(self) -> list[str | None]:
        """Names of the sources that anything was applied of, in order of appearance."""
        return list(self._sets)

    def keys(self, source: _Which = ...) -> set[ResidentKey]:
        """All keys of a source, as Python objects."""
        return _keys(self._one(source).difference(_core.ResidentSet()))

    def missing(self, truth: ResidentSet, source: _Which = ...) -> set[ResidentKey]:
        """The keys that ``truth`` has and this set has not."""
        return _keys(truth._only().difference(self._one(source)))

    def extra(self, truth: ResidentSet, source: _Which = ...) -> set[ResidentKey]:
        """The keys that this set has and ``truth`` has not."""
        return _keys(self._one(source).difference(truth._only()))

    def drop(self, source: str | None) -> None:
        """Forget a source."""
        self._sets.pop(source, None)
        self._unsure.pop(source, None)
        self._next.pop(source, None)

    def copy(self) -> ResidentSet:
        """An independent copy."""
        new = ResidentSet()
        new._sets = {name: s.copy() for name, s in self._sets.items()}
        new._unsure = dict(self._unsure)
        new._next = dict(self._next)
        return new

    @property
    def duplicate_stores(self) -> int:
        """Stores of keys that were resident already, over all sources."""
        return sum(s.duplicate_stores for s in self._sets.values())

    @property
    def unknown_removals(self) -> int:
        """Removals of keys that were not resident, over all sources."""
        return sum(s.unknown_removals for s in self._sets.values())

    def __len__(self) -> int:
        """Keys over all sources; a block that two sources hold counts twice."""
        return sum(map(len, self._sets.values()))

    def __contains__(self, key: object) -> bool:
        """Whether any source holds the key; a bare hash is looked for in every tier and group."""
        if isinstance(key, tuple):
            full = ResidentKey(*key)
            return any(s.contains(*full) for s in self._sets.values())
        if isinstance(key, (int, bytes)):
            return any(key in s for s in self._sets.values())
        return False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ResidentSet):
            return NotImplemented
        mine = {k: s for k, s in self._sets.items() if len(s)}
        theirs = {k: s for k, s in other._sets.items() if len(s)}
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        parts = [f"{name!r}: {len(s)} keys" for name, s in self._sets.items()]
        return f"ResidentSet({', '.join(parts)})"

    def _set(self, source: str | None) -> _core.ResidentSet:
        if source not in self._sets:
            self._sets[source] = _core.ResidentSet()
        return self._sets[source]

    def _name(self, source: _Which) -> str | None:
        if source is not ...:
            return source
        if len(self._sets) > 1:
            known = ", ".join(map(repr, self._sets))
            raise EventTypeError(f"name the source, one of {known} (None: of the bare events)")
        return next(iter(self._sets), None)

    def _one(self, source: _Which) -> _core.ResidentSet:
        name = self._name(source)
        if name in self._sets:
            return self._sets[name]
        if not self._sets and name is None:
            return _core.ResidentSet()
        known = ", ".join(map(repr, self._sets))
        raise EventTypeError(f"name the source: {name!r} is none of {known or 'no sources'}")

    def _only(self) -> _core.ResidentSet:
        return self._one(...)

    def _wipe(self, source: str | None) -> None:
        self._set(source).clear()
        self._unsure.pop(source, None)
        self._next.pop(source, None)

    def _apply_events(self, source: str | None, events: EventList, what: str) -> None:
        cleared = self._set(source).apply(events)
        skipped = len(events.skipped)
        if skipped:
            self._unsure[source] = f"{what}: {skipped} events could not be decoded"
        elif cleared:
            self._unsure.pop(source, None)
        elif events.overflowed:
            self._unsure[source] = f"{what}: events are missing before it"


def _columns(events: object) -> EventList:
    if isinstance(events, EventList):
        return events
    if events is None:
        raise EventTypeError(
            "a subscriber's item, a batch or events were expected, saw None (a poll in vain?)"
        )
    try:
        return EventList(events)  # type: ignore[arg-type]
    except EventTypeError:
        raise
    except TypeError as e:
        raise EventTypeError(
            f"a subscriber's item, a batch or events were expected, saw {type(events).__name__}"
        ) from e


def _keys(removals: EventList) -> set[ResidentKey]:
    found: set[ResidentKey] = set()
    for event in removals:
        assert isinstance(event, BlockRemoved)  # noqa: S101 - what `difference` is made of
        scope = (event.medium, event.group_idx, event.locality, event.ownership)
        found.update(ResidentKey(h, *scope) for h in event.block_hashes)
    return found
