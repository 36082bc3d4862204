"""The main job end to end on one machine, in separate processes, with faults on the way.

An engine process serves requests and publishes what its pool does; a link process loses, repeats, delays and
reorders what it carries and cuts the connection; a reader process repairs what it missed and rebuilds the
resident set. Beside every batch the engine writes the digest of its true set, asked of the pool, to a file
that only the comparison reads.
"""

from __future__ import annotations

from kvevents.demo.options import DemoOptions
from kvevents.demo.run import run_demo
from kvevents.demo.verdict import DemoResult

__all__ = ["DemoOptions", "DemoResult", "run_demo"]
