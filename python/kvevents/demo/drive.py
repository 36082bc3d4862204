"""The demo's engine without its clock: the same options give the same batches, in any process.

The engine process runs it with a publisher. Where the reader's set differs, the demo runs it again, alone,
up to that step, to name what is missing: the wire never carried the truth.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from kvevents.simulate.engine import EngineConfig, MockEngine
from kvevents.simulate.trace import read_trace, trace_requests
from kvevents.simulate.workloads import Request, mixed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvevents.collector import BatchSink
    from kvevents.demo.options import DemoOptions
    from kvevents.events import EventList, KVEventBatch
    from kvevents.simulate.connectors import EngineConnectors

__all__ = ["Drive", "true_set"]


class Drive:
    """Serves the requests of a run, with a prefix-cache reset after half of them.

    With workers, one of them is killed and started anew after five eighths, and the engine steps on at the
    end until every store is finished. What the pool does is the same with and without ``connectors``.
    """

    def __init__(
        self,
        options: DemoOptions,
        *,
        publisher: BatchSink | None = None,
        before_publish: Callable[[int, KVEventBatch], None] | None = None,
        connectors: EngineConnectors | None = None,
    ) -> None:
        self._options = options
        self._connectors = connectors
        config = EngineConfig(
            num_blocks=options.pool_blocks,
            block_size=options.block_size,
            # Recorded answers are long: in steps of one token nearly all batches would be empty.
            tokens_per_step=options.block_size if options.trace else 1,
            data_parallel_rank=0,
        )
        self.engine = MockEngine(
            config, publisher=publisher, before_publish=before_publish, connectors=connectors
        )

    def steps(self) -> Iterator[EventList]:
        """Run to the end, one scheduler step a time; yields the events of each."""
        options = self._options
        traffic = self._traffic()
        first = options.requests // 2
        yield from self._serve(islice(traffic, first))
        self.engine.reset_prefix_cache()
        rest = options.requests - first
        if options.behind is not None:
            before = rest // 4
            yield from self._serve(islice(traffic, before))
            if self._connectors is not None:
                self._connectors.restart_worker(options.behind.workers - 1, self.engine.stats.steps + 1)
            rest -= before
        yield from self._serve(islice(traffic, rest))
        for _ in range(1 + max((t.max_delay for tiers in options.tiers() for t in tiers), default=-1)):
            yield self.engine.step()

    def _traffic(self) -> Iterator[Request]:
        options = self._options
        if options.trace is not None:
            return trace_requests(read_trace(options.trace), seed=options.seed)
        return mixed(seed=options.seed, block_size=options.block_size)

    def _serve(self, traffic: Iterator[Request]) -> Iterator[EventList]:
        engine = self.engine
        coming = next(traffic, None)
        while coming is not None or not engine.idle:
            while coming is not None and engine.num_waiting < engine.config.max_running:
                engine.submit(coming)
                coming = next(traffic, None)
            yield engine.step()


def true_set(options: DemoOptions, step: int) -> EventList:
    """What the engine's pool held in step ``step``: stores, parents first, asked of the pool."""
    drive = Drive(options)
    for _ in drive.steps():
        if drive.engine.stats.steps == step:
            break
    return drive.engine.pool.snapshot()
