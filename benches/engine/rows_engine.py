"""A whole engine on the tiny model, in this process: its step while it is busy, and its throughput."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import zmq
from vllm import LLM, SamplingParams
from vllm.distributed import kv_events

from benches.engine import stock
from benches.engine.pairs import Pair, row
from kvevents import decode

MODEL = os.environ.get("KVEVENTS_TINY_MODEL", str(Path(sys.prefix) / "share" / "engine" / "tiny-llama"))
REQUESTS, PROMPT, OUTPUT = 16, 160, 48
_engines: dict[bool, Engine] = {}


class Engine:
    """One engine with events on, and a reader of them."""

    def __init__(self, ours):
        endpoint = f"inproc://engine-{int(ours)}"
        registry = kv_events.EventPublisherFactory._registry
        plugged = registry["zmq"]
        registry["zmq"] = plugged if ours else stock.Publisher
        try:
            self.llm = LLM(
                model=MODEL, dtype="bfloat16", max_model_len=512, block_size=32, enable_prefix_caching=True,
                enforce_eager=True, max_num_seqs=REQUESTS, num_gpu_blocks_override=256,
                kv_cache_memory_bytes=1 << 26, skip_tokenizer_init=True,
                kv_events_config={
                    "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint,
                    "replay_endpoint": f"{endpoint}-replay",
                },
            )  # fmt: skip
        finally:
            registry["zmq"] = plugged
        self._sub = zmq.Context.instance().socket(zmq.SUB)
        self._sub.set_hwm(0)
        self._sub.subscribe(b"")
        self._sub.connect(endpoint)
        self.calls = 0
        self.run()

    def run(self):
        """The next requests, none of which shares a prefix. Returns thread and process seconds, and steps."""
        core = self.llm.llm_engine
        self.calls += 1
        seeds = range(self.calls * REQUESTS, (self.calls + 1) * REQUESTS)
        for n in seeds:
            prompt = [4 + (n * 7919 + i * i * 31 + n * i) % 250 for i in range(PROMPT)]
            core.add_request(
                str(n), {"prompt_token_ids": prompt},
                SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True),
            )  # fmt: skip
        finished, steps = {}, 0
        thread, process = time.thread_time(), time.process_time()
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
            steps += 1
        spent = time.thread_time() - thread, time.process_time() - process
        assert len(finished) == REQUESTS
        # Every whole block of a prompt and its output is announced, of each request.
        expected = REQUESTS * ((PROMPT + OUTPUT - 1) // 32)
        stored = self._stored(expected)
        assert stored == expected, f"{stored} blocks were announced, {expected} were expected"
        return *spent, steps

    def _stored(self, expected):
        """Blocks that are announced; the sender may still be at it."""
        count = 0
        while self._sub.poll(10_000 if count < expected else 50):
            for event in decode(self._sub.recv_multipart()[2], strict=True).events:
                count += len(event.block_hashes) if type(event).__name__ == "BlockStored" else 0
        return count

    def close(self):
        self._sub.close(0)


def _engine(ours):
    if ours not in _engines:
        _engines[ours] = Engine(ours)
    return _engines[ours]


def _measured(ours, figure):
    return figure(*_engine(ours).run())


def _pair(figure):
    for ours in (False, True):
        _engine(ours)
    return Pair(stock=lambda: _measured(False, figure), ours=lambda: _measured(True, figure))


@row("engine step of a busy engine with events, CPU of its thread", unit="us", floor=1.03, aim=0.97, digits=0)
def step():
    """16 requests at once; the sender's thread runs beside it."""
    return _pair(lambda thread, _process, steps: thread * 1e6 / steps)


@row(
    "offline throughput of the tiny model, CPU of the process a token",
    unit="us", floor=0.97, aim=1.05, more=True, digits=1,
)  # fmt: skip
def throughput():
    """The same requests; every thread of the process counts."""
    return _pair(lambda _thread, process, _steps: process * 1e6 / (REQUESTS * (PROMPT + OUTPUT)))
