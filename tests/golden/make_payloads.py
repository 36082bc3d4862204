"""Writes `payloads.txt`: the short payloads of the vectors and captures here, for tests without JSON.

A line: dialect, payload in hex. Run from the repository's root: `python tests/golden/make_payloads.py`.
"""

from __future__ import annotations

from pathlib import Path

from kvevents.testing import read_json_lines

HERE = Path(__file__).resolve().parent
LONGEST = 700
"""Bytes; longer payloads say nothing new."""


def main() -> None:
    lines: dict[str, None] = {}
    for v in read_json_lines(HERE / "conformance" / "vectors.jsonl.gz"):
        if len(v["hex"]) <= LONGEST * 2:
            lines[f"{v['dialect'].replace(' ', '-')} {v['hex']}"] = None
    for path in sorted((HERE / "conformance" / "captures").glob("*.jsonl")):
        for v in read_json_lines(path):
            if v["kind"] == "frame" and v["payload"] and len(v["payload"]) <= LONGEST * 2:
                lines[f"vllm-map-0.32 {v['payload']}"] = None
    (HERE / "payloads.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
