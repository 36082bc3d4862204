"""What loading the plug-in costs a process that asks for none of its parts: a few modules of this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCRIPT = """
import json, logging, sys
import msgspec  # vLLM has it loaded in every process
before = set(sys.modules)
from kvevents.integrations.vllm import plugin
plugin.register()
assert [p.state for p in plugin.report().parts] == ["off"] * len(plugin.report().parts), plugin.report()
print(json.dumps(sorted(set(sys.modules) - before)))
"""
SMALL = 25
"""Modules of this package; each costs a fraction of a millisecond."""


def imported(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return json.loads(done.stdout)


def test_with_all_parts_off_nothing_but_this_package_is_imported():
    modules = imported(KVEVENTS_VLLM="")
    ours = [m for m in modules if m.partition(".")[0] == "kvevents"]
    others = {m.partition(".")[0] for m in modules} - {"kvevents"}
    assert others <= set(sys.stdlib_module_names), others - set(sys.stdlib_module_names)
    assert len(ours) < SMALL, ours


def test_with_all_parts_off_no_module_of_sockets_threads_or_vllm_is_imported():
    modules = set(imported(KVEVENTS_VLLM=""))
    assert not modules & {"zmq", "vllm", "asyncio", "multiprocessing", "rich", "typer", "inspect"}
    assert not [
        m for m in modules if m.startswith(("kvevents.publish", "kvevents.connectors", "kvevents.cli"))
    ]
