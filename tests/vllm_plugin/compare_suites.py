"""vLLM's own tests with stock vLLM and with the plug-in, compared test by test.

usage: compare_suites.py ENGINE_DIR SHARED_ENGINE_DIR SITE OUT_DIR [GROUP or tests/path ...]

ENGINE_DIR is an environment that setup_engine.sh made, SITE a directory with the installed package. Exit 0 if
no test that passes with stock vLLM does anything else with the plug-in.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path


def run(engine, scripts, groups, out, **env):
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.xml"):
        old.unlink()
    print(f"== {out.name}", flush=True)
    command = ["bash", str(scripts / "run_vllm_tests.sh"), str(engine), *groups]
    subprocess.run(command, env=os.environ | {"OUT": str(out)} | env, check=False)
    results = {}
    for path in sorted(out.glob("*.xml")):
        for case in ET.parse(path).getroot().iter("testcase"):
            kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
            results[f"{case.get('classname')}::{case.get('name')}"] = kinds.pop() if kinds else "passed"
    return results


def main():
    engine, scripts, site, out = map(Path, sys.argv[1:5])
    groups = sys.argv[5:] or ["events", "connectors"]
    out = out.resolve()
    stock = run(engine, scripts, groups, out / "stock", VLLM_PLUGINS="")
    ours = run(
        engine, scripts, groups, out / "plug-in",
        PYTHONPATH=str(site.resolve()), EXTRA="-p kvevents.integrations.vllm.pytest_plugin",
    )  # fmt: skip
    for name, results in (("stock", stock), ("plug-in", ours)):
        print(f"{name:<8}", ", ".join(f"{n} {what}" for what, n in sorted(Counter(results.values()).items())))
    worse = [test for test, what in stock.items() if what == "passed" and ours.get(test) != "passed"]
    for test in worse:
        print(f"  {ours.get(test, 'not run')} with the plug-in: {test}")
    print(
        "no test that passes with stock vLLM fails with the plug-in" if not worse and stock else "DIFFERENT"
    )
    return 1 if worse or not stock else 0


if __name__ == "__main__":
    sys.exit(main())
