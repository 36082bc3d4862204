"""A real vLLM engine that does what it is told: a JSON object a line on stdin, an answer a line on stdout.

Started by `engine_process.py` with an engine environment's Python; imports nothing of the tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

MARK = "@answer "


def answer(**words: Any) -> None:
    """One line, told apart from what libraries print."""
    print(MARK + json.dumps(words), flush=True)


def answers(outputs: list[Any]) -> list[list[Any]]:
    """Cached tokens and generated tokens of each request."""
    return [[done.num_cached_tokens, list(done.outputs[0].token_ids)] for done in outputs]


class Engine:
    """The commands, for the offline engine."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import vllm

        self.vllm = vllm
        self.llm = vllm.LLM(**arguments)

    def scheduler(self) -> Any:
        """Only where the engine core runs in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def generate(self, prompts: list[list[int]], max_tokens: int = 4) -> dict[str, Any]:
        """Serve the prompts together."""
        sampling = self.vllm.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        requests = [{"prompt_token_ids": p} for p in prompts]
        return {"outputs": answers(self.llm.generate(requests, sampling, use_tqdm=False))}

    def sabotage(self) -> dict[str, Any]:
        """Put an event into the pool's queue that no encoder takes, between others."""
        from vllm.distributed.kv_events import BlockRemoved, BlockStored

        bad = BlockStored([2], None, [object()], 1, None, "GPU", None)
        queue = self.scheduler().kv_cache_manager.block_pool.kv_event_queue
        queue.extend([BlockStored([1], None, [7], 1, None, "X", None), bad, BlockRemoved([1], "X")])
        return {}

    def stats(self) -> dict[str, Any]:
        """What the publisher counts, and which class it is."""
        publisher = self.scheduler().kv_event_publisher
        told = publisher.stats() if hasattr(publisher, "stats") else None
        return {
            "publisher": type(publisher).__name__,
            "sent": told and told.sent,
            "events_lost": told and told.events_lost,
        }

    def full_disk(self) -> dict[str, Any]:
        """From here on this process's log is on a disk without room."""
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 2)
        return {}


class Ranks:
    """The commands, for two data-parallel ranks."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import vllm

        self.vllm = vllm
        self.loop = asyncio.new_event_loop()
        self.llm = self.loop.run_until_complete(self._make(arguments))

    async def _make(self, arguments: dict[str, Any]) -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(self.vllm.AsyncEngineArgs(**arguments))

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 4, rank: int | None = None
    ) -> dict[str, Any]:
        """Serve the prompts together, on one rank where it is named."""
        sampling = self.vllm.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)

        async def one(number: int, prompt: list[int]) -> Any:
            request = {"prompt_token_ids": prompt}
            name = f"{rank}-{number}-{os.urandom(4).hex()}"
            stream = self.llm.generate(request, sampling, name, data_parallel_rank=rank)
            return [done async for done in stream][-1]

        async def everything() -> list[Any]:
            return list(await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts))))

        return {"outputs": answers(self.loop.run_until_complete(everything()))}

    def sources(self) -> dict[str, Any]:
        """Where each rank publishes, as the engine tells its clients."""
        told = self.llm.get_kv_event_sources()
        return {"sources": {rank: [c.endpoint, c.replay_endpoint] for rank, c in told.items()}}

    def end(self) -> dict[str, Any]:
        """Shut down."""
        self.llm.shutdown()
        return {}


def main() -> None:
    """Start the engine, then obey until stdin ends."""
    arguments = json.loads(sys.argv[1])
    engine = (Ranks if arguments.pop("ranks", False) else Engine)(arguments)
    plugin = sys.modules.get("kvevents.integrations.vllm.plugin")
    report = None if plugin is None else plugin.report()
    answer(ready=True, parts=[] if report is None else [p.name for p in report.parts if p.state == "on"])
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer(**getattr(engine, command.pop("do"))(**command))
        except Exception as e:
            answer(error=type(e).__name__, text=str(e))


if __name__ == "__main__":
    main()
