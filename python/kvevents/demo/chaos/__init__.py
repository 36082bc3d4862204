"""Three engines, several readers of different ages, and everything that can happen to them.

Engines are restarted, one of them by force; links lose, repeat, delay and reorder messages and break for
longer than the replay log reaches back; a publisher's queue overflows; a reader is slow, one joins late, one
is killed and started again. Every reader's digests are compared with the engines' pools at every sequence
number, and at quiet points its index answers prompts, which the pools answer too.
"""

from __future__ import annotations

from kvevents.demo.chaos.options import ChaosOptions
from kvevents.demo.chaos.run import run_chaos
from kvevents.demo.chaos.verdict import ChaosResult

__all__ = ["ChaosOptions", "ChaosResult", "run_chaos"]
