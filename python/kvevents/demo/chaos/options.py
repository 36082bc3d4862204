"""What a chaos run is made of."""

from __future__ import annotations

import msgspec

from kvevents.demo.options import LinkRates
from kvevents.errors import ConfigError

__all__ = ["ENGINES", "ChaosOptions", "EngineSpec", "role"]

ROLES = ("first", "late", "killed")


def role(reader: int) -> str:
    """``first``: there from the start; ``late``: joins a running stream; ``killed``: and started again."""
    return ROLES[reader % len(ROLES)]


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine; each differs from the others in what a common index must not mind."""

    name: str
    ranks: int = 1
    block_size: int = 16
    hash_algorithm: str = "sha256_cbor"
    hash_form: str = "bytes"
    pool_blocks: int = 768

    def sources(self) -> list[str]:
        """Names of its ranks, as :meth:`kvevents.subscribe.Source.ranks` makes them."""
        return [self.name] if self.ranks == 1 else [f"{self.name}/dp{r}" for r in range(self.ranks)]


ENGINES = (
    EngineSpec(name="a"),
    EngineSpec(name="b", hash_algorithm="sha256", hash_form="int", pool_blocks=512),
    EngineSpec(name="c", ranks=2, block_size=32, pool_blocks=384),
)
"""``a`` is killed, ``b`` overflows, ``c`` is restarted in peace."""


class ChaosOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what happens in a run."""

    readers: int = 3
    faults: bool = True
    """Restarts, outages, overflow, and a reader's death; without them only what ``link`` says."""
    seed: int = 0
    rate: float = 100.0
    """Batches a second that each rank publishes at most."""
    stretch_s: float = 3.0
    """Seconds of traffic between two things that are done to the system."""
    prompts: int = 1000
    """Asked of every index and every pool at each quiet point."""
    log_batches: int = 50
    """What each publisher keeps for replay: less than an outage lasts."""
    queue: int = 64
    """Batches that may wait for a publisher's sender."""
    link: LinkRates = LinkRates()
    break_reader: bool = False
    """Let the first reader leave one removal out: the verdict must notice."""
    silence_s: float = 20.0
    """Seconds without any progress after which a process counts as stuck."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        if not 1 <= self.readers <= 16:
            raise ConfigError(f"readers is {self.readers}, 1 to 16 are possible")

    @property
    def outage_s(self) -> float:
        """How long a link is cut: twice what the replay log holds."""
        return 2 * self.log_batches / self.rate
