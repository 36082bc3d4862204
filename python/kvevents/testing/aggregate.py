"""The plainest aggregator: one dictionary per worker. What :class:`kvevents.Aggregator` is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from kvevents.aggregate import Quorum

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvevents.aggregate import Rule

__all__ = ["BlockKey", "NaiveAggregator"]

BlockKey: TypeAlias = tuple[bytes | int, str | None, int | None, str | None, str | None]
"""``(hash, medium, group_idx, locality, ownership)``; integers as unsigned 64 bits."""


class NaiveAggregator:
    """Ledgers of workers, and the rule asked of every block anew. No bounds, no output, no order."""

    def __init__(
        self, num_workers: int, *, rule: Rule = "all", group_rules: Mapping[int | None, Rule] | None = None
    ) -> None:
        self.rule = rule
        self.group_rules = dict(group_rules or {})
        self.ledgers: list[set[BlockKey]] = [set() for _ in range(num_workers)]

    def add(self, worker: int, events: Iterable[Any]) -> None:
        """Apply what a worker reports, in order."""
        ledger = self.ledgers[worker]
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                ledger.clear()
                continue
            keys = {self.key(event, h) for h in event.block_hashes}
            if kind == "BlockStored":
                ledger |= keys
            else:
                ledger -= keys

    @staticmethod
    def key(event: Any, block_hash: bytes | int) -> BlockKey:
        """Under which a block of this event is known."""
        h = block_hash & (2**64 - 1) if isinstance(block_hash, int) else block_hash
        return h, event.medium, event.group_idx, event.locality, event.ownership

    def forget_worker(self, worker: int) -> None:
        """The worker has nothing."""
        self.ledgers[worker].clear()

    def resize(self, num_workers: int) -> None:
        """Workers come with nothing, or go with what they had."""
        del self.ledgers[num_workers:]
        self.ledgers.extend(set() for _ in range(num_workers - len(self.ledgers)))

    def resident(self) -> set[BlockKey]:
        """Return what the rule accepts."""
        return {key for key in set().union(*self.ledgers) if self._accepts(key)}

    def waiting(self) -> set[BlockKey]:
        """Return what some worker holds and the rule does not accept."""
        return set().union(*self.ledgers) - self.resident()

    def _accepts(self, key: BlockKey) -> bool:
        holders = {w for w, ledger in enumerate(self.ledgers) if key in ledger}
        rule = self.group_rules.get(key[2], self.rule)
        if isinstance(rule, Quorum):
            return all(len(holders & set(workers)) >= k for workers, k in rule)
        if rule == "all":
            return len(holders) == len(self.ledgers)
        return len(holders) >= (1 if rule == "any" else int(rule))
