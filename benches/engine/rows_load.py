"""What the plug-in costs a process that asks for none of its parts."""

from __future__ import annotations

import os
import subprocess
import sys

from benches.engine.pairs import value

SCRIPT = """
import time, logging, msgspec
start = time.process_time()
from kvevents.integrations.vllm import plugin
plugin.register()
spent = time.process_time() - start
assert not [p for p in plugin.report().parts if p.state != "off"]
print(spent * 1000)
"""


@value("loading the plug-in, no part asked for, CPU", unit="ms", floor=50, digits=1)
def loading():
    """In a process of its own that has msgspec, as every process of vLLM has."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "KVEVENTS_VLLM": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)
