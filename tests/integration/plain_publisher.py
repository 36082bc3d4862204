"""A publisher with vLLM's live and replay wire, made of plain sockets and told what to do wrong."""

from __future__ import annotations

import threading
from typing import Any

import zmq

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, EventList, KVEventBatch, encode

END = (2**64 - 1).to_bytes(8, "big")


MADE: list[PlainPublisher] = []
"""All that were made, for the fixture that closes them."""


def batch_of(seq: int, life: int = 0, rank: int | None = 0) -> bytes:
    """Stores one block that tells number and life; removes the one of ten batches before."""
    h = 2**40 + life * 1_000_000 + seq
    events: list[Any] = [BlockStored([h], None, [1, 2, 3, 4], 4, None, "GPU", None)]
    if seq >= 10:
        events.append(BlockRemoved([h - 10], "GPU"))
    if seq % 50 == 49:
        events.append(AllBlocksCleared())
    return encode(KVEventBatch(1000.0 * life + 1 + seq * 0.001, EventList(events), rank))


class PlainPublisher:
    """PUB and ROUTER as vLLM has them. Numbers and logs what it publishes; sends it unless told not to."""

    def __init__(
        self, *, topic: bytes = b"", live: str = "tcp://127.0.0.1:*", replay: str | None = "tcp://127.0.0.1:*"
    ) -> None:
        MADE.append(self)
        self.topic = topic
        self.layout = 4
        self.first_seq = 0
        self.answer_replays = True
        self.answer_limit: int | None = None
        self.log: dict[int, bytes] = {}
        self.requests: list[int] = []
        self.extended_requests = 0
        self.seq = 0
        self.life = 0
        self.context = zmq.Context()
        self.pub = self._bound(zmq.XPUB, live)
        self.live = self.pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay: str | None = None
        self._stop = threading.Event()
        if replay is not None:
            self.router = self._bound(zmq.ROUTER, replay)
            self.replay = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
            self.thread = threading.Thread(target=self._serve, daemon=True)
            self.thread.start()

    def _bound(self, kind: int, endpoint: str) -> Any:
        s = self.context.socket(kind)
        s.linger = 0
        s.ipv6 = True
        s.set_hwm(0)
        s.rcvtimeo = 10_000
        for _ in range(200):
            try:
                s.bind(endpoint)
            except zmq.ZMQError as e:  # the socket before, on the same port, is closed in the background
                if e.errno != zmq.EADDRINUSE:
                    raise
                threading.Event().wait(0.01)
            else:
                return s
        raise AssertionError(f"{endpoint} stays in use")

    def wait_for_reader(self) -> None:
        """Until a subscription has arrived."""
        assert self.pub.recv()[:1] == b"\x01"

    def publish(self, payload: bytes | None = None, *, send: bool = True, log: bool = True) -> int:
        seq = self.seq
        self.seq += 1
        payload = batch_of(seq, self.life) if payload is None else payload
        if log:
            self.log[seq] = payload
        if send:
            self.send(seq, payload)
        return seq

    def send(self, seq: int, payload: bytes) -> None:
        self.pub.send_multipart([self.topic, seq.to_bytes(8, "big"), payload])

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self.router, zmq.POLLIN)
        while not self._stop.is_set():
            if not poller.poll(20):
                continue
            client, *request = self.router.recv_multipart()
            if len(request) != 2:
                # vLLM's server logs a warning here, and nothing else.
                self.extended_requests += 1
                continue
            empty, start = request
            assert empty == b""
            first = int.from_bytes(start, "big")
            if first < 2**63 - 1:
                self.requests.append(first)
            if not self.answer_replays:
                continue
            head = [client, b""] if self.layout == 3 else [client, b"", self.topic]
            sent = 0
            for seq, payload in sorted(self.log.items()):
                if seq >= first:
                    if self.answer_limit is not None and sent >= self.answer_limit:
                        break
                    self.router.send_multipart([*head, seq.to_bytes(8, "big"), payload])
                    sent += 1
            else:
                self.router.send_multipart([*(head if self.layout == 3 else [client, b"", b""]), END, b""])
        self.router.close()

    def close(self) -> None:
        self._stop.set()
        if self.replay is not None:
            self.thread.join(10)
        self.pub.close()
        self.context.term()

    def restart(self, life: int | None = None) -> PlainPublisher:
        """A new process on the same ports, counting from the start."""
        self.close()
        new = PlainPublisher(topic=self.topic, live=self.live, replay=self.replay)
        new.life = self.life + 1 if life is None else life
        new.layout = self.layout
        new.answer_replays = self.answer_replays
        return new
