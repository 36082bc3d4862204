"""The subscriber against our own publisher: lives, snapshots, digests, policies; over real sockets."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from kvevents import (
    AsyncSubscriber,
    BlockRemoved,
    BlockStored,
    EventList,
    KVEventBatch,
    PrefixIndex,
    ResidentSet,
    Source,
    Subscriber,
    encode,
)
from kvevents.publish import ZmqEventPublisher
from kvevents.subscribe import Batch, Gap, Item, Reset, Snapshot, Timing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from plain_publisher import PlainPublisher

QUICK = Timing(silence_s=0.1, replay_timeout_s=1.0, cooldown_s=0.1, hello_timeout_s=0.5, look_s=0.3)
LIMIT_S = 15


def stored(*hashes: int) -> BlockStored:
    return BlockStored(list(hashes), None, [h % 1000 for h in hashes for _ in range(4)], 4, None, "GPU", None)


class Engine:
    """A publisher, and the set that it should lead to."""

    def __init__(self, folder: Any, **options: Any) -> None:
        self.addresses = {
            "endpoint": f"ipc://{folder}/live",
            "replay_endpoint": f"ipc://{folder}/replay",
        }
        self.options = options
        self.publisher = ZmqEventPublisher(0, **self.addresses, **options)
        self.truth = ResidentSet()
        self.numbers = 0

    @property
    def source(self) -> Source:
        return Source(self.addresses["endpoint"], self.addresses["replay_endpoint"], name="it")

    @property
    def digest(self) -> bytes:
        return self.truth.digest()

    def publish(self, *hashes: int, remove: tuple[int, ...] = (), unheard: bool = False) -> None:
        """One batch; ``unheard``: it gets its number and enters the mirror, and is not sent."""
        events: list[Any] = [stored(*hashes)] if hashes else []
        if remove:
            events.append(BlockRemoved(list(remove), "GPU"))
        self.truth.apply(events)
        batch = KVEventBatch(ts=time.time(), events=EventList(events))
        if unheard:
            # A time stamp that no payload can hold: the batch cannot be sent.
            batch = KVEventBatch(ts="never", events=EventList(events))  # type: ignore[arg-type]
        self.publisher.publish(batch)
        self.numbers += 1
        until = time.monotonic() + LIMIT_S
        while self.publisher.stats().queued or self.publisher.stats().mirror.resume_seq != self.numbers:
            assert time.monotonic() < until
            time.sleep(0.002)

    def restart(self, *, first_unused: bool = False) -> None:
        """A new process at the same addresses."""
        del first_unused
        self.publisher.shutdown()
        self.publisher = ZmqEventPublisher(0, **self.addresses, **self.options)
        self.truth, self.numbers = ResidentSet(), 0


@pytest.fixture
def engine(tmp_path: Any) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.publisher.shutdown()


def follow(stream: Subscriber, resident: ResidentSet, done: Callable[[list[Item]], bool]) -> list[Item]:
    """Apply what comes until it is enough."""
    items: list[Item] = []
    until = time.monotonic() + LIMIT_S
    while not done(items):
        assert time.monotonic() < until, (items[-5:], stream.stats())
        item = stream.poll(0.02)
        if item is not None:
            resident.apply(item)
            items.append(item)
    return items


def same(resident: ResidentSet, one: Engine) -> bool:
    return resident.valid_digest("it") == one.digest


def kinds(items: list[Item]) -> list[str]:
    return [type(i).__name__ for i in items]


def test_a_late_reader_begins_with_a_snapshot_where_the_log_is_too_short(
    engine: Callable[..., Engine],
) -> None:
    one = engine(buffer_steps=3, topic="kv", data_parallel_size=1)
    for n in range(20):
        one.publish(n, remove=(n - 3,) if n >= 3 else ())
    resident, index = ResidentSet(), PrefixIndex()
    with Subscriber([one.source], timing=QUICK) as stream:
        items = follow(stream, resident, lambda _: same(resident, one))
        assert isinstance(items[0], Snapshot)
        assert (items[0].resume_seq, items[0].digest, items[0].epoch) == (
            20, one.digest, one.publisher.stats().epoch,
        )  # fmt: skip
        one.publish(100)
        items += follow(stream, resident, lambda _: same(resident, one))
        assert kinds(items) == ["Snapshot", "Batch"]
        (stats,) = stream.stats()
        assert (stats.protocol, stats.rank, stats.exact_for, stats.snapshots, stats.complete) == (
            "extended", 0, "stream", 1, True,
        )  # fmt: skip
        assert stats.epoch == one.publisher.stats().epoch
    for item in items:
        index.apply_item(item)
    assert index.digest("it") == one.digest


def test_a_log_that_reaches_back_is_replayed_and_costs_no_snapshot(engine: Callable[..., Engine]) -> None:
    one = engine()
    for n in range(20):
        one.publish(n)
    resident = ResidentSet()
    with Subscriber([one.source], timing=QUICK) as stream:
        items = follow(stream, resident, lambda _: same(resident, one))
    assert kinds(items) == ["Batch"] * 20
    assert one.publisher.stats().replay.snapshots == 0
    assert one.publisher.stats().replay.requests == 1  # the probe that only an old server needs


def test_a_restart_that_goes_on_counting_is_told_by_its_epoch(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R10: numbers and stamps go on as if nothing had happened; the life is another, its cache is empty."""
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    one = engine()
    for n in range(5):
        one.publish(n)
    resident = ResidentSet()
    with Subscriber([one.source], timing=QUICK) as stream:
        follow(stream, resident, lambda _: same(resident, one))
        one.restart()
        for n in range(10, 18):
            one.publish(n)
        items = follow(stream, resident, lambda _: same(resident, one))
        assert items[0] == Reset("it", "restart")
        assert [i.seq for i in items if isinstance(i, Batch)] == list(range(8))
        assert stream.stats()[0].epoch == one.publisher.stats().epoch


def test_a_restart_into_an_equal_stream_is_told_though_every_byte_is_the_same(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    one = engine()
    one.publish(1)
    resident = ResidentSet()
    with Subscriber([one.source], timing=QUICK) as stream:
        follow(stream, resident, lambda _: same(resident, one))
        one.restart()
        one.publish(1)
        items = follow(stream, resident, lambda items: len(items) >= 2)
        assert kinds(items) == ["Reset", "Batch"]


def test_what_the_publisher_dropped_is_healed_by_a_snapshot(engine: Callable[..., Engine]) -> None:
    one = engine()
    resident = ResidentSet()
    with Subscriber([one.source], timing=QUICK) as stream:
        one.publish(1)
        follow(stream, resident, lambda _: same(resident, one))
        one.publish(2, unheard=True)
        one.publish(3)
        items = follow(stream, resident, lambda _: same(resident, one))
        assert "Gap" not in kinds(items)
        assert "Snapshot" in kinds(items)
        # The last of all: nothing live follows it.
        one.publish(4, remove=(1,), unheard=True)
        items = follow(stream, resident, lambda _: same(resident, one))
        assert kinds(items) == ["Snapshot"]
        assert stream.stats()[0].complete


@pytest.mark.parametrize(
    ("policy", "said", "held"),
    [
        ("replay", ["Gap"], {1, 3, 4}),
        ("wipe", ["Reset", "Gap"], {3, 4}),
        ("keep_and_flag", ["Gap"], {1, 3, 4}),
    ],
)
def test_a_hole_is_what_the_policy_says(
    engine: Callable[..., Engine], policy: Any, said: list[str], held: set[int]
) -> None:
    one = engine()
    resident = ResidentSet()
    with Subscriber([one.source], timing=QUICK, policy=policy) as stream:
        one.publish(1)
        follow(stream, resident, lambda items: bool(items) or stream.stats()[0].protocol == "extended")
        one.publish(2, unheard=True)
        one.publish(3)
        one.publish(4)
        items = follow(
            stream, resident, lambda items: any(isinstance(i, Batch) and i.seq == 3 for i in items)
        )
        assert [k for k in kinds(items) if k != "Batch"][-len(said) :] == said
        assert {k.hash for k in resident.keys("it")} - {1} == held - {1}
        assert (1 in {k.hash for k in resident.keys("it")}) <= (1 in held)
        assert resident.why_invalid("it") is not None
        assert not stream.stats()[0].complete
        assert stream.stats()[0].snapshots == 0


def test_a_batch_that_no_reader_can_decode_is_healed_by_a_snapshot(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvevents.errors import DecodeError
    from kvevents.subscribe import messages

    real = messages.decode
    one = engine()

    def decode(payload: bytes) -> Any:
        batch = real(payload)
        if any(isinstance(e, BlockStored) and e.block_hashes == [666] for e in batch.events):
            raise DecodeError("not for this reader")
        return batch

    monkeypatch.setattr(messages, "decode", decode)
    resident = ResidentSet()
    with Subscriber([one.source], timing=QUICK) as stream:
        for h in (1, 666, 3):
            one.publish(h)
        items = follow(stream, resident, lambda _: same(resident, one))
        assert "Gap" not in kinds(items)
        assert "Snapshot" in kinds(items)


def test_drift_is_found_by_the_digest_and_healed(engine: Callable[..., Engine]) -> None:
    one = engine()
    resident = ResidentSet()
    timing = QUICK._replace(check_s=0.05)
    with Subscriber([one.source], timing=timing, digest_of=resident.valid_digest) as stream:
        one.publish(1, 2, 3)
        follow(stream, resident, lambda _: stream.stats()[0].checks > 2)
        assert stream.stats()[0].drifts == 0
        resident._sets["it"].apply(EventList([BlockRemoved([2], "GPU")]))
        assert not same(resident, one)
        items = follow(stream, resident, lambda _: same(resident, one))
        assert kinds(items) == ["Snapshot"]
        assert stream.stats()[0].drifts == 1


def test_a_comparison_may_be_asked_for(engine: Callable[..., Engine]) -> None:
    one = engine()
    resident = ResidentSet()
    with Subscriber([one.source], timing=QUICK) as stream:
        one.publish(1)
        follow(stream, resident, lambda _: same(resident, one))
        follow(stream, resident, lambda _: stream.check("it", 0, one.digest))
        follow(stream, resident, lambda _: stream.stats()[0].checks == 1)
        follow(stream, resident, lambda _: stream.check("it", 0, bytes(16)))
        assert kinds(follow(stream, resident, bool)) == ["Snapshot"]
        assert not stream.check("it", 7, bytes(16))


@pytest.mark.parametrize(("policy", "said"), [("replay", ["Reset", "Batch"]), ("keep_and_flag", ["Gap"])])
def test_drift_is_what_the_policy_says(engine: Callable[..., Engine], policy: Any, said: list[str]) -> None:
    one = engine()
    resident = ResidentSet()
    with Subscriber([one.source], timing=QUICK, policy=policy) as stream:
        follow(stream, resident, lambda _: stream.stats()[0].protocol == "extended")
        one.publish(1)
        follow(stream, resident, lambda _: same(resident, one))
        follow(stream, resident, lambda _: stream.check("it", 0, bytes(16)))
        items = follow(stream, resident, lambda items: len(items) == len(said))
        assert kinds(items) == said
        assert (resident.why_invalid("it") is None) == (policy == "replay")


def test_two_publishers_at_one_address_are_reported(
    engine: Callable[..., Engine], caplog: Any
) -> None:  # R34
    """Requests go to one and the other in turns: two lives that come back again and again."""
    one = engine()
    two = ZmqEventPublisher(0, endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    context = zmq.Context()
    turn = context.socket(zmq.ROUTER)
    port = turn.bind_to_random_port("tcp://127.0.0.1")
    import threading

    stop = threading.Event()

    def relay() -> None:
        ends = [one.addresses["replay_endpoint"], two.get_publisher_config().replay_endpoint]
        clients: dict[bytes, Any] = {}
        poller = zmq.Poller()
        poller.register(turn, zmq.POLLIN)
        while not stop.is_set():
            for s, _ in poller.poll(20):
                if s is turn:
                    client, *frames = turn.recv_multipart()
                    if client not in clients:
                        clients[client] = context.socket(zmq.DEALER)
                        clients[client].connect(ends[len(clients) % 2])
                        poller.register(clients[client], zmq.POLLIN)
                    clients[client].send_multipart(frames)
                else:
                    client = next(c for c, d in clients.items() if d is s)
                    turn.send_multipart([client, *s.recv_multipart()])
        for s in clients.values():
            s.close(linger=0)

    thread = threading.Thread(target=relay)
    thread.start()
    try:
        one.publish(1)
        source = Source(one.addresses["endpoint"], f"tcp://127.0.0.1:{port}", name="it")
        resident = ResidentSet()
        with Subscriber([source], timing=QUICK) as stream:
            follow(stream, resident, lambda _: stream.stats()[0].returned_epochs > 0)
        assert "do two publishers share the address?" in caplog.text
    finally:
        stop.set()
        thread.join(10)
        turn.close(linger=0)
        context.term()
        two.shutdown()


def test_the_rank_that_the_publisher_says_is_shown_beside_the_name(tmp_path: Any) -> None:  # R36
    """Node B serves global ranks 8 to 15; a reader that dialled by local rank can see whom it reached."""
    addresses = {"endpoint": f"ipc://{tmp_path}/live", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    publisher = ZmqEventPublisher(9, data_parallel_size=16, **addresses)
    try:
        at = publisher.get_publisher_config()
        with Subscriber([Source(at.endpoint, at.replay_endpoint)], timing=QUICK) as stream:
            follow(stream, ResidentSet(), lambda _: stream.stats()[0].rank == 9)
    finally:
        publisher.shutdown()


def test_an_old_server_is_known_at_once_and_said_once(
    publisher: Callable[..., PlainPublisher], caplog: Any
) -> None:
    old = publisher()
    for _ in range(5):
        old.publish(send=False)
    started = time.monotonic()
    with Subscriber([Source(old.live, old.replay)], timing=Timing(hello_timeout_s=60)) as stream:
        got = [stream.poll(LIMIT_S) for _ in range(5)]
        assert [i.seq for i in got if isinstance(i, Batch)] == list(range(5))
        assert stream.stats()[0].protocol == "plain"
    assert time.monotonic() - started < 10
    assert caplog.text.count("knows no extended replay") == 1


def test_a_server_that_never_answers_costs_the_time_out_once_and_the_stream_goes_on(
    publisher: Callable[..., PlainPublisher],
) -> None:
    old = publisher()
    old.answer_replays = False
    timing = Timing(hello_timeout_s=0.1, replay_timeout_s=0.1, backoff_s=0.01)
    with Subscriber([Source(old.live, old.replay)], timing=timing) as stream:
        while not stream.stats()[0].connected:
            stream.poll(0.02)
        old.wait_for_reader()
        old.publish()
        old.publish()
        got = [stream.poll(LIMIT_S) for _ in range(2)]
        assert [i.seq for i in got if isinstance(i, Batch)] == [0, 1]
        assert stream.stats()[0].protocol == "unknown"


def test_without_a_replay_address_it_is_said_that_there_is_none(
    publisher: Callable[..., PlainPublisher],
) -> None:
    old = publisher(replay=None)
    with Subscriber([Source(old.live, first_seq=0)]) as stream:
        while not stream.stats()[0].connected:
            stream.poll(0.02)
        old.wait_for_reader()
        old.publish()
        assert isinstance(stream.poll(LIMIT_S), Batch)
        assert stream.stats()[0].protocol == "none"


def test_an_old_server_in_the_place_of_ours_is_another_life(
    engine: Callable[..., Engine], publisher: Callable[..., PlainPublisher]
) -> None:
    one = engine()
    one.publish(1)
    resident = ResidentSet()
    with Subscriber([one.source], timing=QUICK) as stream:
        follow(stream, resident, lambda _: same(resident, one))
        one.publisher.shutdown()
        old = publisher(live=one.addresses["endpoint"], replay=one.addresses["replay_endpoint"])
        old.publish(encode(KVEventBatch(5.0, EventList([stored(7)]), 0)), send=False)
        items = follow(stream, resident, lambda items: len(items) >= 2)
        assert kinds(items) == ["Reset", "Batch"]
        assert stream.stats()[0].protocol == "plain"


def test_the_asyncio_subscriber_does_the_same(engine: Callable[..., Engine]) -> None:
    one = engine(buffer_steps=3)
    for n in range(10):
        one.publish(n)
    resident = ResidentSet()

    async def run() -> list[Item]:
        items: list[Item] = []
        async with asyncio.timeout(LIMIT_S):
            async with AsyncSubscriber([one.source], timing=QUICK, digest_of=resident.valid_digest) as stream:
                while not same(resident, one):
                    item = await stream.poll(0.05)
                    if item is not None:
                        resident.apply(item)
                        items.append(item)
        return items

    assert kinds(asyncio.run(run())) == ["Snapshot"]


def test_a_bad_policy_is_refused() -> None:
    from kvevents.errors import ConfigError

    with pytest.raises(ConfigError, match="replay, snapshot, wipe, keep_and_flag"):
        Subscriber("tcp://127.0.0.1:1", policy="hope")  # type: ignore[arg-type]


def test_a_gap_item_says_the_reason(engine: Callable[..., Engine]) -> None:
    one = engine(buffer_steps=2, mirror=False)
    one.publisher.publish(KVEventBatch(ts=1.0, events=[stored(1)]))
    for n in range(5):
        one.publisher.publish(KVEventBatch(ts=2.0 + n, events=[stored(n)]))
    until = time.monotonic() + LIMIT_S
    while one.publisher.stats().sent < 6:
        assert time.monotonic() < until
        time.sleep(0.002)
    resident = ResidentSet()
    with Subscriber([one.source], timing=QUICK) as stream:
        items = follow(stream, resident, lambda items: len(items) >= 3)
    assert items[0] == Gap("it", 0, 3, "too old")
