"""Dynamo's stand-alone indexer as a process of its own: the reader that nobody here wrote.

It comes with `ai-dynamo-runtime`, in this environment or in the one that `KVEVENTS_DYNAMO` names (a folder,
or its interpreter). It listens on all interfaces and asks nobody for a name, so it is started for one test or
benchmark only, and ended after it.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["NOT_HERE", "DynamoIndexer", "dynamo_python"]

NOT_HERE = "KVEVENTS_DYNAMO names no environment with ai-dynamo-runtime"
MODEL = "m"


def dynamo_python() -> str | None:
    """The interpreter that has Dynamo; `None` where there is none."""
    named = os.environ.get("KVEVENTS_DYNAMO")
    if named:
        path = Path(named).expanduser()
        python = path / "bin" / "python" if path.is_dir() else path
        return str(python) if python.exists() else None
    from benches.harness import have

    return sys.executable if have("dynamo.indexer") else None


class DynamoIndexer:
    """One indexer, for one test. A context manager: leaving it ends the process."""

    def __init__(self, python: str) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        # In a file: nobody reads a pipe while it runs.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [python, "-m", "dynamo.indexer", "--port", str(self.port)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        )
        self._http = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            self._wait_until_up()
        except BaseException:
            self.close()
            raise

    def _wait_until_up(self) -> None:
        end = time.monotonic() + 30
        while True:
            try:
                self._call("/health")
            except OSError as e:
                self._http.close()
                if self._process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"dynamo.indexer did not start: {self.log()[-500:]}") from e
                time.sleep(0.05)
            else:
                return

    def register(
        self, instance: int, endpoint: str, block_size: int, *, replay: str | None = None, rank: int = 0
    ) -> None:
        """Let it follow a publisher. All publishers of one indexer have one block size."""
        body = {
            "instance_id": instance, "endpoint": endpoint, "model_name": MODEL, "block_size": block_size,
            "dp_rank": rank,
        }  # fmt: skip
        self._call("/register", body if replay is None else {**body, "replay_endpoint": replay})

    def query(self, token_ids: Sequence[int], lora_name: str | None = None) -> dict[str, Any]:
        """Its answer as it stands: `scores` (device) by instance and rank, `instances` by tier; in tokens."""
        body: dict[str, Any] = {"token_ids": list(token_ids), "model_name": MODEL}
        answer: dict[str, Any] = json.loads(
            self._call("/query", body if lora_name is None else {**body, "lora_name": lora_name})
        )
        return answer

    def device_tokens(self, token_ids: Sequence[int], instance: int, rank: int = 0) -> int:
        """Tokens of the prompt that one rank holds on its device."""
        return int(self.query(token_ids)["scores"].get(str(instance), {}).get(str(rank), 0))

    def log(self) -> str:
        """What it printed."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _call(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        head = {"content-type": "application/json"}
        self._http.request(
            "GET" if body is None else "POST", path, None if body is None else json.dumps(body), head
        )
        with self._http.getresponse() as answer:
            data = answer.read()
            if answer.status >= 300:
                raise RuntimeError(f"{path}: {answer.status} {data[:200]!r}")
        return data

    def close(self) -> None:
        """End it."""
        self._http.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
