"""What an engine's scheduler does to its block pool, one random operation at a time."""

from __future__ import annotations

import math
import random
from array import array
from typing import TYPE_CHECKING, NamedTuple

from kvevents.pool import BlockPool, KVCacheGroup
from kvevents.tokens import TokenBlocks

if TYPE_CHECKING:
    from kvevents.testing.system.config import EngineSpec

__all__ = ["Prompt", "Serving", "prompts_of"]

_BASES, _BRANCHES, _SALTS = 5, 4, (None, None, "tenant")
_RUNNING = 6
"""Requests that hold blocks at a time."""


class Prompt(NamedTuple):
    """What may be asked, with what follows it."""

    tokens: array[int]
    salt: str | None


def prompts_of(seed: int) -> list[Prompt]:
    """All that is ever asked in a simulation: few prompts with prefixes in common, so that hits are usual."""
    rng = random.Random(f"prompts {seed}")
    prompts = []
    for _ in range(_BASES):
        base = [rng.randrange(1000) for _ in range(rng.choice((8, 16, 21)))]
        salt = rng.choice(_SALTS)
        prompts += [
            Prompt(array("I", base + [rng.randrange(1000) for _ in range(rng.randrange(4, 36))]), salt)
            for _ in range(_BRANCHES)
        ]
    return prompts


class _Running:
    def __init__(self, tokens: TokenBlocks, groups: int) -> None:
        self.tokens = tokens
        self.rest: array[int] = array("I")
        self.blocks: list[list[int]] = [[] for _ in range(groups)]
        self.cached = [0] * groups


class Serving:
    """A pool, and requests that come, decode and go as it pleases a random generator."""

    def __init__(self, spec: EngineSpec, prompts: list[Prompt]) -> None:
        size = spec.block_size
        groups = None
        if spec.kind == "groups":
            groups = [
                KVCacheGroup(size),
                KVCacheGroup(2 * size),
                KVCacheGroup(size, "sliding_window", 2 * size),
            ]
        self.pool = BlockPool(
            spec.num_blocks,
            size,
            report="every_copy" if spec.kind == "every_copy" else "residency",
            hash_form=spec.hash_form,
            groups=groups,
            max_queued_events=spec.max_queued_events,
        )
        self._size = size
        self._groups = groups or [KVCacheGroup(size)]
        self._prompts = prompts
        self._running: list[_Running] = []

    def act(self, rng: random.Random) -> None:
        """Do one thing."""
        dice = rng.random()
        if dice < 0.45 or not self._running:
            self._admit(rng)
        elif dice < 0.7:
            self._decode(rng.choice(self._running), rng.randrange(1, 8))
        elif dice < 0.94:
            self._finish(rng.randrange(len(self._running)))
        else:
            self.pool.evict_blocks(rng.sample(range(1, self.pool.num_blocks), 3))

    def reset(self) -> None:
        """Finish everything and forget what is cached."""
        while self._running:
            self._finish(0)
        if not self.pool.reset_prefix_cache():
            raise RuntimeError("blocks are in use though no request runs")

    def held(self, prompt: Prompt) -> int:
        """How many tokens of a prompt the pool holds for all groups, by its own look-up."""
        tokens = self._tokens(prompt, len(prompt.tokens))
        full = [
            len(self.pool.find_longest_cache_hit(tokens, group=g)) * group.block_size
            for g, group in enumerate(self._groups)
            if group.sliding_window is None
        ]
        limit = min(full)
        windows = [(g, group) for g, group in enumerate(self._groups) if group.sliding_window is not None]
        if not windows:
            return limit
        step = math.lcm(*(group.block_size for group in self._groups))
        for length in range(limit // step * step, 0, -step):
            if all(self._hits(tokens, g, length) for g, _ in windows):
                return length
        return 0

    def _hits(self, tokens: TokenBlocks, group: int, length: int) -> bool:
        blocks = length // self._groups[group].block_size
        return len(self.pool.find_longest_cache_hit(tokens, blocks, group)) == blocks

    def _tokens(self, prompt: Prompt, length: int) -> TokenBlocks:
        tokens = TokenBlocks(self._size, cache_salt=prompt.salt)
        tokens.extend(prompt.tokens[:length])
        return tokens

    def _admit(self, rng: random.Random) -> None:
        prompt = rng.choice(self._prompts)
        length = rng.randrange(len(prompt.tokens) // 2, len(prompt.tokens)) + 1
        request = _Running(self._tokens(prompt, length), len(self._groups))
        request.rest = prompt.tokens[length:]
        # The last token is always computed, and all groups must hold what is not.
        cached = min(self.held(Prompt(prompt.tokens[:length], prompt.salt)), length - 1)
        cached -= cached % math.lcm(*(group.block_size for group in self._groups))
        while cached and not all(self._hits(request.tokens, g, cached) for g in range(len(self._groups))):
            cached -= math.lcm(*(group.block_size for group in self._groups))
        for g, group in enumerate(self._groups):
            blocks = cached // group.block_size
            hits = list(self.pool.find_longest_cache_hit(request.tokens, blocks, g)) if blocks else []
            self.pool.touch(hits)
            request.blocks[g], request.cached[g] = hits, len(hits)
        self._running.append(request)
        if len(self._running) > _RUNNING:
            self._finish(0)
        self._fill(request)

    def _decode(self, request: _Running, count: int) -> None:
        request.tokens.extend(request.rest[:count])
        del request.rest[:count]
        self._fill(request)

    def _fill(self, request: _Running) -> None:
        """Give a request the blocks that its tokens need; older ones make room, or it goes itself."""
        length = request.tokens.num_tokens
        needed = [-(-length // group.block_size) for group in self._groups]
        while True:
            missing = [n - len(have) for n, have in zip(needed, request.blocks, strict=True)]
            if sum(missing) <= self.pool.get_num_free_blocks():
                break
            victim = self._running[0]
            self._finish(0)
            if victim is request:
                return
        for g, group in enumerate(self._groups):
            request.blocks[g].extend(self.pool.get_new_blocks(missing[g]))
            full = length // group.block_size
            if full > request.cached[g]:
                self.pool.cache_full_blocks(
                    request.tokens, request.blocks[g], request.cached[g], full, group=g
                )
                request.cached[g] = full

    def _finish(self, index: int) -> None:
        request = self._running.pop(index)
        for blocks in request.blocks:
            self.pool.free_blocks(blocks[::-1])
