"""Every interleaving of what can happen to a reader that knows lives, up to a stated number of messages.

The world: a publisher with one or more lives that drops batches, keeps a short log and a mirror; a link
with messages in flight; a server that answers, is silent or is gone. All reachable states are visited once.
What is checked in each is one sentence: what the actions say, applied to a set, is the publisher's set as it
was behind the last number in one of its lives, or the reader was told that it is not.

``KVEVENTS_DEEP=1`` goes one or two messages, losses and failures further in every world (some minutes).
"""

from __future__ import annotations

import copy
import operator
import os
from typing import Any, NamedTuple

import pytest

from kvevents.subscribe.actions import (
    Action,
    Apply,
    Compare,
    Fetch,
    Head,
    Hello,
    Limits,
    Lose,
    Message,
    Policy,
    Range,
    Restore,
    Wipe,
)
from kvevents.subscribe.course import Job
from kvevents.subscribe.held import Held
from kvevents.subscribe.sequence import Sequence

Sent = tuple[int, int]  # life, number


class Rules(NamedTuple):
    """What may happen in a world, and how often."""

    sizes: tuple[int, ...]
    """Numbers of each life."""
    drops: int = 0
    repeats: int = 0
    window: int = 1
    """A message may overtake ``window - 1`` others."""
    fails: int = 0
    """Requests that are not answered."""
    looks: int = 0
    """Times that the server is asked though nothing happened, and that a rest ends."""
    log: int = 1000
    """Batches that can be replayed."""
    mirror: bool = True
    poisoned: frozenset[Sent] = frozenset()
    partial: frozenset[Sent] = frozenset()
    holes: frozenset[Sent] = frozenset()
    """Numbers that the publisher gave and did not send."""
    told: bool = True
    """Whether a restart is seen as a new connection."""
    stamps: bool = True
    policies: tuple[Policy, ...] = ("snapshot",)
    drift: bool = False
    """Whether the user's digest once turns out to be another."""


class World(NamedTuple):
    life: int = 0
    sent: int = 0
    flight: tuple[Sent, ...] = ()
    drops: int = 0
    repeats: int = 0
    fails: int = 0
    looks: int = 0
    drifted: bool = False
    asked: Any = None
    """A request on its way to the server."""
    answers: tuple[Any, ...] = ()
    # What the reader has been told.
    cursor: int = 0
    view: Sent | None = (-1, 0)
    """Life (-1: any) and number that the reader's set is exact behind; None: of none."""
    flagged: bool = False


class Broken(AssertionError):
    """The machine told its reader something that is not so."""


def message(sent: Sent, rules: Rules) -> Message:
    life, seq = sent
    bad = sent in rules.poisoned
    ts = life * 1000.0 + seq if rules.stamps and not bad else None
    return Message(seq, hash(sent), ts, 1, sent, bad, sent in rules.partial)


def told(w: World, actions: list[Action], rules: Rules) -> World:
    """The world after the reader did what the machine says."""
    for a in actions:
        if isinstance(a, Apply):
            life, seq = a.message.content
            if seq != w.cursor or a.message.poisoned:
                raise Broken(f"{a} at {w.cursor}")
            exact = w.view is not None and w.view[1] == seq and w.view[0] in {-1, life}
            w = w._replace(cursor=seq + 1, view=(life, seq + 1) if exact else None)
            if a.message.partial:
                w = w._replace(flagged=True, view=None)
        elif isinstance(a, Lose):
            drift = a.reason == "drift" and a.first == a.last == w.cursor - 1
            if not drift and (a.first != w.cursor or a.last < a.first):
                raise Broken(f"{a} at {w.cursor}")
            w = w._replace(cursor=a.last + 1, view=None, flagged=True)
        elif isinstance(a, Wipe):
            if a.reason == "gap":
                w = w._replace(view=(-1, w.cursor) if w.cursor == 0 else None, flagged=False)
            else:
                w = w._replace(cursor=0, view=(-1, 0), flagged=False)
        elif isinstance(a, Restore):
            if a.resume_seq < w.cursor:
                raise Broken(f"{a} goes back from {w.cursor}")
            w = w._replace(cursor=a.resume_seq, view=a.content, flagged=False)
        elif isinstance(a, Hello | Range | Fetch | Compare):
            w = w._replace(asked=a, answers=())
    if w.view is None and not w.flagged and rules.told:
        raise Broken(f"not exact and not said so after {actions}: {w}")
    return w


def head(w: World, rules: Rules, *, hello: bool = False) -> Head:
    log = in_log(w, rules)
    holes = tuple((seq, seq) for life, seq in sorted(rules.holes) if life == w.life and seq < w.sent)
    return Head(
        bytes([w.life] * 16),
        log[0] if log else None,
        log[-1] if log else None,
        w.sent if rules.mirror else None,
        w.sent if hello else None,
        holes if hello else (),
    )


def in_log(w: World, rules: Rules) -> list[int]:
    return [i for i in range(w.sent) if (w.life, i) not in rules.holes][-rules.log :]


def serve(w: World, rules: Rules) -> World:
    """The server's answers, made at once."""
    request, h = w.asked, head(w, rules)
    answers: list[Any]
    if isinstance(request, Hello):
        answers = [("hello", head(w, rules, hello=True))]
    elif isinstance(request, Range):
        log = in_log(w, rules)
        if log and request.first < log[0]:
            answers = [("too_old", h)]
        else:
            found = [i for i in log if request.first <= i <= request.last]
            answers = [("replayed", h, (w.life, i)) for i in found] + [("replay_ended", h, len(found))]
    elif isinstance(request, Fetch):
        answers = [("restored", h, w.sent, (w.life, w.sent))] if rules.mirror else [("failed", "no_mirror")]
    else:
        answers = [("digested", h, b"true" if rules.mirror else None)]
    return w._replace(asked=None, answers=tuple(answers))


def answer(w: World, s: Sequence, rules: Rules) -> World:
    (what, *args), rest = w.answers[0], w.answers[1:]
    if what == "replayed":
        args[1] = message(args[1], rules)
    return told(w._replace(answers=rest), getattr(s, what)(*args), rules)


def clone(s: Sequence) -> Sequence:
    new = Sequence.__new__(Sequence)
    vars(new).update(vars(s))
    new.held = Held(s.limits)
    new.held._messages = dict(s.held._messages)
    new.held.nbytes = s.held.nbytes
    new._seen = dict(s._seen)
    if s.job is not None:
        new.job = copy.copy(s.job)
    return new


STATE = operator.attrgetter(
    *(sorted(vars(Sequence()).keys() - {"held", "job", "_seen", "limits", "policy", "first_seq", "_before"}))
)
JOB = operator.attrgetter(*Job.__slots__)


def fingerprint(s: Sequence) -> tuple[object, ...]:
    held = frozenset((n, m.content) for n, m in s.held._messages.items())
    return (STATE(s), tuple(s._seen.items()), held, s.job and JOB(s.job))


def successors(w: World, s: Sequence, rules: Rules):
    def after(new: World, what: str, *args: Any, **options: Any):
        t = clone(s)
        return told(new, getattr(t, what)(*args, **options), rules), t

    if w.sent < rules.sizes[w.life]:
        sent = (w.life, w.sent)
        flight = w.flight if sent in rules.holes else (*w.flight, sent)
        yield w._replace(sent=w.sent + 1, flight=flight), s
    elif w.life + 1 < len(rules.sizes):
        new = w._replace(life=w.life + 1, sent=0)
        yield after(new._replace(asked=None, answers=()), "connected") if rules.told else (new, s)
    for i, m in enumerate(w.flight[: rules.window]):
        rest = (*w.flight[:i], *w.flight[i + 1 :])
        yield after(w._replace(flight=rest), "live", message(m, rules))
        if w.repeats < rules.repeats:
            yield after(w._replace(repeats=w.repeats + 1), "live", message(m, rules))
    if w.flight and w.drops < rules.drops:
        yield w._replace(flight=w.flight[1:], drops=w.drops + 1), s
    if w.asked is not None:
        yield serve(w, rules), s
        if w.fails < rules.fails:
            yield after(w._replace(asked=None, fails=w.fails + 1), "failed", "unreachable")
    if w.answers:
        t = clone(s)
        yield answer(w, t, rules), t
    if w.looks < rules.looks:
        for what in ("look", "rested"):
            yield after(w._replace(looks=w.looks + 1), what)
    if rules.drift and not w.drifted and w.cursor:
        yield after(w._replace(drifted=True), "check", w.cursor - 1, b"other")


def settle(w: World, s: Sequence, rules: Rules) -> World:
    """The end: nothing is in flight, the server answers, the reader looks until nothing comes of it."""
    for what in ("look", "rested", "look", "rested", "look"):
        for _ in range(60):
            if w.answers:
                w = answer(w, s, rules)
            elif w.asked is not None:
                w = serve(w, rules)
            else:
                break
        else:
            raise Broken(f"asks without end: {w}")
        w = told(w, getattr(s, what)(), rules)
    while w.asked is not None or w.answers:
        w = serve(w, rules) if w.asked is not None else answer(w, s, rules)
    return w


def explore(rules: Rules, policy: Policy) -> tuple[int, int]:
    s = Sequence(limits=Limits(attempts=2, late_run=2), policy=policy)
    w = told(World(), s.connected(), rules)
    seen = set()
    stack = [(w, s)]
    states = ends = 0
    while stack:
        w, s = stack.pop()
        key = (w, fingerprint(s))
        if key in seen:
            continue
        seen.add(key)
        states += 1
        stack.extend(successors(w, s, rules))
        if not w.flight and w.life == len(rules.sizes) - 1 and w.sent == rules.sizes[-1]:
            ends += 1
            check_end(settle(w, clone(s), rules), rules, policy)
    return states, ends


def check_end(w: World, rules: Rules, policy: Policy) -> None:
    newest, n = len(rules.sizes) - 1, rules.sizes[-1]
    exact = (
        w.view is not None
        and w.view[1] == w.cursor == n
        and w.view[0] in ({-1, newest} if n == 0 else {newest})
    )
    if policy == "snapshot" and rules.mirror:
        if not exact or w.flagged:
            raise Broken(f"does not end exact in life {newest} behind {n}: {w}")
    elif not exact and not w.flagged:
        raise Broken(f"ends neither exact nor flagged: {w}")


ALL: tuple[Policy, ...] = ("snapshot", "replay", "wipe", "keep_and_flag")
ONE = ("snapshot",)
DEEP = bool(os.environ.get("KVEVENTS_DEEP"))


def deep(shallow: int, more: int) -> int:
    return more if DEEP else shallow


N, M = deep(3, 4), deep(2, 3)
WORLDS = {
    "one life: loss, repetition, overtaking": Rules((N,), drops=2, repeats=1, window=2, policies=ALL),
    "one life: far overtaking": Rules((N,), drops=1, repeats=1, window=4),
    "one life: short log": Rules((4,), drops=M, window=2, log=1, policies=ALL),
    "one life: holes of the publisher": Rules(
        (4,), drops=1, window=2, holes=frozenset({(0, 1), (0, 3)}), policies=ALL
    ),
    "one life: everything is a hole": Rules((2,), looks=1, holes=frozenset({(0, 0), (0, 1)})),
    "one life: poison": Rules((N,), drops=1, window=2, poisoned=frozenset({(0, 1), (0, 3)}), policies=ALL),
    "one life: batches with bad events": Rules(
        (N,), drops=1, looks=1, partial=frozenset({(0, 1)}), policies=ALL
    ),
    "one life: unanswered requests": Rules((M,), drops=M - 1, window=2, fails=4, looks=1, policies=ALL),
    "one life: no mirror": Rules((4,), drops=M, window=2, log=1, mirror=False, policies=ALL),
    "one life: drift": Rules((M,), drops=1, looks=1, drift=True, fails=2, policies=ALL),
    "one life: no stamps": Rules((3,), drops=2, repeats=1, window=2, stamps=False),
    "restart, shorter life": Rules((N, 2), drops=1 + DEEP, window=2, policies=ALL if DEEP else ONE),
    "restart, counts past the old number": Rules(
        (2, 3), drops=M, window=1 + DEEP, policies=ALL if DEEP else ONE
    ),
    "restart, repetition": Rules((2, 2), drops=0 + DEEP, repeats=1, window=2 + DEEP),
    "restart, short log": Rules((2, M), drops=2, window=2, log=1, policies=ALL),
    "restart, holes": Rules((2, 2), drops=1, window=2, holes=frozenset({(0, 1), (1, 0)}), policies=ALL),
    "restart, unanswered requests": Rules((2, 2), drops=0 + DEEP, window=1 + DEEP, fails=2, policies=ALL),
    "restart, no mirror": Rules((2, 2), drops=2, window=2, log=1, mirror=False, policies=ALL),
    "restart that no connection tells of": Rules((2, M), drops=2, window=1 + DEEP, told=False, looks=1),
    "two restarts": Rules((1, 1, 2), drops=1 + DEEP, window=2),
    "a restart before anything was sent": Rules((0, 2), drops=1, looks=1),
}
CASES = [(name, policy) for name, rules in WORLDS.items() for policy in rules.policies]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_what_a_reader_is_told_is_exact_or_flagged_in_every_interleaving(name: str, policy: Policy) -> None:
    states, ends = explore(WORLDS[name], policy)
    assert states > 10
    assert ends > 0
