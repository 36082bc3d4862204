"""Extended requests: what they may ask, and what is answered. ``docs/wire.md`` is their definition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvevents.publish.jobs import EXTENDED, Answer, Frames, Job, RangeReplay, SendSnapshot, pack
from kvevents.publish.outbox import END_SEQUENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvevents._core import Mirror, ReplayLog
    from kvevents.config import KVEventsConfig
    from kvevents.publish.outbox import Outbox
    from kvevents.publish.snapshots import Snapshot, Snapshots
    from kvevents.publish.store_only import StoreOnlyMedia
    from kvevents.publish.writer import BatchWriter

__all__ = ["Extended", "RequestError"]

VERSION = 1
MAX_ID = 64
"""Bytes of a request's id."""
MAX_PIECES = 16
"""Pieces of a snapshot that one request may ask for."""
NO_ID = None
_NO_MIRROR = ("no_mirror", "this publisher keeps no mirror: no snapshots, no digests")
_MIRROR_LOST = (
    "mirror_lost",
    "more batches were dropped than could wait for the mirror; it is known again after a clear",
)


class RequestError(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Extended:
    """Answers for one publisher; belongs to the replay server's thread."""

    def __init__(
        self,
        config: KVEventsConfig,
        rank: int,
        epoch: bytes,
        *,
        log: ReplayLog,
        outbox: Outbox,
        sender: BatchWriter,
        mirror: Mirror | None,
        snapshots: Snapshots | None,
        store_only: StoreOnlyMedia | None = None,
    ) -> None:
        self._config = config
        self._rank = rank
        self._epoch = epoch
        self._log = log
        self._outbox = outbox
        self._sender = sender
        self._mirror = mirror
        self._snapshots = snapshots
        self._store_only = store_only
        self._ops: dict[str, Callable[[Any, dict[str, Any]], Job]] = {
            "hello": self._hello,
            "replay": self._replay,
            "snapshot": self._snapshot,
            "digest": self._digest,
        }

    def state(self) -> dict[str, Any]:
        """What every answer says."""
        mirror = self._mirror
        return {
            "epoch": self._epoch,
            "oldest": self._log.oldest,
            "newest": self._log.newest,
            "resume_seq": mirror.resume_seq if mirror is not None and mirror.known else None,
        }

    def refusal(self, code: str, reason: str, request: Any = NO_ID) -> tuple[bytes, ...]:
        """An answer that says what was wrong."""
        answer = {"op": "error", "id": request, **self.state(), "code": code, "error": reason}
        return (b"", EXTENDED, pack(answer))

    def job(self, frames: list[bytes]) -> Job:
        """What one request is owed; errors too are answers."""
        request: Any = NO_ID
        try:
            fields = _fields(frames)
            request = _id(fields)
            op = fields.get("op")
            if not isinstance(op, str) or op not in self._ops:
                known = ", ".join(self._ops)
                return Answer(
                    self.refusal("unknown_op", f"op: {_short(op)} is none of {known}", request), error=True
                )
            return self._ops[op](request, fields)
        except RequestError as e:
            return Answer(self.refusal(e.code, str(e), request), error=True)

    # ------------------------------------------------------------ one of each

    def _hello(self, request: Any, fields: dict[str, Any]) -> Job:  # noqa: ARG002 - it has none
        config, outbox, sender, mirror = self._config, self._outbox, self._sender, self._mirror
        exact_for = "stream" if sender.events_lost else config.exact_for
        return self._answer(
            "hello",
            request,
            version=VERSION,
            ops=list(self._ops),
            rank=self._rank,
            topic=config.topic,
            dialect=config.dialect,
            next_sequence=outbox.next_sequence,
            mirror=mirror is not None,
            mirror_tokens=mirror is not None and config.mirror_tokens,
            exact_for=None if mirror is None else exact_for,
            blocks=None if mirror is None else len(mirror),
            holes=outbox.holes.ranges(),
            holes_from=outbox.holes.complete_from,
            dropped=outbox.dropped,
            failed=sender.failed,
            events_lost=sender.events_lost,
            max_pieces=MAX_PIECES,
            store_only=[] if self._store_only is None else list(self._store_only.media),
        )

    def _replay(self, request: Any, fields: dict[str, Any]) -> Job:
        first = _number(fields, "first")
        last = _number(fields, "last", END_SEQUENCE - 1)
        if last < first:
            raise RequestError("bad_request", f"last: {last} is below first, {first}")
        oldest, newest = self._log.oldest, self._log.newest
        if newest is not None and first <= newest and (oldest is None or first < oldest):
            state = self.state()
            answer = {
                "op": "error", "id": request, **state, "code": "too_old",
                "error": f"first: {first} is below the oldest that can be replayed, {oldest}",
                "first": first,
            }  # fmt: skip
            return Answer((b"", EXTENDED, pack(answer)), error=True)
        # Batches that come while this is served are live for the one who asks.
        last = min(last, -1 if newest is None else newest)
        return RangeReplay(self._log, first, max(last, 0), request, self.state)

    def _digest(self, request: Any, fields: dict[str, Any]) -> Job:
        mirror = self._known()
        seq = fields.get("seq")
        found = mirror.digest(None if seq is None else _number(fields, "seq"))
        if found is None:
            raise RequestError(
                "unknown_seq",
                f"seq: the digest behind {seq} is not known (any more); leave seq out for the newest",
            )
        resume_seq, digest = found
        return self._answer("digest", request, seq=resume_seq - 1 if resume_seq else None, digest=digest)

    def _snapshot(self, request: Any, fields: dict[str, Any]) -> Job:
        snapshots = self._snapshots
        if snapshots is None:
            raise RequestError(*_NO_MIRROR)
        first = _number(fields, "piece", 0)
        count = _number(fields, "count", 1)
        if not 1 <= count <= MAX_PIECES:
            raise RequestError("bad_request", f"count: {count} (1 to {MAX_PIECES} pieces)")

        def gone() -> Frames:
            reason = f"there is no piece {first} of such a snapshot (any more); begin a new one"
            return self.refusal("gone", reason, request)

        def head(snapshot: Snapshot) -> dict[str, Any]:
            return self._snapshot_head(request, snapshot)

        if fields.get("resume_seq") is not None:
            snapshot = snapshots.get(_number(fields, "resume_seq"))
            if snapshot is None:
                return Answer(gone(), error=True)
            return SendSnapshot(lambda: snapshot, first, count, head, gone)
        self._known()
        if first:
            raise RequestError("bad_request", "piece: say of which snapshot, by resume_seq")
        at_least = _number(fields, "at_least", 0)

        def find() -> Snapshot | Frames | None:
            found = snapshots.current(at_least)
            if found is not None or snapshots.making:
                return found
            return self.refusal(*_MIRROR_LOST, request)

        return SendSnapshot(find, 0, count, head, gone)

    # ------------------------------------------------------------ parts

    def _known(self) -> Mirror:
        if self._mirror is None:
            raise RequestError(*_NO_MIRROR)
        if not self._mirror.known:
            raise RequestError(*_MIRROR_LOST)
        return self._mirror

    def _snapshot_head(self, request: Any, snapshot: Snapshot) -> dict[str, Any]:
        head = {"op": "snapshot", "id": request, **self.state()}
        return head | {
            "resume_seq": snapshot.resume_seq, "digest": snapshot.digest, "blocks": snapshot.blocks,
        }  # fmt: skip

    def _answer(self, op: str, request: Any, **more: Any) -> Job:
        return Answer((b"", EXTENDED, pack({"op": op, "id": request, **self.state(), **more})))


def _fields(frames: list[bytes]) -> dict[str, Any]:
    if len(frames) != 1:
        raise RequestError("bad_request", f"one frame with a map follows {EXTENDED!r}; seen: {len(frames)}")
    try:
        fields = msgspec.msgpack.decode(frames[0])
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        raise RequestError("bad_request", f"the request is no msgpack: {e}") from None
    if not isinstance(fields, dict):
        raise RequestError("bad_request", f"the request is no map but {type(fields).__name__}")
    return fields


def _id(fields: dict[str, Any]) -> Any:
    request = fields.get("id")
    short = not isinstance(request, str | bytes) or len(request) <= MAX_ID
    if request is not None and not (isinstance(request, int | str | bytes) and short):
        raise RequestError("bad_request", f"id: an integer, or at most {MAX_ID} bytes or characters")
    return request


def _number(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 <= value < END_SEQUENCE:
        raise RequestError(
            "bad_request", f"{name}: a number from 0 to 2^64-2 was expected, saw {_short(value)}"
        )
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
