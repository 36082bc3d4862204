"""What a real engine publishes with stock vLLM and with each part of the plug-in, compared event by event.

usage: compare_captures.py ENGINE_DIR SHARED_ENGINE_DIR SITE OUT_DIR
           [--parts A,B ...] [--scenarios NAME ...] [--keep-stock]

Runs the capture script of SHARED_ENGINE_DIR: one engine after the other in one process for each choice of
parts, whole hashes. `--parts` names choices (default: every part alone, those that are on by default, all),
`--scenarios` some of SCENARIOS. GPU events must be the same in order in every cache group, those of the
scenarios with a second tier or two workers as a multiset; outputs and cached-token counts the same. Where a
generated token differs, stock vLLM runs again: what differs between two runs of its own is named, not blamed.
Exit 0 if all is well.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

OFFLOAD = {
    "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostCopySpec", "spec_module_path": "kvprobe.offload_spec",
        "cpu_bytes_to_use": 655360, "self_describing_kv_events": True,
    },
}  # fmt: skip
PROBE = {
    "kv_connector": "ProbeConnector",
    "kv_connector_module_path": "kvprobe.connector",
    "kv_role": "kv_both",
}


class Scenario(NamedTuple):
    """Arguments of the capture script."""

    name: str
    model: str = "tiny-llama"
    options: tuple[str, ...] = ()
    ordered: bool = True
    """Compared in order, group by group; else as a multiset."""
    workers: int = 1
    """With several, what a connector reports is compared by the blocks that it holds in the end: votes
    announce a block once, where stock vLLM announces each report on which the workers agree."""


SCENARIOS = {
    "prefix": Scenario("prefix"),
    "eviction": Scenario("evict"),
    "reset": Scenario("reset"),
    "salt": Scenario("salt"),
    "full": Scenario("full"),
    "lora": Scenario("lora", options=("--lora", "{data}/tiny-lora")),
    "hybrid": Scenario("evict", "tiny-gemma3", ("--blocks", "40", "--max-len", "256")),
    "single": Scenario("single"),
    "twice": Scenario("twice"),
    "mixed": Scenario("mixed"),
    "offload": Scenario("offload", options=("--kv-transfer", json.dumps(OFFLOAD)), ordered=False),
    "tp2": Scenario("prefix", options=("--kv-transfer", json.dumps(PROBE)), ordered=False, workers=2),
}
STOCK = "stock"
RUN_S = 1500
"""After so long, one process of runs counts as failed."""


class Capture(NamedTuple):
    """What one run published and answered."""

    events: list[str]
    """Without those of a connector with several workers."""
    held: set[str]
    """Tier, group and hash of the blocks that other tiers than the GPU hold in the end."""
    groups: dict[str, list[str]]
    requests: list[tuple[list[int], int]]
    """Output tokens and number of cached tokens."""
    complete: bool
    """No number is missing, and replay says what the live stream said."""


def read(path: Path, scenario: Scenario) -> Capture:
    """The capture script's file; batch borders and time stamps are left out."""
    events, groups, requests = [], defaultdict(list), []
    held: set[str] = set()
    frames: dict[str, dict[int, str]] = {"live": {}, "replay": {}}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if entry["kind"] == "request":
            requests.append((entry["output_token_ids"], entry["num_cached_tokens"]))
        elif entry["kind"] == "frame" and entry["seq"] >= 0:
            frames[entry["src"]][entry["seq"]] = entry["payload"]
            if entry["src"] == "live":
                for event in msgspec.msgpack.decode(bytes.fromhex(entry["payload"]))[1]:
                    text = json.dumps(event, sort_keys=True, default=bytes.hex)
                    if event.get("medium") not in {None, "GPU"}:
                        apply(held, event)
                        if scenario.workers > 1:
                            continue
                    events.append(text)
                    groups[f"{event.get('medium')} {event.get('group_idx')}"].append(text)
    live = frames["live"]
    complete = bool(live) and sorted(live) == list(range(len(live))) and live == frames["replay"]
    return Capture(events, held, dict(groups), requests, complete)


def apply(held: set[str], event: dict[str, Any]) -> None:
    """One event of another tier."""
    blocks = {f"{event['medium']} {event.get('group_idx')} {h!r}" for h in event["block_hashes"]}
    if event["type"] == "BlockStored":
        held |= blocks
    else:
        held -= blocks


def capture(scripts: Path, data: Path, out: Path, names: list[str]) -> None:
    """Child: run the scenarios here, one engine after the other."""
    sys.path.insert(0, str(scripts))
    script = importlib.import_module("capture")
    port = random.SystemRandom().randrange(20_000, 29_000)
    for i, name in enumerate(names):
        scenario = SCENARIOS[name]
        options = [option.replace("{data}", str(data)) for option in scenario.options]
        model, workers = str(data / scenario.model), str(scenario.workers)
        sys.argv = ["capture.py", scenario.name, "--model", model, "--port", str(port + 3 * i),
                    "--tp", workers, *options, "--out", str(out / f"{name}.part")]  # fmt: skip
        start = time.monotonic()
        if script.main() == 0:
            (out / f"{name}.part").rename(out / f"{name}.jsonl")
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        gc.collect()
        importlib.import_module("vllm.distributed").cleanup_dist_env_and_memory()
    if os.environ["VLLM_PLUGINS"]:
        report = importlib.import_module("kvevents.integrations.vllm.plugin").report()
        (out / "parts").write_text(",".join(part.name for part in report.parts if part.state == "on"))


def run(options: argparse.Namespace, choice: str, names: list[str]) -> Path:
    """One choice of parts: a process for the scenarios with one worker, one for each of the others."""
    out = options.out / choice.replace(",", "+")
    out.mkdir(parents=True, exist_ok=True)
    for old in (*(out / f"{name}.jsonl" for name in names), out / "parts"):
        old.unlink(missing_ok=True)
    alone = [name for name in names if SCENARIOS[name].workers == 1]
    for batch in ([alone] if alone else []) + [[n] for n in names if n not in alone]:
        env = os.environ | {
            "PYTHONPATH": str(options.site.resolve()), "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
            "VLLM_PLUGINS": "" if choice == STOCK else "kvevents", "KVEVENTS_VLLM": choice,
        }  # fmt: skip
        env.pop("KVEVENTS_VLLM_OPTIONS", None)
        if batch is alone:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        command = [str(options.engine / "bin/python"), __file__, str(options.engine), str(options.scripts),
                   str(options.site), str(out), "--child", "--scenarios", *batch]  # fmt: skip
        with (out / f"{batch[0]}.log").open("w") as log:
            try:
                subprocess.run(command, env=env, stdout=log, stderr=log, timeout=RUN_S, check=False)
            except subprocess.TimeoutExpired:
                print(f"{choice}: not done after {RUN_S} s, see {log.name}")
    return out


def compare(stock: Capture, ours: Capture, *, ordered: bool) -> list[str]:
    """What differs; nothing if nothing does."""
    wrong = [] if ours.complete else ["numbers missing, or replay differs from live"]
    if ordered and stock.groups != ours.groups:
        groups = {*stock.groups, *ours.groups}
        wrong += [f"order in {g}" for g in sorted(groups) if stock.groups.get(g) != ours.groups.get(g)]
    if Counter(stock.events) != Counter(ours.events):
        one, two = Counter(stock.events), Counter(ours.events)
        wrong.append(f"{(one - two).total()} events only in stock, {(two - one).total()} only here")
    if stock.held != ours.held:
        wrong.append(f"{len(stock.held ^ ours.held)} blocks of other tiers")
    if [cached for _, cached in stock.requests] != [cached for _, cached in ours.requests]:
        wrong.append("cached-token counts")
    return wrong + [f"output of request {i}" for i in other_outputs(stock, ours)]


def other_outputs(one: Capture, two: Capture) -> list[int]:
    """Requests that generated other tokens."""
    return [i for i, (a, b) in enumerate(zip(one.requests, two.requests, strict=False)) if a[0] != b[0]]


class Judge:
    """Stock captures, several where stock vLLM itself generates other tokens from run to run."""

    def __init__(self, options: argparse.Namespace, names: list[str]) -> None:
        self.options = options
        self.stock: dict[str, list[Capture]] = defaultdict(list)
        kept = options.out / STOCK
        missing = [n for n in names if not (options.keep_stock and (kept / f"{n}.jsonl").exists())]
        if missing:
            run(options, STOCK, missing)
        self._add(kept, names)

    def _add(self, out: Path, names: list[str]) -> None:
        for name in names:
            if (out / f"{name}.jsonl").exists():
                self.stock[name].append(read(out / f"{name}.jsonl", SCENARIOS[name]))

    def row(self, name: str, out: Path) -> tuple[bool, str]:
        """Whether a capture is that of a stock run, and the words for it."""
        path, ordered = out / f"{name}.jsonl", SCENARIOS[name].ordered
        if not path.exists() or not self.stock[name]:
            return False, f"NOT RUN, see {out if self.stock[name] else self.options.out / STOCK}"
        ours = read(path, SCENARIOS[name])
        first = self.stock[name][0]
        wrong = compare(first, ours, ordered=ordered)
        for again in range(1, 3):
            if not wrong or not other_outputs(first, ours):
                break
            if len(self.stock[name]) == again:
                self._add(run(self.options, STOCK, [name]), [name])
            if len(self.stock[name]) == again:
                break
            if not compare(self.stock[name][again], ours, ordered=ordered):
                varies = other_outputs(first, self.stock[name][again])
                return (
                    True,
                    f"as in one of {again + 1} stock runs, which differ in the outputs of requests {varies}",
                )
        how = "same in order" if ordered else "same multiset"
        if wrong:
            return False, "; ".join(wrong)
        tiers = f"; the same {len(ours.held)} blocks in other tiers" if ours.held else ""
        return True, f"{len(ours.events)} events, {how}{tiers}; outputs and hits the same"


def table(options: argparse.Namespace) -> bool:
    """All runs, and a row for each."""
    names, judge, good = options.scenarios, Judge(options, options.scenarios), True
    for choice in options.parts:
        out = run(options, choice, names)
        on = (out / "parts").read_text() if (out / "parts").exists() else "nothing"
        if set(on.split(",")) != set(choice.split(",")):
            print(f"{choice}: plugged in was {on}")
            good = False
        for name in names:
            same, words = judge.row(name, out)
            good &= same
            print(f"{'ok' if same else 'DIFFERENT':<10}{name:<10}{choice:<34}{words}", flush=True)
    print("every capture is that of stock vLLM" if good else "DIFFERENT")
    return good


def main() -> int:
    """Parse, and run as parent or child."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("engine", "scripts", "site", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--parts", nargs="+")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--keep-stock", action="store_true", help="use stock captures that are there again")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        capture(options.scripts, options.engine / "share/engine", options.out, options.scenarios)
        return 0
    if not options.parts:
        known = tuple(importlib.import_module("kvevents.integrations.vllm.names").NAMES)
        usual = importlib.import_module("kvevents.integrations.vllm.settings").DEFAULT_PARTS
        options.parts = list(dict.fromkeys([*known, ",".join(usual), ",".join(known)]))
    return 0 if table(options) else 1


if __name__ == "__main__":
    sys.exit(main())
