"""What a soak is made of."""

from __future__ import annotations

import msgspec

from kvevents.demo.chaos.options import ChaosOptions
from kvevents.errors import ConfigError

__all__ = ["SoakOptions"]


class SoakOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what happens in a run. Times are in seconds."""

    seconds: float = 600.0
    """How long it runs, from the moment at which everybody has started."""
    seed: int = 0
    rate: float = 40.0
    """Batches a second that each rank publishes at most."""
    every_s: float = 5.0
    """Something happens to the system so often: an outage, a restart, an overflow, in turn."""
    quiet_s: float = 30.0
    """Everybody stands still and is compared so often."""
    prompts: int = 100
    """Asked of the index and of every pool at each quiet point."""
    memory: bool = True
    """Judge the growth of resident memory; without it only what the reader holds is judged."""
    warm_up_s: float | None = None
    """A process is sampled from so long after its start on; ``None``: a quarter of the run, at most 150 s."""
    limit_mb: float = 1.0
    """MB a minute that no process may grow by."""
    silence_s: float = 30.0
    """Seconds without any progress after which a process counts as stuck."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        for name in ("seconds", "rate", "every_s", "quiet_s", "limit_mb"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, more than 0 is needed")

    @property
    def warm_up(self) -> float:
        """Seconds of a process's life that are not judged."""
        return min(150.0, self.seconds / 4) if self.warm_up_s is None else self.warm_up_s

    def parts(self) -> ChaosOptions:
        """The same for the engines and the link, which are those of ``demo --chaos``."""
        return ChaosOptions(seed=self.seed, rate=self.rate, log_batches=50, silence_s=self.silence_s)
