"""The prompts of a quiet point: what was asked lately, as it was and in variations; and their answers."""

from __future__ import annotations

import random
from array import array
from typing import TYPE_CHECKING, NamedTuple

from kvevents.simulate.workloads import random_tokens

if TYPE_CHECKING:
    from kvevents.index import PrefixIndex

__all__ = ["Prompt", "choose_prompts", "held_by"]


class Prompt(NamedTuple):
    """Token ids, and the salt under which they are asked."""

    tokens: array[int]
    salt: str | None


def choose_prompts(recent: list[Prompt], count: int, seed: int) -> list[Prompt]:
    """``count`` prompts: a third as they were, the rest cut, continued, with a token or the salt changed."""
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    chosen: list[Prompt] = []
    for i in range(count):
        tokens, salt = recent[rng.randrange(len(recent))]
        kind = i % 6
        if kind == 2:
            tokens = tokens[: rng.randrange(1, len(tokens) + 1)]
        elif kind == 3:
            tokens = array("I", tokens)
            tokens[rng.randrange(len(tokens))] ^= 1
        elif kind == 4:
            tokens = tokens + random_tokens(rng, rng.randrange(1, 100))
        elif kind == 5:
            salt = "nobody's" if salt is None else None
        chosen.append(Prompt(tokens, salt))
    return chosen


def held_by(index: PrefixIndex, sources: list[str], prompts: list[Prompt]) -> dict[str, array[int]]:
    """By source: how many tokens of each prompt it holds, by the index."""
    held = {name: array("I", bytes(4 * len(prompts))) for name in sources}
    for i, prompt in enumerate(prompts):
        for match in index.find(prompt.tokens, cache_salt=prompt.salt):
            held[match.source][i] = match.tokens
    return held
