"""How long a subscriber waits for what."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Timing"]


class Timing(NamedTuple):
    """How long to wait for what, in seconds."""

    reorder_wait_s: float = 0.05
    """Without a replay endpoint: a missing batch may be so late before it is a gap."""
    replay_timeout_s: float = 2.0
    """A replay that brings nothing new for so long has failed."""
    backoff_s: float = 0.1
    """Wait before the second try; doubles with each, and is drawn from half to one and a half of that."""
    jitter_s: float = 0.05
    """After a connection, replay is asked for within this time, so that many readers do not ask at once."""
    silence_s: float = 2.0
    """After so long without a message the replay socket is asked; doubles up to 30 times while silence
    lasts."""
    cooldown_s: float = 1.0
    """After a replay failed for good, gaps are not asked for during this time; doubles up to 60 times.
    After a snapshot no other one is asked for during this time; doubles likewise while they are needed often.
    """
    hello_timeout_s: float = 1.0
    """A server that knows nothing of extended requests is silent, or answers at once that it does not."""
    look_s: float = 5.0
    """An extended server is asked so often whether it still lives the same life, on a busy stream too."""
    snapshot_timeout_s: float = 10.0
    """A snapshot that brings no new piece for so long has failed."""
    snapshot_total_s: float = 120.0
    """A snapshot that is not whole after so long has failed."""
    check_s: float = 30.0
    """Time between comparisons of digests, where the subscriber was given ``digest_of``."""
