"""The block pool beside vLLM's own: churn in steady state, decoding, events off, and large pools.

Rows against vLLM run where vllm is installed (`make bench ENGINE=DIR`), in the same process, measured as the
engine core runs: collections frozen, environment look-ups cached.
"""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from benches import workloads
from benches.harness import Absent, Work, as_tests, compare, have
from kvevents import BlockPool, KVCacheEvent, TokenBlocks

if TYPE_CHECKING:
    from collections.abc import Callable

VLLM = "vLLM's BlockPool"
BLOCKS = 128
POOL = 4096
REQUESTS = POOL // BLOCKS + 8
"""More than fit, so that every request is evicted before it comes again."""
NO_VLLM = Absent("vllm is not installed here")


class Request:
    """One request in every form that the pools take."""

    def __init__(self, tokens: array[int], algorithm: str = "sha256_cbor") -> None:
        self.handle = TokenBlocks(workloads.BLOCK, algorithm=algorithm)
        self.handle.extend(tokens)
        self.tokens = tokens
        self.token_list = list(tokens)
        self.hashes = self.handle.block_hashes
        self.hash_list = list(self.hashes)
        # What vLLM's pool reads of a request.
        self.vllm = SimpleNamespace(
            block_hashes=self.hash_list,
            all_token_ids=self.token_list,
            lora_request=None,
            session_id=None,
            mm_features=[],
            cache_salt=None,
            prompt_embeds=None,
            prompt_embeds_per_block_hashes={},
        )


def make_requests(n: int = REQUESTS) -> list[Request]:
    """Requests without shared prefixes."""
    return [Request(tokens) for tokens in workloads.requests(n, BLOCKS)]


def by_handle(pool: BlockPool, r: Request, blocks: Any, cached: int, full: int) -> None:
    """The request's handle."""
    pool.cache_full_blocks(r.handle, blocks, cached, full)


def by_buffers(pool: BlockPool, r: Request, blocks: Any, cached: int, full: int) -> None:
    """Hashes and tokens as buffers, whole."""
    pool.cache_full_blocks(None, blocks, cached, full, block_hashes=r.hashes, token_ids=r.tokens)


def by_lists(pool: BlockPool, r: Request, blocks: Any, cached: int, full: int) -> None:
    """Hashes and tokens as lists, whole; block ids as a list, too."""
    pool.cache_full_blocks(None, blocks, cached, full, block_hashes=r.hash_list, token_ids=r.token_list)


def vllm_pool(blocks: int, *, events: bool) -> Any:
    """vLLM's pool as the engine core has it."""
    from vllm import envs
    from vllm.v1.core.block_pool import BlockPool as VllmPool

    envs.enable_envs_cache()
    return VllmPool(blocks, True, workloads.BLOCK, enable_kv_cache_events=events)


def our_churn(
    pool: BlockPool, requests: list[Request], store: Callable[..., None], *, lists: bool = False
) -> Callable[[], object]:
    """Allocate, store and free request after request; take the events of each."""

    def run() -> None:
        for r in requests:
            blocks: Any = pool.get_new_blocks(BLOCKS)
            if lists:
                blocks = blocks.to_list()
            store(pool, r, blocks, 0, BLOCKS)
            pool.free_blocks(blocks[::-1])
            pool.take_events()

    return run


def vllm_churn(pool: Any, requests: list[Request]) -> Callable[[], object]:
    """The same with vLLM's pool."""

    def run() -> None:
        for r in requests:
            blocks = pool.get_new_blocks(BLOCKS)
            pool.cache_full_blocks(r.vllm, blocks, 0, BLOCKS, workloads.BLOCK, 0)
            pool.free_blocks(reversed(blocks))
            pool.take_events()

    return run


def comparable(events: Any) -> list[tuple[Any, ...]]:
    """The fields that both pools fill."""
    return [
        (type(e).__name__, e.block_hashes, e.medium, e.group_idx)
        + ((e.parent_block_hash, e.token_ids, e.extra_keys) if hasattr(e, "token_ids") else ())
        for e in events
    ]


def check_against_vllm(requests: list[Request], store: Callable[..., None]) -> None:
    """Both pools make the same events, twice round."""
    if not have("vllm"):
        check_alone(requests, store)
        return
    ours = BlockPool(POOL + 1, workloads.BLOCK, report="every_copy", hash_form="int")
    theirs = vllm_pool(POOL + 1, events=True)
    for r in [*requests, *requests[:5]]:
        a, b = ours.get_new_blocks(BLOCKS), theirs.get_new_blocks(BLOCKS)
        assert list(a) == [x.block_id for x in b]
        store(ours, r, a, 0, BLOCKS)
        theirs.cache_full_blocks(r.vllm, b, 0, BLOCKS, workloads.BLOCK, 0)
        ours.free_blocks(a[::-1])
        theirs.free_blocks(reversed(b))
        assert comparable(ours.take_events()) == comparable(theirs.take_events())


def check_alone(requests: list[Request], store: Callable[..., None]) -> None:
    """Without vLLM: the events' content, and that eviction goes on."""
    pool = BlockPool(POOL + 1, workloads.BLOCK)
    seen: list[KVCacheEvent] = []
    for r in requests:
        blocks = pool.get_new_blocks(BLOCKS)
        store(pool, r, blocks, 0, BLOCKS)
        pool.free_blocks(blocks[::-1])
        seen = list(pool.take_events())
    removed, stored = seen
    assert len(removed.block_hashes) == BLOCKS
    assert (stored.block_hashes, stored.token_ids) == (requests[-1].hash_list, requests[-1].token_list)


def churn(store: Callable[..., None], *, events: bool = True) -> Work:
    """One row of churn."""
    requests = make_requests()
    pool = BlockPool(POOL + 1, workloads.BLOCK, hash_form="int", enable_kv_cache_events=events)
    ours = our_churn(pool, requests, store, lists=store is by_lists)
    theirs = vllm_churn(vllm_pool(POOL + 1, events=events), requests) if have("vllm") else NO_VLLM
    return Work(ours, theirs, REQUESTS * BLOCKS, lambda: check_against_vllm(requests, store))


@compare("pool churn with events, request handle", per="block", against=VLLM, floor=25, aim=40)
def churn_handle() -> Work:
    """128-block requests, 4,096 blocks, steady state."""
    return churn(by_handle)


@compare("pool churn with events, buffers", per="block", against=VLLM, floor=20, aim=35)
def churn_buffers() -> Work:
    """The same with buffers."""
    return churn(by_buffers)


@compare("pool churn with events, lists", per="block", against=VLLM, floor=8, aim=15)
def churn_lists() -> Work:
    """The same with lists."""
    return churn(by_lists)


@compare(
    "pool churn, events off, request handle", per="block", against=VLLM + ", events off", floor=10, aim=20
)
def churn_off_handle() -> Work:
    """Nothing is built or kept for events."""
    return churn(by_handle, events=False)


@compare("pool churn, events off, lists", per="block", against=VLLM + ", events off", floor=4, aim=8)
def churn_off_lists() -> Work:
    """The same with lists."""
    return churn(by_lists, events=False)


@compare(
    "what events add to a block",
    per="block",
    against="own, events off",
    measure="difference",
    floor=40,
    aim=15,
)
def events_add() -> Work:
    """Request handle, with events and without."""
    requests = make_requests()
    on = BlockPool(POOL + 1, workloads.BLOCK)
    off = BlockPool(POOL + 1, workloads.BLOCK, enable_kv_cache_events=False)
    return Work(
        our_churn(on, requests, by_handle),
        our_churn(off, requests, by_handle),
        REQUESTS * BLOCKS,
        lambda: check_alone(requests, by_handle),
    )


DECODING = 16


def decode_by_handle(pool: BlockPool, requests: list[Request], held: list[Any]) -> None:
    """All requests fill one block each a step; no function of ours in between, as in an engine's loop."""
    store, pairs = pool.cache_full_blocks, [(r.handle, b) for r, b in zip(requests, held, strict=True)]
    for i in range(BLOCKS):
        for handle, blocks in pairs:
            store(handle, blocks, i, i + 1)
        pool.take_events()


def decode_by_parts(pool: BlockPool, parts: list[tuple[Any, Any]], held: list[Any]) -> None:
    """The same with hashes and tokens of the whole request."""
    store, rows = pool.cache_full_blocks, [(h, t, b) for (h, t), b in zip(parts, held, strict=True)]
    for i in range(BLOCKS):
        for hashes, tokens, blocks in rows:
            store(None, blocks, i, i + 1, block_hashes=hashes, token_ids=tokens)
        pool.take_events()


def decode(form: str) -> Work:
    """Sixteen requests that fill one block each, step after step; events are taken once a step."""
    requests = make_requests(DECODING)
    pool = BlockPool(DECODING * BLOCKS + 1, workloads.BLOCK, hash_form="int")
    held: list[Any] = []

    def before() -> None:
        for blocks in held:
            pool.free_blocks(blocks)
        held[:] = [pool.get_new_blocks(BLOCKS) for _ in requests]
        if form == "lists":
            held[:] = [list(b) for b in held]
        pool.take_events()

    def run() -> None:
        if form == "handle":
            decode_by_handle(pool, requests, held)
        elif form == "buffers":
            decode_by_parts(pool, [(r.hashes, r.tokens) for r in requests], held)
        else:
            decode_by_parts(pool, [(r.hash_list, r.token_list) for r in requests], held)

    def check() -> None:
        before()
        store = {"handle": by_handle, "buffers": by_buffers, "lists": by_lists}[form]
        for i in range(2):
            for r, blocks in zip(requests, held, strict=True):
                store(pool, r, blocks, i, i + 1)
            events = list(pool.take_events())
            assert [len(e.block_hashes) for e in events] == [1] * DECODING
            assert [e.token_ids for e in events] == [r.token_list[i * 16 : i * 16 + 16] for r in requests]
        before()
        run()
        assert pool.stats().resident_hashes == DECODING * BLOCKS

    work = Work(run, NO_VLLM, DECODING * BLOCKS, check, before_ours=before)
    if not have("vllm"):
        return work
    theirs = vllm_pool(DECODING * BLOCKS + 1, events=True)
    theirs_held: list[Any] = []

    def before_theirs() -> None:
        for blocks in theirs_held:
            theirs.free_blocks(blocks)
        theirs_held[:] = [theirs.get_new_blocks(BLOCKS) for _ in requests]
        theirs.take_events()

    def run_theirs() -> None:
        store, pairs = (
            theirs.cache_full_blocks,
            [(r.vllm, b) for r, b in zip(requests, theirs_held, strict=True)],
        )
        for i in range(BLOCKS):
            for request, blocks in pairs:
                store(request, blocks, i, i + 1, workloads.BLOCK, 0)
            theirs.take_events()

    return Work(run, run_theirs, work.n, check, before_ours=before, before_theirs=before_theirs)


@compare("decode, one block a call, request handle", per="block", against=VLLM, floor=15, aim=30)
def decode_handle() -> Work:
    """The handle knows tokens and hashes."""
    return decode("handle")


@compare("decode, one block a call, buffers", per="block", against=VLLM, floor=10, aim=20)
def decode_buffers() -> Work:
    """Buffers of the whole request, read in place."""
    return decode("buffers")


@compare("decode, one block a call, lists", per="block", against=VLLM, floor=5, aim=12)
def decode_lists() -> Work:
    """Lists of the whole request, read in place."""
    return decode("lists")


def random_tokens(n: int, seed: int) -> array[int]:
    """Many token ids, quickly."""
    ids = array("I", random.Random(seed).randbytes(4 * n))
    return array("I", [x & 0x1FFFF for x in ids])


def resident(blocks: int, algorithm: str) -> Callable[[], object]:
    """Churn in a pool of this size, in which everything is resident. 64 requests are served a call."""
    requests = []
    for seed in range(blocks // BLOCKS + 64):
        handle = TokenBlocks(workloads.BLOCK, algorithm=algorithm)
        handle.extend(random_tokens(BLOCKS * workloads.BLOCK, seed))
        requests.append(handle)
    random.Random(1).shuffle(requests)
    pool = BlockPool(blocks + 1, workloads.BLOCK)
    turn = 0

    def serve(n: int) -> None:
        nonlocal turn
        for _ in range(n):
            handle = requests[turn]
            turn = (turn + 1) % len(requests)
            ids = pool.get_new_blocks(BLOCKS)
            pool.cache_full_blocks(handle, ids, 0, BLOCKS)
            pool.free_blocks(ids[::-1])
            pool.take_events()

    serve(len(requests))
    assert pool.stats().resident_hashes == blocks
    return lambda: serve(64)


def growth(algorithm: str) -> Work:
    """The same work in a large pool and in a small one."""
    large, small = resident(1 << 19, algorithm), resident(1 << 12, algorithm)
    return Work(large, small, 64 * BLOCKS, lambda: None)


OWN = "own at 4,096 blocks"


@compare(
    "524,288 blocks resident, 32-byte keys", per="block", against=OWN, measure="fraction", floor=4.5, aim=2.5
)
def growth_bytes() -> Work:
    """Digests."""
    return growth("sha256_cbor")


@compare(
    "524,288 blocks resident, 64-bit keys", per="block", against=OWN, measure="fraction", floor=2.5, aim=1.5
)
def growth_ints() -> Work:
    """Integers."""
    return growth("xxh3_64")


test_rows = as_tests(__name__)
