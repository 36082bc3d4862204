"""Tensor-parallel workers without processes: the real connectors, and a pickle across every border."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, cast

from kvevents.connectors import KVConnectorRole
from kvevents.simulate.truth import TierTruth
from kvevents.simulate.workers import make_connector, run_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvevents.connectors import KVConnectorMetadata, ModelRunnerOutput
    from kvevents.simulate.tier import TierConfig, TierConnector

__all__ = ["InlineWorkers"]


class InlineWorkers:
    """All workers of one engine, with the truth of their tiers."""

    def __init__(self, tiers: Sequence[Sequence[TierConfig]]) -> None:
        """``tiers[w]`` are worker ``w``'s connectors."""
        self._tiers = tiers
        self._connectors = [make_connector(tier, KVConnectorRole.WORKER) for tier in tiers]
        self.truth = TierTruth(tiers[0])
        self.pickled_bytes = 0

    def step(self, step: int, metadata: KVConnectorMetadata) -> list[ModelRunnerOutput]:
        """Let every worker do one step; returns their outputs, by worker."""
        message = pickle.dumps((step, metadata), protocol=5)
        outputs = []
        for worker, connector in enumerate(self._connectors):
            _, received = pickle.loads(message)  # noqa: S301 - our own
            output = pickle.dumps(run_step(connector, received), protocol=5)
            for i, tier in enumerate(connector.sub_connectors):
                for sign, block_hash in cast("TierConnector", tier).take_ledger():
                    self.truth.vote(i, block_hash, worker, holds=sign == "+")
            self.pickled_bytes += len(output)
            outputs.append(cast("ModelRunnerOutput", pickle.loads(output)))  # noqa: S301 - our own
        self.truth.settle()
        return outputs

    def restart(self, worker: int, next_step: int) -> None:  # noqa: ARG002 - the truth has no steps
        """Start a worker anew: what it held is gone."""
        self.truth.restarted(worker)
        self._connectors[worker] = make_connector(self._tiers[worker], KVConnectorRole.WORKER)

    def close(self) -> None:
        """Nothing to end."""
