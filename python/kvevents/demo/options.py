"""What a demo run is made of."""

from __future__ import annotations

import msgspec

__all__ = ["DemoOptions", "LinkRates"]


class LinkRates(msgspec.Struct, frozen=True, kw_only=True):
    """How often the link does what to a live message: probabilities a message, and how often it is cut."""

    drop: float = 0.02
    duplicate: float = 0.02
    delay: float = 0.01
    reorder: float = 0.02
    cut_every: int = 400
    """The connection is cut once in about so many messages; 0: never."""


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
    silence_s: float = 20.0
    """Seconds without any progress after which a process counts as stuck."""

    @property
    def pool_blocks(self) -> int:
        """Blocks of the pool. A trace's requests are up to 8,000 blocks long, generated ones up to 100."""
        return self.blocks or (16_384 if self.trace else 1_024)
