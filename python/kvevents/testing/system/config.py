"""What a simulated system is made of, drawn from a seed."""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from kvevents.subscribe.actions import Policy  # noqa: TC001 - msgspec reads it at run time

__all__ = ["EngineSpec", "ReaderSpec", "SystemConfig"]

EngineKind = Literal["plain", "groups", "tiers", "every_copy"]
Server = Literal["extended", "plain", "none"]
POLICIES: tuple[Policy, ...] = ("replay", "snapshot", "wipe", "keep_and_flag")

_ALL = 100_000
"""Batches: more than any life has."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, that is one source. Small sizes, so that everything overflows often."""

    name: str
    kind: EngineKind = "plain"
    """``plain``: one group. ``groups``: two full-attention groups and a window. ``tiers``: two workers with a
    connector that holds a CPU tier. ``every_copy``: vLLM's literal stream."""
    rank: int = 0
    block_size: int = 4
    num_blocks: int = 64
    hash_form: Literal["bytes", "int"] = "bytes"
    dialect: str = "vllm-map-0.33"
    max_queued_events: int = 100_000
    queue: int = 8
    """Batches that may wait for the sender."""
    overflow: Literal["drop_oldest", "drop_newest"] = "drop_oldest"
    log_batches: int = 32
    log_bytes: int = 1 << 20
    heartbeat_s: float | None = None
    mirror_tokens: bool = True
    piece_bytes: int = 2_000
    """Bytes of a snapshot's piece."""
    server: Server = "extended"
    """What answers at the replay address: all of ours, replay as vLLM has it, or nothing."""

    @property
    def can_restart(self) -> bool:
        """Whether readers can always tell: without epochs only a log that still has the first batches does.

        What stays invisible to them otherwise is listed in the decision on the sequence machine.
        """
        return self.server == "extended" or (self.server == "plain" and self.log_batches >= _ALL)


class ReaderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One reader of all engines."""

    name: str
    inbox: int = 16
    """Messages that wait for a reader that is slow; what is beyond is lost."""
    pipe: int = 8
    """Answers of a replay server that are on their way to a reader."""
    policy: Policy = "snapshot"
    naive: bool = False
    """Keeps the naive index beside the real one, and compares their answers."""


class SystemConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Engines and readers; every reader reads every engine."""

    seed: int
    engines: tuple[EngineSpec, ...]
    readers: tuple[ReaderSpec, ...]

    @classmethod
    def draw(cls, seed: int) -> SystemConfig:
        """Four engines, one of each kind, and three readers, with sizes of the seed's choice."""
        rng = random.Random(f"system {seed}")
        kinds: tuple[EngineKind, ...] = ("plain", "groups", "tiers", "every_copy")
        servers: list[Server] = ["extended", "extended", "extended", rng.choice(("plain", "none"))]
        rng.shuffle(servers)
        engines = tuple(
            EngineSpec(
                name=kind,
                kind=kind,
                rank=rng.choice((0, 0, 1)),
                block_size=rng.choice((2, 4)),
                num_blocks=rng.choice((32, 64, 96)),
                hash_form=rng.choice(("bytes", "int")) if kind != "tiers" else "bytes",
                dialect=rng.choice(("vllm-map-0.33", "vllm-map-0.32")),
                max_queued_events=rng.choice((8, 100_000)),
                queue=rng.choice((2, 8, 20)),
                overflow=rng.choice(("drop_oldest", "drop_oldest", "drop_newest")),
                log_batches=rng.choice((4, 16, 64) if server == "extended" else (4, 16, _ALL)),
                log_bytes=rng.choice((4_000, 1 << 20)) if server == "extended" else 1 << 30,
                heartbeat_s=rng.choice((None, None, 0.5)),
                mirror_tokens=rng.choice((True, True, False)),
                piece_bytes=rng.choice((500, 2_000, 1 << 20)),
                server=server,
            )
            for kind, server in zip(kinds, servers, strict=True)
        )
        readers = tuple(
            ReaderSpec(
                name=f"r{i}",
                inbox=rng.choice((4, 16, 64)),
                pipe=rng.choice((2, 8, 64)),
                policy=policy,
                naive=i == 0,
            )
            for i, policy in enumerate(("snapshot", rng.choice(POLICIES), "snapshot"))
        )
        return cls(seed=seed, engines=engines, readers=readers)
