"""Every interleaving of loss, repetition, reordering, replay and restart, up to a stated number of messages.

The world is a publisher with one or two lives, a link with messages in flight and a replay server. All
reachable states are visited once. The oracle is what the publisher really sent.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest

from kvevents.subscribe.actions import Action, Apply, Ask, Limits, Lose, Message, Wipe
from kvevents.subscribe.plain import PlainSequence

Sent = tuple[int, int]  # life, number


class Rules(NamedTuple):
    """What may happen in a world, and how often."""

    sizes: tuple[int, ...]
    """Messages of each life."""
    drops: int = 0
    repeats: int = 0
    window: int = 1
    """A message may overtake ``window - 1`` others."""
    fails: int = 0
    """Replay requests that are not answered."""
    log: int = 1000
    """Messages that the replay log keeps."""
    replay: bool = True
    poisoned: frozenset[Sent] = frozenset()
    told: bool = True
    """Whether a restart is seen as a new connection."""


class World(NamedTuple):
    life: int
    sent: int
    flight: tuple[Sent, ...]
    drops: int
    repeats: int
    fails: int
    asked: int | None
    """A request on its way to the server."""
    answers: tuple[Sent | None, ...]
    """Answers on their way back; None is the end marker."""
    # What the reader has been told.
    cursor: int
    shown: int
    """Life of what was applied since the last wipe; -1 before."""
    past: int
    """Newest life that was wiped."""
    lost: frozenset[int]


def message(sent: Sent, rules: Rules) -> Message:
    life, seq = sent
    bad = sent in rules.poisoned
    return Message(seq, hash(sent), None if bad else life * 1000.0 + seq, 1, sent, bad)


def fingerprint(s: PlainSequence) -> tuple[object, ...]:
    rep = s._repair
    return (
        s.next,
        s.heard,
        s._high,
        tuple(s._seen.items()),
        tuple(s._lost),
        tuple(sorted((k, m.content, r) for k, (m, r) in s._held.items())),
        frozenset(s._condemned),
        s._suspect and s._suspect.content,
        s._life_ts,
        s._last_ts,
        s._unverified,
        s._doubt_from,
        s._confirmed,
        s._late_run,
        s._late_seq,
        s._replay_known,
        rep
        and (rep.start, rep.attempt, rep.high, rep.why, rep.next, rep.newest, rep.first_answer, rep.verified),
    )


def clone(s: PlainSequence) -> PlainSequence:
    new = copy.copy(s)
    new._seen = dict(s._seen)
    new._lost = list(s._lost)
    new._held = dict(s._held)
    new._condemned = set(s._condemned)
    new._repair = copy.copy(s._repair)
    return new


class Broken(AssertionError):
    """The machine told its reader something that is not so."""


def told(w: World, actions: list[Action], rules: Rules, *, doubtful: bool) -> World:
    """The world after the reader did what the machine says, checked against what was sent."""
    for a in actions:
        if isinstance(a, Apply):
            life, seq = a.message.content
            if seq != w.cursor:
                raise Broken(f"{a} at cursor {w.cursor}")
            if a.message.poisoned:
                raise Broken(f"{a} is no batch")
            mixed = w.shown not in {-1, life}
            # A log so short that it has nothing of what was applied cannot tell lives apart.
            tellable = rules.told and rules.log >= max(rules.sizes)
            if mixed and tellable and not doubtful:
                raise Broken(f"{a} mixes life {life} into life {w.shown}")
            if life <= w.past and tellable and rules.replay:
                raise Broken(f"{a} comes back after a wipe")
            w = w._replace(cursor=seq + 1, shown=min(w.shown, life) if mixed else life)
        elif isinstance(a, Lose):
            if a.first != w.cursor or a.last < a.first:
                raise Broken(f"{a} at cursor {w.cursor}")
            w = w._replace(cursor=a.last + 1, lost=w.lost | frozenset(range(a.first, a.last + 1)))
        elif isinstance(a, Wipe):
            w = w._replace(cursor=0, shown=-1, past=max(w.past, w.shown), lost=frozenset())
        elif isinstance(a, Ask):
            w = w._replace(asked=a.start, answers=())
    return w


def fed(w: World, s: PlainSequence, rules: Rules, what: str, *args: object, **options: object) -> World:
    """The world after the machine was told something."""
    doubtful = s.doubtful
    actions = getattr(s, what)(*args, **options)
    return told(w, actions, rules, doubtful=doubtful or s.doubtful)


def serve(w: World, rules: Rules) -> World:
    assert w.asked is not None
    first = max(w.asked, w.sent - rules.log)
    answers = (*((w.life, i) for i in range(first, w.sent)), None)
    return w._replace(asked=None, answers=answers)


def answer(w: World, s: PlainSequence, rules: Rules) -> World:
    head, rest = w.answers[0], w.answers[1:]
    w = w._replace(answers=rest)
    return fed(w, s, rules, *(["replay_ended"] if head is None else ["replayed", message(head, rules)]))


def successors(w: World, s: PlainSequence, rules: Rules):
    if w.sent < rules.sizes[w.life]:
        sent = (w.life, w.sent)
        yield w._replace(sent=w.sent + 1, flight=(*w.flight, sent)), s
    elif w.life + 1 < len(rules.sizes):
        t = clone(s)
        new = w._replace(life=w.life + 1, sent=0)
        if rules.told:
            # The request that was under way died with the process.
            new = new._replace(asked=None, answers=())
            if t.repairing:
                new = fed(new, t, rules, "replay_failed", "unreachable")
            new = fed(new, t, rules, "connected")
        yield new, t
    for i, m in enumerate(w.flight[: rules.window]):
        rest = (*w.flight[:i], *w.flight[i + 1 :])
        t = clone(s)
        yield fed(w._replace(flight=rest), t, rules, "live", message(m, rules)), t
        if w.repeats < rules.repeats:
            t = clone(s)
            yield fed(w._replace(repeats=w.repeats + 1), t, rules, "live", message(m, rules)), t
    if w.flight and w.drops < rules.drops:
        yield w._replace(flight=w.flight[1:], drops=w.drops + 1), s
    if w.asked is not None:
        if rules.replay:
            yield serve(w, rules), s
        if not rules.replay or w.fails < rules.fails:
            t = clone(s)
            new = w._replace(asked=None, fails=w.fails + rules.replay)
            yield fed(new, t, rules, "replay_failed", "no replay", retry=rules.replay), t
    if w.answers:
        t = clone(s)
        yield answer(w, t, rules), t


def settle(w: World, s: PlainSequence, rules: Rules) -> World:
    """The end: nothing is in flight, the reader asks after a silence until nothing comes of it."""
    for _ in range(3):
        for _ in range(100):
            if w.answers:
                w = answer(w, s, rules)
            elif w.asked is not None:
                if rules.replay:
                    w = serve(w, rules)
                else:
                    w = fed(w._replace(asked=None), s, rules, "replay_failed", "no replay", retry=False)
            else:
                break
        else:
            raise Broken("asks without end")
        w = fed(w, s, rules, "look")
    return w


def explore(rules: Rules) -> tuple[int, int]:
    s = PlainSequence(limits=Limits(attempts=4))
    w = World(0, 0, (), 0, 0, 0, None, (), 0, -1, -1, frozenset())
    if rules.told:
        w = fed(w, s, rules, "connected")
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
            check_end(settle(w, clone(s), rules), rules)
    return states, ends


def check_end(w: World, rules: Rules) -> None:
    newest, n = len(rules.sizes) - 1, rules.sizes[-1]
    if not rules.replay or not rules.told:
        # Nothing but the log can tell of a restart that no connection tells of, and then not always.
        return
    bad = {seq for life, seq in rules.poisoned if life == newest}
    kept = set(range(max(0, n - rules.log), n))
    if w.cursor != n:
        raise Broken(f"ends at {w.cursor} of {n}: {w}")
    if not rules.fails and rules.log >= n and w.shown != newest and bad != kept:
        raise Broken(f"ends in life {w.shown}: {w}")
    if not (w.lost - bad).isdisjoint(kept) and not rules.fails:
        raise Broken(f"lost {set(w.lost)}, which the log had: {w}")


WORLDS = {
    "one life: loss, repetition, overtaking": Rules((5,), drops=3, repeats=1, window=2),
    "one life: far overtaking": Rules((4,), drops=1, repeats=1, window=4),
    "one life: short log": Rules((5,), drops=4, window=2, log=2),
    "one life: poison": Rules((4,), drops=2, window=2, poisoned=frozenset({(0, 1), (0, 3)})),
    "one life: unanswered requests": Rules((4,), drops=3, window=2, fails=2),
    "one life: no replay": Rules((6,), drops=3, repeats=1, window=3, replay=False),
    "restart, shorter life": Rules((3, 2), drops=3, window=2),
    "restart, counts past the old number": Rules((2, 3), drops=3, window=2),
    "restart, repetition": Rules((2, 2), drops=1, repeats=1, window=3),
    "restart, short log": Rules((2, 3), drops=3, window=2, log=1),
    "restart, unanswered requests": Rules((2, 2), drops=2, window=2, fails=1),
    "restart that no connection tells of": Rules((3, 2), drops=2, window=2, told=False),
    "two restarts": Rules((1, 1, 2), drops=2, window=2),
    "restart, no replay": Rules((3, 3), drops=2, window=2, replay=False),
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_interleaving_is_in_order_and_accounted_for(name: str) -> None:
    states, ends = explore(WORLDS[name])
    assert states > 50
    assert ends > 0
