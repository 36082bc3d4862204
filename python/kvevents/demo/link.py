"""The link process: what lies between engine and reader, and is not to be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvevents.testing.link import FaultyLink, LinkConfig

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvevents.demo.options import DemoOptions

__all__ = ["link_main"]


def link_main(pipe: Connection, options: DemoOptions, live: str, replay: str) -> None:
    """Says ``ready`` with the addresses for the reader, forwards until ``stop``, says ``done``."""
    rates = options.link
    config = LinkConfig(
        upstream=live,
        upstream_replay=replay,
        seed=options.seed,
        drop=rates.drop,
        duplicate=rates.duplicate,
        delay=rates.delay,
        reorder=rates.reorder,
        cut_every=rates.cut_every,
    )
    with FaultyLink(config) as link:
        pipe.send(("ready", (link.live_endpoint, link.replay_endpoint)))
        pipe.recv()  # stop
    pipe.send(("done", msgspec.structs.asdict(link.counters)))
