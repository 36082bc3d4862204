"""From an engine's socket to an answer: a publisher process, and the two indexes that read it.

`python -m benches.zmq_race FILE` is the publisher: it prints its address, `ready` when somebody subscribed,
and sends every payload of the file as fast as it can when its standard input says so.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import zmq

from benches import workloads
from benches.dynamo_indexer import DynamoIndexer
from kvevents import BlockStored, KVEventBatch, PrefixIndex, Source, Subscriber, encode

__all__ = ["Ours", "Race", "Theirs", "stored", "write_messages"]

BLOCK = workloads.BLOCK
MARKER = [199_999] * BLOCK
"""The last block of all: who finds it has read everything."""


@cache
def stored(blocks: int, per_event: int) -> list[BlockStored]:
    """Prompts of at most 1,024 blocks, in events of so many."""
    per_prompt = max(1, min(blocks, 1024) // per_event)
    found = workloads.stored_events(blocks // per_event, per_event)
    for event in found[::per_prompt]:
        event.parent_block_hash = None
    return found


def write_messages(path: Path, blocks: int, per_event: int) -> None:
    """One event each, and the marker."""
    events = [*stored(blocks, per_event), BlockStored([7], None, MARKER, BLOCK, None, "GPU", None)]
    payloads = [encode(KVEventBatch(1.0 + i * 1e-3, [e], 0)) for i, e in enumerate(events)]
    path.write_bytes(msgspec.msgpack.encode(payloads))


class Race:
    """One publisher process, for one reader."""

    def __init__(self, messages: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benches.zmq_race", str(messages)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.endpoint = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ready(self) -> None:
        """Wait until the reader is connected."""
        assert self._line() == "ready"

    def go(self) -> None:
        """Send everything, from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the publisher."""
        self._process.communicate()


class Ours:
    """A subscriber and an index in this process, as a router has them."""

    def __init__(self, messages: Path) -> None:
        self.race = Race(messages)
        self.index = PrefixIndex()
        # Nothing is lost before it is read: the other reader has no limit either.
        self._stream = Subscriber(Source(self.race.endpoint, name="w"), decode=False, hwm=2**20)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.race.ready()

    def _read(self) -> None:
        apply = self.index.apply
        for item in self._stream:
            apply("w", 0, item.seq, item.payload)  # type: ignore[union-attr]

    def run(self) -> None:
        """From the first message to the last block's answer."""
        marker = array("I", MARKER)
        self.race.go()
        wait_for(lambda: len(self.index.find(marker)) > 0)

    def blocks(self, token_ids: list[int]) -> int:
        """How many of a prompt's blocks it holds."""
        found = self.index.find(token_ids)
        return found[0].blocks if len(found) else 0

    def close(self) -> None:
        """End reader and publisher."""
        self._stream.close()
        self._reader.join()
        self.race.close()


class Theirs:
    """The same by Dynamo's indexer in a process of its own."""

    def __init__(self, messages: Path, python: str) -> None:
        self._indexer = DynamoIndexer(python)
        self.race = Race(messages)
        self._indexer.register(1, self.race.endpoint, BLOCK)
        self.race.ready()

    def run(self) -> None:
        """From the first message to the last block's answer."""
        self.race.go()
        wait_for(lambda: self._indexer.device_tokens(MARKER, 1) > 0)

    def blocks(self, token_ids: list[int]) -> int:
        """How many of a prompt's blocks it holds."""
        return self._indexer.device_tokens(token_ids, 1) // BLOCK

    def close(self) -> None:
        """End indexer and publisher."""
        self._indexer.close()
        self.race.close()


def wait_for(known: Callable[[], bool]) -> None:
    """Ask every millisecond; neither reader is slowed down by more."""
    end = time.monotonic() + 60
    while not known():
        if time.monotonic() > end:
            raise TimeoutError("the last block was not heard of within 60 s")
        time.sleep(0.001)


def main(messages: Path) -> None:
    """The publisher; see the module."""
    frames = msgspec.msgpack.decode(messages.read_bytes(), type=list[bytes])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.XPUB)
    socket.set_hwm(0)
    socket.bind("tcp://127.0.0.1:*")
    print(socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    socket.recv()
    # As fast as can be: the readers are to be what is measured.
    numbered = [(seq.to_bytes(8, "big"), payload) for seq, payload in enumerate(frames)]
    send, more, last = zmq.backend.Socket.send.__get__(socket), int(zmq.SNDMORE), 0
    print("ready", flush=True)
    if sys.stdin.readline():
        for number, payload in numbered:
            send(b"", more)
            send(number, more)
            send(payload, last)
        sys.stdin.readline()
    socket.close(linger=0)
    context.term()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
