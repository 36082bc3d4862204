"""What a simulation is told to do: a list of steps, drawn from a seed before anything runs.

A run depends on its configuration and its steps alone. Every step carries its own seed, so that leaving
some out does not change what the others choose; that is what lets :mod:`kvevents.testing.system.shrink` cut
a failing list down to what matters.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["FAULTS", "KINDS", "OF_ENGINES", "Kind", "Step", "draw_plan", "parse_numbers", "say_numbers"]


class Kind(NamedTuple):
    """A kind of step: how often it comes, how large it may be, what it does."""

    weight: float
    least: int
    most: int
    about: str


KINDS: dict[str, Kind] = {
    "work": Kind(60, 1, 4, "an engine serves requests and publishes, {n} steps"),
    "wait": Kind(10, 0, 12, "time passes, 2^{n} ms"),
    "hoard": Kind(1, 5, 40, "an engine changes its pool {n} times before it looks at its events"),
    "reset": Kind(0.3, 1, 1, "an engine resets its prefix cache"),
    "drop": Kind(3, 1, 6, "the next {n} messages of a link are lost"),
    "duplicate": Kind(3, 0, 12, "the next message of a link comes again, 2^{n} ms later"),
    "reorder": Kind(3, 1, 4, "the next message of a link comes after the {n} that follow it"),
    "delay": Kind(2, 6, 13, "the next message of a link is late by 2^{n} ms"),
    "garble": Kind(1, 1, 2, "the payloads of the next {n} messages of a link arrive as garbage"),
    "cut": Kind(1.5, 0, 13, "a connection breaks, for 2^{n} ms; what is on its way is lost"),
    "partition": Kind(1.5, 6, 13, "for 2^{n} ms a link takes everything and delivers nothing"),
    "mute": Kind(
        1.5, 1, 6, "a reader's next replay breaks off after {n} answers (vLLM's server: loses {n} of them)"
    ),
    "deafen": Kind(0.7, 1, 2, "the next {n} replay conversations of a reader are not heard"),
    "slow": Kind(1, 6, 13, "a reader takes nothing for 2^{n} ms"),
    "overflow": Kind(0.8, 1, 24, "a sender stands still while its engine does {n} steps"),
    "poison": Kind(0.7, 1, 1, "the next batch of an engine holds an event that nobody can encode"),
    "restart": Kind(0.6, 0, 13, "an engine dies and comes back after 2^{n} ms, with nothing"),
    "worker": Kind(0.6, 1, 1, "a tensor-parallel worker is started anew, with nothing"),
    "leave": Kind(0.4, 1, 1, "a reader leaves"),
    "join": Kind(0.6, 1, 1, "a reader joins, with nothing"),
    "quiet": Kind(0, 1, 1, "everything heals; after the repairs all must agree"),
}
"""All kinds of steps."""

ALWAYS = frozenset({"work", "wait", "hoard", "reset", "quiet"})
"""What is no fault: it happens in every simulation."""
FAULTS = tuple(kind for kind in KINDS if kind not in ALWAYS)
"""Kinds of steps that something has to heal."""
OF_ENGINES = frozenset({"work", "hoard", "reset", "overflow", "poison", "restart"})
"""Kinds of steps whose ``who`` is an engine."""
QUIET_EVERY = 250
"""Steps from one quiet point to the next."""


class Step(NamedTuple):
    """One step. ``who`` chooses among whatever there is, by its remainder."""

    number: int
    kind: str
    who: int
    amount: int
    seed: int

    def __str__(self) -> str:
        return f"{self.number:>7}  {self.kind:<9}  {KINDS[self.kind].about.format(n=self.amount)}"


def draw_plan(seed: int, length: int, faults: Iterable[str] = FAULTS) -> list[Step]:
    """Draw ``length`` steps with these kinds of faults; a quiet point every :data:`QUIET_EVERY` and last."""
    rng = random.Random(f"plan {seed}")
    kinds = [kind for kind in KINDS if kind in ALWAYS or kind in set(faults)]
    weights = [KINDS[kind].weight for kind in kinds]
    plan: list[Step] = []
    for number in range(length):
        kind = rng.choices(kinds, weights)[0]
        who, amount_at, step_seed = rng.getrandbits(32), rng.random(), rng.getrandbits(32)
        if (number + 1) % QUIET_EVERY == 0 or number == length - 1:
            kind = "quiet"
        k = KINDS[kind]
        plan.append(Step(number, kind, who, k.least + int(amount_at * (k.most - k.least + 1)), step_seed))
    return plan


def say_numbers(numbers: Sequence[int]) -> str:
    """Numbers as ``3,7-9``, the way :func:`parse_numbers` reads them."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def parse_numbers(text: str) -> list[int]:
    """The numbers of ``3,7-9``.

    :raises ValueError: it is no such list.
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers
