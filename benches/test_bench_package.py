"""What the package itself costs: the wheel, and `import kvevents`."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

from benches.harness import Absent, as_tests, value

DIST = Path(__file__).resolve().parent.parent / "dist"


@value("wheel", unit="MB", floor=1.5, aim=0.8)
def wheel() -> float | Absent:
    """The release wheel that `make wheel` left in dist/."""
    wheels = list(DIST.glob("kvevents-*.whl"))
    if len(wheels) != 1:
        return Absent("no wheel in dist/: make wheel")
    return wheels[0].stat().st_size / 1e6


IMPORT = """
import time
import msgspec.msgpack, typing, collections.abc
began = time.perf_counter_ns()
import kvevents
print(time.perf_counter_ns() - began)
"""


@value("import kvevents, warm, beyond msgspec", unit="ms", floor=15, aim=5)
def import_time() -> float:
    """Median of fresh interpreters; files are in the page cache after the first."""
    runs = [
        int(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout)
        for _ in range(12)
    ]
    return statistics.median(runs[1:]) / 1e6


test_rows = as_tests(__name__)
