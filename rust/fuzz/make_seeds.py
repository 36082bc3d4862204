# ruff: noqa: INP001 - a script
"""Writes the seeds of the fuzz corpus: ``python rust/fuzz/make_seeds.py`` with kvevents installed.

Payloads are those of ``tests/golden``, the smallest of each dialect and shape; lists and dumps are made of
them; operations are random, from a fixed seed. What fuzzers found stands beside them and is left alone.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

from kvevents import EventList, PrefixIndex, decode

HERE = Path(__file__).parent
GOLDEN = HERE.parent.parent / "tests" / "golden"
PER_DIALECT = 4
SMALL = 700


def write(target: str, data: bytes) -> None:
    """One seed, named by what is in it, as libFuzzer names them."""
    folder = HERE / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / hashlib.sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)


def payloads() -> list[bytes]:
    """Engines' payloads: of each dialect the smallest, the largest that is small, and two between."""
    by_dialect: dict[str, set[bytes]] = {}
    for line in (GOLDEN / "payloads.txt").read_text().splitlines():
        dialect, packed = line.split()
        by_dialect.setdefault(dialect, set()).add(bytes.fromhex(packed))
    for path in sorted((GOLDEN / "conformance" / "captures").iterdir()):
        lines = map(json.loads, path.read_text().splitlines())
        by_dialect[path.name] = {bytes.fromhex(f["payload"]) for f in lines if f["kind"] == "frame"} - {b""}
    chosen = []
    for found in by_dialect.values():
        small = sorted((p for p in found if len(p) <= SMALL), key=lambda p: (len(p), p))
        chosen += (
            [small[i * (len(small) - 1) // (PER_DIALECT - 1)] for i in range(PER_DIALECT)] if small else []
        )
    return sorted(set(chosen))


def main() -> None:
    """All of them."""
    seeds = payloads()
    for payload in seeds:
        write("decode_any", payload)
        write("roundtrip", payload)
    events = EventList([])
    index = PrefixIndex(seed=1, clock=lambda: 0.0)
    for n, payload in enumerate(seeds[::4]):
        some = EventList(decode(payload).events)
        write("event_list", some.to_bytes())
        events += some
        index.apply(f"w{n % 3}", n % 2, None, payload)
        if n < 10:
            write("index_dump", index.dump())
    write("event_list", events[:20].with_source("cpu").to_bytes())
    dice = random.Random(1)  # noqa: S311 - repeatable
    for n in range(24):
        write("stream", dice.randbytes(40 + 20 * n))
        write("index_ops", dice.randbytes(40 + 20 * n))


if __name__ == "__main__":
    main()
