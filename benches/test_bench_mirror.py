"""The mirror: what it costs the sender, snapshots of a million blocks, and replays beside the live stream."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import threading
import time
from functools import cache
from typing import Any

import msgspec
import zmq

from benches.harness import Work, as_tests, compare, value
from benches.workloads import BLOCK, hashes, token_ids
from kvevents import BlockRemoved, BlockStored, EventList, KVEventBatch
from kvevents._core import Mirror, ReplayLog, ResidentSet
from kvevents.codec import decode
from kvevents.publish import ZmqEventPublisher

ANY = "tcp://127.0.0.1:0"
DIALECT = "vllm-map-0.33"
PER_EVENT = 64
EVENTS = 64
MILLION = 1_000_000


def _stored(keys: list[Any], tokens: list[int]) -> BlockStored:
    return BlockStored(
        keys, None, tokens, BLOCK, None, "GPU", None, extra_keys=[None] * len(keys), group_idx=0,
        kv_cache_spec_kind="full_attention",
    )  # fmt: skip


@cache
def _stream() -> tuple[list[EventList], list[EventList]]:
    """Stores of 64 blocks each with hashes of 32 bytes, and their removals."""
    stores, removals = [], []
    for i in range(EVENTS):
        keys = hashes(i + 1, PER_EVENT)
        stores.append(EventList([_stored(list(keys), token_ids(i + 1, PER_EVENT * BLOCK))]))
        removals.append(EventList([BlockRemoved(list(reversed(keys)), "GPU", group_idx=0)]))
    return stores, removals


def _cost(*, keep_tokens: bool) -> Work:
    stores, removals = _stream()
    log, mirror = ReplayLog(1000, 1 << 24), Mirror(keep_tokens=keep_tokens)
    seq = 0

    def run(mirror: Mirror | None) -> None:
        nonlocal seq
        for events in (*stores, *removals):
            log.append_encoded(seq, events, 1.0, 0, DIALECT, mirror=mirror)
            seq += 1

    def check() -> None:
        resident = ResidentSet()
        other = Mirror(keep_tokens=keep_tokens)
        for i, events in enumerate(stores):
            other.record(i, events)
            resident.apply(events)
        found = other.digest()
        assert found is not None
        assert (found[1], len(other)) == (resident.digest(), PER_EVENT * EVENTS)
        run(mirror)
        assert len(mirror) == 0

    return Work(ours=lambda: run(mirror), theirs=lambda: run(None), n=2 * PER_EVENT * EVENTS, check=check)


@compare(
    "mirror and digest with tokens, a block of 16 tokens that is stored or removed",
    per="block", measure="difference", floor=90, aim=50, against="the same without a mirror",
)  # fmt: skip
def with_tokens() -> Work:
    """Batches of 64 blocks through the sender's call."""
    return _cost(keep_tokens=True)


@compare(
    "mirror and digest without tokens, a block of 16 tokens that is stored or removed",
    per="block", measure="difference", floor=45, aim=20, against="the same without a mirror",
)  # fmt: skip
def without_tokens() -> Work:
    """Batches of 64 blocks through the sender's call."""
    return _cost(keep_tokens=False)


@cache
def _million() -> list[tuple[list[bytes], EventList]]:
    """A million blocks, a thousand in each store."""
    rng = random.Random(7)
    tokens = token_ids(1, 1000 * BLOCK)
    keys = [[rng.randbytes(32) for _ in range(1000)] for _ in range(MILLION // 1000)]
    return [(run, EventList([_stored(run, tokens)])) for run in keys]


@value("longest wait of a batch while 10^6 blocks are walked", unit="ms", floor=1, aim=0.2)
def longest_stop() -> float:
    """Batches of 16 stored and 16 removed blocks go on all the time.

    The smallest of three: what a wait is, without what other processes of the machine take.
    """
    rng = random.Random(8)
    tokens = token_ids(2, 16 * BLOCK)
    batches = []
    for keys, _ in _million():
        new = [rng.randbytes(32) for _ in range(16)]
        batches.append(EventList([BlockRemoved(keys[:16], "GPU", group_idx=0), _stored(new, tokens)]))
    waits = []
    for _ in range(3):
        mirror = Mirror()
        for i, (_, events) in enumerate(_million()):
            mirror.record(i, events)
        seq = mirror.resume_seq
        head = mirror.begin_snapshot(1 << 20)
        assert head is not None
        pieces = []
        done = threading.Event()

        def walk(mirror: Mirror = mirror, pieces: list[bytes] = pieces, done: threading.Event = done) -> None:
            more = True
            while more:
                piece, more = mirror.next_piece(0.0, 0, DIALECT, 32 * 1024)
                if piece is not None:
                    pieces.append(piece)
            done.set()

        thread = threading.Thread(target=walk)
        thread.start()
        during = 0
        for events in batches:
            mirror.record(seq, events)
            seq += 1
            during += not done.is_set()
        thread.join()
        waits.append(mirror.longest_wait_ns / 1e6)
        resident = ResidentSet()
        for piece in pieces:
            resident.apply(decode(piece).events)
        assert (resident.digest(), len(resident)) == (head[1], MILLION)
        assert during > 10, "the walk was over before the batches"
    print("  longest waits, ms: " + ", ".join(f"{w:.3f}" for w in sorted(waits)))
    return min(waits)


class _Dealer:
    """A client of the extended replay."""

    def __init__(self, publisher: ZmqEventPublisher) -> None:
        self.socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.rcvtimeo = 60_000
        self.socket.connect(publisher.get_publisher_config().replay_endpoint)

    def ask(self, **request: Any) -> None:
        self.socket.send_multipart([b"", b"KVE1", msgspec.msgpack.encode(request)])

    def answer(self) -> tuple[dict[str, Any], bytes]:
        _, _, head, *payload = self.socket.recv_multipart()
        return msgspec.msgpack.decode(head), payload[0] if payload else b""


@value("snapshot of 10^6 blocks, asked for, received and applied", unit="s", floor=2, aim=1)
def whole_snapshot() -> float:
    """Over TCP, from the publisher to a resident set; the best of three, each made anew."""
    publisher = ZmqEventPublisher(endpoint=ANY, replay_endpoint=ANY)
    try:
        for _, events in _million():
            publisher.publish(KVEventBatch(0.0, events))
        while publisher.stats().sent < publisher.stats().next_sequence or publisher.stats().queued:
            time.sleep(0.01)
        times = []
        for _ in range(3):
            publisher.publish(KVEventBatch(0.0, EventList()))
            while publisher.stats().sent < publisher.stats().next_sequence or publisher.stats().queued:
                time.sleep(0.01)
            dealer, resident = _Dealer(publisher), ResidentSet()
            start = time.perf_counter()
            dealer.ask(op="snapshot", count=8, at_least=publisher.stats().next_sequence)
            received, asked = 0, 8
            while True:
                head, payload = dealer.answer()
                received += 1
                if head["more"] and asked - received == 4:
                    dealer.ask(op="snapshot", resume_seq=head["resume_seq"], piece=asked, count=4)
                    asked += 4
                resident.apply(decode(payload).events)
                if not head["more"]:
                    break
            times.append(time.perf_counter() - start)
            assert (resident.digest(), len(resident)) == (head["digest"], MILLION)
            dealer.socket.close(linger=0)
        print(f"  {received} pieces, {publisher.stats().replay}")
        return min(times)
    finally:
        publisher.shutdown()


LIVE = """
import sys, time, zmq, msgspec
sub = zmq.Context().socket(zmq.SUB)
sub.subscribe(b"")
sub.connect(sys.argv[1])
found = []
print("on", flush=True)
while True:
    frames = sub.recv_multipart()
    now = time.monotonic()
    if len(frames[2]) < 40:
        continue
    ts = msgspec.msgpack.decode(frames[2])[0]
    if ts < 0:
        break
    found.append(now - ts)
print(*found)
"""
REPLAYS = """
import sys, zmq, msgspec
context = zmq.Context()
dealers = []
for _ in range(10):
    dealer = context.socket(zmq.DEALER)
    dealer.connect(sys.argv[1])
    dealers.append(dealer)
poller = zmq.Poller()
ask = [b"", b"KVE1", msgspec.msgpack.encode({"op": "replay", "first": 0})]
for d in dealers:
    poller.register(d, zmq.POLLIN)
print("on", flush=True)
for line in sys.stdin:
    for d in dealers:
        d.send_multipart(ask)
    ended = batches = 0
    while ended < 10:
        for d, _ in poller.poll():
            frames = d.recv_multipart()
            batches += len(frames) == 4
            ended += len(frames) == 3
    print(batches, flush=True)
"""


def _process(code: str, endpoint: str | None) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(endpoint)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    return process


def _latency(*, busy: bool) -> tuple[float, float, int]:
    """Median and 99th percentile of the live latency in ms, and the number of batches."""
    events = EventList([_stored(list(hashes(1, 8)), token_ids(1, 8 * BLOCK))])
    publisher = ZmqEventPublisher(endpoint=ANY, replay_endpoint=ANY, buffer_steps=100_000)
    config = publisher.get_publisher_config()
    live, replays = _process(LIVE, config.endpoint), _process(REPLAYS, config.replay_endpoint)
    for _ in range(10_000):
        publisher.publish(KVEventBatch(1e18, EventList()))
    while publisher.stats().sent < 10_000:
        time.sleep(0.01)
    assert replays.stdin is not None
    assert replays.stdout is not None
    time.sleep(0.5)  # the reader has its backlog behind it
    if busy:
        replays.stdin.write("go\n")
        replays.stdin.flush()
        while publisher.stats().replay.active == 0:  # type: ignore[union-attr]
            time.sleep(0.0005)
    due = time.perf_counter()
    sent = 0
    until = due + 1.0
    while time.perf_counter() < until:
        if busy and sent and publisher.stats().replay.active == 0:  # type: ignore[union-attr]
            break
        publisher.publish(KVEventBatch(time.monotonic(), events))
        sent += 1
        due += 0.001
        time.sleep(max(0.0, due - time.perf_counter()))
    if busy:
        assert int(replays.stdout.readline()) >= 100_000
    time.sleep(0.2)
    publisher.publish(KVEventBatch(-1.0, events))
    text, _ = live.communicate(timeout=30)
    times = sorted(float(line) * 1e3 for line in text.split())
    assert len(times) == sent, f"{len(times)} of {sent}"
    replays.communicate(timeout=10)
    publisher.shutdown()
    return statistics.median(times), times[len(times) * 99 // 100], len(times)


@cache
def _latencies() -> dict[bool, tuple[float, float]]:
    """Medians over interleaved runs, without and with ten replays of 10,000 batches."""
    runs: dict[bool, list[tuple[float, float, int]]] = {False: [], True: []}
    for _ in range(5):
        for busy, found in runs.items():
            found.append(_latency(busy=busy))
    medians = {}
    for busy, found in runs.items():
        p50, p99 = (statistics.median(r[i] for r in found) for i in (0, 1))
        beside = "with ten replays" if busy else "alone"
        print(
            f"  live latency {beside}, {sum(r[2] for r in found)} batches: p50 {p50:.3f} ms, p99 {p99:.3f} ms"
        )
        medians[busy] = (p50, p99)
    return medians


@value("live latency p50 with ten replays from 0", unit="x", floor=2, aim=1.2, against="without")
def latency_p50() -> float:
    """1,000 batches a second, read in another process; the ten clients in a third; medians of five runs."""
    found = _latencies()
    return found[True][0] / found[False][0]


@value("live latency p99 with ten replays from 0", unit="x", floor=5, aim=2, against="without")
def latency_p99() -> float:
    """The same run."""
    found = _latencies()
    return found[True][1] / found[False][1]


test_rows = as_tests(__name__)
