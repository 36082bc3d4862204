"""`kvevents record` and `kvevents replay`: a stream to a file and back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from plain_publisher import batch_of

from kvevents import (
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventsConfig,
    ResidentSet,
    Source,
    Subscriber,
)
from kvevents.publish import EventPublisherFactory
from kvevents.recording import Mark, Message, read_recording
from kvevents.subscribe import Timing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.timeout(90)


def start(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvevents", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    return out, err


def heard(endpoint: str, n: int) -> list[list[bytes]]:
    with zmq.Context() as context, context.socket(zmq.SUB) as s:
        s.linger = 0
        s.rcvtimeo = 30_000
        s.set_hwm(0)
        s.subscribe(b"")
        s.connect(endpoint)
        return [s.recv_multipart() for _ in range(n)]


def test_a_stream_goes_to_a_file_and_back_byte_for_byte(
    publisher: Callable[..., Any], tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    file = tmp_path / "stream.kvr"
    pub = publisher(topic=b"kv@pod@model")
    for i in range(5):
        pub.publish(send=i > 2)  # before anybody listens: by replay
    recorder = start(
        "record",
        pub.live,
        file,
        "--replay-endpoint",
        pub.replay,
        "--count",
        "40",
        "--timeout",
        "30",
        "--json",
    )
    pub.wait_for_reader()
    for i in range(35):
        pub.publish(send=i not in {3, 4, 20})
    out, _ = finish(recorder)
    counts = json.loads(out)
    assert (counts["batches"], counts["gaps"]) == (40, 0)
    assert counts["replayed"] >= 3
    messages = [r for r in read_recording(file) if isinstance(r, Message)]
    assert [(m.seq, m.topic, m.payload) for m in messages] == [
        (i, b"kv@pod@model", batch_of(i)) for i in range(40)
    ]
    assert sum(m.replayed for m in messages) == counts["replayed"]

    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    player = start("replay", file, "--endpoint", endpoint, "--fast", "--json")
    got = heard(endpoint, 40)
    assert got == [[b"kv@pod@model", i.to_bytes(8, "big"), batch_of(i)] for i in range(40)]
    out, err = finish(player)
    assert json.loads(out)["batches"] == 40
    assert "waiting for 1 reader(s)" in err


def test_gaps_are_marks_and_a_stopped_recorder_keeps_what_it_has(
    publisher: Callable[..., Any], tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    file = tmp_path / "stream.kvr"
    pub = publisher(replay=None)
    for code, extra in ((130, []), (130, ["--append"])):
        recorder = start("record", pub.live, file, *extra)
        pub.wait_for_reader()
        first = pub.seq
        for i in range(10):
            pub.publish(send=i != 4)
        # The recorder flushes once a second, so what is in the file was received.
        deadline = time.monotonic() + 30
        while not file.exists() or first + 9 not in {
            r.seq for r in read_recording(file) if isinstance(r, Message)
        }:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        recorder.send_signal(signal.SIGINT)
        out, _ = finish(recorder, code)
        assert "9 batches" in out
        assert pub.pub.recv()[:1] == b"\x00"
    marks = [(r.kind, r.first, r.last, r.reason) for r in read_recording(file) if isinstance(r, Mark)]
    assert marks == [("gap", 4, 4, "no replay"), ("gap", 0, 9, "no replay"), ("gap", 14, 14, "no replay")]

    refused = start("record", pub.live, file)
    _, err = finish(refused, 2)
    assert "--append" in err

    file.write_bytes(file.read_bytes()[:-3])
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    player = start("replay", file, "--endpoint", endpoint, "--fast")
    seqs = [int.from_bytes(frames[1], "big") for frames in heard(endpoint, 17)]
    assert seqs == [i for i in range(19) if i not in {4, 14}]
    _, err = finish(player)
    assert "ends inside a record" in err


def test_a_snapshot_in_a_recording_is_part_of_what_a_reader_of_the_replay_holds(
    tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    """The recorder came too late for the log; in the file stands a snapshot instead."""
    live, replay, again = (f"tcp://127.0.0.1:{p}" for p in free_ports(3))
    publisher = EventPublisherFactory.create(
        KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=live,
            replay_endpoint=replay,
            buffer_steps=3,
            topic="kv",
            dialect="sglang-map",
        ),
        0,
    )
    truth = ResidentSet()

    def publish(numbers: range) -> None:
        for n in numbers:
            events: list[Any] = [
                BlockStored([n + 1], n or None, [n] * 4, 4, None, "GPU", None, cache_salt="s")
            ]
            if n >= 20:
                events.append(BlockRemoved([n - 15], "GPU"))
            truth.apply(events)
            publisher.publish(KVEventBatch(time.time(), events, 0))

    file = tmp_path / "stream.kvr"
    try:
        publish(range(30))
        recorder = start(
            "record", live, file, "--replay-endpoint", replay, "--count", "10", "--timeout", "30"
        )
        deadline = time.monotonic() + 30
        while not (_begun(file) and any(isinstance(r, Mark) for r in read_recording(file))):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        publish(range(30, 40))
        finish(recorder)
    finally:
        publisher.shutdown()
    player = start("replay", file, "--endpoint", again, "--fast", "--json")
    held = ResidentSet()
    with Subscriber(Source(again, name="w"), timing=Timing(reorder_wait_s=0.01)) as stream:
        deadline = time.monotonic() + 30
        while stream.stats()[0].last_seq != 39:
            assert time.monotonic() < deadline
            if (item := stream.poll(0.1)) is not None:
                held.apply(item)
        while (item := stream.poll(0)) is not None:
            held.apply(item)
    out, _ = finish(player)
    assert json.loads(out)["snapshots"] == 1
    assert held.why_invalid("w") is None
    assert held.digest("w") == truth.digest()


def _begun(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 8


def test_replay_keeps_the_recorded_pace(
    publisher: Callable[..., Any], tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    from kvevents.recording import Begin, RecordingWriter

    file = tmp_path / "stream.kvr"
    with RecordingWriter(file, "s") as out:
        for i in range(4):
            out.write(Message(1000.0 + i, i, b"", b"x", replayed=False))
            if i == 1:
                out.write(Begin(2000.0, "s"))
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    for speed, slowest in (("4", 0.5), ("0", 0.0)):
        player = start("replay", file, "--endpoint", endpoint, "--speed", speed)
        with zmq.Context() as context, context.socket(zmq.SUB) as s:
            s.linger = 0
            s.rcvtimeo = 30_000
            s.subscribe(b"")
            s.connect(endpoint)
            s.recv_multipart()
            began = time.monotonic()
            for _ in range(3):
                s.recv_multipart()
            took = time.monotonic() - began
        finish(player)
        assert took >= slowest * 0.95
    silent = start("replay", file, "--endpoint", endpoint, "--timeout", "0.2")
    _, err = finish(silent, 3)
    assert "0 of 1 readers" in err
    _, err = finish(start("replay", tmp_path / "none", "--endpoint", endpoint), 3)
    assert "none" in err
