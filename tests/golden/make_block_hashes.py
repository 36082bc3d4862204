"""Makes block_hashes.jsonl with a real vLLM: random requests through its own request hasher.

Run it with the Python of an environment that has vLLM 0.32 and xxhash; `sha256` and `sha256_cbor` are vLLM's
functions, `xxh3_64` is computed here by the definition in docs/hashes.md. Strings come out of JSON, so that
they are objects of their own, as in an engine that gets its requests from another process.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cbor2
import xxhash
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

EDGES = [0, 1, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1]
NAMES = ["a", "é", "adapter-one", "lora", "mm", "x" * 300, "字典", "🦀", "cache_salt"]


def token(rng: random.Random) -> int:
    return rng.choice(EDGES) if rng.random() < 0.2 else rng.randrange(1 << rng.choice([5, 8, 16, 17, 32]))


def request(rng: random.Random) -> dict[str, Any]:
    size = rng.choice([1, 2, 3, 4, 5, 16, 32])
    tokens = [token(rng) for _ in range(size * rng.randrange(1, 6) + rng.randrange(size))]
    mm = []
    at = 0
    while rng.random() < 0.7 and len(mm) < 6:
        at += rng.randrange(0, 2 * size)
        length = rng.randrange(1, 2 * size + 2)
        mm.append([rng.choice([*NAMES, "f00d" * 16]), at, length])
        at += length
    kinds = rng.randrange(8)
    return {
        "seed": rng.choice([None, None, "0", "", "4711"]),
        "block_size": size,
        "token_ids": tokens,
        "lora": [rng.choice(NAMES), rng.choice([*NAMES, "/adapters/one"])] if kinds & 1 else None,
        "cache_salt": rng.choice([*NAMES, ""]) if kinds & 2 else None,
        "mm": mm if kinds & 4 else [],
    }


def engine_request(given: dict[str, Any]) -> SimpleNamespace:
    """What vLLM's hasher reads of a request."""
    name = given["lora"]
    return SimpleNamespace(
        block_hashes=[],
        num_tokens=len(given["token_ids"]),
        all_token_ids=given["token_ids"],
        mm_features=[
            SimpleNamespace(identifier=i, mm_position=SimpleNamespace(offset=o, length=n))
            for i, o, n in given["mm"]
        ],
        lora_request=SimpleNamespace(lora_name=name[0], lora_path=name[1]) if name else None,
        cache_salt=given["cache_salt"],
        prompt_embeds=None,
    )


def tagged_keys(given: dict[str, Any]) -> list[tuple[Any, ...] | None]:
    """vLLM's extra keys of every block."""
    size, mm_at, keys = given["block_size"], 0, []
    req = engine_request(given)
    for start in range(0, len(given["token_ids"]) - size + 1, size):
        key, mm_at = kv_cache_utils.generate_block_hash_extra_keys(req, start, start + size, mm_at)
        keys.append(key)
    return keys


def ours(given: dict[str, Any]) -> tuple[str, list[str]]:
    none = xxhash.xxh3_64_intdigest(
        (given["seed"] if given["seed"] is not None else "vllm-none-hash").encode()
    )
    parent, size, hashes = none, given["block_size"], []
    for i, keys in enumerate(tagged_keys(given)):
        block = given["token_ids"][i * size : (i + 1) * size]
        message = parent.to_bytes(8, "little") + b"".join(t.to_bytes(4, "little") for t in block)
        parent = xxhash.xxh3_64_intdigest(message + (cbor2.dumps(keys, canonical=True) if keys else b""))
        hashes.append(f"{parent:016x}")
    return f"{none:016x}", hashes


def theirs(given: dict[str, Any], algorithm: str) -> tuple[str, list[str]]:
    function = get_hash_fn_by_name(algorithm)
    if given["seed"] is None:
        os.environ.pop("PYTHONHASHSEED", None)
    else:
        os.environ["PYTHONHASHSEED"] = given["seed"]
    kv_cache_utils.init_none_hash(function)
    hashes = kv_cache_utils.get_request_block_hasher(given["block_size"], function)(engine_request(given))
    return kv_cache_utils.NONE_HASH.hex(), [h.hex() for h in hashes]


def main() -> None:
    rng = random.Random(20261129)
    with (Path(__file__).parent / "block_hashes.jsonl").open("w", encoding="utf-8") as out:
        for i in range(360):
            algorithm = ("sha256", "sha256_cbor", "xxh3_64")[i % 3]
            given = json.loads(json.dumps(request(rng)))
            none, hashes = ours(given) if algorithm == "xxh3_64" else theirs(given, algorithm)
            keys = kv_cache_utils.to_event_extra_keys(tagged_keys(given))
            line = {"algorithm": algorithm, **given, "none_hash": none, "hashes": hashes, "extra_keys": keys}
            out.write(json.dumps(line, separators=(",", ":")) + "\n")
    sys.stderr.write("360 vectors\n")


if __name__ == "__main__":
    main()
