"""The oracle for the prefix index: slow, plain, obviously right.

What a block holds is the nested tuple ``(what is before it, its tokens, its extra keys)``, compared as such;
lengths are found token by token. Bounds are left out but one: orphans are dropped, oldest first, as there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from kvevents.codec import decode
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvevents.index import Match
from kvevents.testing.resident import NaiveResidentSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvevents.events import ExternalBlockHash, KVCacheEvent

__all__ = ["NaivePrefixIndex"]

Content: TypeAlias = tuple[Any, ...]
Scope: TypeAlias = "tuple[str | None, int | None, str | None, str | None]"
Group: TypeAlias = "tuple[int | None, int]"
Sized: TypeAlias = "tuple[ExternalBlockHash, int]"
"""A hash, and the size of the blocks into which the prefix before it is cut: one may end several cuts."""

TIERS = {
    "GPU": ("GPU", "DEVICE", "HBM"),
    "CPU": ("CPU", "CPU_PINNED", "CPU_TIER1", "HOST", "HOST_PINNED", "DRAM"),
    "STORAGE": ("STORAGE", "DISK", "NVME", "SSD", "CPU_TIER2", "SHARED_STORAGE", "OBJECT_STORE"),
    "EXTERNAL": ("EXTERNAL", "NETWORK", "REMOTE", "SHARED"),
}


def tier_of(medium: str | None) -> str:
    """The tier of a medium, by its name."""
    for tier, media in TIERS.items():
        if (medium or "GPU").upper() in media:
            return tier
    return medium or ""


def window_of(kind: str | None, window: int | None) -> int | None:
    """Tokens of a window group; ``None`` for one that needs its whole prefix."""
    if any(k in (kind or "") for k in ("mamba", "linear", "recurrent", "ssm")):
        return 1
    if window is not None and window > 0 and (kind is None or "sliding" in kind):
        return window
    return None


def is_shared(event: BlockStored | BlockRemoved) -> bool:
    """Whether the tier has an owner of its own."""
    return event.ownership is not None or (event.locality or "local").lower() != "local"


def _key(h: ExternalBlockHash) -> ExternalBlockHash:
    return h % 2**64 if isinstance(h, int) else h


def _scope(event: BlockStored | BlockRemoved) -> Scope:
    return event.medium, event.group_idx, event.locality, event.ownership


def _is_regular(event: BlockStored) -> bool:
    n = len(event.block_hashes)
    plain = all(isinstance(t, int) and 0 <= t < 2**32 for t in event.token_ids)
    per_block = [event.extra_keys, event.lookahead_token_ids]
    return (
        n > 0
        and event.block_size > 0
        and plain
        and len(event.token_ids) == n * event.block_size
        and all(v is None or len(v) == n for v in per_block)
    )


def _extra(event: BlockStored) -> tuple[str | None, list[tuple[Any, ...]]]:
    """The salt of a sequence that begins here, and per block what is neither LoRA name nor salt."""
    salt, out = event.cache_salt, []
    for i, keys in enumerate(event.extra_keys or [None] * len(event.block_hashes)):
        rest = [tuple(k) if isinstance(k, list) else k for k in keys or ()]
        if event.lora_name in rest:
            rest.remove(event.lora_name)
        if i == 0 and event.parent_block_hash is None:
            strings = [k for k in rest if isinstance(k, str)]
            if salt is None and strings:
                salt = strings[0]
            rest = [k for k in rest if k != salt]
        out.append(tuple(rest))
    return salt, out


@dataclass
class _Source:
    """What one source said."""

    name: str
    rank: int
    owner: bool
    ttl: float | None = None
    # Tiers whose blocks expire; `None`: all.
    store_only: set[str] | None = None
    # When a block was last stored where it expires.
    stored_at: dict[Sized, float] = field(default_factory=dict)
    resident: dict[Sized, set[Scope]] = field(default_factory=dict)
    content: dict[Sized, Content] = field(default_factory=dict)
    units: list[int] = field(default_factory=list)
    """Sizes that were seen."""
    orphans: list[BlockStored] = field(default_factory=list)
    scopes: dict[Scope, bool] = field(default_factory=dict)
    groups: dict[Group, int | None] = field(default_factory=dict)
    keys: NaiveResidentSet = field(default_factory=NaiveResidentSet)
    expected: dict[Content, float] = field(default_factory=dict)
    complete: bool = True
    valid: bool = True
    last_seq: int | None = None

    def clear(self) -> None:
        self.resident, self.content, self.orphans, self.expected = {}, {}, [], {}
        self.units = []
        self.keys = NaiveResidentSet()
        self.complete = self.valid = True

    def forget(self) -> None:
        """As after a restart: what kind of cache it has may be another, too."""
        self.clear()
        self.scopes, self.groups = {}, {}

    def incomplete(self) -> None:
        self.complete = self.valid = False

    def expires(self, medium: str | None) -> bool:
        """Whether nobody announces that blocks leave this tier."""
        return self.ttl is not None and (self.store_only is None or tier_of(medium) in self.store_only)

    def unit(self, event: BlockStored) -> int:
        """The size of its group's blocks, or a multiple of that in a tier with larger ones."""
        own = next((size for g, size in self.groups if g == event.group_idx), 0)
        size = event.block_size
        return own if own and (not size or size % own) else size

    def at(self, h: ExternalBlockHash, unit: int) -> Sized:
        """Where a block belongs; one whose size nobody said, where its hash is known."""
        if unit not in self.units:
            if unit == 0 and self.units:
                rows = [(h, u) for u in self.units if (h, u) in self.resident or (h, u) in self.content]
                return rows[0] if rows else (h, self.units[0])
            if 0 in self.units:
                self.units[self.units.index(0)] = unit
                self.resident = {(h, u or unit): scopes for (h, u), scopes in self.resident.items()}
                self.content = {(h, u or unit): content for (h, u), content in self.content.items()}
                self.stored_at = {(h, u or unit): at for (h, u), at in self.stored_at.items()}
            else:
                self.units.append(unit)
        return h, unit

    def put(self, event: BlockStored, h: ExternalBlockHash, content: Content | None, now: float) -> None:
        scope = _scope(event)
        there = [(h, u) for u in self.units if scope in self.resident.get((h, u), ())]
        key = there[0] if there else self.at(h, self.unit(event))
        was = self.resident.setdefault(key, set())
        if content is not None and (key not in self.content or not was):
            self.content[key] = content
        if not was or self.expires(event.medium):
            self.stored_at[key] = now
        was.add(scope)
        if content is not None:
            self.expected.pop(content, None)

    def unset(self, h: ExternalBlockHash, scope: Scope) -> bool:
        had = [(h, u) for u in self.units if scope in self.resident.get((h, u), ())]
        for key in had:
            self.resident[key].remove(scope)
            if not self.resident[key]:
                del self.resident[key]
        return bool(had)

    def learn(self, key: Sized, content: Content) -> None:
        """A block that waited: resident still, or remembered."""
        if (key in self.resident) != (key in self.content):
            self.content[key] = content

    def run(self, event: BlockStored, parent: Content, start: int, now: float | None) -> None:
        """The contents down a chain; ``now`` is ``None`` for blocks that were stored before."""
        _, extra = _extra(event)
        size, before = event.block_size, event.parent_block_hash and _key(event.parent_block_hash)
        content = parent
        for i, h in enumerate(map(_key, event.block_hashes)):
            if i < start:
                before = h
                continue
            if h == before:
                for rest in event.block_hashes[i:] if now is not None else ():
                    self.put(event, _key(rest), None, now or 0)
                return
            content = (content, tuple(event.token_ids[i * size : (i + 1) * size]), extra[i])
            if now is None:
                self.learn((h, self.unit(event)), content)
            else:
                self.put(event, h, content, now)
            before = h

    def parent(self, event: BlockStored) -> Sized:
        """What an event's blocks follow."""
        return _key(event.parent_block_hash or 0), self.unit(event)

    def adopt(self) -> None:
        """Give every orphan whose parent is known its contents, and so on."""
        while ready := [o for o in self.orphans if self.parent(o) in self.content]:
            orphan = ready[0]
            self.orphans.remove(orphan)
            self.run(orphan, self.content[self.parent(orphan)], 0, None)


class NaivePrefixIndex:
    """Dictionaries and sets, driven by events one at a time; answers as :class:`kvevents.PrefixIndex`."""

    def __init__(
        self,
        *,
        orphan_blocks: int = 65_536,
        expires_s: float = 600.0,
        clock: Callable[[], float] = lambda: 0.0,
        **_: object,
    ) -> None:
        self._sources: dict[tuple[str, int, bool], _Source] = {}
        self._dropped: set[tuple[str, int]] = set()
        self._orphan_blocks = orphan_blocks
        self._expires_s = expires_s
        self._clock = clock

    # ---------------------------------------------------------------- events in

    def add_source(
        self,
        source: str,
        rank: int = 0,
        *,
        emits_removals: bool = True,
        store_only: Sequence[str] = (),
        first_seq: int = 0,
    ) -> None:
        """Make a source known."""
        self._dropped.discard((source, rank))
        s = self._sources.setdefault((source, rank, False), _Source(source, rank, False))
        s.ttl = None if emits_removals and not store_only else self._expires_s
        s.store_only = {tier_of(m) for m in store_only} if emits_removals else None
        if s.last_seq is None and first_seq:
            s.last_seq = first_seq - 1

    def _source(self, source: str, rank: int) -> _Source:
        return self._sources.setdefault((source, rank, False), _Source(source, rank, False))

    def apply(self, source: str, rank: int, seq: int | None, payload: bytes) -> int:
        """Apply one message's payload."""
        events = decode(payload).events
        self.apply_events(source, rank, events, seq=seq)
        return len(events)

    def apply_events(
        self,
        source: str,
        rank: int,
        events: Iterable[KVCacheEvent],
        *,
        seq: int | None = None,
        checked: bool = True,
    ) -> None:
        """Apply events in order."""
        if (source, rank) in self._dropped:
            return
        s = self._source(source, rank)
        if seq is not None:
            if checked and seq != (0 if s.last_seq is None else s.last_seq + 1):
                s.incomplete()
            s.last_seq = seq
        self._apply(s, list(events))
        if getattr(events, "skipped", None):
            s.incomplete()

    def apply_snapshot(
        self, source: str, rank: int, events: Iterable[KVCacheEvent], *, resume_seq: int | None = None
    ) -> bool:
        """Replace what is known of a source."""
        if (source, rank) in self._dropped:
            return False
        s = self._source(source, rank)
        if resume_seq is not None and s.last_seq is not None and s.last_seq >= resume_seq:
            return False
        s.forget()
        s.last_seq = resume_seq - 1 if resume_seq else None
        self._apply(s, list(events))
        return True

    def _apply(self, s: _Source, events: list[KVCacheEvent]) -> None:
        for event in events:
            s.keys.apply([event])
            if isinstance(event, AllBlocksCleared):
                s.clear()
            elif isinstance(event, BlockRemoved):
                for h in event.block_hashes:
                    s.unset(_key(h), _scope(event))
            elif isinstance(event, BlockStored):
                self._store(s, event)
        self._settle()
        if not s.owner:
            for event in events:
                if isinstance(event, BlockStored | BlockRemoved) and is_shared(event):
                    name = event.ownership or "shared"
                    owner = self._sources.setdefault((name, 0, True), _Source(name, 0, True))
                    if s.expires(event.medium):
                        known = set() if owner.ttl is None else owner.store_only
                        both = s.store_only is not None and known is not None
                        owner.store_only = {tier_of(event.medium)} | (known or set()) if both else None
                        owner.ttl = s.ttl
                    self._apply(owner, [event])

    def _settle(self) -> None:
        """What is known of one source counts for whatever waits in another."""
        again = True
        while again:
            again = False
            for s in self._sources.values():
                for orphan in list(s.orphans):
                    h = s.parent(orphan)
                    found = [o.content[h] for o in self._sources.values() if o is not s and h in o.content]
                    if found and orphan in s.orphans:
                        s.orphans.remove(orphan)
                        s.run(orphan, found[0], 0, None)
                        s.adopt()
                        again = True

    def _store(self, s: _Source, event: BlockStored) -> None:
        now = self._clock()
        s.scopes.setdefault(_scope(event), not s.owner and is_shared(event))
        if event.block_size > 0:
            first = [w for (g, _), w in s.groups.items() if g == event.group_idx]
            window = window_of(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
            s.groups.setdefault((event.group_idx, event.block_size), first[0] if first else window)
        parent = None if event.parent_block_hash is None else _key(event.parent_block_hash)
        if not _is_regular(event):
            for h in event.block_hashes:
                s.put(event, _key(h), None, now)
        elif parent is None:
            lora_id = event.lora_id if event.lora_name is None and event.lora_id else None
            s.run(event, ("root", event.lora_name, lora_id, _extra(event)[0]), 0, now)
        elif s.parent(event) in s.content:
            s.run(event, s.content[s.parent(event)], 0, now)
        else:
            for h in event.block_hashes:
                s.put(event, _key(h), None, now)
            first_hash = _key(event.block_hashes[0])
            if (first_hash, s.unit(event)) in s.content:
                s.run(event, s.content[first_hash, s.unit(event)], 1, None)
            elif first_hash != parent:
                self._wait(s, event)
        s.adopt()

    def _wait(self, s: _Source, event: BlockStored) -> None:
        s.orphans.append(event)
        while sum(len(o.block_hashes) for o in s.orphans) > self._orphan_blocks:
            gone = s.orphans.pop(0)
            keys = [(_key(h), u) for h in gone.block_hashes for u in s.units]
            if any(key in s.resident and key not in s.content for key in keys):
                s.incomplete()

    # ---------------------------------------------------------------- answers out

    def find(
        self,
        token_ids: Sequence[int] | None = None,
        *,
        block_hashes: Sequence[ExternalBlockHash] | None = None,
        source: str | None = None,
        rank: int = 0,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        mm: Sequence[tuple[str, int, int]] = (),
    ) -> list[Match]:
        """Longest first, ties in the order in which sources came."""
        if block_hashes is not None:
            s = self._sources.get((source or "", rank, False))
            hashes = [_key(h) for h in block_hashes]
            groups = {} if s is None else s.groups or {(g, 1): None for _, g, _, _ in s.scopes}
            found = [s and self._match(s, groups, {size: hashes for _, size in groups}, lambda h: h)]
        else:
            root = ("root", lora_name, None, cache_salt or None)
            found = []
            for s in self._sources.values():
                chains = {
                    size: self._contents(root, list(token_ids or ()), size, sorted(mm, key=lambda m: m[1]))
                    for _, size in s.groups
                }
                found.append(self._match(s, s.groups, chains, None))
        return sorted((m for m in found if m), key=lambda m: (-m.tokens, -m.expected))

    @staticmethod
    def _contents(
        root: Content, tokens: list[int], size: int, mm: Sequence[tuple[str, int, int]]
    ) -> list[Content]:
        out, content = [], root
        for start in range(0, len(tokens) - size + 1, size):
            end = start + size
            extra = tuple((name, at - start) for name, at, n in mm if at < end and at + n > start)
            content = (content, tuple(tokens[start:end]), extra)
            out.append(content)
        return out

    def _match(
        self,
        s: _Source,
        groups: dict[Group, int | None],
        chains: dict[int, list[Any]],
        by_hash: Callable[[Any], ExternalBlockHash] | None,
    ) -> Match | None:
        now = self._clock()
        held: dict[Any, set[Scope]] = {}
        for h, scopes in s.resident.items():
            old = s.ttl is not None and s.stored_at[h] < now - s.ttl
            fresh = {sc for sc in scopes if not (old and s.expires(sc[0]))}
            name = h[0] if by_hash else s.content.get(h)
            if name is not None:
                held.setdefault(name, set()).update(fresh)
        expected = {c for c, until in s.expected.items() if until >= now} - held.keys()
        mine = [sc for sc, shared in s.scopes.items() if not shared]
        order = [*TIERS, *dict.fromkeys(tier_of(m) for m, *_ in mine)]
        tiers = [t for t in dict.fromkeys(order) if any(tier_of(sc[0]) == t for sc in mine)]

        def usable(allowed: list[str], also: set[Any]) -> int:
            return _usable(groups, chains, [sc for sc in mine if tier_of(sc[0]) in allowed], held, also)

        tokens = usable(tiers, set())
        soon = usable(tiers, expected) if expected else tokens
        if soon == 0:
            return None
        full = [size for (_, size), window in groups.items() if window is None]
        return Match(
            s.name,
            s.rank,
            tokens,
            (full or [size for _, size in groups])[0],
            {t: usable([t], set()) for t in tiers},
            {t: usable(tiers[: i + 1], set()) for i, t in enumerate(tiers)},
            s.complete,
            s.owner,
            soon,
        )

    def find_many(self, prompts: Iterable[Sequence[int]]) -> list[list[Match]]:
        """One after the other."""
        return [self.find(p) for p in prompts]

    def expect(self, source: str, rank: int, token_ids: Sequence[int], ttl_s: float) -> int:
        """Expect the blocks of a prompt."""
        s = self._sources.get((source, rank, False))
        if s is None or not s.groups:
            return 0
        contents = self._contents(("root", None, None, None), list(token_ids), next(iter(s.groups))[1], ())
        missing = [c for c in contents if c not in {s.content.get(h) for h in s.resident}]
        s.expected.update(dict.fromkeys(missing, self._clock() + ttl_s))
        return len(missing)

    def digest(self, source: str, rank: int = 0, *, owner: bool = False) -> bytes | None:
        """The digest of the naive resident set, where it is valid; needs the package ``xxhash``."""
        import xxhash  # noqa: PLC0415 - for tests only

        s = self._sources.get((source, rank, owner))
        if s is None or not s.valid:
            return None
        return s.keys.digest(lambda data: xxhash.xxh3_128(data).intdigest())

    # ---------------------------------------------------------------- upkeep

    def _ranks(self, source: str, rank: int | None) -> list[_Source]:
        return [
            s for (n, r, owner), s in self._sources.items() if n == source and rank in (None, r) and not owner
        ]

    def mark_incomplete(self, source: str, rank: int | None = None, *, last_seq: int | None = None) -> bool:
        """Something is missing."""
        for s in self._ranks(source, rank):
            s.incomplete()
            s.last_seq = s.last_seq if last_seq is None else last_seq
        return bool(self._ranks(source, rank))

    def reset(self, source: str, rank: int | None = None) -> None:
        """Forget what a source holds."""
        for s in self._ranks(source, rank):
            s.forget()
            s.last_seq = None

    def drop(self, source: str, rank: int | None = None, *, owner: bool = False) -> bool:
        """Forget a source."""
        gone = [(source, 0, True)] if owner else [(s.name, s.rank, False) for s in self._ranks(source, rank)]
        known = [self._sources.pop(key, None) for key in gone]
        self._dropped.update((n, r) for n, r, is_owner in gone if not is_owner)
        return any(known)

    def clear_tier(self, source: str, tier: str, rank: int = 0, *, owner: bool = False) -> int:
        """Forget one tier."""
        s = self._sources[source, rank, owner]
        gone = 0
        for h in list(s.resident):
            scopes = [sc for sc in s.resident[h] if tier_of(sc[0]) == tier]
            gone += bool(scopes)
            for sc in scopes:
                s.unset(h[0], sc)
        s.valid = s.valid and not gone
        return gone


def _usable(
    groups: dict[Group, int | None],
    chains: dict[int, list[Any]],
    scopes: list[Scope],
    held: dict[Any, set[Scope]],
    expected: set[Any],
) -> int:
    """The longest usable length in tokens."""
    numbered = any(g is not None for g, _ in groups)
    needed: dict[int | None, tuple[int, int | None]] = {}
    for (g, size), window in groups.items():
        if g is not None or not numbered:
            needed.setdefault(g, (size, window))

    def has(g: int | None, block: Any) -> bool:
        counts = {sc for sc in scopes if sc[1] in (None, g)}
        return bool(counts and block in expected) or bool(held.get(block, set()) & counts)

    def reach(g: int | None) -> int:
        at = 0
        sizes = [size for h, size in groups if h in (None, g)]
        while any(at // n < len(chains[n]) and has(g, chains[n][at // n]) for n in sizes):
            at += 1
        return at

    longest = min((len(chains[size]) * size for size, _ in needed.values()), default=0)
    limit = min((reach(g) for g, (_, window) in needed.items() if window is None), default=longest)
    windows = {g: (size, window) for g, (size, window) in needed.items() if window is not None}
    if not windows:
        return limit if needed else 0
    step = math.lcm(*(size for size, _ in needed.values()))
    for length in range(min(limit, longest) // step * step, 0, -step):
        if all(
            all(
                has(g, chains[size][i])
                for i in range(max(0, length // size - max(1, math.ceil((w - 1) / size))), length // size)
            )
            for g, (size, w) in windows.items()
        ):
            return length
    return 0
