"""A real vLLM with two CPU tiers in a MultiConnector; a reader elsewhere must hold what they hold.

Run by ``make demo-vllm`` with the Python of an environment that has vLLM. The engine runs three times: as
shipped, with the plug-in announcing every copy of a block as vLLM does, and with it announcing residency.
Requests come one at a time and share prefixes, until blocks are evicted from GPU and tiers; prompts that end
where a block ends are asked twice, which leaves one hash in two blocks. Each worker writes down what its
tiers hold, the scheduler what the block pool holds. Verdict (exit code): with residency the reader's set is
that of the engine in every tier, at every checkpoint; as copies the GPU events are those of the engine as
shipped, in order, and the tiers are right. What the shipped engine loses is printed beside.
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
CHECKPOINTS = 4
SILENCE_S = 5.0
"""At a checkpoint: so long nothing may have come before the stream counts as read."""
BLOCK = 32
ANSWER = 5
"""Tokens of an answer. No block ends in one, so that hashes depend on prompts alone."""
RUNS: dict[str, dict[str, str]] = {
    "stock": {"VLLM_PLUGINS": ""},
    "every_copy": {"VLLM_PLUGINS": "kvevents", "KVEVENTS_VLLM_OPTIONS": '{"report": "every_copy"}'},
    "residency": {"VLLM_PLUGINS": "kvevents", "KVEVENTS_VLLM_OPTIONS": '{"report": "residency"}'},
}
PARTS = "publisher,aggregator,multi,pool"


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
    """Four prefixes with different ends; every third prompt ends where a block ends, and is asked twice.

    The last token of a prompt is always computed, and its block with it: the second time there are two of it.
    """
    rnd = random.Random(5)
    base = [[rnd.randrange(4, 250) for _ in range(64 + 32 * i)] for i in range(4)]
    out: list[list[int]] = []
    while len(out) < count:
        prefix = rnd.choice(base)
        if rnd.random() < 1 / 3:
            prompt = [*prefix, *(rnd.randrange(4, 250) for _ in range(BLOCK))]
            out += [prompt, prompt]
        else:
            end = rnd.choice((0, BLOCK, 2 * BLOCK)) + rnd.randrange(1, BLOCK - ANSWER)
            out.append([*prefix, *(rnd.randrange(4, 250) for _ in range(end))])
    return out[:count]


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
    asked = prompts(requests)
    for i, prompt in enumerate(asked, 1):
        sampling = vllm.SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
        done = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        outputs.append([done.num_cached_tokens, list(done.outputs[0].token_ids)])
        if i * CHECKPOINTS // requests != (i - 1) * CHECKPOINTS // requests:
            (Path(os.environ["KVEVENTS_DEMO_LEDGER"]) / "outputs").write_text(json.dumps(outputs))
            print("checkpoint", flush=True)
            sys.stdin.readline()  # the reader says when it has compared


# ---------------------------------------------------------------- the reader


class Seen:
    """What one run published and held."""

    def __init__(self) -> None:
        from kvevents import ResidentSet  # noqa: PLC0415

        self.resident = ResidentSet()
        self.gpu: dict[int | None, list[Any]] = {}
        """The GPU's events by group, in order."""
        self.batches = self.gaps = 0
        self.wrong: dict[str, int] = {}
        """Tier, and the checkpoints at which the reader held something else than the engine."""
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
            for event in item.batch.events:
                if getattr(event, "medium", "GPU") == "GPU":
                    self.gpu.setdefault(getattr(event, "group_idx", None), []).append(event)

    def held(self, medium: str) -> set[Any]:
        """Hashes that the reader holds in one tier."""
        keys = self.resident.keys()
        return {key.hash for key in keys if key.medium == medium}

    def compare(self, ledger: Path, workers: int) -> None:
        """The reader's set beside what the engine wrote down."""
        for medium in TIERS:
            ledgers = [set(json.loads(p.read_text())) for p in sorted(ledger.glob(f"{medium}-?"))]
            self.truth[medium] = set.intersection(*ledgers)
            self.agreed &= len(ledgers) == workers and all(one == ledgers[0] for one in ledgers)
        self.truth["GPU"] = set(json.loads((ledger / "GPU").read_text()))
        self.outputs = json.loads((ledger / "outputs").read_text())
        told = []
        for medium in ("GPU", *TIERS):
            held, truth = self.held(medium), self.truth[medium]
            lost, extra = len(truth - held), len(held - truth)
            self.wrong[medium] = self.wrong.get(medium, 0) + (held != truth)
            differs = f" but {lost} missing, {extra} extra" if lost or extra else ""
            told.append(f"{medium} {len(truth)}{differs}")
        print(f"  after {len(self.outputs):>3} requests the engine holds, and the reader: " + "; ".join(told))


def run(options: argparse.Namespace, name: str, port: int) -> Seen:
    """Start an engine, read its stream to the end, and compare with what the engine wrote down."""
    from kvevents.subscribe import Source, Subscriber  # noqa: PLC0415

    seen = Seen()
    with tempfile.TemporaryDirectory() as ledger:
        env = os.environ | {
            "KVEVENTS_DEMO_LEDGER": ledger, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "KVEVENTS_VLLM": PARTS,
        } | RUNS[name]  # fmt: skip
        env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        env["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
        if options.tp == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        command = [sys.executable, __file__, "--serve", "--port", str(port), "--model", options.model,
                   "--tp", str(options.tp), "--requests", str(options.requests)]  # fmt: skip
        start = time.monotonic()
        print(f"{name}: {options.requests} requests, {options.tp} workers", flush=True)
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
                for _ in range(CHECKPOINTS):
                    print("go", file=engine.stdin, flush=True)
                    _wait_for("checkpoint", engine.stdout, log.name)
                    _read(subscriber, seen, silence_s=SILENCE_S)
                    seen.compare(Path(ledger), options.tp)
            engine.communicate("done\n", timeout=120)
    print(f"  {seen.batches} batches, {seen.gaps} gaps, {time.monotonic() - start:.0f} s", flush=True)
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
    """The three runs and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="directory of a (tiny) model")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--port", type=int, default=15557)
    parser.add_argument("--logs", default=".")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.model, options.port, options.tp, options.requests)
        return 0
    runs = {name: run(options, name, options.port + 2 * i) for i, name in enumerate(RUNS)}
    stock, copies, resident = runs["stock"], runs["every_copy"], runs["residency"]
    ours = (copies, resident)
    verdicts = {
        "residency: every tier as the engine holds it, at every checkpoint": not any(resident.wrong.values()),
        "every copy: the connectors' tiers as the workers hold them": not any(copies.wrong[m] for m in TIERS),
        "every copy: GPU events as the engine ships them, in order, by group": copies.gpu == stock.gpu,
        "some hash had two blocks and lost one: copies do not say what is held": bool(copies.wrong["GPU"]),
        "both workers hold the same": all(r.agreed for r in ours),
        "no gap": not any(r.gaps for r in ours),
        "blocks were evicted from every tier": all(
            len(r.truth[m]) == size for r in ours for m, size in TIERS.items()
        ) and sum(map(len, copies.gpu.values())) > 2 * GPU_BLOCKS,
    }  # fmt: skip
    for what, good in verdicts.items():
        print(f"{'yes' if good else 'NO ':<4}{what}")
    lost = ", ".join(f"{m} at {n} of {CHECKPOINTS} checkpoints" for m, n in stock.wrong.items() if n)
    print(f"as shipped the reader is wrong in {lost or 'no tier'}")
    verdicts["outputs"] = _same_outputs(stock, ours)
    return 0 if all(verdicts.values()) else 1


def _same_outputs(stock: Seen, ours: tuple[Seen, ...]) -> bool:
    """Cached tokens are the same; a generated token may differ on some processors, and is named."""
    same = True
    for other in ours:
        for i, (a, b) in enumerate(zip(stock.outputs, other.outputs, strict=True)):
            if a[0] != b[0]:
                print(f"NO  request {i}: {b[0]} cached tokens, {a[0]} as shipped")
                same = False
            elif a[1] != b[1]:
                print(f"    request {i}: other tokens were generated ({b[1]}, {a[1]} as shipped)")
    if same:
        print("yes cached tokens as without the plug-in")
    return same


if __name__ == "__main__":
    sys.exit(main())
