"""Random requests against Python's own pickle, cbor2 and hashlib, in random pieces."""

from __future__ import annotations

import hashlib
import pickle
from array import array
from itertools import pairwise
from typing import Any

import cbor2
from hypothesis import given
from hypothesis import strategies as st

from kvevents import TokenBlocks

EDGES = [0, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1]
tokens = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 2**32 - 1)), max_size=70)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def features(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    at, out = 0, []
    for text, gap, length in draw(
        st.lists(st.tuples(texts, st.integers(0, 20), st.integers(1, 30)), max_size=6)
    ):
        at += gap
        out.append((text, at, length))
        at += length
    return out


def fresh(text: str) -> str:
    """An object of its own where CPython makes one, as a string that came from another process."""
    return text.encode().decode()


def extra_keys(start: int, end: int, options: dict[str, Any]) -> tuple[tuple[Any, ...], ...] | None:
    """The rule in its plainest form."""
    keys: list[tuple[Any, ...]] = []
    if options["lora_name"] is not None:
        keys.append(("lora", fresh(options["lora_name"]), fresh(options["lora_path"])))
    keys += [("mm", fresh(i), at - start) for i, at, n in options["mm"] if at < end and at + n > start]
    if start == 0 and options["cache_salt"]:
        keys.append(("cache_salt", fresh(options["cache_salt"])))
    return tuple(keys) or None


def oracle(ids: list[int], size: int, algorithm: str, options: dict[str, Any]) -> list[bytes]:
    def digest(value: object) -> bytes:
        if algorithm == "sha256":
            return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()
        return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()

    seed = options["seed"]
    parent = digest("vllm-none-hash" if seed is None else fresh(seed))
    out = []
    for start in range(0, len(ids) - size + 1, size):
        keys = extra_keys(start, start + size, options)
        parent = digest((parent, tuple(ids[start : start + size]), keys))
        out.append(parent)
    return out


@given(
    ids=tokens,
    size=st.integers(1, 20),
    algorithm=st.sampled_from(["sha256", "sha256_cbor"]),
    lora=st.none() | st.tuples(texts, texts),
    salt=st.none() | texts,
    mm=features(),
    seed=st.none() | texts,
    cuts=st.lists(st.integers(0, 70), max_size=8),
    as_buffer=st.booleans(),
)
def test_any_request_in_any_pieces_hashes_as_python_does(  # noqa: PLR0917 - one strategy each
    ids: list[int],
    size: int,
    algorithm: str,
    lora: tuple[str, str] | None,
    salt: str | None,
    mm: list[tuple[str, int, int]],
    seed: str | None,
    cuts: list[int],
    as_buffer: bool,
) -> None:
    name, path = lora or (None, None)
    options = {"lora_name": name, "lora_path": path, "cache_salt": salt, "mm": mm, "seed": seed}
    blocks = TokenBlocks(size, algorithm=algorithm, **options)
    edges = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    for a, b in pairwise(edges):
        blocks.extend(array("Q", ids[a:b]) if as_buffer else ids[a:b])
    assert blocks.to_token_ids() == ids
    assert list(blocks.block_hashes) == oracle(ids, size, algorithm, options)
    untagged = [extra_keys(s, s + size, options) for s in range(0, len(ids) - size + 1, size)]
    assert blocks.to_extra_keys() == [
        None if keys is None else tuple(k[1:] if k[0] == "mm" else k[1] for k in keys) for keys in untagged
    ]
