"""Generated requests: seeded, with shared prefixes and prompts that end on a block border."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from kvevents.simulate.workloads import WORKLOADS, chat, random_tokens, shared_prefix

BLOCK = 16


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_same_seed_gives_the_same_requests(name):
    first = list(islice(WORKLOADS[name](seed=3, block_size=BLOCK), 200))
    assert first == list(islice(WORKLOADS[name](seed=3, block_size=BLOCK), 200))
    assert first != list(islice(WORKLOADS[name](seed=4, block_size=BLOCK), 200))


@pytest.mark.parametrize("name", sorted(WORKLOADS))
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_prompts_that_end_on_a_block_border_are_asked_again(name, block_size):
    requests = list(islice(WORKLOADS[name](seed=1, block_size=block_size), 400))
    asked: dict[tuple, int] = {}
    for r in requests:
        key = (r.cache_salt, r.prompt.tobytes())
        asked[key] = asked.get(key, 0) + 1
    again = [key for key, times in asked.items() if times > 1]
    assert len(again) >= 10
    assert all(len(tokens) // 4 % block_size == 0 for _, tokens in again)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_requests_arrive_in_order_and_are_never_empty(name):
    requests = list(islice(WORKLOADS[name](seed=0, rate=50), 500))
    arrivals = [r.arrival_s for r in requests]
    assert arrivals == sorted(arrivals)
    assert 500 / 50 * 0.6 < arrivals[-1] < 500 / 50 * 1.6
    assert all(len(r.prompt) and len(r.output) for r in requests)
    assert len({r.id for r in requests}) == len(requests)


def test_a_conversation_grows_by_what_was_said():
    requests = list(islice(chat(seed=2, conversations=1, repeat_chance=0), 60))
    grown = [
        b for a, b in pairwise(requests) if b.prompt[: len(a.prompt) + len(a.output)] == a.prompt + a.output
    ]
    assert len(grown) >= 30
    assert all(len(b.prompt) > 0 for b in grown)


def test_conversations_keep_their_tenant():
    requests = list(islice(chat(seed=2, conversations=1, repeat_chance=0), 300))
    for a, b in pairwise(requests):
        if b.prompt[: len(a.prompt)] == a.prompt:
            assert a.cache_salt == b.cache_salt
    assert {r.cache_salt for r in requests} > {None}


def test_shared_prefixes_are_shared():
    requests = list(islice(shared_prefix(seed=5, prefixes=3), 300))
    heads = {r.prompt[:320].tobytes() for r in requests}
    assert len(heads) == 3


def test_tokens_stay_within_the_vocabulary():
    import random

    tokens = random_tokens(random.Random(0), 10_000)
    assert max(tokens) < 1 << 17
    assert len(set(tokens)) > 9_000
