"""Chained block hashes and what token ids cost on their way in."""

from __future__ import annotations

import hashlib
import pickle
from array import array
from collections.abc import Callable

import cbor2

from benches import workloads
from benches.harness import Work, as_tests, compare
from kvevents import BlockHashes, TokenBlocks, hash_blocks
from kvevents.tokens import ALGORITHMS

BLOCKS = 128
DUMPS: dict[str, Callable[[object], bytes]] = {
    "sha256": lambda value: pickle.dumps(value, protocol=5),
    "sha256_cbor": lambda value: cbor2.dumps(value, canonical=True),
}


def python_chain(tokens: list[int], algorithm: str) -> list[bytes]:
    """What an engine does a block: serialise the tuple, hash it."""
    dump, size = DUMPS[algorithm], workloads.BLOCK
    parent = hashlib.sha256(dump("vllm-none-hash")).digest()
    out = []
    for i in range(0, len(tokens) - size + 1, size):
        parent = hashlib.sha256(dump((parent, tuple(tokens[i : i + size]), None))).digest()
        out.append(parent)
    return out


def chain(algorithm: str, tokens: list[int] | array[int]) -> Work:
    """A prompt of 128 blocks of 16 tokens."""
    listed = list(tokens)

    def check() -> None:
        assert list(hash_blocks(tokens, 16, algorithm=algorithm)) == python_chain(listed, algorithm)

    return Work(
        lambda: hash_blocks(tokens, 16, algorithm=algorithm),
        lambda: python_chain(listed, algorithm),
        BLOCKS,
        check,
    )


def ids() -> list[int]:
    """A prompt."""
    return workloads.token_ids(1, BLOCKS * workloads.BLOCK)


@compare("`sha256_cbor` chain, a buffer", per="block", against="cbor2 + hashlib", floor=12, aim=20)
def cbor_buffer() -> Work:
    """As a router has them."""
    return chain("sha256_cbor", array("i", ids()))


@compare("`sha256_cbor` chain, a list", per="block", against="cbor2 + hashlib", floor=12, aim=20)
def cbor_list() -> Work:
    """As an engine has them."""
    return chain("sha256_cbor", ids())


@compare("`sha256` chain, a list", per="block", against="pickle + hashlib")
def pickle_list() -> Work:
    """The engine's default."""
    return chain("sha256", ids())


@compare("`sha256_cbor` chain, one token a call", per="token", against="cbor2 + hashlib")
def decode() -> Work:
    """What a decode step costs, beside the same blocks hashed at once by Python."""
    tokens = ids()
    steps = [[t] for t in tokens]

    def ours() -> TokenBlocks:
        blocks = TokenBlocks(16)
        for step in steps:
            blocks.extend(step)
        return blocks

    def check() -> None:
        assert list(ours().block_hashes) == python_chain(tokens, "sha256_cbor")

    return Work(ours, lambda: python_chain(tokens, "sha256_cbor"), len(tokens), check)


def reading(tokens: list[int] | array[int]) -> Work:
    """Blocks that never fill: what is left is reading the ids and one copy."""
    size = 1 << 24
    wanted = array("I", tokens)

    def ours() -> TokenBlocks:
        blocks = TokenBlocks(size, algorithm="xxh3_64")
        blocks.extend(tokens)
        return blocks

    def check() -> None:
        assert array("I", ours().to_token_ids()) == wanted

    return Work(ours, lambda: array("I", tokens), len(tokens), check)


@compare("read a list of ids", per="token", against="array('I', ids)")
def read_list() -> Work:
    """2,048 of them."""
    return reading(ids())


@compare("read an int32 buffer of ids", per="token", against="array('I', ids)")
def read_buffer() -> Work:
    """2,048 of them."""
    return reading(array("i", ids()))


@compare("read an int64 buffer of ids", per="token", against="array('I', ids)")
def read_wide_buffer() -> Work:
    """2,048 of them."""
    return reading(array("q", ids()))


def hash_reading(form: str) -> Work:
    """512 hashes into one piece of memory."""
    hashes = workloads.hashes(1, 512, form)
    join = b"".join if form == "bytes" else lambda v: array("Q", v)

    def check() -> None:
        assert bytes(memoryview(BlockHashes(hashes))) == bytes(join(hashes))

    return Work(lambda: BlockHashes(hashes), lambda: join(hashes), 512, check)


@compare("read a list of 32-byte hashes", per="hash", against="b''.join")
def read_digests() -> Work:
    """As an engine's block pool holds them."""
    return hash_reading("bytes")


@compare("read a list of 64-bit hashes", per="hash", against="array('Q', hashes)")
def read_integers() -> Work:
    """As events carry them."""
    return hash_reading("int")


assert set(DUMPS) < set(ALGORITHMS)
test_rows = as_tests(__name__)
