"""Real engines for tests, in the environment that KVEVENTS_ENGINE names, with this package beside it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import queue
import random
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

import kvevents
from kvevents import ResidentSet
from kvevents.subscribe import Batch, Source, Subscriber

ENGINE = os.environ.get("KVEVENTS_ENGINE", "")
HERE = Path(__file__).resolve().parent
MARK = "@answer "
BLOCK = 32
START_S = 900.0
"""An engine with two workers on a machine that is busy with other things."""

needs_engine = pytest.mark.skipif(
    not (ENGINE and Path(ENGINE, "bin/python").exists()),
    reason="no real engine: KVEVENTS_ENGINE names no environment with vLLM",
)


def make_site(where):
    """A directory with this package alone, for PYTHONPATH: the engine's own packages stay its own."""
    (where / "kvevents").symlink_to(Path(kvevents.__file__).parent)
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvevents")
    metadata = Path(str(entry.dist.locate_file(""))) / f"kvevents-{entry.dist.version}.dist-info"
    (where / metadata.name).symlink_to(metadata)
    return where


def ids(seed, n):
    rnd = random.Random(seed)
    return [rnd.randrange(4, 250) for _ in range(n)]


def free_port(ranks=1):
    """A port whose successors are free too, and those of the replay sockets 1000 above."""
    while True:
        port = random.SystemRandom().randrange(20_000, 31_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for other in (port + i + k for i in range(ranks) for k in (0, 1000)):
                stack.enter_context(socket.socket()).bind(("0.0.0.0", other))
            return port


def arguments(port, blocks=64, **more):
    """Of `vllm.LLM`."""
    return {
        "model": f"{ENGINE}/share/engine/tiny-llama", "dtype": "bfloat16", "max_model_len": 256,
        "block_size": BLOCK, "enable_prefix_caching": True, "enforce_eager": True, "max_num_seqs": 4,
        "num_gpu_blocks_override": blocks, "kv_cache_memory_bytes": 1 << 26, "skip_tokenizer_init": True,
        "kv_events_config": {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}",
            "replay_endpoint": f"tcp://*:{port + 1000}",
        },
    } | more  # fmt: skip


class EngineProcess:
    """One engine; `ask(do=..., ...)` gives its answer. Ends with the `with` block, whatever happened."""

    def __init__(self, site, port, *, log, plugins="kvevents", paths=(), env=None, **more):
        self.port, self.log = port, log
        variables = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, (site, *paths))), "VLLM_PLUGINS": plugins,
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        }  # fmt: skip
        for name in ("KVEVENTS_VLLM", "KVEVENTS_VLLM_OPTIONS", "VLLM_LOGGING_LEVEL"):
            variables.pop(name, None)
        if more.get("tensor_parallel_size", 1) == 1 and not more.get("ranks"):
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        with Path(log).open("ab") as stderr:
            self.process = subprocess.Popen(
                [f"{ENGINE}/bin/python", str(HERE / "engine_child.py"), json.dumps(arguments(port, **more))],
                env=variables | (env or {}), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                text=True, start_new_session=True,
            )  # fmt: skip
        self._lines = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self.process.stdout:
            if line.startswith(MARK):
                self._lines.put(json.loads(line[len(MARK) :]))
        self._lines.put(None)

    def __enter__(self):
        try:
            told = self.hear(START_S)
        except BaseException:
            self._end()
            raise
        self.parts = set(told["parts"])
        return self

    def __exit__(self, *_):
        self._end()

    def _end(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its workers too
        self.process.wait(30)
        self.process.stdout.close()

    def hear(self, seconds=120.0):
        """The next answer; the end of the engine is a failure with the end of its log."""
        try:
            told = self._lines.get(timeout=seconds)
        except queue.Empty:
            pytest.fail(f"no answer in {seconds} s: {self.tail()}")
        if told is None:
            pytest.fail(f"the engine ended: {self.tail()}")
        return told

    def tail(self):
        return Path(self.log).read_text(errors="replace")[-3000:]

    def ask(self, seconds=120.0, **command):
        self.tell(**command)
        return self.hear(seconds)

    def tell(self, **command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def generate(self, *prompts, **more):
        told = self.ask(do="generate", prompts=[list(p) for p in prompts], **more)
        assert "outputs" in told, told
        return told["outputs"]

    def children(self):
        """Processes below this one: pid and command line."""
        parents = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
        found, below = [], {self.process.pid}
        while below:
            below = {pid for pid, parent in parents.items() if parent in below}
            found += below
        return found


def warnings(log):
    """Lines of warnings that this package wrote."""
    ours = ("kvevents", "cannot be encoded", "is in use")
    lines = Path(log).read_text(errors="replace").splitlines()
    return [line for line in lines if "WARNING" in line and any(word in line for word in ours)]


class Reader:
    """Follows one engine from here."""

    def __init__(self, port, *, replay=True, host="127.0.0.1"):
        source = Source(f"tcp://{host}:{port}", f"tcp://{host}:{port + 1000}" if replay else None)
        self.stream = Subscriber([source])
        self.resident = ResidentSet()
        self.items = []

    def __enter__(self):
        self.stream.__enter__()
        return self

    def __exit__(self, *words):
        self.stream.__exit__(*words)

    def read(self, until, seconds=60.0):
        """Apply items until there is what was waited for."""
        deadline = time.monotonic() + seconds
        while not until():
            if time.monotonic() > deadline:
                pytest.fail(f"not seen in {seconds} s; items: {self.items[-20:]}; {self.stream.stats()}")
            self.take(0.1)

    def take(self, seconds):
        """Wait so long for an item, and apply it."""
        item = self.stream.poll(seconds)
        if item is not None:
            self.items.append(item)
            self.resident.apply(item)

    def connected(self):
        self.read(lambda: self.stream.stats()[0].connected)

    def of(self, kind):
        return [item for item in self.items if isinstance(item, kind)]

    def events(self, medium=None):
        return [
            e
            for item in self.of(Batch)
            for e in item.batch.events
            if medium in (None, getattr(e, "medium", None))
        ]


def hello(port, seconds=30.0):
    """What the replay socket says of its publisher."""
    with zmq.Context.instance().socket(zmq.DEALER) as asked:
        asked.setsockopt(zmq.LINGER, 0)
        asked.connect(f"tcp://127.0.0.1:{port + 1000}")
        asked.send_multipart([b"", b"KVE1", msgspec.msgpack.encode({"op": "hello"})])
        if not asked.poll(int(seconds * 1000)):
            pytest.fail("no answer to hello")
        return msgspec.msgpack.decode(asked.recv_multipart()[2])
