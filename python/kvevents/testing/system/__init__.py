"""The whole system in one process: engines, workers, publishers, links, readers and indexes, from a seed.

Nothing but sockets, threads and clocks is replaced: pools, connectors, the vote over workers, collector,
outbox, encoder, replay log, mirror, snapshots, replay server, sequence machine, resident set and index are
the very ones that run elsewhere. Time is virtual; links lose, repeat, reorder, delay, garble and break;
engines and workers die; readers come, go and are slow. Every reader is compared with every engine at every
number that it applies, and everybody with everybody at quiet points.

``python -m kvevents.testing.system --seed 7`` runs one; a failure prints the command that shows it again, and
the few steps that suffice for it.
"""

from __future__ import annotations

from kvevents.testing.system.config import EngineSpec, ReaderSpec, SystemConfig
from kvevents.testing.system.failure import SimulationError
from kvevents.testing.system.plan import FAULTS, KINDS, Step, draw_plan
from kvevents.testing.system.reproduce import Options, explain, simulate
from kvevents.testing.system.run import Failure, Report, run_plan
from kvevents.testing.system.shrink import shrink

__all__ = [
    "FAULTS",
    "KINDS",
    "EngineSpec",
    "Failure",
    "Options",
    "ReaderSpec",
    "Report",
    "SimulationError",
    "Step",
    "SystemConfig",
    "draw_plan",
    "explain",
    "run_plan",
    "shrink",
    "simulate",
]
