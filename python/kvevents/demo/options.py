"""What a demo run is made of."""

from __future__ import annotations

import msgspec

from kvevents.aggregate import Rule  # noqa: TC001 - a field's type is read at run time
from kvevents.errors import ConfigError
from kvevents.simulate.tier import TierConfig

__all__ = ["DemoOptions", "LinkRates", "WorkerOptions"]

MEDIA = ("CPU", "STORAGE")


class LinkRates(msgspec.Struct, frozen=True, kw_only=True):
    """How often the link does what to a live message: probabilities a message, and how often it is cut."""

    drop: float = 0.02
    duplicate: float = 0.02
    delay: float = 0.01
    reorder: float = 0.02
    cut_every: int = 400
    """The connection is cut once in about so many messages; 0: never."""


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Worker processes behind the engine, and the connectors that run in each."""

    workers: int = 4
    connectors: int = 2
    """The first one's tier is ``CPU``, the second's ``STORAGE``, and so on in turn."""
    same_medium: bool = False
    """All tiers are ``CPU``; what one of them holds is there."""
    rule: str = "all"
    """``all``, ``any``, or the number of workers that must hold a block."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        for name, most in (("workers", 64), ("connectors", 8)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}, 1 to {most} are possible")
        if self.rule not in ("all", "any") and not (
            self.rule.isdecimal() and 1 <= int(self.rule) <= self.workers
        ):
            raise ConfigError(f"rule is {self.rule!r}: all, any, or a number from 1 to {self.workers}")

    def tiers(self, worker: int, *, pool_blocks: int, seed: int) -> list[TierConfig]:
        """The connectors of one worker; tiers are twice as large as the pool, three times, ...."""
        rule: Rule = self.rule if self.rule in ("all", "any") else int(self.rule)  # type: ignore[assignment]
        return [
            TierConfig(
                medium=MEDIA[0 if self.same_medium else i % len(MEDIA)],
                capacity=(2 + i) * pool_blocks,
                rule=rule,
                num_workers=self.workers,
                worker=worker,
                seed=seed + i,
            )
            for i in range(self.connectors)
        ]


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what happens in a run; equal options give equal batches."""

    requests: int = 4000
    seed: int = 0
    trace: str | None = None
    """A file in Mooncake's format; generated traffic without one."""
    blocks: int | None = None
    """Blocks of the pool; by default fewer than the requests need, so that blocks are evicted."""
    block_size: int = 16
    rate: float = 800.0
    """Batches a second that the engine publishes at most."""
    link: LinkRates = LinkRates()
    break_reader: bool = False
    """Let the reader leave one removal out: the verdict must notice."""
    behind: WorkerOptions | None = None
    """Workers and connectors behind the engine; ``None``: the pool only."""
    silence_s: float = 20.0
    """Seconds without any progress after which a process counts as stuck."""

    @property
    def pool_blocks(self) -> int:
        """Blocks of the pool. A trace's requests are up to 8,000 blocks long, generated ones up to 100."""
        return self.blocks or (16_384 if self.trace else 1_024)

    def tiers(self) -> list[list[TierConfig]]:
        """Every worker's connectors; none where there are no workers."""
        behind = self.behind
        if behind is None:
            return []
        return [
            behind.tiers(worker, pool_blocks=self.pool_blocks, seed=self.seed)
            for worker in range(behind.workers)
        ]
