"""One life of a publisher: the real parts, with a schedule in the place of threads and links for sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvevents._core import Mirror, ReplayLog
from kvevents.config import KVEventsConfig
from kvevents.publish.desk import ClientGoneError, ReplayDesk
from kvevents.publish.extended import Extended
from kvevents.publish.jobs import EXTENDED
from kvevents.publish.outbox import Outbox
from kvevents.publish.snapshots import Snapshots
from kvevents.publish.writer import BatchWriter
from kvevents.testing.system.failure import check

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvevents.events import EventBatch
    from kvevents.publish.jobs import Frames
    from kvevents.testing.system.config import EngineSpec
    from kvevents.testing.system.link import Dealer
    from kvevents.testing.system.schedule import Schedule
    from kvevents.testing.system.truth import Truth

__all__ = ["Publisher"]

SEND_S = 0.0002
"""What a sender needs for a batch."""
TURN_S = 0.001
"""A replay server's round while there is something to do."""
STUCK_S = 0.02
"""Its round while no client takes anything."""
FORGET_S = 5.0
"""So often idle snapshots are looked for."""


class _Outbox(Outbox):
    """Counts the numbers that are left out on purpose."""

    skips = 0

    def skip(self) -> None:
        self.skips += 1
        super().skip()


class _Writer(BatchWriter):
    send: Callable[[bytes, bytes], None]

    def _transmit(self, number: bytes, payload: bytes) -> None:
        self.send(number, payload)


class _Desk(ReplayDesk):
    dealers: dict[bytes, Dealer]

    def _transmit(self, client: bytes, messages: Sequence[Frames]) -> int:
        dealer = self.dealers.get(client)
        if dealer is None:
            raise ClientGoneError
        return dealer.take(messages)


class Publisher:
    """From its start to its death; then nothing of it happens any more."""

    def __init__(
        self, spec: EngineSpec, schedule: Schedule, truth: Truth, epoch: bytes, dealers: dict[bytes, Dealer]
    ) -> None:
        self.spec = spec
        self.epoch = epoch
        self.alive = True
        self.stands_until = 0.0
        """The sender does nothing before this time."""
        self.config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            replay_endpoint="tcp://127.0.0.1:5558",
            buffer_steps=spec.log_batches,
            buffer_bytes=spec.log_bytes,
            max_queue_size=spec.queue,
            overflow=spec.overflow,
            dialect=spec.dialect,
            topic=f"kv@{spec.name}",
            mirror_tokens=spec.mirror_tokens,
            exact_for="engine" if spec.kind in {"plain", "groups"} else "stream",
        )
        self.topic = self.config.topic.encode()
        self.log = ReplayLog(spec.log_batches, spec.log_bytes)
        self.mirror = Mirror(0, keep_tokens=spec.mirror_tokens)
        self.outbox = _Outbox(spec.queue, spec.overflow, keep_dropped=True)
        self.writer = _Writer(
            self.config, spec.rank, outbox=self.outbox, log=self.log, mirror=self.mirror, clock=schedule.clock
        )
        self.snapshots = Snapshots(
            self.mirror, self.log, self.outbox.holes, spec.dialect, spec.rank,
            wall=schedule.clock, clock=schedule.clock, piece_bytes=spec.piece_bytes,
        )  # fmt: skip
        extended = Extended(
            self.config, spec.rank, epoch,
            log=self.log, outbox=self.outbox, sender=self.writer, mirror=self.mirror,
            snapshots=self.snapshots,
        )  # fmt: skip
        self.desk = _Desk(self.log, self.topic, extended, self.snapshots, rank=spec.rank)
        self.desk.dealers = dealers
        self._schedule = schedule
        self._truth = truth
        self._sending = self._serving = self._forgetting = False
        self._spoke_at = schedule.now
        truth.began(epoch, schedule.now)
        if spec.heartbeat_s is not None:
            schedule.after(spec.heartbeat_s, self._beat)

    # ------------------------------------------------------------ the engine's step

    def publish(self, batch: EventBatch, digest: bytes) -> None:
        """Queue a batch with which ``digest`` is true. Returns at once, whatever the sender does."""
        if batch.data_parallel_rank is None:
            batch.data_parallel_rank = self.spec.rank
        outbox = self.outbox
        before = outbox.next_sequence
        self._truth.published(digest)
        outbox.put(batch)
        self._truth.numbered(outbox.next_sequence - before)
        # A hole of the newest ones stands in the queue as well.
        check(
            "bounded", len(outbox) <= self.spec.queue + 1, "{}: {} batches wait", self.spec.name, len(outbox)
        )
        self._wake()

    # ------------------------------------------------------------ the sender

    def _wake(self) -> None:
        if not self._sending:
            self._sending = True
            self._schedule.at(max(self._schedule.now + SEND_S, self.stands_until), self._send)

    def _send(self) -> None:
        self._sending = False
        if not self.alive:
            return
        if self._schedule.now < self.stands_until:
            self._wake()
            return
        outbox, writer = self.outbox, self.writer
        before, skips = outbox.next_sequence, outbox.skips
        worked = writer.step()
        own = outbox.skips - skips
        self._truth.numbered(outbox.next_sequence - before - own, own)
        check("sender", writer.failed == 0, "{}: a batch could not be sent", self.spec.name)
        if worked:
            self._spoke_at = self._schedule.now
            self._check_mirror()
            self._wake()

    def _beat(self) -> None:
        """As the sender does after so long without a batch."""
        silence = self.spec.heartbeat_s
        if not self.alive or silence is None:
            return
        due = max(self._spoke_at + silence, self.stands_until)
        if self._schedule.now >= due and not self._sending:
            before = self.outbox.next_sequence
            self.writer.beat()
            self._truth.numbered(0, self.outbox.next_sequence - before)
            self._spoke_at = self._schedule.now
            due = self._schedule.now + silence
        self._schedule.at(max(due, self._schedule.now + SEND_S), self._beat)

    def _check_mirror(self) -> None:
        found = self.mirror.digest()
        check("mirror", found is not None, "{}: the mirror is lost", self.spec.name)
        if found is not None:
            resume_seq, digest = found
            true = self._truth.of_epoch(self.epoch, resume_seq - 1)
            check("mirror", digest == true, "{}: the mirror differs at {}", self.spec.name, resume_seq)

    # ------------------------------------------------------------ the replay server

    def request(self, client: bytes, frames: list[bytes]) -> None:
        """What a client asks."""
        if self.spec.server == "plain" and frames[:2] == [b"", EXTENDED]:
            return  # as vLLM's does, which says so in its log
        self.desk.request(client, frames, self._schedule.now)
        self._turn_soon(0.0)
        if not self._forgetting:
            self._forgetting = True
            self._schedule.after(FORGET_S, self._forget)

    def _turn_soon(self, seconds: float) -> None:
        if not self._serving:
            self._serving = True
            self._schedule.after(seconds, self._turn)

    def _turn(self) -> None:
        self._serving = False
        if not self.alive:
            return
        if self.desk.turn(self._schedule.now):
            self._turn_soon(TURN_S)
        elif self.desk.serving:
            self._turn_soon(STUCK_S)

    def _forget(self) -> None:
        self._forgetting = False
        if self.alive and self.snapshots.drop_idle() is not None:
            self._forgetting = True
            self._schedule.after(FORGET_S, self._forget)
