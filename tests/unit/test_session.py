"""A session against servers that lie, break off, or never end: bounded, loud, and healed when they behave."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvevents import BlockRemoved, BlockStored, EventList, KVEventBatch, ResidentSet, Source, encode
from kvevents.subscribe import Gap, Limits, Reset, Snapshot, Timing
from kvevents.subscribe.log import RateLimitedLog
from kvevents.subscribe.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvevents.subscribe import Item

pack = msgspec.msgpack.encode
Frames = tuple[bytes, ...]


def stored(*hashes: int) -> EventList:
    tokens = [h % 1000 for h in hashes for _ in range(4)]
    return EventList([BlockStored(list(hashes), None, tokens, 4, None, "GPU", None)])


class Server:
    """An honest publisher in memory; tests change what it answers."""

    def __init__(self, log: int = 4) -> None:
        self.epoch = b"e" * 16
        self.log: dict[int, bytes] = {}
        self.keep = log
        self.next = 0
        self.truth = ResidentSet()
        self.requests: list[dict[str, Any]] = []
        self.lie: Callable[[dict[str, Any], list[Frames]], Iterable[Frames]] = lambda _, answers: answers
        self.pieces = 3

    def publish(self) -> bytes:
        events = stored(self.next * 10, self.next * 10 + 1)
        self.truth.apply(events)
        payload = encode(KVEventBatch(float(self.next), events, 0))
        self.log[self.next] = payload
        self.next += 1
        while len(self.log) > self.keep:
            del self.log[next(iter(self.log))]
        return payload

    def head(self, op: str, **more: Any) -> dict[str, Any]:
        state = {
            "op": op, "id": None, "epoch": self.epoch, "resume_seq": self.next,
            "oldest": min(self.log, default=None), "newest": max(self.log, default=None),
        }  # fmt: skip
        return state | more

    def framed(self, head: dict[str, Any], *payload: bytes) -> Frames:
        return (b"", b"KVE1", pack(head), *payload)

    def answer(self, message: Frames) -> list[Frames]:
        if message[1] != b"KVE1":
            return [(b"", b"", b"\xff" * 8, b"")]
        request = msgspec.msgpack.decode(message[2])
        self.requests.append(request)
        return list(self.lie(request, getattr(self, "_" + request["op"])(request)))

    def _hello(self, request: dict[str, Any]) -> list[Frames]:
        del request
        return [
            self.framed(self.head("hello", next_sequence=self.next, holes=[], rank=0, exact_for="engine"))
        ]

    def _replay(self, request: dict[str, Any]) -> list[Frames]:
        if self.log and request["first"] < min(self.log):
            return [self.framed(self.head("error", code="too_old"))]
        found = {n: p for n, p in self.log.items() if request["first"] <= n <= request["last"]}
        answers = [self.framed(self.head("replay", seq=n), p) for n, p in found.items()]
        return [*answers, self.framed(self.head("end", of="replay", count=len(found)))]

    def _digest(self, request: dict[str, Any]) -> list[Frames]:
        return [self.framed(self.head("digest", seq=request["seq"], digest=self.truth.digest()))]

    def _snapshot(self, request: dict[str, Any]) -> list[Frames]:
        hashes = [key.hash for key in self.truth.keys(None)] if self.truth.sources else []
        chunks = [hashes[i :: self.pieces] for i in range(self.pieces) if hashes[i :: self.pieces]] or [[]]
        first = request.get("piece", 0)
        return [
            self.framed(
                self.head(
                    "snapshot",
                    piece=i,
                    more=i + 1 < len(chunks),
                    digest=self.truth.digest(),
                    blocks=len(hashes),
                ),
                encode(KVEventBatch(1.0, stored(*chunks[i]) if chunks[i] else EventList(), 0)),
            )
            for i in range(first, min(len(chunks), first + request["count"]))
        ]


class Run:
    """A session, driven in virtual time."""

    def __init__(self, server: Server, **options: Any) -> None:
        self.server = server
        self.now = 0.0
        limits = Limits(hold_batches=16, hold_bytes=10_000, snapshot_bytes=200_000)
        timing = options.pop("timing", Timing())
        log = RateLimitedLog("test", lambda: self.now)
        source = Source("inproc://live", "inproc://replay", name="it")
        self.session = Session(source, timing=timing, limits=limits, rng=random.Random(1), log=log, **options)
        self.resident = ResidentSet()
        self.items: list[Item] = []
        self.sent = 0
        self.steps = 0
        self.take(self.session.connected(0.0))

    def take(self, items: list[Item]) -> None:
        for item in items:
            self.resident.apply(item)
        self.items += items

    def live(self) -> None:
        seq = self.server.next
        payload = self.server.publish()
        self.take(self.session.live([b"", seq.to_bytes(8, "big"), payload], self.now))

    def until(self, end: float, *, every: float = 0.0) -> None:
        """Let time pass; a live batch ``every`` so many seconds."""
        due = self.now + every if every else end
        s = self.session
        while True:
            self.steps += 1
            assert self.steps < 20_000, "it spins"
            while s.wants(self.now):
                self.steps += 1
                assert self.steps < 20_000, "it spins"
                request = s.request
                messages = s.take(self.now)
                self.sent += len(messages)
                for message in messages:
                    for frames in self.server.answer(message):
                        if s.request is request:
                            self.take(s.answer(list(frames), self.now))
            assert len(s.sequence.held) <= 16
            self.now = max(self.now, min(s.deadline(self.now), due, end))
            if self.now >= end:
                return
            if self.now >= s.deadline(self.now):
                self.take(s.tick(self.now))
            elif self.now >= due:
                due += every
                self.live()

    @property
    def exact(self) -> bool:
        return self.resident.valid_digest("it") == self.server.truth.digest()

    def of(self, kind: type) -> list[Any]:
        return [i for i in self.items if isinstance(i, kind)]


def old_server(log: int = 4, batches: int = 12) -> Server:
    """One whose log does not reach back: a reader needs a snapshot."""
    server = Server(log)
    for _ in range(batches):
        server.publish()
    return server


def test_an_honest_server_leads_to_its_set_by_one_snapshot() -> None:
    run = Run(old_server())
    run.until(5, every=0.1)
    assert run.exact
    assert len(run.of(Snapshot)) == 1
    assert not run.of(Gap)


def lying(**fields: Any) -> Callable[[dict[str, Any], list[Frames]], list[Frames]]:
    """Every head says so."""

    def lie(request: dict[str, Any], answers: list[Frames]) -> list[Frames]:
        del request
        return [(*a[:2], pack(msgspec.msgpack.decode(a[2]) | fields), *a[3:]) for a in answers]

    return lie


def new_epochs() -> Callable[[dict[str, Any], list[Frames]], list[Frames]]:
    count = 0

    def lie(request: dict[str, Any], answers: list[Frames]) -> list[Frames]:
        nonlocal count
        changed = []
        for a in answers:
            count += 1
            changed += lying(epoch=count.to_bytes(16, "big"))(request, [a])
        return changed

    return lie


def only(op: str, lie: Callable[[dict[str, Any], list[Frames]], Iterable[Frames]]) -> Any:
    return lambda request, answers: lie(request, answers) if request["op"] == op else answers


def endless(request: dict[str, Any], answers: list[Frames]) -> list[Frames]:
    first = request.get("piece", 0)
    head = msgspec.msgpack.decode(answers[0][2]) if answers else {}
    return [
        (b"", b"KVE1", pack(head | {"piece": first + i, "more": True}),
         encode(KVEventBatch(1.0, stored(10**6 + 1000 * first + i), 0)))
        for i in range(request["count"])
    ]  # fmt: skip


def with_removals(_: dict[str, Any], answers: list[Frames]) -> list[Frames]:
    bad = encode(KVEventBatch(1.0, EventList([BlockRemoved([1], "GPU")]), 0))
    return [(*a[:3], bad) for a in answers]


TOP = 2**64 - 2
LIES: dict[str, Any] = {
    "silence": lambda *_: [],
    "silence about snapshots": only("snapshot", lambda *_: []),
    "another life in every answer": new_epochs(),
    "another life in every piece": only("snapshot", new_epochs()),
    "a newest number that is not": lying(newest=TOP),
    "an oldest number above the newest": lying(oldest=TOP),
    "numbers beyond the last": lying(newest=2**64 - 1, oldest=2**64 - 1),
    "negative numbers": lying(newest=-1),
    "an epoch of one byte": lying(epoch=b"e"),
    "an epoch that is text": lying(epoch="e" * 16),
    "holes everywhere": only("hello", lying(holes=[[0, TOP]])),
    "holes backwards": only("hello", lying(holes=[[5, 4]])),
    "a next number that is behind": only("hello", lying(next_sequence=0)),
    "snapshots of the far future": only("snapshot", lying(resume_seq=TOP)),
    "snapshots of the past": only("snapshot", lying(resume_seq=0)),
    "snapshots without an end": only("snapshot", endless),
    "a snapshot with another digest": only("snapshot", lying(digest=bytes(16))),
    "a snapshot that says it has more blocks": only("snapshot", lying(blocks=10**9)),
    "a snapshot with removals": only("snapshot", with_removals),
    "pieces out of order": only("snapshot", lambda _, a: a[::-1]),
    "half of the pieces, again and again": only("snapshot", lambda r, a: a[:1] if "piece" not in r else []),
    "pieces that are gone": only(
        "snapshot", lambda *_: [(b"", b"KVE1", pack({"op": "error", "code": "gone"}))]
    ),
    "always busy": lambda *_: [(b"", b"KVE1", pack({"op": "error", "code": "busy"}))],
    "too old, whatever is asked": only("replay", lying(op="error", code="too_old")),
    "too old, and an oldest number of the far future": only(
        "replay", lying(op="error", code="too_old", oldest=TOP, newest=TOP)
    ),
    "too old, and nothing in the log": only("replay", lying(op="error", code="too_old", oldest=None)),
    "too old, and never anything sent": only(
        "replay", lying(op="error", code="too_old", oldest=None, newest=None)
    ),
    "an oldest number and no newest": lying(newest=None),
    "a rank that none can be": lying(rank=2**32),
    "a head beyond measure": lying(exact_for="x" * 70_000),
    "batches that were not asked for": only("replay", lying(op="replay", seq=TOP)),
    "the same batch again and again": only("replay", lambda _, a: a[:1] * 500),
    "an end without batches": only("replay", lambda _, a: a[-1:]),
    "batches without an end": only("replay", lambda _, a: a[:-1]),
    "noise for a head": lambda *_: [(b"", b"KVE1", b"\xc1\xff")],
    "a head nested beyond measure": lambda *_: [(b"", b"KVE1", b"\x91" * 100_000)],
    "a list for a head": lambda *_: [(b"", b"KVE1", pack([1, 2]))],
    "heads without a payload": lambda _, answers: [a[:3] for a in answers],
    "noise for a payload": lambda _, answers: [(*a[:3], b"\xc1") for a in answers],
    "answers of another kind": lying(op="digest"),
    "answers of no kind": lying(op="poem"),
}


@pytest.mark.parametrize("policy", ["snapshot", "replay", "keep_and_flag"])
@pytest.mark.parametrize("name", LIES)
def test_a_lying_server_is_bounded_never_believed_and_healed_afterwards(name: str, policy: Any) -> None:
    server = old_server()
    server.lie = LIES[name]
    run = Run(server, policy=policy)
    run.until(60, every=0.5)
    # A forged number makes it ask, too.
    forged = (server.next + 50).to_bytes(8, "big")
    run.take(run.session.live([b"", forged, encode(KVEventBatch(1e9, stored(7), 0))], run.now))
    run.until(120, every=0.5)
    assert run.sent < 700, "it hammers"
    assert len(run.items) < 1_500
    # What it says is known is true, or it says that it is not: nobody is ever sure and wrong.
    assert (
        not run.items or run.session.sequence.held or run.exact or run.resident.why_invalid("it") is not None
    )
    server.lie = lambda _, answers: answers
    run.until(400, every=0.5)
    assert not run.session.sequence.held
    if policy == "snapshot":
        assert run.exact, (run.items[-5:], run.session.statistics(run.now))
    else:
        assert run.exact or run.resident.why_invalid("it") is not None


def test_what_a_server_calls_its_errors_does_not_get_into_items() -> None:
    server = old_server()
    server.lie = only("snapshot", lying(op="error", code="drift\nforged" + "x" * 10_000))
    run = Run(server)
    run.until(30, every=0.5)
    assert {g.reason for g in run.of(Gap)} == {"refused"}


def test_an_input_that_is_broken_off_is_said_and_healed() -> None:
    server = old_server()
    run = Run(server)
    run.until(5, every=0.1)
    assert run.exact
    payload = server.publish()
    lost = run.session.live([b"", (server.next - 1).to_bytes(8, "big"), payload], run.now)
    assert lost, "the machine counts it as delivered, and Ctrl-C came before the user had it"
    run.take(run.session.broken_off(run.now))
    assert run.of(Reset)[-1].reason == "unsure"
    run.until(20, every=0.1)
    assert run.exact


def test_a_snapshot_that_breaks_off_goes_on_where_it_was() -> None:
    server = old_server(batches=40)
    server.pieces = 20
    seen: list[int] = []

    def lie(request: dict[str, Any], answers: list[Frames]) -> list[Frames]:
        seen.append(request.get("piece", 0))
        return answers[:3]

    server.lie = only("snapshot", lie)
    run = Run(server, timing=Timing(snapshot_timeout_s=0.5))
    run.until(60)
    assert seen[:3] == [0, 3, 6]
    server.lie = lambda _, answers: answers
    run.until(120)
    assert run.exact


def test_live_batches_wait_for_a_snapshot_and_are_applied_after_it() -> None:
    server = old_server()
    server.lie = only("snapshot", lambda *_: [])
    run = Run(server)
    run.until(3)
    for _ in range(3):
        run.live()
    assert not run.items
    assert run.session.statistics(run.now).held == 3
    server.lie = lambda _, answers: answers
    run.until(30)
    assert run.exact
    assert not run.of(Gap)


def test_while_nobody_answers_the_waits_grow_and_differ_by_seed() -> None:
    server = old_server()
    server.lie = lambda *_: []
    run = Run(server)
    server.lie = lambda _, answers: answers
    run.until(2)
    assert run.exact
    server.lie = lambda *_: []
    before = run.sent
    run.until(600, every=1.0)
    assert run.sent - before < 400
    run.session.live([b"", (server.next + 5).to_bytes(8, "big"), server.publish()], run.now)


def test_a_restart_under_every_policy_is_a_reset() -> None:
    for policy in ("snapshot", "replay", "wipe", "keep_and_flag"):
        server = Server(100)
        run = Run(server, policy=policy)
        run.until(1, every=0.1)
        assert run.exact
        server.epoch, server.truth, server.log, server.next = b"f" * 16, ResidentSet(), {}, 0
        for _ in range(20):
            server.publish()  # it counts past the old number before anything is heard of it
        run.take(run.session.connected(run.now))
        run.until(10, every=0.5)
        assert run.of(Reset)[0].reason == "restart", policy
        assert run.exact or run.resident.why_invalid("it") is not None
        assert run.exact == (policy != "keep_and_flag")


def test_a_mirror_that_was_lost_is_waited_for_until_it_is_known_again() -> None:
    server = old_server()
    lost = [(b"", b"KVE1", pack(server.head("error", code="mirror_lost")))]
    server.lie = only("snapshot", lambda *_: lost)
    run = Run(server)
    run.until(20, every=0.5)
    assert run.of(Gap)[0].reason in {"mirror_lost", "too old"}
    assert run.resident.why_invalid("it") is not None
    server.lie = lambda _, answers: answers
    run.until(120, every=0.5)
    assert run.exact


def test_snapshots_that_are_needed_often_come_ever_more_rarely() -> None:
    server = Server(100)

    def holes(request: dict[str, Any], answers: list[Frames]) -> list[Frames]:
        if request["op"] != "replay":
            return answers
        kept = [a for a in answers if (msgspec.msgpack.decode(a[2]).get("seq") or 1) % 3]
        end = msgspec.msgpack.decode(kept[-1][2])
        return [*kept[:-1], (b"", b"KVE1", pack(end | {"count": len(kept) - 1}))]

    server.lie = holes
    run = Run(server)

    def skip() -> None:
        server.publish()
        if server.next % 3 == 0:
            server.publish()

    for _ in range(400):
        run.until(run.now + 0.25)
        skip()
        run.live()
    assert 3 <= len(run.of(Snapshot)) < 25


def test_what_is_heard_before_the_server_is_known_waits_and_costs_no_reset() -> None:
    server = Server(100)
    run = Run(server, timing=Timing(hello_timeout_s=5, jitter_s=0))
    asked = run.session.take(run.now)
    for _ in range(3):
        run.live()
    assert not run.items
    assert run.session.statistics(run.now).held == 3
    for frames in server.answer(asked[0]):
        run.take(run.session.answer(list(frames), run.now))
    run.until(1)
    assert run.exact
    assert not run.of(Reset)
    assert not run.of(Gap)


def test_what_waited_for_the_server_is_forgotten_with_its_connection() -> None:
    server = Server(100)
    run = Run(server, timing=Timing(hello_timeout_s=5, jitter_s=0))
    run.live()
    assert run.session.statistics(run.now).held == 1
    run.take(run.session.connected(run.now))
    assert run.session.statistics(run.now).held == 0
    run.until(10)
    assert run.exact
