"""A real vLLM with two CPU tiers in a MultiConnector; a reader elsewhere must hold what they hold.

Run by ``make demo-vllm`` with the Python of an environment that has vLLM. The engine runs twice, as shipped
and with the plug-in: requests one at a time, prefixes shared, until blocks are evicted from GPU and tiers.
Each worker writes down what its tiers hold, the scheduler what the block pool holds. Verdict (exit code):
with the plug-in the reader's set is that of the engine in every tier; the GPU events of both runs
are the same, in order. The shipped engine's loss is printed beside.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TIERS = {"CPU": 20, "STORAGE": 30}
"""Medium and blocks of each tier."""
GPU_BLOCKS = 24
SILENCE_S = 8.0
"""After the last request: so long nothing may have come before the stream counts as read."""
BLOCK = 32


# ---------------------------------------------------------------- the engine's processes


def recorded_tier() -> type:
    """The example's connector, which also writes down what there is."""
    from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash  # noqa: PLC0415

    from vllm_connector import CpuTierConnector  # noqa: PLC0415

    class RecordedTier(CpuTierConnector):
        pool: Any = None

        def _write(self, name: str, held: list[Any]) -> None:
            path = Path(os.environ["KVEVENTS_DEMO_LEDGER"]) / name
            path.with_suffix(".new").write_text(json.dumps(held))
            path.with_suffix(".new").rename(path)

        def wait_for_save(self) -> None:
            super().wait_for_save()
            self._write(f"{self.medium}-{self._vllm_config.parallel_config.rank}", list(self.held.values()))

        def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
            self.pool = gpu_block_pool

        def take_events(self) -> Any:
            if self.pool is not None and self.medium == "CPU":
                keys = self.pool.cached_block_hash_to_block._cache
                self._write("GPU", [maybe_convert_block_hash(get_block_hash(key)) for key in keys])
            return super().take_events()

    return RecordedTier


def __getattr__(name: str) -> Any:
    """The engine looks the connector up here by name; the reader's process has no need of vLLM."""
    if name == "RecordedTier":
        found = globals()["RecordedTier"] = recorded_tier()
        return found
    raise AttributeError(name)


def prompts(count: int) -> list[list[int]]:
    """Four prefixes with different ends; none ends where a block ends, so that no block is computed twice."""
    rnd = random.Random(5)
    base = [[rnd.randrange(4, 250) for _ in range(64 + 32 * i)] for i in range(4)]
    out = []
    for _ in range(count):
        prompt = rnd.choice(base) + [rnd.randrange(4, 250) for _ in range(rnd.randrange(1, 70))]
        out.append([*prompt, 7] if len(prompt) % BLOCK == 0 else prompt)
    return out


def serve(model: str, port: int, tp: int, requests: int) -> None:
    """One engine, from start to end."""
    import vllm  # noqa: PLC0415

    tier = {"kv_connector": "RecordedTier", "kv_connector_module_path": "vllm_demo", "kv_role": "kv_both"}
    children = [
        tier | {"kv_connector_extra_config": {"medium": medium, "cpu_blocks": blocks}}
        for medium, blocks in TIERS.items()
    ]
    llm = vllm.LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=512,
        block_size=BLOCK,
        tensor_parallel_size=tp,
        enable_prefix_caching=True,
        enforce_eager=True,
        max_num_seqs=4,
        num_gpu_blocks_override=GPU_BLOCKS,
        kv_cache_memory_bytes=1 << 26,
        skip_tokenizer_init=True,
        kv_events_config={
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://*:{port}",
            "replay_endpoint": f"tcp://*:{port + 1000}",
        },
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": children},
        },
    )
    print("ready", flush=True)
    sys.stdin.readline()  # the reader says when it listens
    outputs = []
    for prompt in prompts(requests):
        sampling = vllm.SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        done = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        outputs.append([done.num_cached_tokens, list(done.outputs[0].token_ids)])
    (Path(os.environ["KVEVENTS_DEMO_LEDGER"]) / "outputs").write_text(json.dumps(outputs))
    print("served", flush=True)
    sys.stdin.readline()  # the reader says when it has everything


# ---------------------------------------------------------------- the reader


class Seen:
    """What one run published and held."""

    def __init__(self) -> None:
        from kvevents import ResidentSet  # noqa: PLC0415

        self.resident = ResidentSet()
        self.gpu: list[Any] = []
        self.batches = self.gaps = 0
        self.truth: dict[str, set[Any]] = {}
        self.agreed = True
        self.outputs: Any = None

    def take(self, item: Any) -> None:
        """Apply one item of the subscriber."""
        from kvevents.subscribe import Batch, Gap  # noqa: PLC0415

        self.resident.apply(item)
        self.gaps += isinstance(item, Gap)
        if isinstance(item, Batch) and item.batch is not None:
            self.batches += 1
            self.gpu += [e for e in item.batch.events if getattr(e, "medium", "GPU") == "GPU"]

    def held(self, medium: str) -> set[Any]:
        """Hashes that the reader holds in one tier."""
        keys = self.resident.keys()
        return {key.hash for key in keys if key.medium == medium}


def run(options: argparse.Namespace, name: str, port: int, *, plugged: bool) -> Seen:
    """Start an engine, read its stream to the end, and what the engine wrote down."""
    from kvevents.subscribe import Source, Subscriber  # noqa: PLC0415

    seen = Seen()
    with tempfile.TemporaryDirectory() as ledger:
        env = os.environ | {
            "KVEVENTS_DEMO_LEDGER": ledger, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }  # fmt: skip
        env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        env["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
        env["VLLM_PLUGINS"] = "kvevents" if plugged else ""
        if options.tp == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        command = [sys.executable, __file__, "--serve", "--port", str(port), "--model", options.model,
                   "--tp", str(options.tp), "--requests", str(options.requests)]  # fmt: skip
        start = time.monotonic()
        source = Source(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1000}")
        with (
            Path(f"{options.logs}/vllm-{name}.log").open("w", encoding="utf-8") as log,
            subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            ) as engine,
        ):
            assert engine.stdin is not None
            assert engine.stdout is not None
            _wait_for("ready", engine.stdout, log.name)
            with Subscriber([source]) as subscriber:
                _read(subscriber, seen, until=lambda: subscriber.stats()[0].connected)
                print("go", file=engine.stdin, flush=True)
                _wait_for("served", engine.stdout, log.name)
                _read(subscriber, seen, silence_s=SILENCE_S)
            engine.communicate("done\n", timeout=120)
        for medium in TIERS:
            ledgers = [set(json.loads(p.read_text())) for p in sorted(Path(ledger).glob(f"{medium}-?"))]
            seen.truth[medium] = set.intersection(*ledgers)
            seen.agreed &= len(ledgers) == options.tp and all(one == ledgers[0] for one in ledgers)
        seen.truth["GPU"] = set(json.loads((Path(ledger) / "GPU").read_text()))
        seen.outputs = json.loads((Path(ledger) / "outputs").read_text())
    print(f"{name}: {seen.batches} batches, {seen.gaps} gaps, {time.monotonic() - start:.0f} s")
    for medium in ("GPU", *TIERS):
        held, truth = seen.held(medium), seen.truth[medium]
        same = (
            "the same"
            if held == truth
            else f"DIFFERENT: {len(truth - held)} missing, {len(held - truth)} extra"
        )
        print(f"  {medium:<8} engine {len(truth):>3} blocks, reader {len(held):>3}: {same}")
    return seen


def _wait_for(word: str, lines: Any, log: str) -> None:
    for line in lines:
        if line.strip() == word:
            return
    sys.exit(f"the engine ended early, see {log}")


def _read(subscriber: Any, seen: Seen, *, until: Any = lambda: False, silence_s: float = 60.0) -> None:
    """Take items until there is reason to stop, or none has come for so long."""
    last = time.monotonic()
    while not until() and time.monotonic() - last < silence_s:
        item = subscriber.poll(timeout=0.1)
        if item is not None:
            seen.take(item)
            last = time.monotonic()


def main() -> int:
    """Both runs and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="directory of a (tiny) model")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--port", type=int, default=15557)
    parser.add_argument("--logs", default=".")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.model, options.port, options.tp, options.requests)
        return 0
    stock = run(options, "stock", options.port, plugged=False)
    ours = run(options, "plug-in", options.port + 2, plugged=True)
    verdicts = {
        "every tier as the engine holds it": all(ours.held(m) == t for m, t in ours.truth.items()),
        "both workers hold the same": ours.agreed,
        "no gap": not ours.gaps,
        "blocks were evicted from every tier": len(ours.gpu) > GPU_BLOCKS
        and all(len(ours.truth[m]) == size for m, size in TIERS.items()),
        "GPU events as without the plug-in, in order": ours.gpu == stock.gpu,
        "outputs and cached tokens as without the plug-in": ours.outputs == stock.outputs,
    }
    for what, good in verdicts.items():
        print(f"{'yes' if good else 'NO ':<4}{what}")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
