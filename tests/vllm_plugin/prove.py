"""The plug-in against real vLLM, from end to end: what `make test-vllm` runs.

usage: prove.py ENGINE_DIR SHARED_ENGINE_DIR SITE OUT_DIR [WORD ...]

Words choose: `plugin` (this directory's tests, engines among them), `captures` (compare_captures.py), `next`
(the same tests on the sources of the next release), `smoke` (one capture and vLLM's group `events`), and the
groups of vllm_tests.txt (compare_suites.py). Without words, all but `smoke`. Exit 0 if all of them are good.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
NEXT = "0.33.0"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
OURS = (*PYTEST, "-c", "/dev/null", "--rootdir", str(HERE.parents[1]), "--confcutdir", str(HERE))
NEXT_TESTS = ("tests/distributed/test_events.py", "tests/distributed/test_kv_cache_events.py",
              "tests/v1/kv_connector/unit/test_output_aggregator.py")  # fmt: skip
_SALVAGE = "tests/v1/kv_connector/unit/test_output_aggregator.py::test_"
_SILENT = "expects that a worker that reports nothing agrees; here silence is no vote"
OTHERWISE = {
    f"{_SALVAGE}replay_preserves_get_and_clear_fields": _SILENT,
    f"{_SALVAGE}salvaged_votes_dropped_live_votes_unaffected_lmcache_exact_quorum": _SILENT,
    f"{_SALVAGE}salvaged_votes_dropped_live_votes_unaffected_mooncake_quorum": _SILENT,
    f"{_SALVAGE}salvaged_kv_cache_events_do_not_raise_quorum": "expects two workers in the merged container; "
    "here it holds what both agreed on, as one worker's",
}
"""Tests of the next release that the plug-in is meant to fail, and why."""
DEFAULT_PARTS = "publisher,aggregator,multi"


class Proof:
    """Where everything is, and what was found so far."""

    def __init__(self, engine: Path, scripts: Path, site: Path, out: Path) -> None:
        self.engine, self.scripts, self.site, self.out = engine, scripts, site.resolve(), out.resolve()
        self.python = str(engine / "bin/python")
        self.verdicts: list[tuple[str, bool, float]] = []
        self.out.mkdir(parents=True, exist_ok=True)

    def run(
        self, what: str, *command: str, path: tuple[Path, ...] = (), cwd: Path | None = None, **env: str
    ) -> bool:
        """One command of the engine's Python, and its verdict."""
        print(f"== {what}", flush=True)
        start = time.monotonic()
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, self.site)))} | env
        good = subprocess.run([self.python, *command], env=variables, cwd=cwd, check=False).returncode == 0
        self.verdicts.append((what, good, time.monotonic() - start))
        return good

    def places(self, out: str) -> tuple[str, ...]:
        """The four arguments that the scripts share."""
        return str(self.engine), str(self.scripts), str(self.site), str(self.out / out)

    def plugin(self) -> None:
        """This directory's tests, with real engines."""
        self.run("tests of the plug-in", *OURS, "-rs", str(HERE), KVEVENTS_ENGINE=str(self.engine.resolve()))

    def captures(self, *options: str) -> None:
        """Engines with and without each part."""
        self.run("captures", str(HERE / "compare_captures.py"), *self.places("captures"), *options)

    def suites(self, groups: list[str]) -> None:
        """vLLM's own tests."""
        self.run("vLLM's tests", str(HERE / "compare_suites.py"), *self.places("suites"), *groups)

    def next(self) -> None:
        """The next release, of which there is no build for a CPU: its sources, and some of its tests."""
        source = self._source()
        if source is None:
            self.verdicts.append((f"sources of vLLM {NEXT}", False, 0.0))
            return
        # Part `pool` knows 0.32 alone, and so do its tests; that it falls back is in test_plugin_next.py.
        ours = [str(path) for path in sorted(HERE.glob("test_plugin*.py")) if path.stem != "test_plugin_pool"]
        self.run(f"tests of the plug-in on vLLM {NEXT}'s sources", *OURS, "-rs", *ours, path=(source,))
        plugged = ["-p", "kvevents.integrations.vllm.pytest_plugin"]
        for test, why in OTHERWISE.items():
            print(f"left out with the plug-in: {test} {why}")
            plugged += ["--deselect", test]
        for kind, options in (("stock", []), ("plug-in", plugged)):
            self.run(
                f"vLLM {NEXT}'s own tests, {kind}", *PYTEST, *options, *NEXT_TESTS,
                path=(source,), cwd=source / "only-tests", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
                VLLM_PLUGINS="",
            )  # fmt: skip

    def _source(self) -> Path | None:
        root = self.out / f"vllm-{NEXT}"
        if not (root / "only-tests/tests").exists():
            print(f"== getting the sources of vLLM {NEXT}", flush=True)
            pip = [self.python, "-m", "pip", "--disable-pip-version-check", "-q", "download", "--no-deps"]
            pip += ["--no-build-isolation", "--no-binary", "vllm", "-d", str(self.out), f"vllm=={NEXT}"]
            # pip asks the sources for their version: for no device, nothing is built.
            env = os.environ | {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": NEXT}
            unpack = ["tar", "-xzf", f"{root}.tar.gz", "-C", str(self.out)]
            for command in (pip, unpack):
                if subprocess.run(command, env=env, check=False).returncode:
                    return None
            (root / "only-tests").mkdir(exist_ok=True)
            (root / "tests").rename(root / "only-tests/tests")
        return root

    def smoke(self) -> None:
        """Some minutes' worth."""
        self.captures("--scenarios", "prefix", "--parts", DEFAULT_PARTS)
        self.suites(["events", "--parts", DEFAULT_PARTS])


def main() -> int:
    """Run what was asked for, then one line for each."""
    proof = Proof(*map(Path, sys.argv[1:5]))
    words = sys.argv[5:]
    stages = {"plugin": proof.plugin, "captures": proof.captures, "smoke": proof.smoke, "next": proof.next}
    groups = [word for word in words if word not in stages]
    for name, stage in stages.items():
        if name in words or (not words and name != "smoke"):
            stage()
    if groups or not words:
        proof.suites(groups)
    print("==")
    for what, good, seconds in proof.verdicts:
        print(f"{'ok' if good else 'FAILED':<8}{what} ({seconds:.0f} s)")
    return 0 if all(good for _, good, _ in proof.verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
