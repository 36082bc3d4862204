"""The connector of `memory_connector.py` in an engine with two workers, and what its reader sees."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from kvevents import BlockPool, KVEventCollector, ResidentSet, TokenBlocks
from kvevents.connectors import KVConnectorOutput, KVConnectorRole, KVOutputAggregator, ModelRunnerOutput
from memory_connector import MemoryConnector

WORKERS, BLOCKS, BLOCK_SIZE = 2, 8, 4


@dataclass
class Request:
    """A request as the connector sees it."""

    request_id: str
    tokens: TokenBlocks


class Engine:
    """The least of an engine: a pool, workers with memory, and a step."""

    def __init__(self) -> None:
        config = {"capacity": 16, "num_workers": WORKERS}
        self.pool = BlockPool(BLOCKS, BLOCK_SIZE)
        self.scheduler = MemoryConnector(config, KVConnectorRole.SCHEDULER)
        self.workers = [MemoryConnector(config, KVConnectorRole.WORKER) for _ in range(WORKERS)]
        # Every worker's memory: two layers, in each a buffer of 64 bytes for every block.
        self.memory = [
            {f"layer {n}": [bytearray(64) for _ in range(BLOCKS)] for n in range(2)} for _ in range(WORKERS)
        ]
        for worker, memory in zip(self.workers, self.memory, strict=True):
            worker.register_kv_caches(memory)
        self.outputs = KVOutputAggregator.from_connector(self.scheduler, WORKERS)
        self.resident = ResidentSet()
        self.collector = KVEventCollector(self.pool, [self.scheduler], flush_interval_s=0)

    def serve(self, name: str, token_ids: list[int]) -> tuple[int, set[int]]:
        """Serve a prompt; returns how many tokens came from the connector, and blocks that did not."""
        request = Request(name, TokenBlocks(BLOCK_SIZE))
        request.tokens.extend(token_ids)
        hits = self.pool.find_longest_cache_hit(request.tokens, (len(token_ids) - 1) // BLOCK_SIZE)
        self.pool.touch(hits)
        loaded, _ = self.scheduler.get_num_new_matched_tokens(request, len(hits) * BLOCK_SIZE)
        full = len(token_ids) // BLOCK_SIZE
        blocks = [*hits, *self.pool.get_new_blocks(-(-len(token_ids) // BLOCK_SIZE) - len(hits))]
        self.scheduler.update_state_after_alloc(request, blocks, loaded)
        self.pool.cache_full_blocks(request.tokens, blocks, len(hits), full)
        computed = len(hits) + loaded // BLOCK_SIZE
        hashes = list(request.tokens.block_hashes)
        parent = hashes[computed - 1] if computed else None
        new = (hashes[computed:full], parent, token_ids[computed * BLOCK_SIZE : full * BLOCK_SIZE])
        failed = self.step([(*new, BLOCK_SIZE, blocks[computed:full])] if computed < full else [], new[2])
        self.pool.free_blocks(blocks[::-1])
        return loaded, failed

    def step(self, stores: list[tuple[object, ...]], computed: list[int]) -> set[int]:
        """What workers do in a step, and what becomes of their outputs."""
        metadata = pickle.dumps(self.scheduler.build_connector_meta(stores))
        outputs = []
        for rank, worker in enumerate(self.workers):
            worker.bind_connector_metadata(pickle.loads(metadata))
            worker.start_load_kv(None)
            for *_, blocks in stores:  # the model: every layer's bytes depend on tokens, worker and layer
                for i, block in enumerate(blocks if isinstance(blocks, list) else []):
                    tokens = bytes(computed[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE])
                    for n, layer in enumerate(self.memory[rank].values()):
                        layer[block][:] = (tokens + bytes([rank, n])).ljust(64, b"\0")
            worker.wait_for_save()
            output = KVConnectorOutput(
                kv_cache_events=worker.get_kv_connector_kv_cache_events(),
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
            )
            worker.clear_connector_metadata()
            outputs.append(pickle.loads(pickle.dumps(ModelRunnerOutput(output))))
        joined = self.outputs.aggregate(outputs).kv_connector_output
        self.collector.update(joined)
        batch = self.collector.step()
        if batch is not None:
            self.resident.apply(batch.events)
        failed: set[int] = joined.invalid_block_ids
        return failed


def main() -> None:
    """Serves a prompt, fills the pool with others, and serves it again from the connector's memory."""
    engine = Engine()
    prompt = list(range(1, 14))
    engine.serve("first", prompt)
    for n in range(4):
        engine.serve(f"other {n}", list(range(50 * n + 50, 50 * n + 63)))
    loaded, failed = engine.serve("again", prompt)
    print(f"{loaded} of {len(prompt)} tokens came from the connector, {len(failed)} blocks failed")
    media = sorted(str(key.medium) for key in engine.resident.keys())  # noqa: SIM118 - not a dict
    print(f"a reader sees {media.count('GPU')} blocks on the GPU, {media.count('CPU')} in CPU memory")


if __name__ == "__main__":
    main()
