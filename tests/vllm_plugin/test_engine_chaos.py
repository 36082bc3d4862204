"""What goes wrong around a real engine: it serves on, readers see what was lost, one warning says so."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_process import EngineProcess, Reader, free_port, hello, ids, make_site, needs_engine, warnings

from kvevents.subscribe import Batch, Reset, Snapshot

pytestmark = [needs_engine, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return make_site(tmp_path_factory.mktemp("site"))


def command(*words):
    return [sys.executable, "-m", "kvevents", *map(str, words)]


def numbers(reader):
    return [item.seq for item in reader.of(Batch)]


def test_killed_readers_and_full_disks_cost_the_engine_nothing(site, tmp_path):
    """The engine's own log is on a full disk; one reader is killed, a recorder's disk is full."""
    port = free_port()
    with EngineProcess(site, port, log=tmp_path / "engine.log") as engine, Reader(port) as reader:
        assert engine.parts == {"publisher", "aggregator", "multi"}
        engine.ask(do="full_disk")
        reader.connected()
        tail = subprocess.Popen(
            command("tail", f"tcp://127.0.0.1:{port}", "--json"), stdout=subprocess.PIPE, text=True
        )
        outputs, seed = [], 0
        deadline = time.monotonic() + 120
        while not select.select([tail.stdout], [], [], 0)[0]:  # until it reads
            assert time.monotonic() < deadline
            outputs.append(engine.generate(ids(seed, 150)))
            seed += 1
        limited = ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash"]  # a disk of four blocks
        recording = command("record", f"tcp://127.0.0.1:{port}", tmp_path / "log.kv")
        recorder = subprocess.Popen(
            [*limited, *recording, "--replay-endpoint", f"tcp://127.0.0.1:{port + 1000}"],
            stderr=subprocess.PIPE,
            text=True,
        )
        while recorder.poll() is None and time.monotonic() < deadline:  # until its disk is full
            outputs.append(engine.generate(ids(seed, 150)))
            seed += 1
        assert tail.stdout.readline()
        tail.kill()
        tail.wait(10)
        told = recorder.communicate(timeout=10)[1].strip().splitlines()
        assert recorder.returncode == 3
        assert "too large" in told[-1]
        before = numbers(reader)
        again = engine.generate(ids(0, 150), ids(900, 150), max_tokens=40)
        assert len(again[1][1]) == 40
        sent = engine.ask(do="stats")
        assert sent["publisher"] == "EnginePublisher"
        reader.read(lambda: len(numbers(reader)) == sent["sent"])
        assert numbers(reader) == list(range(sent["sent"]))
        assert len(numbers(reader)) > len(before)
        assert reader.of(Reset) == []
        tail.stdout.close()


def test_an_event_that_cannot_be_encoded_is_a_hole_and_one_warning(site, tmp_path):
    port, log = free_port(), tmp_path / "engine.log"
    with EngineProcess(site, port, log=log) as engine, Reader(port) as reader:
        reader.connected()
        engine.generate(ids(1, 100))
        assert engine.ask(do="sabotage") == {}
        (output,) = engine.generate(ids(2, 100))
        assert len(output[1]) == 4
        engine.generate(ids(3, 100))
        deadline = time.monotonic() + 30
        while engine.ask(do="stats")["events_lost"] != 1:
            assert time.monotonic() < deadline
        # What stood around it arrived; the number that is left out says that something is lost.
        reader.read(lambda: bool(reader.events("X")))
        assert [type(e).__name__ for e in reader.events("X")] == ["BlockStored", "BlockRemoved"]
        told = hello(port)
        assert told["events_lost"] == 1, told
        assert told["exact_for"] == "stream", told
        ((first, last),) = told["holes"]
        assert first == last
        # Who sees the hole gets a snapshot: every block but the lost one, whatever that was.
        reader.read(lambda: any(item.resume_seq > last for item in reader.of(Snapshot)))
        assert last not in numbers(reader)
        assert len(reader.resident) == 9
    told = [line for line in warnings(log) if "cannot be encoded" in line]
    assert len(told) == 1, told


def test_a_port_that_is_taken_does_not_stop_the_engine(site, tmp_path):
    """Events wait in the replay log until the port is free; readers then get all of them."""
    port, log = free_port(), tmp_path / "engine.log"
    taken = socket.socket()
    taken.bind(("0.0.0.0", port))
    taken.listen()
    with EngineProcess(site, port, log=log) as engine:
        (output,) = engine.generate(ids(1, 100))
        assert len(output[1]) == 4
        assert len(warnings(log)) == 1, warnings(log)
        assert str(port) in warnings(log)[0]
        taken.close()
        with Reader(port) as reader:
            deadline = time.monotonic() + 60
            while not reader.stream.stats()[0].connected and time.monotonic() < deadline:
                engine.generate(ids(int(time.monotonic()), 100))
                reader.take(0.5)
            engine.generate(ids(2, 100))
            sent = engine.ask(do="stats")["sent"]
            reader.read(lambda: numbers(reader)[-1:] == [sent - 1])
            assert reader.resident.digest() is not None
    assert len(warnings(log)) == 1, warnings(log)


@pytest.mark.parametrize("plugins", ["", "kvevents"], ids=["stock", "plug-in"])
def test_a_killed_worker_ends_the_engine_as_in_stock_vllm(site, tmp_path, plugins):
    """Requests get vLLM's own error in bounded time; readers of the next engine are told to start anew."""
    port, log = free_port(), tmp_path / "engine.log"
    with Reader(port) as reader:
        with EngineProcess(site, port, log=log, plugins=plugins, tensor_parallel_size=2) as engine:
            engine.generate(ids(1, 100), seconds=300.0)
            reader.read(lambda: bool(reader.of(Batch)))
            workers = [pid for pid in engine.children() if _name(pid).startswith("VLLM::Worker")]
            assert len(workers) == 2, [_name(pid) for pid in engine.children()]
            os.kill(workers[-1], signal.SIGKILL)
            told = engine.ask(300.0, do="generate", prompts=[ids(2, 100)])
            assert told["error"] == "EngineDeadError"
        if not plugins:
            return
        held = len(reader.resident)
        assert held
        with EngineProcess(site, port, log=log) as engine:
            engine.generate(ids(3, 70))
            reader.read(lambda: bool(reader.of(Reset)))
            reader.read(lambda: len(reader.resident) == 2)
    assert [line for line in warnings(log) if "kvevents:" in line] == []


def _name(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""
