"""A link process: all that lies between the engines and one reader."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from kvevents.testing.link import FaultyLink, LinkConfig

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvevents.demo.chaos.options import ChaosOptions

__all__ = ["link_main"]


def link_main(
    pipe: Connection, options: ChaosOptions, reader: int, upstream: dict[str, tuple[str, str]]
) -> None:
    """Says ``ready`` with an address pair for each source, is told of ``outage``, ends with ``stop``.

    The last word, ``done``, is what was done to messages, over all sources.
    """
    rates = options.link
    with ExitStack() as stack:
        links = {
            source: stack.enter_context(
                FaultyLink(
                    LinkConfig(
                        upstream=live,
                        upstream_replay=replay,
                        seed=options.seed + 100 * reader + number,
                        drop=rates.drop,
                        duplicate=rates.duplicate,
                        delay=rates.delay,
                        reorder=rates.reorder,
                        cut_every=rates.cut_every,
                    )
                )
            )
            for number, (source, (live, replay)) in enumerate(upstream.items())
        }
        pipe.send(("ready", {s: (link.live_endpoint, link.replay_endpoint) for s, link in links.items()}))
        while True:
            word, value = pipe.recv()
            if word == "stop":
                break
            source, seconds = value
            links[source].cut(seconds)
    total: Counter[str] = Counter()
    for link in links.values():
        total.update(msgspec.structs.asdict(link.counters))
    pipe.send(("done", dict(total)))
