"""Requests as a chat service sees them: seeded, endless, with shared prefixes.

Every generator yields the same requests for the same arguments on every machine. What makes them hard for
a cache, and so worth serving, is in all of them: long shared prefixes, prompts that end on a block border
and are asked again (the last block is computed anew, so one hash gets several copies), and tenants whose
salts keep equal tokens apart.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["WORKLOADS", "Request", "chat", "mixed", "random_tokens", "shared_prefix"]

VOCABULARY_BITS = 17
"""Token ids are below 2^17 = 131,072, as in today's large vocabularies."""

_MASK_WORD = ((1 << VOCABULARY_BITS) - 1).to_bytes(4, "little")


@dataclass(frozen=True, slots=True)
class Request:
    """One request: what is asked, what the model will answer, and when it arrives.

    ``prompt`` and ``output`` are arrays of unsigned 32-bit token ids; ``arrival_s`` counts seconds from the
    start of the workload. Immutable by convention: engines read the arrays and never write them.
    """

    id: str
    prompt: array[int]
    output: array[int]
    arrival_s: float = 0.0
    cache_salt: str | None = None


def tokens_from_bytes(data: bytes) -> array[int]:
    """Little-endian 32-bit words, cut to the vocabulary; ``len(data)`` is a multiple of 4."""
    n = len(data)
    mask = int.from_bytes(_MASK_WORD * (n // 4), "little")
    tokens = array("I")
    tokens.frombytes((int.from_bytes(data, "little") & mask).to_bytes(n, "little"))
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def random_tokens(rng: random.Random, n: int) -> array[int]:
    """``n`` token ids drawn from ``rng``."""
    return tokens_from_bytes(rng.randbytes(4 * n))


@dataclass(slots=True)
class _Repeats:
    """Prompts that end on a block border, kept to be asked again later."""

    rng: random.Random
    kept: deque[tuple[array[int], str | None]] = field(default_factory=lambda: deque(maxlen=12))

    def draw(self, chance: float) -> tuple[array[int], str | None] | None:
        """One of the kept prompts with its salt, with probability ``chance``."""
        if self.kept and self.rng.random() < chance:
            return self.kept[self.rng.randrange(len(self.kept))]
        return None


def _to_border(rng: random.Random, prompt: array[int], block_size: int) -> array[int]:
    """``prompt`` lengthened so that it ends on a block border."""
    return prompt + random_tokens(rng, -len(prompt) % block_size)


@dataclass(slots=True)
class _Conversation:
    history: array[int]
    turns_left: int
    salt: str | None


def chat(
    *,
    seed: int = 0,
    block_size: int = 16,
    rate: float = 20.0,
    conversations: int = 24,
    system_prompts: int = 4,
    border_chance: float = 0.2,
    repeat_chance: float = 0.1,
) -> Iterator[Request]:
    """Conversations whose history grows: each turn's prompt is all that was said before, and a message.

    ``rate`` is requests a second (arrivals are random), ``conversations`` how many go on at a time;
    a conversation starts from one of ``system_prompts`` shared beginnings and ends after 2 to 8 turns.
    ``border_chance`` of the prompts end on a border of ``block_size``; a request is one of those asked
    again with ``repeat_chance``. Every fifth conversation belongs to a tenant with a salt.
    """
    rng = random.Random(f"chat {seed}")
    systems = [random_tokens(rng, rng.randint(60, 300)) for _ in range(system_prompts)]
    live: list[_Conversation] = []
    repeats = _Repeats(rng)
    now = 0.0
    n = 0
    while True:
        now += rng.expovariate(rate)
        name = f"chat-{n}"
        n += 1
        output = random_tokens(rng, rng.randint(4, 96))
        again = repeats.draw(repeat_chance)
        if again is not None:
            yield Request(name, again[0], output, now, again[1])
            continue
        if len(live) < conversations:
            salt = f"tenant-{rng.randrange(3)}" if rng.random() < 0.2 else None
            live.append(_Conversation(rng.choice(systems), rng.randint(2, 8), salt))
            turn = live[-1]
        else:
            turn = live[rng.randrange(len(live))]
        prompt = turn.history + random_tokens(rng, rng.randint(8, 120))
        if rng.random() < border_chance:
            prompt = _to_border(rng, prompt, block_size)
            repeats.kept.append((prompt, turn.salt))
        turn.history = prompt + output
        turn.turns_left -= 1
        if turn.turns_left == 0:
            live.remove(turn)
        yield Request(name, prompt, output, now, turn.salt)


def shared_prefix(
    *,
    seed: int = 0,
    block_size: int = 16,
    rate: float = 20.0,
    prefixes: int = 6,
    border_chance: float = 0.2,
    repeat_chance: float = 0.1,
) -> Iterator[Request]:
    """Single questions behind a few long system prompts, some far more popular than others.

    Arguments as for :func:`chat`; ``prefixes`` is the number of system prompts (320 to 960 tokens each),
    the i-th of which is used with weight 1/i.
    """
    rng = random.Random(f"shared-prefix {seed}")
    systems = [random_tokens(rng, rng.randint(320, 960)) for _ in range(prefixes)]
    weights = [1 / (i + 1) for i in range(prefixes)]
    repeats = _Repeats(rng)
    now = 0.0
    n = 0
    while True:
        now += rng.expovariate(rate)
        name = f"shared-{n}"
        n += 1
        output = random_tokens(rng, rng.randint(1, 48))
        again = repeats.draw(repeat_chance)
        if again is not None:
            yield Request(name, again[0], output, now, again[1])
            continue
        prompt = rng.choices(systems, weights)[0] + random_tokens(rng, rng.randint(10, 160))
        if rng.random() < border_chance:
            prompt = _to_border(rng, prompt, block_size)
            repeats.kept.append((prompt, None))
        yield Request(name, prompt, output, now)


def mixed(*, seed: int = 0, block_size: int = 16, rate: float = 20.0) -> Iterator[Request]:
    """:func:`chat` and :func:`shared_prefix` interleaved by arrival, half of ``rate`` each."""
    streams = [
        chat(seed=seed, block_size=block_size, rate=rate / 2),
        shared_prefix(seed=seed, block_size=block_size, rate=rate / 2),
    ]
    heads = [next(s) for s in streams]
    while True:
        first = min(range(len(heads)), key=lambda i: heads[i].arrival_s)
        yield heads[first]
        heads[first] = next(streams[first])


Workload: TypeAlias = Callable[..., Iterator[Request]]

WORKLOADS: dict[str, Workload] = {"mixed": mixed, "chat": chat, "shared-prefix": shared_prefix}
"""The generators by the names that the command line uses."""
