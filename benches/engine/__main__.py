"""`python -m benches.engine [--pairs 7] [--only publish] [--strict]`: stock against the plug-in."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent

for _name, _value in {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}.items():  # fmt: skip
    os.environ.setdefault(_name, _value)


def main():
    """Registers the plug-in, with stock's names kept, and prints a line a row."""
    concepts = sorted(p.stem.removeprefix("rows_") for p in HERE.glob("rows_*.py"))
    ask = argparse.ArgumentParser(prog="python -m benches.engine", description=__doc__)
    ask.add_argument("--pairs", type=int, default=7)
    ask.add_argument("--only", action="append", choices=concepts, help="one concept; may be repeated")
    ask.add_argument("--strict", action="store_true", help="exit code 1 where a floor is missed")
    args = ask.parse_args()

    import vllm
    import vllm.envs

    vllm.envs.enable_envs_cache()
    importlib.import_module("benches.engine.stock")
    from benches.engine import pairs
    from kvevents import _core
    from kvevents.integrations.vllm import plugin

    plugin.register()
    print(plugin.report().line())
    print(
        f"Machine: cores {os.cpu_count()}, load {os.getloadavg()[0]:.1f}, python {platform.python_version()}"
    )
    print(f"vllm {vllm.__version__}, kvevents {_core.__version__} ({_core.BUILD_PROFILE})")
    print(f"Medians of {args.pairs} interleaved pairs.\n\n{pairs.HEAD}", flush=True)
    started, bad = time.monotonic(), 0
    for concept in args.only or concepts:
        before = len(pairs.DECLARED)
        importlib.import_module(f"benches.engine.rows_{concept}")
        for declared in pairs.DECLARED[before:]:
            try:
                lines = pairs.measure(declared, args.pairs)
            except Exception as e:
                lines, bad = [f"| {r.name} | failed: {type(e).__name__}: {e} |" for r in declared.rows], 1
            for line in lines:
                bad |= args.strict and line.endswith("missed |")
                print(line, flush=True)
    print(f"\n{time.monotonic() - started:.0f} s")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
