"""The subscriber against a plain publisher: loss, repair, restart, and everything that a wire can do."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from plain_publisher import batch_of

from kvevents import ResidentSet, Source, Subscriber, decode
from kvevents.errors import ConfigError, EndpointInUseError, ForkError
from kvevents.subscribe import Batch, Gap, Item, Limits, Reset, Resume, Timing

if TYPE_CHECKING:
    from collections.abc import Callable

QUICK = Timing(replay_timeout_s=0.3, backoff_s=0.02, jitter_s=0, silence_s=0.15, cooldown_s=0.2)


def take(sub: Subscriber, n: int, timeout: float = 10.0) -> list[Item]:
    """The next ``n`` items; fails when they do not come."""
    got: list[Item] = []
    end = time.monotonic() + timeout
    while len(got) < n:
        item = sub.poll(end - time.monotonic())
        assert item is not None, f"only {got} came"
        got.append(item)
    return got


def seqs(items: list[Item]) -> list[int]:
    assert all(isinstance(i, Batch) for i in items), items
    return [i.seq for i in items if isinstance(i, Batch)]


def connected(pub: Any, *sources: Source, **options: Any) -> Subscriber:
    """A subscriber of which the publisher knows, with the first exchange behind it."""
    options.setdefault("timing", QUICK)
    sub = Subscriber(list(sources) or [Source(pub.live, pub.replay, name="a")], **options)
    deadline = time.monotonic() + 10
    seen = False
    while not seen or (pub.replay and pub.answer_replays and not pub.requests):
        assert sub.poll(0.01) is None
        seen |= pub.pub.poll(0) > 0 and pub.pub.recv()[:1] == b"\x01"
        assert time.monotonic() < deadline
    return sub


def test_batches_come_in_order_and_decoded(publisher: Callable[..., Any]) -> None:
    pub = publisher()
    with connected(pub) as sub:
        for _ in range(30):
            pub.publish()
        items = take(sub, 30)
    assert seqs(items) == list(range(30))
    assert items[3] == Batch("a", 3, decode(batch_of(3)), replayed=False)


@pytest.mark.parametrize("layout", [3, 4])
def test_lost_batches_are_replayed_in_both_layouts(publisher: Callable[..., Any], layout: int) -> None:
    pub = publisher()
    pub.layout = layout
    with connected(pub) as sub:
        for i in range(30):
            pub.publish(send=i not in {0, 7, 8, 20})
        assert seqs(take(sub, 30)) == list(range(30))
        assert sub.poll(0.05) is None
        stats = sub.stats()[0]
    assert (stats.complete, stats.lost, stats.state, stats.last_seq) == (True, 0, "live", 29)
    assert stats.replayed >= 4


def test_the_replay_client_takes_every_answer_and_the_end_marker(publisher: Callable[..., Any]) -> None:
    """A REQ socket would take the first of these and no more."""
    pub = publisher()
    for _ in range(500):
        pub.publish()
    with Subscriber([Source(pub.live, pub.replay)], timing=QUICK) as sub:
        assert seqs(take(sub, 500)) == list(range(500))
        assert sub.poll(0.05) is None
        assert pub.requests.count(0) == 1
        assert sub.stats()[0].replayed == 500


def test_a_late_joiner_gets_what_was_sent_before_it_came(publisher: Callable[..., Any]) -> None:
    """The first number that is seen is not 0, and no live batch is needed to notice."""
    pub = publisher()
    for _ in range(5):
        pub.publish()
    with Subscriber([Source(pub.live, pub.replay)], timing=QUICK) as sub:
        assert [i.replayed for i in take(sub, 5) if isinstance(i, Batch)] == [True] * 5


def test_what_came_before_is_a_gap_where_there_is_no_replay(publisher: Callable[..., Any]) -> None:
    pub = publisher(replay=None)
    with connected(pub) as sub:
        for i in range(5):
            pub.publish(send=i >= 3)
        items = take(sub, 3)
        assert items[0] == Gap("a", 0, 2, "no replay")
        assert seqs(items[1:]) == [3, 4]
        assert sub.stats()[0].complete is False


def test_the_loss_of_the_last_batch_is_noticed_after_a_silence(publisher: Callable[..., Any]) -> None:
    pub = publisher()
    with connected(pub) as sub:
        pub.publish()
        pub.publish(send=False)
        assert seqs(take(sub, 2)) == [0, 1]


def test_batches_that_the_log_no_longer_has_are_a_gap(publisher: Callable[..., Any]) -> None:
    pub = publisher()
    with connected(pub) as sub:
        for i in range(10):
            pub.publish(send=i in {0, 9}, log=i > 5)
        items = take(sub, 6)
        assert items[1] == Gap("a", 1, 5, "too old")
        assert seqs(items[2:]) == [6, 7, 8, 9]


def test_a_replay_that_does_not_answer_ends_in_a_gap_and_is_left_alone_for_a_while(
    publisher: Callable[..., Any],
) -> None:
    pub = publisher()
    pub.answer_replays = False
    timing = QUICK._replace(replay_timeout_s=0.05, silence_s=60, cooldown_s=60)
    with connected(pub, timing=timing) as sub:
        for i in range(4):
            pub.publish(send=i != 1)
        items = take(sub, 4)
        assert items[1] == Gap("a", 1, 1, "unreachable")
        asked = sub.stats()[0].replays
        pub.publish(send=False)
        pub.publish()
        assert take(sub, 2)[0] == Gap("a", 4, 4, "unreachable")
        assert sub.stats()[0].replays == asked


def test_an_answer_that_breaks_off_is_resumed_from_the_next_number(publisher: Callable[..., Any]) -> None:
    pub = publisher()
    for _ in range(100):
        pub.publish()
    pub.answer_limit = 60
    with Subscriber([Source(pub.live, pub.replay)], timing=QUICK._replace(replay_timeout_s=0.1)) as sub:
        assert seqs(take(sub, 60)) == list(range(60))
        pub.publish()
        assert seqs(take(sub, 41)) == list(range(60, 101))
    assert pub.requests[1:2] == [59]


def test_a_gap_inside_the_log_costs_a_short_replay_and_keeps_the_state(publisher: Callable[..., Any]) -> None:
    pub = publisher()
    with connected(pub, timing=QUICK._replace(silence_s=60)) as sub:
        for i in range(100):
            pub.publish(send=i != 90)
        items = take(sub, 100)
        assert seqs(items) == list(range(100))
        assert pub.requests[1:] == [89]


@pytest.mark.parametrize("replay", [True, False])
def test_a_restarted_publisher_resets_its_source_before_its_first_batch(
    publisher: Callable[..., Any], replay: bool
) -> None:
    pub = publisher(**({} if replay else {"replay": None}))
    held = ResidentSet()
    with connected(pub) as sub:
        for _ in range(20):
            pub.publish()
        for item in take(sub, 20):
            held.apply(item)
        pub = pub.restart()
        wait_for_subscription(pub, sub)
        for _ in range(3):
            pub.publish()
        items = take(sub, 4)
        assert items[0] == Reset("a", "restart")
        assert seqs(items[1:]) == [0, 1, 2]
        for item in items:
            held.apply(item)
        assert (2**40 + 1_000_000, "GPU") in held
        assert (2**40 + 19, "GPU") not in held
        assert sub.stats()[0].connects == 2


def wait_for_subscription(pub: Any, sub: Subscriber) -> None:
    deadline = time.monotonic() + 10
    while True:
        assert sub.poll(0.01) is None
        if pub.pub.poll(0):
            pub.pub.recv()
            return
        assert time.monotonic() < deadline


def test_a_restart_that_counts_past_the_old_number_is_found_by_the_log(publisher: Callable[..., Any]) -> None:
    pub = publisher()
    with connected(pub) as sub:
        for _ in range(5):
            pub.publish()
        take(sub, 5)
        pub = pub.restart()
        for _ in range(8):
            pub.publish()
        items = take(sub, 9)
        assert items[0] == Reset("a", "restart")
        assert seqs(items[1:]) == list(range(8))


def test_each_source_has_a_state_of_its_own(publisher: Callable[..., Any]) -> None:
    """Two ranks count independently; on one socket every message would look like a gap."""
    a, b = publisher(), publisher()
    sources = [Source(a.live, a.replay, name="r0"), Source(b.live, b.replay, name="r1")]
    with Subscriber(sources, timing=QUICK) as sub:
        a.wait_for_reader()
        for _ in range(20):
            a.publish()
        for _ in range(5):
            b.publish()
        items = take(sub, 25)
        assert [i.seq for i in items if isinstance(i, Batch) and i.source == "r0"] == list(range(20))
        assert [i.seq for i in items if isinstance(i, Batch) and i.source == "r1"] == list(range(5))
        assert [s.gaps for s in sub.stats()] == [0, 0]


def test_topics_are_compared_exactly(publisher: Callable[..., Any]) -> None:
    pub = publisher(topic=b"kv@10@org/a@b")
    with connected(pub, Source(pub.live, pub.replay, topic="kv@10@org/a@b", name="a")) as sub:
        pub.topic = b"kv@10@org/a@bc"
        pub.send(0, batch_of(0, 7))
        pub.topic = b"kv@10@org/a@b"
        pub.publish()
        assert seqs(take(sub, 1)) == [0]
        assert sub.poll(0.05) is None
        assert sub.stats()[0].other_topics == 1


def test_without_a_topic_a_second_stream_on_the_address_is_left_out(publisher: Callable[..., Any]) -> None:
    pub = publisher(topic=b"kv@1@m", replay=None)
    with connected(pub) as sub:
        pub.publish()
        pub.topic = b"kv@2@m"
        pub.send(0, batch_of(0, 3))
        pub.topic = b"kv@1@m"
        pub.publish()
        assert seqs(take(sub, 2)) == [0, 1]
        assert sub.stats()[0].other_topics == 1


def test_other_shapes_are_counted_and_end_nothing(publisher: Callable[..., Any]) -> None:
    pub = publisher()
    with connected(pub) as sub:
        for frames in (
            [b""],
            [b"", b"x"],
            [b"", b"short", b""],
            [b"", bytes(8), b"", b""],
            [b"", b"\xff" * 8, b""],
        ):
            pub.pub.send_multipart(frames)
        pub.publish()
        assert seqs(take(sub, 1)) == [0]
        assert sub.stats()[0].malformed == 5


@pytest.mark.parametrize("poison", [b"", b"garbage", b"\xdd\xff\xff\xff\xff" + bytes(64), b"\x91" * 100_000])
def test_one_bad_batch_is_a_gap_and_the_reader_goes_on(publisher: Callable[..., Any], poison: bytes) -> None:
    pub = publisher()
    with connected(pub) as sub:
        pub.publish()
        pub.publish(poison)
        pub.publish()
        items = take(sub, 3)
        assert items[1] == Gap("a", 1, 1, "poisoned")
        assert seqs([items[0], items[2]]) == [0, 2]
        assert sub.stats()[0].poisoned >= 1


def test_a_batch_that_was_damaged_on_the_way_is_had_again(publisher: Callable[..., Any]) -> None:
    pub = publisher()
    with connected(pub) as sub:
        pub.publish()
        pub.send(1, b"damaged")
        pub.publish(send=False)
        assert seqs(take(sub, 2)) == [0, 1]
        assert sub.stats()[0].gaps == 0


def test_replays_at_the_same_time_are_limited(publisher: Callable[..., Any]) -> None:
    pubs = [publisher() for _ in range(6)]
    for p in pubs:
        p.answer_replays = False
    timing = QUICK._replace(replay_timeout_s=60, hello_timeout_s=60)
    with Subscriber([Source(p.live, p.replay) for p in pubs], timing=timing, max_replays=2) as sub:
        deadline = time.monotonic() + 10
        while sum(p.extended_requests for p in pubs) < 2:
            assert sub.poll(0.02) is None
            assert time.monotonic() < deadline
        for _ in range(5):
            assert sub.poll(0.02) is None
        assert sum(p.extended_requests for p in pubs) == 2


def test_retries_are_spread_out() -> None:
    import random

    from kvevents.subscribe.actions import Ask
    from kvevents.subscribe.asking import Asking

    source = Source("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    waits = []
    for seed in range(50):
        a = Asking(source, Timing(), Limits(), random.Random(seed), "snapshot")
        waits.append((a.delay(Ask(0, 1, "connect")), a.delay(Ask(0, 2, "gap")), a.delay(Ask(0, 4, "gap"))))
        assert a.delay(Ask(0, 1, "gap")) == 0
        assert a.delay(Ask(0, 10**9, "gap")) < 10
    first, second, fourth = zip(*waits, strict=True)
    assert len(set(first)) == 50
    assert max(first) <= 0.05
    assert 0.05 <= min(second) < max(second) <= 0.15
    assert 0.2 <= min(fourth) < max(fourth) <= 0.6


def test_the_state_of_every_source_is_shown(publisher: Callable[..., Any]) -> None:
    """A reader that is attached to nothing says so."""
    pub = publisher()
    nobody = Source("tcp://127.0.0.1:9", name="nobody")
    with connected(pub, Source(pub.live, pub.replay, name="a"), nobody) as sub:
        before = sub.stats()
        assert [(s.connected, s.state, s.last_seq, s.last_message_age_s) for s in before][1] == (
            False,
            "waiting",
            None,
            None,
        )
        pub.publish()
        take(sub, 1)
        after = sub.stats()[0]
        assert (after.connected, after.state, after.complete, after.last_seq) == (True, "live", True, 0)
        assert after.last_message_age_s is not None
        assert 0 <= after.last_message_age_s < 5


def test_nothing_is_logged_per_event_and_warnings_are_rate_limited(
    publisher: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    pub = publisher()
    caplog.set_level(logging.INFO, "kvevents")
    with connected(pub, timing=QUICK._replace(silence_s=60)) as sub:
        for _ in range(300):
            pub.publish()
            pub.pub.send_multipart([b"odd"])
        assert len(take(sub, 300)) == 300
        assert sub.stats()[0].malformed >= 299
    assert len(caplog.records) <= 2


def test_iteration_ends_when_another_thread_closes(publisher: Callable[..., Any]) -> None:
    pub = publisher()
    sub = connected(pub)
    pub.publish()
    got: list[Item] = []
    arrived = threading.Event()

    def read() -> None:
        for item in sub:
            got.append(item)
            arrived.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert arrived.wait(10)
    sub.close()
    reader.join(10)
    assert not reader.is_alive()
    assert seqs(got) == [0]
    assert sub.poll(0) is None
    sub.close()


def test_a_callback_may_close_its_subscriber(publisher: Callable[..., Any]) -> None:
    pub = publisher()
    sub = connected(pub)
    for _ in range(3):
        pub.publish()
    got: list[Item] = []

    def callback(item: Item) -> None:
        got.append(item)
        if len(got) == 2:
            sub.close()

    sub.run(callback)
    assert seqs(got) == [0, 1]


def test_a_poll_that_times_out_gives_nothing(publisher: Callable[..., Any]) -> None:
    with connected(publisher()) as sub:
        assert sub.poll(0) is None
        start = time.monotonic()
        assert sub.poll(0.05) is None
        assert 0.04 <= time.monotonic() - start < 5


def test_raw_payloads_can_be_had_without_decoding(publisher: Callable[..., Any]) -> None:
    pub = publisher()
    with connected(pub, decode=False) as sub:
        pub.publish()
        pub.publish(send=False)
        pub.publish(b"\x93anything")
        items = take(sub, 3)
    assert [i.payload for i in items if isinstance(i, Batch)] == [batch_of(0), batch_of(1), b"\x93anything"]
    assert [i.batch for i in items if isinstance(i, Batch)] == [None] * 3


def test_raw_readers_tell_a_restart_too(publisher: Callable[..., Any]) -> None:
    pub = publisher(replay=None)
    with connected(pub, decode=False) as sub:
        pub.publish()
        take(sub, 1)
        pub.send(0, batch_of(0, 1))
        assert take(sub, 2)[0] == Reset("a", "restart")


def test_a_source_can_listen_for_a_publisher_that_connects() -> None:
    context = zmq.Context()
    with Subscriber([Source("tcp://127.0.0.1:*", bind=True, name="a")], timing=QUICK) as sub:
        pub = context.socket(zmq.XPUB)
        pub.linger = 0
        pub.rcvtimeo = 10_000
        pub.connect(sub.endpoints[0])
        # The listening side takes a new connection in while it is polled.
        for _ in range(500):
            assert sub.poll(0.02) is None
            if pub.poll(0):
                break
        assert pub.recv() == b"\x01"
        pub.send_multipart([b"", bytes(8), batch_of(0)])
        assert seqs(take(sub, 1)) == [0]
        with pytest.raises(EndpointInUseError, match="in use"):
            Subscriber([Source(sub.endpoints[0], bind=True)])
        pub.close()
    context.term()


def test_ipv6_and_inproc_and_ipc_work(tmp_path: Any) -> None:
    context = zmq.Context()
    for endpoint in ("tcp://[::1]:*", "inproc://kv", f"ipc://{tmp_path}/kv"):
        pub = context.socket(zmq.XPUB)
        pub.linger = 0
        pub.ipv6 = True
        pub.rcvtimeo = 10_000
        try:
            pub.bind(endpoint)
        except zmq.ZMQError:
            pub.close()
            continue
        address = pub.getsockopt_string(zmq.LAST_ENDPOINT)
        with Subscriber([Source(address)], context=context, timing=QUICK) as sub:
            assert pub.recv() == b"\x01"
            pub.send_multipart([b"", bytes(8), batch_of(0)])
            assert seqs(take(sub, 1)) == [0]
        pub.close()
    context.term()


def test_ranks_follow_the_engines_port_rule() -> None:
    ranks = Source.ranks("tcp://10.0.0.1:5557", 3, "tcp://10.0.0.1:5657", name="pod")
    assert [(s.endpoint, s.replay_endpoint, s.name) for s in ranks] == [
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657", "pod/dp0"),
        ("tcp://10.0.0.1:5558", "tcp://10.0.0.1:5658", "pod/dp1"),
        ("tcp://10.0.0.1:5559", "tcp://10.0.0.1:5659", "pod/dp2"),
    ]
    assert [s.endpoint for s in Source.ranks("ipc:///tmp/kv", 2)] == ["ipc:///tmp/kv", "ipc:///tmp/kv_dp1"]
    with pytest.raises(ConfigError, match="overlap"):
        Source.ranks("tcp://10.0.0.1:5557", 3, "tcp://10.0.0.1:5558")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Source("tcp://127.0.0.1"), "port is missing"),
        (lambda: Source("tcp://0.0.0.0:5557"), "to connect, name a host"),
        (lambda: Source("tcp://*:5557"), "to connect, name a host"),
        (lambda: Source("tcp://127.0.0.1:0"), "a port is needed"),
        (lambda: Source("tcp://127.0.0.1:5", "tcp://*:6"), "replay_endpoint"),
        (lambda: Source("http://x"), "begins with tcp"),
        (lambda: Subscriber([]), "at least one source"),
        (lambda: Subscriber(["tcp://127.0.0.1:5", "tcp://127.0.0.1:5"]), "two sources are named"),
        (lambda: Subscriber("tcp://127.0.0.1:5", hwm=0), "without a bound"),
        # What a socket refuses must not leave a context that waits for that socket for ever.
        (lambda: Subscriber("tcp://127.0.0.1:5", hwm=2**40), "hwm: a number"),
        (lambda: Subscriber("tcp://127.0.0.1:5", max_message_bytes=1.5), "max_message_bytes: a number"),
        (lambda: Subscriber("tcp://127.0.0.1:5", timing=5), "timing: a Timing"),
        (lambda: Subscriber("tcp://127.0.0.1:5", limits=5), "limits: a Limits"),
        (
            lambda: Subscriber("tcp://127.0.0.1:5", timing=Timing(silence_s=0)),
            "timing.silence_s: a number above 0",
        ),
        (
            lambda: Subscriber("tcp://127.0.0.1:5", timing=Timing(look_s=math.nan)),
            "timing.look_s: a number above 0",
        ),
        (
            lambda: Subscriber("tcp://127.0.0.1:5", timing=Timing(jitter_s=-1)),
            "timing.jitter_s: a number 0 or more",
        ),
        (
            lambda: Subscriber("tcp://127.0.0.1:5", timing=Timing(check_s="1")),
            "timing.check_s: a number above 0",
        ),
        (
            lambda: Subscriber("tcp://127.0.0.1:5", limits=Limits(attempts=0)),
            "limits.attempts: a number above 0",
        ),
        (
            lambda: Subscriber("tcp://127.0.0.1:5", limits=Limits(remember=1.5)),
            "limits.remember: a number above 0",
        ),
        (lambda: Subscriber("tcp://127.0.0.1:5", resume={"x": 5}), "resume: 'x': a Resume"),
        (lambda: Subscriber("tcp://127.0.0.1:5", resume={"x": Resume(2**64)}), "resume: 'x': a Resume"),
        (lambda: Subscriber("tcp://127.0.0.1:5", resume={"x": Resume(1, "epoch")}), "resume: 'x': a Resume"),
        (lambda: Subscriber("tcp://127.0.0.1:5", digest_of=b"digest"), "digest_of: a function"),
        (lambda: Subscriber(5), "sources: addresses"),
        (lambda: Source(5), "endpoint: Expected `str`"),
        (lambda: Source("tcp://127.0.0.1:5", 6), "replay_endpoint: Expected `str"),
        (lambda: Source("tcp://127.0.0.1:5", topic=b"kv"), "topic: Expected `str`"),
        (lambda: Source("tcp://127.0.0.1:5", topic="\ud800"), "topic: text in UTF-8"),
        (lambda: Source("tcp://127.0.0.1:5", first_seq="0"), "first_seq: Expected `int`"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


def test_an_option_that_the_socket_refuses_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise zmq.ZMQError(22)

    monkeypatch.setattr(zmq.Socket, "set_hwm", refuse)
    with pytest.raises(zmq.ZMQError):
        Subscriber("tcp://127.0.0.1:5")


def test_a_fork_is_detected(publisher: Callable[..., Any]) -> None:
    pub = publisher(replay=None)
    with connected(pub) as sub:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                sub.poll(0)
                os.write(write, b"no error")
            except ForkError:
                sub.close()
                os.write(write, b"refused")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 100) == b"refused"
        os.close(read)
        os.close(write)
        pub.publish()
        assert seqs(take(sub, 1)) == [0]
