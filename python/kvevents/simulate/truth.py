"""What the tiers of an engine hold by their rule, worked out by the plainest means from what workers say."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from kvevents._core import EventList
from kvevents.events import BlockRemoved, BlockStored
from kvevents.resident import ResidentSet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvevents.simulate.tier import TierConfig

__all__ = ["TierTruth"]

_GROUP = 0  # the mock engine's pool has one group

_Key: TypeAlias = tuple[bytes | int, str]


class TierTruth:
    """The tiers' resident set by the rule; no event has any part in it.

    A block counts for a connector when enough workers hold it, and for a medium when it counts for any of
    the connectors with that medium. ``tiers`` are the connectors of any one worker.
    """

    def __init__(self, tiers: Sequence[TierConfig]) -> None:
        workers = tiers[0].num_workers
        self._media = [tier.medium for tier in tiers]
        self._needed = [
            {"all": workers, "any": 1}.get(str(tier.rule)) or int(str(tier.rule)) for tier in tiers
        ]
        self._holders: list[dict[bytes | int, set[int]]] = [{} for _ in tiers]
        self._accepting: dict[_Key, set[int]] = {}
        self._changed: dict[_Key, bool] = {}
        """Keys that came (True) or went, and how it was before."""
        self._resident = ResidentSet()

    def vote(self, connector: int, block_hash: bytes | int, worker: int, *, holds: bool) -> None:
        """From now on a worker's connector holds a block, or no more. :meth:`settle` makes it count."""
        workers = self._holders[connector].setdefault(block_hash, set())
        if holds == (worker in workers):
            raise ValueError(f"worker {worker} has {block_hash!r} twice, or drops what it has not")
        (workers.add if holds else workers.discard)(worker)
        key = (block_hash, self._media[connector])
        accepting = self._accepting.setdefault(key, set())
        self._changed.setdefault(key, bool(accepting))
        (accepting.add if len(workers) >= self._needed[connector] else accepting.discard)(connector)
        if not accepting:
            del self._accepting[key]
        if not workers:
            del self._holders[connector][block_hash]

    def restarted(self, worker: int) -> None:
        """Everything that a worker held is gone."""
        for connector, holders in enumerate(self._holders):
            for block_hash in [h for h, w in holders.items() if worker in w]:
                self.vote(connector, block_hash, worker, holds=False)

    def settle(self) -> None:
        """The end of a step: what came and went since the last one counts now."""
        gone = [key for key, before in self._changed.items() if before and key not in self._accepting]
        come = [key for key, before in self._changed.items() if not before and key in self._accepting]
        self._changed.clear()
        # The set is used for its digest only: each key goes in and out once.
        self._resident.apply(EventList([BlockRemoved([h], m, group_idx=_GROUP) for h, m in gone]))
        self._resident.apply(
            EventList([BlockStored([h], None, [], 0, None, m, None, group_idx=_GROUP) for h, m in come])
        )

    def digest(self) -> bytes:
        """Digest of the set; sums with that of other keys modulo 2^128."""
        return self._resident.digest()

    @property
    def resident(self) -> ResidentSet:
        """The set itself; not to be changed."""
        return self._resident
