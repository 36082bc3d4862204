"""The extended requests over real sockets, read with plain ZeroMQ and msgpack."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import xxhash
import zmq

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventList,
    KVEventBatch,
)
from kvevents._core import Mirror
from kvevents._core import ResidentSet as CoreSet
from kvevents.codec import decode
from kvevents.publish import ZmqEventPublisher, extended, replay, snapshots

ROOT = Path(__file__).resolve().parent.parent.parent
ANY = "tcp://127.0.0.1:0"
pack = msgspec.msgpack.encode
unpack = msgspec.msgpack.decode
COMMON = {"op", "id", "epoch", "oldest", "newest", "resume_seq"}


def digest_of(hashes, medium="GPU"):
    return digest_of_keys([[h, medium, None, None, None] for h in hashes])


def digest_of_keys(keys):
    return (sum(xxhash.xxh3_128_intdigest(pack(k)) for k in keys) % 2**128).to_bytes(16, "big")


def stored(*hashes, parent=None, tokens=True):
    token_ids = [h % 1000 for h in hashes for _ in range(4)] if tokens else []
    return BlockStored(list(hashes), parent, token_ids, 4, None, "GPU", None)


def removed(*hashes):
    return BlockRemoved(list(hashes), "GPU")


def wait_for(condition, seconds=10):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "timed out"
        time.sleep(0.002)


class Peer:
    """A client of one publisher."""

    def __init__(self, socket):
        self.socket = socket

    def send(self, op, **fields):
        self.socket.send_multipart([b"", b"KVE1", pack({"op": op, **fields})])

    def receive(self):
        empty, kind, head, *payload = self.socket.recv_multipart()
        assert (empty, kind) == (b"", b"KVE1")
        head = unpack(head)
        assert head.keys() >= COMMON
        return head, payload[0] if payload else None

    def ask(self, op, **fields):
        self.send(op, **fields)
        return self.receive()[0]

    def replay(self, first, last=None):
        self.send("replay", first=first, last=last)
        found = []
        while (answer := self.receive())[0]["op"] == "replay":
            found.append((answer[0]["seq"], answer[1]))
        return found, answer[0]

    def snapshot(self, count=1, **fields):
        """Head of the last piece, and all payloads."""
        self.send("snapshot", count=count, **fields)
        payloads = []
        while True:
            head, payload = self.receive()
            assert head["op"] == "snapshot", head
            assert head["piece"] == len(payloads)
            payloads.append(payload)
            if not head["more"]:
                return head, payloads
            if len(payloads) % count == 0:
                self.send("snapshot", resume_seq=head["resume_seq"], piece=len(payloads), count=count)


@pytest.fixture
def make():
    made = []

    def factory(rank=0, **options):
        publisher = ZmqEventPublisher(rank, **{"endpoint": ANY, "replay_endpoint": ANY, **options})
        made.append(publisher)
        return publisher

    yield factory
    for publisher in made:
        publisher.shutdown()


@pytest.fixture
def peer(sockets):
    return lambda p: Peer(sockets(zmq.DEALER, connect=p.get_publisher_config().replay_endpoint))


def publish(publisher, *batches):
    for i, events in enumerate(batches):
        publisher.publish(KVEventBatch(ts=float(i), events=list(events)))
    mirror = publisher.stats().mirror
    if mirror is not None:
        wait_for(lambda: publisher.stats().queued == 0)
        wait_for(lambda: publisher.stats().mirror.resume_seq == publisher.stats().next_sequence)
    else:
        wait_for(lambda: publisher.stats().sent == publisher.stats().next_sequence)


def applied(*payloads):
    resident = CoreSet()
    for payload in payloads:
        resident.apply(decode(payload, strict=True).events)
    return resident


# ---------------------------------------------------------------- hello, epoch


def test_hello_says_who_answers_and_what_can_be_asked(make, peer):
    publisher = make(3, data_parallel_size=4, topic="kv", exact_for="engine")
    publish(publisher, [stored(1, 2)], [removed(2)])
    hello = peer(publisher).ask("hello", id="x")
    assert hello.keys() == COMMON | {
        "version", "ops", "rank", "topic", "dialect", "next_sequence", "mirror", "mirror_tokens", "exact_for",
        "blocks", "holes", "holes_from", "dropped", "failed", "events_lost", "max_pieces",
        "store_only",
    }  # fmt: skip
    assert hello["epoch"] == publisher.stats().epoch
    assert len(hello["epoch"]) == 16
    assert (hello["id"], hello["version"], hello["rank"], hello["topic"]) == ("x", 1, 3, "kv")
    assert (hello["oldest"], hello["newest"], hello["resume_seq"], hello["next_sequence"]) == (0, 1, 2, 2)
    assert (hello["mirror"], hello["exact_for"], hello["blocks"]) == (True, "engine", 1)
    assert hello["ops"] == ["hello", "replay", "snapshot", "digest"]
    assert (hello["holes"], hello["holes_from"]) == ([], 0)


def test_every_life_has_its_own_epoch_so_two_publishers_at_one_address_are_told_apart(make, peer):  # R34
    one, two = make(), make()
    assert peer(one).ask("hello")["epoch"] != peer(two).ask("hello")["epoch"]


def test_the_rank_in_hello_is_the_global_one(make, peer):  # R36
    publisher = make(9, data_parallel_size=16)
    assert peer(publisher).ask("hello")["rank"] == 9


def test_without_a_mirror_replay_works_and_the_rest_says_so(make, peer):
    publisher = make(mirror=False)
    publish(publisher, [stored(1)])
    client = peer(publisher)
    hello = client.ask("hello")
    assert (hello["mirror"], hello["exact_for"], hello["resume_seq"], hello["blocks"]) == (
        False,
        None,
        None,
        None,
    )
    assert len(client.replay(0)[0]) == 1
    for op in ("snapshot", "digest"):
        assert client.ask(op)["code"] == "no_mirror"
    assert publisher.stats().mirror is None


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b"KVE1"], "bad_request"),
        ([b"KVE1", b"\xc1"], "bad_request"),
        ([b"KVE1", b"\x91\x91" * 20_000], "bad_request"),
        ([b"KVE1", pack([1])], "bad_request"),
        ([b"KVE1", pack({"op": "hello"}), b""], "bad_request"),
        ([b"KVE1", pack({})], "unknown_op"),
        ([b"KVE1", pack({"op": ["hello"]})], "unknown_op"),
        ([b"KVE1", pack({"op": "drop everything"})], "unknown_op"),
        ([b"KVE1", pack({"op": "hello", "id": "x" * 65})], "bad_request"),
        ([b"KVE1", pack({"op": "replay"})], "bad_request"),
        ([b"KVE1", pack({"op": "replay", "first": -1})], "bad_request"),
        ([b"KVE1", pack({"op": "replay", "first": True})], "bad_request"),
        ([b"KVE1", pack({"op": "replay", "first": 2**64 - 1})], "bad_request"),
        ([b"KVE1", pack({"op": "replay", "first": 5, "last": 4})], "bad_request"),
        ([b"KVE1", pack({"op": "snapshot", "piece": 1})], "bad_request"),
        ([b"KVE1", pack({"op": "snapshot", "count": 17})], "bad_request"),
        ([b"KVE1", pack({"op": "snapshot", "resume_seq": 77})], "gone"),
        ([b"KVE1", pack({"op": "digest", "seq": 77})], "unknown_seq"),
        ([b"replay"], "bad_request"),
    ],
)
def test_errors_have_codes_and_say_the_state_all_the_same(make, peer, frames, code):
    publisher = make()
    publish(publisher, [stored(1)])
    client = peer(publisher)
    client.socket.send_multipart([b"", *frames])
    head, payload = client.receive()
    assert (head["op"], head["code"], payload) == ("error", code, None)
    assert head["error"]
    assert (head["newest"], head["resume_seq"]) == (0, 1)
    assert publisher.stats().replay.refused == 1
    assert client.ask("hello")["op"] == "hello", "the next request is answered"


def test_who_floods_the_server_with_nonsense_does_not_flood_the_log(make, peer, caplog):
    publisher = make()
    client = peer(publisher)
    for _ in range(50):
        client.socket.send_multipart([b"", b"nonsense!"])
        client.receive()
    assert publisher.stats().replay.refused == 50
    assert sum("refused" in r.getMessage() for r in caplog.records) == 1


# ---------------------------------------------------------------- replay


def test_a_range_is_replayed_and_its_end_says_how_many_there_were(make, peer):
    publisher = make()
    publish(publisher, *[[stored(i)] for i in range(10)])
    client = peer(publisher)
    found, end = client.replay(3, 6)
    assert [n for n, _ in found] == [3, 4, 5, 6]
    assert (end["op"], end["of"], end["count"]) == ("end", "replay", 4)
    assert [n for n, _ in client.replay(8)[0]] == [8, 9]
    assert client.replay(10)[0] == []
    assert list(decode(found[0][1]).events) == [stored(3)]


def test_an_expired_position_says_so_and_names_the_snapshot(make, peer):  # R08
    publisher = make(buffer_steps=3)
    publish(publisher, *[[stored(i)] for i in range(10)])
    client = peer(publisher)
    answer = client.ask("replay", first=2, id=7)
    assert (answer["op"], answer["code"], answer["id"]) == ("error", "too_old", 7)
    assert (answer["first"], answer["oldest"], answer["newest"], answer["resume_seq"]) == (2, 7, 9, 10)
    assert [n for n, _ in client.replay(7)[0]] == [7, 8, 9]


def test_plain_replay_and_live_frames_are_what_they_were_beside_extended_ones(make, peer, sockets):
    publisher = make(topic="kv")
    publish(publisher, *[[stored(i)] for i in range(3)])
    client = peer(publisher)
    client.send("replay", first=0)
    client.socket.send_multipart([b"", bytes(8)])
    extended_answers = [client.receive() for _ in range(4)]
    plain = [client.socket.recv_multipart() for _ in range(4)]
    assert [f[1:3] for f in plain[:3]] == [[b"kv", i.to_bytes(8, "big")] for i in range(3)]
    assert [f[3] for f in plain[:3]] == [payload for _, payload in extended_answers[:3]]
    assert plain[3] == [b"", b"", b"\xff" * 8, b""]


# ---------------------------------------------------------------- snapshots


def test_a_late_reader_learns_what_is_resident_and_goes_on_from_there(make, peer):  # R09
    publisher = make(buffer_steps=4)
    rng = random.Random(5)
    truth = set()

    def step(i):
        events = [stored(*range(i * 10, i * 10 + 5), parent=i * 10 - 6 if i else None)]
        truth.update(range(i * 10, i * 10 + 5))
        gone = rng.sample(sorted(truth), min(len(truth), 4))
        truth.difference_update(gone)
        return [*events, removed(*gone)]

    publish(publisher, *[step(i) for i in range(50)])
    client = peer(publisher)
    head, payloads = client.snapshot()
    resident = applied(*payloads)
    assert head["resume_seq"] == 50
    assert (head["digest"], head["blocks"]) == (resident.digest(), len(truth))
    assert resident.digest() == digest_of(truth)
    publish(publisher, *[step(i) for i in range(50, 53)])
    for _, payload in client.replay(head["resume_seq"])[0]:
        resident.apply(decode(payload).events)
    assert resident.digest() == digest_of(truth) == client.ask("digest", seq=52)["digest"]


def test_parents_come_first_and_are_named_where_they_are_gone(make, peer):
    publisher = make()
    publish(publisher, [stored(1, 2, 3, 4)], [removed(2)], [stored(9, parent=4)], [removed(1)], [stored(1)])
    (event,) = [e for p in peer(publisher).snapshot()[1] for e in decode(p).events if 3 in e.block_hashes]
    assert (event.block_hashes, event.parent_block_hash) == ([3, 4, 9], 2)
    assert event.token_ids == [3] * 4 + [4] * 4 + [9] * 4


def test_a_snapshot_keeps_everything_that_a_reader_needs(make, peer):
    publisher = make()
    full = BlockStored(
        [b"a" * 32, b"b" * 32], b"z" * 32, [1, 2, 3, 4], 2, 5, "GPU", "lora",
        extra_keys=[["mm", 1], None], group_idx=1, kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=4, locality="LOCAL", ownership="me", session_id="s",
    )  # fmt: skip
    publish(publisher, [full, stored(7, tokens=False)])
    events = [e for p in peer(publisher).snapshot()[1] for e in decode(p).events]
    assert full in events
    (hash_only,) = [e for e in events if e != full]
    assert (hash_only.block_hashes, hash_only.token_ids) == ([7], [])


def test_without_tokens_a_snapshot_says_hashes_and_parents(make, peer):
    publisher = make(mirror_tokens=False)
    publish(publisher, [stored(1, 2, parent=9)])
    client = peer(publisher)
    assert client.ask("hello")["mirror_tokens"] is False
    (event,) = decode(client.snapshot()[1][0]).events
    assert (event.block_hashes, event.parent_block_hash, event.token_ids) == ([1, 2], 9, [])


def test_an_empty_set_is_a_snapshot_too(make, peer):
    publisher = make()
    head, (payload,) = peer(publisher).snapshot()
    assert (head["resume_seq"], head["blocks"], head["digest"]) == (0, 0, bytes(16))
    assert len(decode(payload, strict=True).events) == 0
    publish(publisher, [stored(1)], [AllBlocksCleared()])
    head, (payload,) = peer(publisher).snapshot(at_least=2)
    assert (head["resume_seq"], head["blocks"]) == (2, 0)


@pytest.fixture
def large(make, monkeypatch):
    """A publisher whose snapshot has many pieces."""
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 2000)
    publisher = make()
    publish(publisher, *[[stored(*range(i * 100, i * 100 + 100))] for i in range(20)])
    return publisher


def test_pieces_are_bounded_and_an_interrupted_snapshot_goes_on_where_it_was(large, peer):  # R114
    head, payloads = peer(large).snapshot(count=5)
    assert len(payloads) > 10
    assert max(map(len, payloads)) <= 2000
    assert applied(*payloads).digest() == head["digest"] == digest_of(range(2000))
    again = peer(large)
    again.send("snapshot", resume_seq=head["resume_seq"], piece=7, count=2)
    assert [again.receive()[1] for _ in range(2)] == payloads[7:9]
    assert again.ask("snapshot", resume_seq=head["resume_seq"], piece=len(payloads))["code"] == "gone"


def test_readers_share_a_snapshot_while_it_helps(large, peer):  # R114
    heads = []
    clients = [peer(large) for _ in range(8)]
    for client in clients:
        client.send("snapshot")
    heads = [client.receive()[0] for client in clients]
    assert {h["resume_seq"] for h in heads} == {20}
    publish(large, [stored(5000)])
    assert peer(large).snapshot()[0]["resume_seq"] == 20, "what came later can be replayed"
    assert large.stats().replay.snapshots == 1
    assert large.stats().replay.snapshot_bytes > 10_000
    head, payloads = peer(large).snapshot(at_least=21)
    assert head["resume_seq"] == 21
    assert applied(*payloads).digest() == head["digest"] == digest_of([*range(2000), 5000])
    assert large.stats().replay.snapshots == 2


def test_a_snapshot_that_the_log_does_not_reach_any_more_is_not_given_again(make, peer):
    publisher = make(buffer_steps=2)
    publish(publisher, [stored(1)])
    assert peer(publisher).snapshot()[0]["resume_seq"] == 1
    publish(publisher, *[[stored(i)] for i in range(2, 6)])
    assert peer(publisher).snapshot()[0]["resume_seq"] == 5


def test_idle_snapshots_are_dropped(large, peer, monkeypatch):
    head, _ = peer(large).snapshot()
    monkeypatch.setattr(snapshots, "IDLE_S", 0.0)
    client = peer(large)
    client.ask("hello")
    wait_for(lambda: large.stats().replay.snapshot_bytes == 0)
    assert client.ask("snapshot", resume_seq=head["resume_seq"], piece=1)["code"] == "gone"


# ---------------------------------------------------------------- holes, losses


def test_a_dropped_batch_takes_its_number_and_a_snapshot_heals_its_hole(make, peer, monkeypatch):
    publisher = make(max_queue_size=2)
    publish(publisher, [stored(1)])
    outbox = publisher._outbox
    take = outbox.take
    monkeypatch.setattr(outbox, "take", lambda: None)  # the sender takes nothing meanwhile
    publisher.publish(KVEventBatch(ts=0.0, events=[]))
    for i in range(2, 9):
        publisher.publish(KVEventBatch(ts=float(i), events=[stored(i)]))
    assert publisher.stats().dropped == 6
    monkeypatch.setattr(outbox, "take", take)
    publish(publisher, [stored(9)])
    client = peer(publisher)
    hello = client.ask("hello")
    (hole,) = hello["holes"]
    assert hole[1] - hole[0] + 1 == hello["dropped"] == publisher.stats().dropped
    assert hello["exact_for"] == "stream"
    head, payloads = client.snapshot()
    assert applied(*payloads).digest() == digest_of(range(1, 10)) == head["digest"]
    assert client.ask("digest", seq=hole[1])["digest"] == digest_of(range(1, hole[1] + 1))


def test_a_hole_makes_an_older_snapshot_useless(make, peer):
    publisher = make()
    publish(publisher, [stored(1)])
    client = peer(publisher)
    assert client.snapshot()[0]["resume_seq"] == 1
    publisher._outbox.skip()
    publish(publisher, [stored(2)])
    assert client.snapshot()[0]["resume_seq"] == 3


def test_an_event_that_cannot_be_encoded_stays_out_of_the_mirror_and_hello_says_so(make, peer):
    publisher = make(exact_for="engine")
    client = peer(publisher)
    publish(publisher, [stored(1)])
    assert client.ask("hello")["exact_for"] == "engine"
    publish(publisher, [stored(2), BlockStored([b"x" * 100], None, [1], 1, None, "GPU", None), stored(3)])
    hello = client.ask("hello")
    assert (hello["exact_for"], hello["events_lost"], hello["holes"]) == ("stream", 1, [[2, 2]])
    head, payloads = client.snapshot()
    assert head["resume_seq"] == 3
    assert applied(*payloads).digest() == digest_of([1, 2, 3])


def test_a_batch_that_cannot_be_sent_enters_the_mirror(make, peer):
    publisher = make()
    publish(publisher, [stored(1)])
    publisher.publish(KVEventBatch(ts="yesterday", events=[stored(2)]))
    publish(publisher, [stored(3)])
    client = peer(publisher)
    hello = client.ask("hello")
    assert (hello["failed"], hello["holes"]) == (1, [[1, 1]])
    assert applied(*client.snapshot()[1]).digest() == digest_of([1, 2, 3])


def test_a_mirror_that_lost_too_much_says_so_until_a_clear(make, peer):
    publisher = make()
    publish(publisher, [stored(1)])
    publisher._mirror.lose()
    client = peer(publisher)
    for op in ("snapshot", "digest"):
        answer = client.ask(op)
        assert (answer["code"], answer["resume_seq"]) == ("mirror_lost", None)
    assert publisher.stats().mirror.digest is None
    publish(publisher, [AllBlocksCleared(), stored(2)])
    assert client.ask("digest")["digest"] == digest_of([2])


# ---------------------------------------------------------------- digest


def test_the_digest_is_that_of_a_number_and_says_of_which(make, peer):
    publisher = make()
    client = peer(publisher)
    assert client.ask("digest")["seq"] is None
    publish(publisher, [stored(1)], [stored(2)], [removed(1)])
    answer = client.ask("digest")
    assert (answer["seq"], answer["digest"]) == (2, digest_of([2]))
    assert [client.ask("digest", seq=i)["digest"] for i in range(3)] == [
        digest_of([1]), digest_of([1, 2]), digest_of([2]),
    ]  # fmt: skip
    assert client.ask("digest", seq=3)["code"] == "unknown_seq"


def test_the_digest_test_vectors_of_the_documentation_hold():
    text = (ROOT / "docs" / "wire.md").read_text()
    vectors = json.loads(text.split("<!-- vectors -->")[1].split("```json\n")[1].split("```")[0])
    assert len(vectors) >= 5
    for vector in vectors:
        keys = [[bytes.fromhex(k[0][4:]) if isinstance(k[0], str) else k[0], *k[1:]] for k in vector["keys"]]
        assert (
            digest_of_keys([[k[0] if isinstance(k[0], bytes) else k[0] % 2**64, *k[1:]] for k in keys]).hex()
            == (vector["digest"])
        )
        assert [pack([k[0] if isinstance(k[0], bytes) else k[0] % 2**64, *k[1:]]).hex() for k in keys] == (
            vector["msgpack"]
        )
        events = [
            BlockStored([k[0]], None, [], 0, None, k[1], None, group_idx=k[2], locality=k[3], ownership=k[4])
            for k in keys
        ]
        mirror, resident = Mirror(), CoreSet()
        mirror.record(0, events)
        resident.apply(EventList(events))
        assert mirror.digest()[1].hex() == resident.digest().hex() == vector["digest"]


# ---------------------------------------------------------------- clients


def run_client(publisher):
    endpoint = publisher.get_publisher_config().replay_endpoint
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "kve1_client.py", endpoint],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_client_in_plain_python_agrees_on_the_digest(large):
    source = (ROOT / "examples" / "kve1_client.py").read_text()
    assert len(source.splitlines()) <= 60
    assert "kvevents" not in source
    publish(large, [BlockStored([b"q" * 32, -5], 7, [1] * 8, 4, None, "CPU", None, group_idx=1)])
    peer_digest = large.stats().mirror.digest
    result = run_client(large)
    assert result == {"same": True, "seq": 20, "blocks": 2002, "epoch": large.stats().epoch.hex()}
    assert peer_digest == large.stats().mirror.digest


def test_many_clients_that_ask_for_everything_at_once_are_served_in_bounded_memory(large, peer, monkeypatch):
    monkeypatch.setattr(replay, "PIPE", 4)
    clients = [peer(large) for _ in range(20)]
    for client in clients:
        client.send("replay", first=0)
        client.send("snapshot", count=extended.MAX_PIECES)
    for client in clients:
        numbers = []
        while (head := client.receive()[0])["op"] == "replay":
            numbers.append(head["seq"])
        assert numbers == list(range(20))
        pieces = [client.receive()[0]["piece"] for _ in range(extended.MAX_PIECES)]
        assert pieces == list(range(extended.MAX_PIECES))
    assert large.stats().replay.snapshots == 1


def test_too_many_open_requests_of_one_client_are_refused(large, peer):
    client = peer(large)
    for i in range(200):
        client.send("hello", id=i)
    answers = [client.receive()[0] for _ in range(200)]
    assert {a.get("code") for a in answers} <= {None, "busy"}
    assert client.ask("hello")["op"] == "hello"


def test_snapshots_are_exact_while_the_stream_goes_on(make, peer, monkeypatch):
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 3000)
    monkeypatch.setattr(snapshots, "STEP_BLOCKS", 64)
    publisher = make(buffer_steps=100_000)
    rng = random.Random(11)
    stop = threading.Event()

    def stream():
        while not stop.is_set():
            start = rng.randrange(3000)
            hashes = range(start, start + rng.randrange(1, 30))
            event = (
                removed(*hashes)
                if rng.random() < 0.4
                else stored(*hashes, parent=start - 1 if start else None)
            )
            publisher.publish(
                KVEventBatch(ts=0.0, events=[AllBlocksCleared() if rng.random() < 0.002 else event])
            )
            time.sleep(0.0002)

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        client = peer(publisher)
        for _ in range(15):
            head, payloads = client.snapshot(count=4, at_least=publisher.stats().mirror.resume_seq)
            resident = applied(*payloads)
            assert (resident.digest(), len(resident)) == (head["digest"], head["blocks"])
            found, end = client.replay(head["resume_seq"])
            for _, payload in found:
                resident.apply(decode(payload).events)
            last = found[-1][0] if found else head["resume_seq"] - 1
            assert resident.digest() == client.ask("digest", seq=last)["digest"]
            assert end["count"] == len(found)
    finally:
        stop.set()
        thread.join(10)
    assert publisher.stats().failed == 0
