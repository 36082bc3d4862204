"""The whole system for as long as wanted, its memory sampled, everybody compared now and then.

Engines under steady traffic with full pools, a link that loses, repeats, delays and reorders messages and
breaks, engines that are restarted, queues that overflow, a reader that follows all of it, and visitors that
come, ask for everything and go. Nothing in it grows with time except by mistake, so resident memory that
rises after the warm-up is a leak. ``python -m kvevents.demo.soak`` (``make soak``) runs it.
"""

from __future__ import annotations

from kvevents.demo.soak.options import SoakOptions
from kvevents.demo.soak.run import run_soak
from kvevents.demo.soak.verdict import SoakResult

__all__ = ["SoakOptions", "SoakResult", "run_soak"]
