"""Part `pool` in a real vLLM: the same calls on vLLM's own pool and on ours, and what is around them.

Runs in an environment with vLLM (`make test-vllm`). Elsewhere it is run in that of `KVEVENTS_ENGINE`.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import os
import random
import subprocess
import weakref
from pathlib import Path

import pytest

import kvevents

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.find_spec("vllm")
REAL = _spec is not None and _spec.origin is not None

needs_vllm = pytest.mark.skipif(not REAL, reason="no vLLM in this environment (make test-vllm has one)")


@pytest.mark.skipif(REAL, reason="this is a real vLLM: the tests below run here")
@pytest.mark.skipif(
    not os.environ.get("KVEVENTS_ENGINE"), reason="KVEVENTS_ENGINE names no environment with vLLM"
)
@pytest.mark.timeout(900)
def test_this_file_passes_in_a_real_vllm():
    site = Path(kvevents.__file__).parents[1]
    ran = subprocess.run(
        [f"{os.environ['KVEVENTS_ENGINE']}/bin/python", "-m", "pytest", "-q", "-c", os.devnull, "--rootdir",
         str(ROOT), "-p", "no:cacheprovider", "--confcutdir", str(Path(__file__).parent), __file__],
        env=os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True, text=True, timeout=880, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]


STEP = 4


@pytest.fixture(scope="module")
def vllm_core():
    """vLLM's own pool and ours, side by side; nothing is patched."""
    from types import SimpleNamespace

    from vllm.distributed import kv_events
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import block_pool, kv_cache_utils
    from vllm.v1.request import Request

    from kvevents.integrations.vllm import pool

    kv_cache_utils.init_none_hash(sha256)
    hasher = kv_cache_utils.get_request_block_hasher(STEP, sha256)

    def request(name, tokens, **more):
        sampling = SamplingParams(max_tokens=1)
        return Request(
            request_id=str(name), prompt_token_ids=list(tokens), sampling_params=sampling,
            pooling_params=None, block_hasher=hasher, **more,
        )  # fmt: skip

    stock = block_pool.BlockPool
    assert stock.__module__ == "vllm.v1.core.block_pool"
    return SimpleNamespace(
        stock=stock, ours=pool.BlockPool, request=request, events=kv_events, utils=kv_cache_utils, pool=pool
    )


class Collector:
    """Writes down what it is told, with what it can see of the block then."""

    def __init__(self):
        self.told = []

    def on_block_allocated(self, block):
        self.told.append(("allocated", block.block_id))

    def on_block_accessed(self, block):
        self.told.append(("accessed", block.block_id, block.ref_cnt))

    def on_block_evicted(self, block):
        self.told.append(("evicted", block.block_id, block.block_hash))

    def reset(self):
        self.told.append("reset")


class Lora:
    adapter_id = 3
    name = lora_name = "an-adapter"
    lora_path = "/adapters/an-adapter"


class Both:
    """One call on both pools; everything that can be seen of them is the same after it."""

    def __init__(self, core, blocks, sizes, seed, **options):
        self.core, self.sizes = core, sizes
        self.collectors = (Collector(), Collector()) if options.pop("collect", False) else (None, None)
        self.pools = tuple(
            cls(blocks, options.get("caching", True), STEP, options.get("events", True), collector)
            for cls, collector in zip((core.stock, core.ours), self.collectors, strict=True)
        )
        self.rnd = random.Random(seed)
        self.reused = ([], [])
        self.events = 0
        self.handed_over = False

    def blocks(self, ids):
        return [[pool.blocks[i] for i in ids] for pool in self.pools]

    def call(self, name, *args, per_pool=None, **kwargs):
        """Calls with the same arguments, or with those of each pool; the same answer or the same error."""
        answers = []
        for i, pool in enumerate(self.pools):
            mine = args if per_pool is None else (*args, *per_pool[i])
            try:
                answers.append(plain(getattr(pool, name)(*mine, **kwargs)))
            except (ValueError, AssertionError) as e:
                answers.append((type(e), str(e) if isinstance(e, ValueError) else ""))
        assert answers[0] == answers[1], name
        return answers[0]

    def check(self):
        stock, ours = self.pools
        assert isinstance(ours, self.core.ours) is not self.handed_over
        queues = [p.free_block_queue for p in self.pools]
        order = [[b.block_id for b in q.get_all_free_blocks()] for q in queues]
        assert order[0] == order[1]
        cursor = self.rnd.randrange(1, len(stock.blocks))
        after = [
            [b.block_id for b in q.iter_blocks_after(p.blocks[cursor])]
            for p, q in zip(self.pools, queues, strict=True)
        ]
        assert after[0] == after[1]
        for a, b in zip(stock.blocks[1:], ours.blocks[1:], strict=True):
            assert (a.block_id, a.ref_cnt, a.block_hash, a.block_hash_num_tokens, a.is_null) == (
                b.block_id, b.ref_cnt, b.block_hash, b.block_hash_num_tokens, b.is_null,
            )  # fmt: skip
        assert stock.cached_block_hashes_by_block == ours.cached_block_hashes_by_block
        maps = [p.cached_block_hash_to_block for p in self.pools]
        caches = [
            {k: [*v] if isinstance(v, dict) else [v.block_id] for k, v in m._cache.items()} for m in maps
        ]
        assert caches[0] == caches[1]
        assert len(maps[0]) == len(maps[1])
        assert stock.get_usage() == ours.get_usage()
        assert self.reused[0] == self.reused[1]
        if self.collectors[0] is not None:
            assert sorted(map(str, self.collectors[0].told)) == sorted(map(str, self.collectors[1].told))
        events = [p.take_events() for p in self.pools]
        assert events[0] == events[1]
        assert all(type(e) is list for e in events)
        self.events += len(events[0])


def plain(value):
    return [b.block_id for b in value] if isinstance(value, list) else value


def one_request(both, number):
    """A prompt of a few families, computed, extended and released as an engine does it."""
    rnd, core = both.rnd, both.core
    tokens = [rnd.randrange(3) + family for family in [rnd.randrange(2)] for _ in range(rnd.randrange(4, 60))]
    more = {}
    if rnd.random() < 0.2:
        more["cache_salt"] = "salt"
    if rnd.random() < 0.2:
        more["session_id"] = f"session {rnd.randrange(2)}"
    if rnd.random() < 0.2:
        more["lora_request"] = Lora()
    request = core.request(number, tokens, **more)
    group = rnd.randrange(len(both.sizes))
    size = both.sizes[group]
    hashes = core.utils.resolve_block_hashes(request.block_hashes, STEP, size)
    held = []
    for i in range(len(hashes)):
        hit = both.call("get_cached_block", hashes[i], [group])
        if hit is None:
            break
        held += hit
    both.call("touch", per_pool=[(b,) for b in both.blocks(held)])
    if held and rnd.random() < 0.3:
        both.call("emit_cached_block_events", request, len(held), size, group)
    cached = len(held)
    while len(held) < -(-len(tokens) // size):
        more_blocks = both.call("get_new_blocks", rnd.randrange(1, 4))
        if isinstance(more_blocks, tuple):  # no room: preempted
            break
        held += more_blocks
    holes = list(held)
    if rnd.random() < 0.2:
        for i in range(cached, len(holes)):
            holes[i] = rnd.choice((holes[i], 0))
    full = min(len(hashes), len(held))
    while cached < full:
        until = rnd.randrange(cached, full) + 1
        mask = None
        if rnd.random() < 0.2:
            mask = [rnd.random() < 0.7 for _ in range(until - cached)]
        both.call("cache_full_blocks", request, per_pool=[
            (b, cached, until, size, group, mask) for b in both.blocks(holes)
        ])  # fmt: skip
        cached = until
        if rnd.random() < 0.5:
            both.check()
    if size > STEP and held and len(tokens) // STEP:
        boundary = rnd.randrange(len(tokens) // STEP) + 1
        at = (boundary * STEP - 1) // size
        replace = rnd.random() < 0.2
        if at < len(held):
            both.call("cache_partial_block", request, per_pool=[
                (b[0], boundary * STEP, group, size, replace) for b in both.blocks([held[at]])
            ])  # fmt: skip
    return held


def play(both, steps):
    rnd = both.rnd
    running = []
    for number in range(steps):
        what = rnd.random()
        if what < 0.55:
            running.append(one_request(both, number))
        elif what < 0.80 and running:
            held = running.pop(rnd.randrange(len(running)))
            form = rnd.choice((lambda b: b[::-1], reversed, lambda b: (x for x in b)))
            both.call("free_blocks", per_pool=[(form(b),) for b in both.blocks(held)])
        elif what < 0.85:
            both.call("evict_blocks", {rnd.randrange(1, len(both.pools[0].blocks)) for _ in range(3)})
        elif what < 0.88 and running and running[-1]:
            block = rnd.choice(running[-1])
            both.call("_maybe_evict_cached_block", per_pool=both_of(both, [block]))
            both.call("is_block_writable", per_pool=both_of(both, [block]))
        elif what < 0.90 and running and running[-1]:
            moved = both.call("get_new_blocks", 1)
            if isinstance(moved, list):
                both.call("move_block_hashes", per_pool=both_of(both, [running[-1][0], *moved]))
                running[-1] += moved
        elif what < 0.93 and running:
            held = [b for b in running.pop() if b]
            if len(set(held)) == len(held):
                watch = [lambda b, r=r: r.append((b.block_id, b.block_hash)) for r in both.reused]
                both.call("unpin_blocks", per_pool=list(zip(both.blocks(held), watch, strict=True)))
            else:
                both.call("free_blocks", per_pool=[(b,) for b in both.blocks(held)])
        elif what < 0.96 and running and running[-1]:
            for blocks in both.blocks([running[-1][0]]):
                blocks[0].ref_cnt += 1
            running.append([running[-1][0]])
        elif what < 0.98:
            while running:
                both.call("free_blocks", per_pool=[(b,) for b in both.blocks(running.pop())])
        if what > 0.97:
            both.call("reset_prefix_cache")
        both.check()


def both_of(both, ids):
    return [tuple(b) for b in both.blocks(ids)]


@needs_vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("int_hashes", ["1", "0"])
@pytest.mark.parametrize("seed", range(6))
def test_the_same_calls_give_the_same_blocks_order_and_events(vllm_core, monkeypatch, seed, int_hashes):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", int_hashes)
    sizes = ([STEP], [STEP, 2 * STEP], [2 * STEP, STEP, STEP])[seed % 3]
    both = Both(vllm_core, random.Random(seed).choice((9, 24, 60)), sizes, seed, collect=seed >= 3)
    play(both, 250)
    assert both.events > 100


@needs_vllm
def test_without_events_or_without_caching_nothing_else_changes(vllm_core):
    both = Both(vllm_core, 24, [STEP], 7, events=False)
    play(both, 120)
    assert both.events == 0
    both = Both(vllm_core, 8, [STEP], 7, caching=False)
    for count in (3, 2, 9):
        got = both.call("get_new_blocks", count)
        if isinstance(got, list):
            both.call("free_blocks", per_pool=[(b,) for b in both.blocks(got[::-1])])
        both.check()
    both.call("reset_prefix_cache")
    both.check()
    assert both.events == 1


@needs_vllm
@pytest.mark.parametrize("seed", range(3))
def test_a_pool_that_is_handed_over_goes_on_with_the_same_contents(vllm_core, seed, caplog):
    sizes = ([STEP], [STEP, 2 * STEP], [2 * STEP, STEP])[seed]
    both = Both(vllm_core, 24, sizes, seed, collect=True)
    play(both, 80)
    one_request(both, "with events that wait")
    view = both.pools[1].free_block_queue
    cache = both.pools[1].cached_block_hash_to_block._cache
    both.pools[1]._hand_over("a test")
    both.handed_over = True
    both.check()
    play(both, 80)
    assert both.events > 50
    assert view.num_free_blocks == both.pools[1].get_num_free_blocks()
    assert set(cache) == set(both.pools[0].cached_block_hash_to_block._cache)
    told = [
        r.getMessage()
        for r in caplog.records
        if r.name == "vllm.kvevents" and "handed over" in r.getMessage()
    ]
    assert told == ["kvevents: one pool is handed over to vLLM's own code: a test"]


def filled(core, cls=None, blocks=10, report=None):
    """A pool with two requests in it, one of them twice."""
    pool = (cls or core.ours)(blocks, True, STEP, True)
    held = []
    for i, tokens in enumerate((range(12), range(12), range(50, 58))):
        request = core.request(i, tokens)
        got = pool.get_new_blocks(len(tokens) // STEP)
        pool.cache_full_blocks(request, got, 0, len(got), STEP, 0)
        held.append(got)
    return pool, held


@needs_vllm
@pytest.mark.parametrize(
    "white_box",
    [
        lambda p, core: p.free_blocks([core.utils.KVCacheBlock(3, ref_cnt=1)]),
        lambda p, core: p.touch([core.utils.KVCacheBlock(3, ref_cnt=1)]),
        lambda p, core: p.blocks[9].set_block_hash(b"x" * 36),
        lambda p, core: setattr(p.blocks[9], "_block_hash", b"x" * 36),
        lambda p, core: setattr(p.blocks[9], "ref_cnt", 4),
        lambda p, core: setattr(p.free_block_queue, "num_free_blocks", 0),
        lambda p, core: p.free_block_queue.popleft(),
        lambda p, core: p.blocks[9].next_free_block,
        lambda p, core: p.cached_block_hash_to_block._cache.clear(),
        lambda p, core: p.cached_block_hash_to_block.insert(b"short" + bytes(4), p.blocks[9]),
        lambda p, core: p._insert_block_hash(b"short" + bytes(4), p.blocks[9], num_tokens=4),
        lambda p, core: p.free_blocks([p.blocks[9]]),
        lambda p, core: p.blocks[1].reset_hash(),
    ],
)  # fmt: skip
def test_what_only_tests_do_to_a_pool_is_done_by_vllms_own_code(vllm_core, white_box):
    """The pool goes on as vLLM's own would after the same."""
    seen = []
    for cls in (vllm_core.stock, vllm_core.ours):
        pool, _held = filled(vllm_core, cls)
        white_box(pool, vllm_core)
        if cls is vllm_core.ours:
            assert not isinstance(pool, vllm_core.ours)
        seen.append((
            pool.get_num_free_blocks(), len(pool.cached_block_hash_to_block), pool.take_events(),
            [(b.ref_cnt, b.block_hash) for b in pool.blocks],
        ))  # fmt: skip
    assert seen[0] == seen[1]


@needs_vllm
def test_handles_are_stable_and_views_are_live(vllm_core):
    pool, held = filled(vllm_core)
    assert held[0][0] is pool.blocks[held[0][0].block_id]
    assert len({pool, pool}) == 1
    assert pool.blocks[1].pool is pool
    assert isinstance(pool.blocks[1], vllm_core.utils.KVCacheBlock)
    assert pool.null_block is pool.blocks[0]
    assert pool.null_block.is_null
    key = held[0][0].block_hash
    cache = pool.cached_block_hash_to_block._cache
    assert cache[key] == {1: pool.blocks[1], 4: pool.blocks[4]}
    assert cache == dict(copy.copy(cache))
    pool.free_blocks(held[0][::-1])
    pool.evict_blocks({1})
    assert cache[key] is pool.blocks[4]
    assert len(cache) == 5
    held[1][0].ref_cnt += 1
    assert held[1][0].ref_cnt == 2
    assert isinstance(pool, vllm_core.ours)


@needs_vllm
def test_a_pool_goes_when_nobody_holds_it(vllm_core):
    pool, held = filled(vllm_core)
    gone = weakref.ref(pool)
    gc.disable()
    try:
        del pool
        assert gone() is None
        assert held[0][0].pool is None
        assert held[0][0].block_id == 1
    finally:
        gc.enable()


@needs_vllm
def test_events_of_others_keep_their_place_in_the_queue(vllm_core):
    pool, _held = filled(vllm_core)
    own = vllm_core.events.BlockRemoved(block_hashes=[1], medium="CPU")
    pool.kv_event_queue.append(own)
    pool.evict_blocks({1})
    events = pool.take_events()
    assert [type(e).__name__ for e in events] == ["BlockStored"] * 3 + ["BlockRemoved"] * 2
    assert events[3] is own
    assert pool.take_events() == []
    assert len(pool.kv_event_queue) == 0


@needs_vllm
@pytest.mark.parametrize("cls", ["stock", "ours"])
def test_a_subclass_that_shares_a_queue_writes_into_it_in_order(vllm_core, cls):
    """hisparse's pool, on ours and, for the same words, on vLLM's."""
    from vllm.v1.hisparse.block_pool import SharedEventQueueBlockPool

    base = getattr(vllm_core, cls)
    shared = SharedEventQueueBlockPool
    if cls == "ours":
        shared = vllm_core.pool.rebased(SharedEventQueueBlockPool, base)
    owner, held = filled(vllm_core, base)
    other = shared(6, True, STEP, True, event_owner=owner)
    request = vllm_core.request("x", range(100, 108))
    got = other.get_new_blocks(2)
    other.cache_full_blocks(request, got, 0, 2, STEP, 0)
    owner.evict_blocks({1})
    other.evict_blocks({1})
    owner.free_blocks([*held[0], *got])
    assert (owner.get_num_free_blocks(), other.get_num_free_blocks()) == (4, 5)
    events = owner.take_events()
    hashes = [vllm_core.utils.maybe_convert_block_hash(h) for h in request.block_hashes]
    assert [e.block_hashes for e in events[3:]] == [hashes, events[0].block_hashes[:1], hashes[:1]]
    if cls == "ours":
        other._hand_over("a test")
        other.evict_blocks({2})
        assert [e.block_hashes for e in owner.take_events()] == [hashes[1:]]


@needs_vllm
def test_columns_say_what_the_structs_say(vllm_core):
    said = []
    for columns in (False, True):
        pool, held = filled(vllm_core)
        pool.free_blocks(held[0][::-1])
        pool.get_new_blocks(4)
        said.append(pool.take_columns() if columns else kvevents.EventList(pool.take_events()))
    assert said[0] == said[1]
    pool._set_group(0, "sliding_window", 64)
    pool.evict_blocks({held[2][1].block_id})
    pool.cache_full_blocks(vllm_core.request("x", range(8)), [pool.null_block, held[2][1]], 1, 2, STEP, 0)
    stored = pool.take_columns()[-1]
    assert (stored.kv_cache_spec_kind, stored.kv_cache_spec_sliding_window) == ("sliding_window", 64)
    pool.kv_event_queue.append(vllm_core.events.AllBlocksCleared())
    assert pool.take_columns() is None
    assert len(pool.take_events()) == 1


@needs_vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
def test_residency_says_exactly_what_is_resident(vllm_core, monkeypatch, seed):
    """The pool does the same as vLLM's; a reader that keeps a set has the pool's hashes after every call."""
    monkeypatch.setattr(vllm_core.pool, "_report", "residency")
    sizes = ([STEP], [STEP, 2 * STEP], [2 * STEP, STEP, STEP], [2 * STEP])[seed]
    both = Both(vllm_core, 24, sizes, seed)
    resident = set()
    take, make = type(both.pools[1]).take_events, vllm_core.utils.make_block_hash_with_group_id

    def check():
        ours = both.pools[1]
        for event in take(ours):
            if type(event) is vllm_core.events.AllBlocksCleared:
                resident.clear()
                continue
            keys = [(h, event.group_idx) for h in event.block_hashes]
            if type(event) is vllm_core.events.BlockStored:
                assert len(event.token_ids) == event.block_size * len(keys)
                resident.update(keys)
            else:
                assert resident.issuperset(keys)
                resident.difference_update(keys)
        held = ours.cached_block_hash_to_block._cache
        cut = vllm_core.utils.get_block_hash, vllm_core.utils.get_group_id
        assert resident == {(cut[0](key), cut[1](key)) for key in held}
        assert set(held) == set(both.pools[0].cached_block_hash_to_block._cache)
        assert make(*next(iter(resident))) in held if resident else not held
        order = [[b.block_id for b in p.free_block_queue.get_all_free_blocks()] for p in both.pools]
        assert order[0] == order[1]

    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    both = Both(vllm_core, 24, sizes, seed)
    both.check = check
    play(both, 200)


@needs_vllm
def test_a_request_that_is_read_only_in_part_and_one_of_another_kind(vllm_core):
    """Tokens behind a view of another class are sliced; hashes in no list are vLLM's own code's."""
    pool, _ = filled(vllm_core)
    request = vllm_core.request("odd", range(200, 208))
    request.all_token_ids = tuple(range(200, 208))
    got = pool.get_new_blocks(1)
    pool.cache_full_blocks(request, got, 0, 1, STEP, 0)
    assert pool.take_events()[-1].token_ids == [200, 201, 202, 203]
    assert isinstance(pool, vllm_core.ours)


@pytest.fixture
def installed(vllm_core, monkeypatch):
    """The part, plugged in, and out again at the end; `installed(report=...)`."""
    from vllm.v1.core import block_pool, kv_cache_coordinator, kv_cache_manager, single_type_kv_cache_manager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.hisparse import block_pool as hisparse

    from kvevents.integrations.vllm.settings import Options, Settings

    for owner, name in (
        (block_pool, "BlockPool"),
        (kv_cache_coordinator, "BlockPool"),
        (hisparse, "SharedEventQueueBlockPool"),
        (single_type_kv_cache_manager, "SharedEventQueueBlockPool"),
        (kv_cache_manager.KVCacheManager, "take_events"),
        (Scheduler, "__init__"),
        (vllm_core.pool, "_report"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))

    def install(report="every_copy"):
        assert report in vllm_core.pool.install(Settings(("pool",), Options(report=report)))
        return kv_cache_manager

    return install


@needs_vllm
def test_every_name_is_there_and_the_part_is_plugged_in(vllm_core, installed):
    import vllm
    from vllm.v1.core import kv_cache_coordinator, single_type_kv_cache_manager

    from kvevents.integrations.vllm import names

    assert names.problem("pool", vllm.__version__) is None
    installed()
    assert kv_cache_coordinator.BlockPool is vllm_core.ours
    assert issubclass(single_type_kv_cache_manager.SharedEventQueueBlockPool, vllm_core.ours)


@needs_vllm
def test_a_changed_signature_of_the_pool_is_not_plugged_in(vllm_core, monkeypatch):
    import vllm
    from vllm.v1.core import block_pool

    from kvevents.integrations.vllm import names

    def init(self, num_gpu_blocks, enable_caching, hash_block_size, enable_kv_cache_events=False,
             metrics_collector=None, medium="GPU", num_hash_lookahead_tokens=0):  # fmt: skip
        """As in vLLM 0.33."""

    monkeypatch.setattr(block_pool.BlockPool, "__init__", init)
    assert "another parameter: num_hash_lookahead_tokens" in names.problem("pool", vllm.__version__)


@needs_vllm
def test_the_manager_gives_structs_unless_somebody_takes_columns(vllm_core, installed):
    """Alone, `take_events()` is vLLM's: a plain list of its Structs, with kind and window set."""
    manager_module = installed()
    from types import SimpleNamespace

    for columns in (False, True):
        pool, _ = filled(vllm_core)
        manager = SimpleNamespace(block_pool=pool, kv_cache_event_metadata=(("full_attention", None),))
        pool.columns = columns
        events = manager_module.KVCacheManager.take_events(manager)
        assert type(events) is list
        if columns:
            assert [type(e) for e in events] == [kvevents.EventList]
            assert len(events[0]) == 3
            assert manager_module.KVCacheManager.take_events(manager) == []
        else:
            assert [type(e) for e in events] == [vllm_core.events.BlockStored] * 3
            assert {e.kv_cache_spec_kind for e in events} == {"full_attention"}


@needs_vllm
def test_columns_and_structs_of_connectors_go_out_as_one_batch(vllm_core):
    """The payload is the one that vLLM writes for the same events as Structs."""
    import msgspec

    from kvevents.integrations.vllm import publisher

    ev = vllm_core.events
    own = ev.BlockRemoved(block_hashes=[1], medium="CPU", group_idx=0)
    payloads = []
    for columns in (False, True):
        pool, held = filled(vllm_core)
        pool.free_blocks(held[0][::-1])
        pool.get_new_blocks(4)
        events = [pool.take_columns(), own] if columns else [*pool.take_events(), own]
        batch = ev.KVEventBatch(ts=1.5, events=events, data_parallel_rank=0)
        publisher._join(batch)
        if columns:
            assert type(batch.events) is kvevents.EventList
            payloads.append(kvevents.encode(batch, dialect=publisher.native()))
        else:
            payloads.append(msgspec.msgpack.encode(batch))
    assert payloads[0] == payloads[1]


@needs_vllm
def test_readers_are_told_when_the_mirror_is_exact_for_the_engine(vllm_core, installed):
    """Only with residency, with nobody else's events, and until the pool is handed over."""
    from types import SimpleNamespace

    from kvevents.integrations.vllm import publisher
    from kvevents.integrations.vllm.settings import Options

    said = []
    for number, (report, alone) in enumerate(
        (("residency", True), ("residency", False), ("every_copy", True))
    ):
        installed(report)
        pool, _ = filled(vllm_core)
        metadata = (("full_attention", None),)
        manager = SimpleNamespace(block_pool=pool, kv_cache_event_metadata=metadata)
        address = f"inproc://exact-{number}"
        mine = publisher.EnginePublisher(0, address, f"{address}-replay", options=Options())
        try:
            assert vllm_core.pool.join(manager, mine, alone=alone)
            assert pool.columns
            said.append(mine._ours.get_publisher_config().exact_for)
            pool._hand_over("a test")
            said.append(mine._ours.get_publisher_config().exact_for)
            assert not pool.columns
        finally:
            mine.shutdown()
        assert not vllm_core.pool.join(manager, mine, alone=alone)
    assert said == ["engine", "stream", "stream", "stream", "stream", "stream"]
