"""The prompts of a quiet point: what was asked lately, as it was and in variations."""

from __future__ import annotations

import random
from array import array
from typing import NamedTuple

from kvevents.simulate.workloads import random_tokens

__all__ = ["Prompt", "choose_prompts"]


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
