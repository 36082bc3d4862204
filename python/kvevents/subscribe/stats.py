"""What is shown of a source."""

from __future__ import annotations

import msgspec

__all__ = ["SourceStats"]


class SourceStats(msgspec.Struct, kw_only=True):
    """What is known of one source, and what was counted since the subscriber was made."""

    name: str
    connected: bool = False
    """Whether the live connection stands."""
    protocol: str = "unknown"
    """``extended`` (snapshots, digests and lives are known), ``plain`` (replay as vLLM has it), ``none`` (no
    replay address), or ``unknown`` so far."""
    epoch: bytes | None = None
    """The life that is followed, where the publisher says so."""
    rank: int | None = None
    """The publisher's global data-parallel rank, where it says so."""
    store_only: tuple[str, ...] = ()
    """Media of which the publisher says that what leaves them is never announced."""
    exact_for: str | None = None
    """What the publisher's snapshots and digests are exact for: ``engine`` or ``stream``."""
    state: str = "waiting"
    """``waiting`` (nothing heard in this life), ``live`` or ``repairing``."""
    complete: bool = False
    """Whether every batch of the present life was delivered, from the first on."""
    last_seq: int | None = None
    """The last number that was delivered or declared lost."""
    last_message_age_s: float | None = None
    """Since the last live message; ``None``: there was none."""
    held: int = 0
    """Batches that wait for the end of a repair."""
    batches: int = 0
    """Batches delivered."""
    replayed: int = 0
    """Those of them that came from the replay socket."""
    duplicates: int = 0
    late: int = 0
    """Messages of an earlier life, or of a number that was given up."""
    gaps: int = 0
    lost: int = 0
    """Numbers inside gaps."""
    resets: int = 0
    poisoned: int = 0
    """Payloads that are no batch."""
    skipped_events: int = 0
    """Events inside batches that could not be decoded."""
    malformed: int = 0
    """Messages of another shape than three frames with eight bytes of number."""
    other_topics: int = 0
    """Messages of another topic than the source's."""
    connects: int = 0
    replays: int = 0
    """Requests to the replay socket, of any kind."""
    replays_failed: int = 0
    """Requests that were not answered to their end."""
    snapshots: int = 0
    """Snapshots delivered."""
    checks: int = 0
    """Digests that were compared."""
    drifts: int = 0
    """Those that differed."""
    returned_epochs: int = 0
    """How often a life came back that another one had followed: two publishers share one address."""
