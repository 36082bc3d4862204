"""The guards that keep the Rust/Python seam where it is."""

from __future__ import annotations

import ast
import gc
import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path

import msgspec
import pytest

import kvevents
from kvevents import _core

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "python" / "kvevents" / "_core.pyi"
RAW = ROOT / "rust" / "py" / "src" / "raw"

# Signatures that may name Python containers, each with its reason.
ALLOWED = {
    "EventList.__new__": "built from any iterable of events: the convenience beside handles",
    "EventList.__getitem__": "the three parameters of `slice`",
    "BlockHashes.__getitem__": "the three parameters of `slice`",
    "BlockIds.__getitem__": "the three parameters of `slice`",
    "BlockPool.evict_blocks": "connectors report a set of ids",
    "BlockPool.unpin_blocks": "the callback is called when a block is used again, not per token",
    "EventQueue.extend": "built from any iterable of events: the convenience beside handles",
    "KVEventRecorder.extend": "built from any iterable of events: the convenience beside handles",
    "PrefixIndex.__new__": "a clock of the caller's own, called once a message",
    "PrefixIndex.apply_events": "any iterable of events: the convenience beside handles",
    "PrefixIndex.apply_snapshot": "any iterable of events: the convenience beside handles",
    "PrefixIndex.find_many": "the outer iterable of prompts, each a list or a buffer",
    "TokenBlocks.__getnewargs_ex__": "the pickle protocol's keyword arguments",
}
FORBIDDEN = re.compile(r"list\[int\]|list\[bytes\]|\bdict\b|\bAny\b|\bCallable\b|\bIterable\b")


def signatures() -> list[tuple[str, str]]:
    """`(qualified name, signature as text)` of every function of the stub."""
    found: list[tuple[str, str]] = []

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(
                    (
                        prefix + node.name,
                        ast.unparse(node.args) + " -> " + ast.unparse(node.returns or ast.Constant(None)),
                    )
                )

    walk(ast.parse(STUB.read_text()).body, "")
    return found


def test_only_handles_buffers_and_scalars_cross() -> None:
    bad = [
        f"{name}({text})"
        for name, text in signatures()
        if FORBIDDEN.search(text) and not name.rpartition(".")[2].startswith("to_") and name not in ALLOWED
    ]
    assert not bad, "containers in the seam (name it to_*, or give a reason in ALLOWED):\n" + "\n".join(bad)


def test_the_allow_list_names_only_what_exists() -> None:
    assert set(ALLOWED) <= {name for name, _ in signatures()}


def test_the_core_knows_no_python_and_no_sockets() -> None:
    cargo = shutil.which("cargo")
    if cargo is None:
        pytest.skip("cargo is not on the path")
    tree = subprocess.run(
        [cargo, "tree", "--locked", "--offline", "-e", "normal", "-p", "kvevents-core", "--prefix", "none"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    names = {line.split()[0] for line in tree.splitlines() if line.strip()}
    assert "kvevents-core" in names
    assert not [n for n in names if re.match(r"pyo3|tokio|zmq|zeromq|async-std|mio|log$|tracing", n)]


def test_unsafe_stands_in_one_place() -> None:
    """The compiler denies it elsewhere; this says it where someone would first look."""
    with_unsafe = [
        p
        for p in (ROOT / "rust").rglob("*.rs")
        if re.search(r"\bunsafe\s*(\{|fn|impl)", p.read_text()) and RAW not in (p.parent, p.with_suffix(""))
    ]
    assert not [p for p in with_unsafe if "fuzz" not in p.parts]


def modules() -> list[str]:
    """Every module of the package, but entry points that run on import."""
    names = ["kvevents"]
    names += [
        m.name
        for m in pkgutil.walk_packages(kvevents.__path__, "kvevents.")
        if not m.name.endswith("__main__")
    ]
    return [n for n in names if not n.startswith("kvevents.integrations")]


# Functions with many positional parameters, each with its reason.
POSITIONAL = {
    "EventQueue.push_stored": "the first fields of BlockStored, in its order",
    "ResidentSet.contains": "the parts of a key, in the order in which the digest hashes them",
    "PrefixIndex.apply": "who, which number, what: the parts of a message in their order",
    "PrefixIndex.expect": "who, what, how long",
    "BlockPool.cache_full_blocks": "vLLM's order of parameters",
    "BlockPool.cache_partial_block": "vLLM's order of parameters",
}


def test_no_long_lists_of_positional_arguments() -> None:
    """Of what users call: an argument known by its place only lands in another parameter some day."""
    long: list[str] = []

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                names = [
                    a.arg for a in node.args.posonlyargs + node.args.args if a.arg not in {"self", "cls"}
                ]
                if len(names) > 3 and prefix + node.name not in POSITIONAL:
                    long.append(f"{prefix}{node.name}({', '.join(names)})")

    public = {
        name
        for module in modules()
        if module != "kvevents._core"
        for name in importlib.import_module(module).__all__
    }
    named = [n for n in ast.parse(STUB.read_text()).body if getattr(n, "name", None) in public]
    walk(named, "")
    assert named
    assert not long, "make what is beyond the obvious keyword-only: " + "; ".join(long)


@pytest.mark.parametrize("name", modules())
def test_every_public_name_exists(name: str) -> None:
    module = importlib.import_module(name)
    if name == "kvevents._core":
        return
    assert hasattr(module, "__all__"), f"{name} says not what is public"
    missing = [n for n in module.__all__ if not hasattr(module, n)]
    assert not missing
    assert len(set(module.__all__)) == len(module.__all__)


def test_everything_of_the_package_is_listed_by_dir() -> None:
    assert set(kvevents.__all__) <= set(dir(kvevents))


def test_importing_loads_nothing_that_is_used_later() -> None:
    """Sockets and the command line load on first use, which keeps the import fast."""
    code = "import kvevents, sys; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    late = {
        "zmq",
        "rich",
        "typer",
        "click",
        "asyncio",
        "logging",
        "numpy",
        "multiprocessing",
        "concurrent",
        "hypothesis",
    }
    assert not late & set(out)


def stored_payload(events: int, hashes: int, block_size: int = 16) -> bytes:
    """A batch in the map dialect, made by msgspec from the Structs."""
    tokens = list(range(100_000, 100_000 + hashes * block_size))
    batch = [
        1.5,
        [
            kvevents.BlockStored(
                block_hashes=[(e << 32) + h + 2**40 for h in range(hashes)],
                parent_block_hash=None,
                token_ids=tokens,
                block_size=block_size,
                lora_id=None,
                medium="GPU",
                lora_name=None,
            )
            for e in range(events)
        ],
        0,
    ]
    return msgspec.msgpack.encode(batch)


def test_decoding_allocates_no_python_object_per_block() -> None:
    """Compares the interpreter's count of allocated blocks for 1 and for 1,000 blocks."""

    def allocated(payload: bytes) -> int:
        kvevents.decode(payload)  # what is made once has been made
        gc.collect()
        gc.disable()
        try:
            before = sys.getallocatedblocks()
            kept = kvevents.decode(payload)
            after = sys.getallocatedblocks()
        finally:
            gc.enable()
        assert len(kept.events) == 1
        return after - before

    few, many = allocated(stored_payload(1, 1)), allocated(stored_payload(1, 1000))
    assert abs(many - few) <= 4, f"{few} objects for 1 block, {many} for 1,000"


def test_another_thread_runs_while_a_large_payload_is_decoded() -> None:
    """The decoder gives the interpreter lock away: a counting thread goes on counting meanwhile."""
    payload = stored_payload(400, 128)
    ticks = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1

    # With a long switch interval only a thread that gives the lock away lets the other one run.
    interval = sys.getswitchinterval()
    other = threading.Thread(target=count, name="counter")
    sys.setswitchinterval(0.5)
    other.start()
    try:
        moved = 0
        for _ in range(20):
            before = ticks
            kvevents.decode(payload)
            moved += ticks > before
            if moved:
                break
            time.sleep(0)
    finally:
        stop.set()
        other.join(30)
        sys.setswitchinterval(interval)
    assert moved >= 1
    assert not other.is_alive()


def test_the_stub_agrees_with_the_extension() -> None:
    """Exceptions stand in the allow list, each with its reason."""
    pytest.importorskip("mypy")
    allowed = ROOT / "tests" / "stubtest-allowlist.txt"
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "kvevents._core", "--concise", "--allowlist", str(allowed)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    reasons = [line for line in allowed.read_text().splitlines() if line and not line.startswith("#")]
    assert all("#" in line for line in reasons)


def test_indexing_allocates_no_python_object_per_block() -> None:
    """From a message's bytes to the index, and a question's answer: the same for 1 and for 1,000 blocks."""
    index = kvevents.PrefixIndex(seed=1)
    prompts = {n: array("I", range(100_000, 100_000 + n * 16)) for n in (1, 1000)}

    def allocated(n: int) -> int:
        payload = stored_payload(1, n)
        index.apply("w", 0, None, payload)  # what is made once has been made
        index.find(prompts[n])
        gc.collect()
        gc.disable()
        try:
            before = sys.getallocatedblocks()
            applied = index.apply("w", 0, None, payload)
            found = index.find(prompts[n])
            after = sys.getallocatedblocks()
        finally:
            gc.enable()
        assert applied == 1
        assert len(found) == 1
        return after - before

    few, many = allocated(1), allocated(1000)
    assert abs(many - few) <= 4, f"{few} objects for 1 block, {many} for 1,000"


def test_another_thread_runs_while_a_large_payload_is_indexed() -> None:
    """As for the decoder: a counting thread goes on counting while `apply` and `find_many` work."""
    payload = stored_payload(400, 128)
    prompts = [array("I", range(100_000, 100_000 + 2048))] * 2000
    index = kvevents.PrefixIndex(seed=1)
    ticks = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1

    interval = sys.getswitchinterval()
    other = threading.Thread(target=count, name="counter")
    sys.setswitchinterval(0.5)
    other.start()
    moved = {"apply": 0, "find_many": 0}
    try:
        for _ in range(20):
            before = ticks
            index.apply("w", 0, None, payload)
            moved["apply"] += ticks > before
            before = ticks
            index.find_many(prompts)
            moved["find_many"] += ticks > before
            if all(moved.values()):
                break
            time.sleep(0)
    finally:
        stop.set()
        other.join(30)
        sys.setswitchinterval(interval)
    assert all(moved.values()), moved
    assert not other.is_alive()


def test_the_build_profile_is_told() -> None:
    assert _core.BUILD_PROFILE in {"debug", "release"}
    assert kvevents.__version__ == _core.__version__


def test_a_debug_build_says_so_on_import() -> None:
    """It is several times slower, and a figure taken with it misleads."""
    code = """
import importlib.machinery, importlib.util, sys, warnings
spec = importlib.util.spec_from_file_location("kvevents._core", sys.argv[1])
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
core.BUILD_PROFILE = "debug"
sys.modules["kvevents._core"] = core
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import kvevents
print(*[f"{w.category.__name__}: {w.message}" for w in caught])
"""
    out = subprocess.run(
        [sys.executable, "-c", code, str(_core.__file__)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert out.startswith("RuntimeWarning: kvevents._core is a debug build")
