"""Captures of a real engine, and an engine in miniature that asks a pool for the same again.

A capture holds what a vLLM engine was asked, what it answered, and every frame that it published. The
scheduler here follows the engine's rules (``conformance/README.md``), so that the same requests through
`TokenBlocks` and `BlockPool` must give the same events with the same hashes in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvevents.codec import decode
from kvevents.errors import TraceError
from kvevents.events import AllBlocksCleared, EventList, KVCacheEvent
from kvevents.pool import BlockIds, BlockPool
from kvevents.resident import ResidentSet
from kvevents.testing.vectors import read_json_lines
from kvevents.tokens import TokenBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = [
    "Capture",
    "CapturedRequest",
    "Reproduction",
    "read_capture",
    "replay_requests",
    "reproduce_capture",
    "unfit_calls",
]


@dataclass(frozen=True)
class CapturedRequest:
    """One request as the engine served it."""

    prompt: list[int]
    output: list[int]
    call: object
    """Requests of one call were submitted together."""
    num_cached_tokens: int
    cache_salt: str | None
    lora_name: str | None
    lora_id: int | None


@dataclass(frozen=True)
class Capture:
    """A capture file."""

    path: Path | str
    meta: dict[str, Any]
    calls: list[list[CapturedRequest] | str]
    """Requests that were submitted together, or the name of an action."""
    events: EventList
    """Everything that was published live, in order."""
    frames: int

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return int(self.meta["engine"]["block_size"])

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""
        return int(self.meta["engine"]["num_gpu_blocks_override"])

    @property
    def algorithm(self) -> str:
        """Name of the hash function."""
        return str(self.meta["engine"]["prefix_caching_hash_algo"])

    @property
    def hash_form(self) -> str:
        """What the engine's events carry."""
        return "bytes" if self.meta["env"]["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] == "0" else "int"

    @property
    def not_reproducible(self) -> str | None:
        """Why a pool cannot know the engine's order of events; ``None`` where it can."""
        engine = self.meta["engine"]
        if engine.get("kv_transfer_config"):
            return "a connector delays frees"
        if engine.get("tensor_parallel_size", 1) != 1 or self.meta.get("scenario") == "mixed":
            return "which of the requests submitted together comes first varies"
        if any(getattr(e, "group_idx", None) for e in self.events):
            return "several KV cache groups: the engine's managers choose what is freed"
        return None

    def pool(self, report: str, hash_form: str | None = None) -> BlockPool:
        """Make a pool like the engine's."""
        form = hash_form or self.hash_form
        return BlockPool(self.num_blocks, self.block_size, report=report, hash_form=form)

    def tokens(self, request: CapturedRequest) -> TokenBlocks:
        """Begin the request's handle: no tokens yet."""
        return TokenBlocks(
            self.block_size,
            algorithm=self.algorithm,
            lora_name=request.lora_name,
            lora_path=self.meta.get("lora_path") if request.lora_name else None,
            lora_id=request.lora_id,
            cache_salt=request.cache_salt,
            seed=self.meta["env"].get("PYTHONHASHSEED"),
        )


def read_capture(path: Path | str) -> Capture:
    """Read a capture; ``TraceError`` where a line is no JSON object or a part is missing."""
    meta: dict[str, Any] | None = None
    steps: list[CapturedRequest | str] = []
    events: list[KVCacheEvent] = []
    frames = 0
    for number, line in enumerate(read_json_lines(path), 1):
        try:
            match line["kind"]:
                case "meta":
                    meta = line
                case "request":
                    steps.append(_request(line, number))
                case "action":
                    steps.append(str(line["name"]))
                case "frame" if line["src"] == "live":
                    frames += 1
                    events.extend(decode(bytes.fromhex(line["payload"])).events)
                case _:
                    pass
        except (KeyError, TypeError, ValueError) as e:
            raise TraceError(f"{path}:{number}: not a line of a capture ({type(e).__name__}: {e})") from e
    if meta is None or "engine" not in meta:
        raise TraceError(f"{path}: not a capture: it has no line of kind 'meta' with the engine's arguments")
    calls: list[list[CapturedRequest] | str] = []
    for _, group in groupby(steps, lambda s: ("action", id(s)) if isinstance(s, str) else ("call", s.call)):
        members = list(group)
        if isinstance(members[0], str):
            calls.append(members[0])
        else:
            calls.append([m for m in members if not isinstance(m, str)])
    return Capture(path, meta, calls, EventList(events), frames)


def _request(line: dict[str, Any], number: int) -> CapturedRequest:
    lora = line.get("lora") or {}
    return CapturedRequest(
        prompt=line["prompt_token_ids"],
        output=line["output_token_ids"],
        call=line.get("call", ("alone", number)),
        num_cached_tokens=line["num_cached_tokens"],
        cache_salt=line.get("cache_salt"),
        lora_name=lora.get("name"),
        lora_id=lora.get("id"),
    )


@dataclass
class _Running:
    """A request that is being served."""

    request: CapturedRequest
    tokens: TokenBlocks
    blocks: BlockIds = field(default_factory=BlockIds)
    cached: int = 0


class _Scheduler:
    """The engine's rules, one step after the other."""

    def __init__(self, capture: Capture, pool: BlockPool, after_call: Callable[[str], object]) -> None:
        self.capture = capture
        self.pool = pool
        self.after_call = after_call

    def _fill(self, r: _Running) -> None:
        """Take the blocks that the tokens so far need, and store the full ones."""
        size = self.capture.block_size
        missing = -(-r.tokens.num_tokens // size) - len(r.blocks)
        if missing > 0:
            r.blocks += self.pool.get_new_blocks(missing)
            self.after_call("get_new_blocks")
        full = r.tokens.num_tokens // size
        if full > r.cached:
            self.pool.cache_full_blocks(r.tokens, r.blocks, r.cached, full)
            self.after_call("cache_full_blocks")
            r.cached = full

    def _admit(self, request: CapturedRequest) -> _Running:
        r = _Running(request, self.capture.tokens(request))
        r.tokens.extend(request.prompt)
        # The last token is always computed.
        limit = (len(request.prompt) - 1) // self.capture.block_size
        r.blocks = self.pool.find_longest_cache_hit(r.tokens, limit)
        r.cached = len(r.blocks)
        seen = r.cached * self.capture.block_size
        if seen != request.num_cached_tokens:
            raise _DifferentError(
                f"a prompt of {len(request.prompt)} tokens hit {request.num_cached_tokens} in the engine, "
                f"{seen} here"
            )
        self.pool.touch(r.blocks)
        self.after_call("touch")
        self._fill(r)
        return r

    def run(self, requests: list[CapturedRequest]) -> None:
        """Serve requests that were submitted together, one token a step."""
        running = [self._admit(request) for request in requests]
        step = 1
        while running:
            # What is finished frees its blocks before the next step, last block first.
            for r in [r for r in running if len(r.request.output) <= step]:
                self.pool.free_blocks(r.blocks[::-1])
                self.after_call("free_blocks")
                running.remove(r)
            for r in running:
                r.tokens.extend(r.request.output[step - 1 : step])
                self._fill(r)
            step += 1


class _DifferentError(Exception):
    """The pool here is not in the state in which the engine's was."""


def replay_requests(
    capture: Capture, pool: BlockPool, after_call: Callable[[str], object] = lambda _name: None
) -> Iterator[int]:
    """Serve the capture's requests with ``pool``; yields the number of each call when it is done.

    ``after_call(name)`` runs after every call that may change the pool.
    """
    scheduler = _Scheduler(capture, pool, after_call)
    for number, call in enumerate(capture.calls):
        if isinstance(call, str):
            if call != "reset_prefix_cache":
                raise TraceError(f"{capture.path}: unknown action {call!r}")
            pool.reset_prefix_cache()
            after_call("reset_prefix_cache")
        else:
            scheduler.run(call)
        yield number


@dataclass(frozen=True)
class Reproduction:
    """Whether a pool gives what the engine gave."""

    frames: int
    reproduced: bool | None
    """``None``: not asked of a pool."""
    reason: str | None = None
    """Why it is not asked, or the first difference."""

    @property
    def text(self) -> str:
        """``yes``, ``no`` or ``not-applicable(reason)``."""
        if self.reproduced is None:
            return f"not-applicable({self.reason})"
        return "yes" if self.reproduced else "no"


def reproduce_capture(path: Path | str) -> Reproduction:
    """Ask a pool for what the engine was asked, and compare.

    Two things must hold: with ``report="every_copy"`` the events equal the engine's, and with
    ``report="residency"`` the replayed events equal the pool's resident set after every call.
    ``TraceError`` where the file is no capture.
    """
    capture = read_capture(path)
    if reason := capture.not_reproducible:
        return Reproduction(capture.frames, None, reason)
    difference = _compare(capture)
    if difference is None and (calls := unfit_calls(capture, "residency")):
        difference = f"residency: events and resident set differ after pool call {calls[0]}"
    return Reproduction(capture.frames, difference is None, difference)


def _compare(capture: Capture) -> str | None:
    """Say where the stream of an ``every_copy`` pool differs from the engine's first."""
    pool = capture.pool("every_copy")
    try:
        for _ in replay_requests(capture, pool):
            pass
    except _DifferentError as e:
        return str(e)
    ours = list(pool.take_events())
    theirs = list(capture.events)
    # A clear goes out with the next step that has output: one at the very end is never seen.
    while len(ours) > len(theirs) and isinstance(ours[-1], AllBlocksCleared):
        ours.pop()
    for i, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            return f"event {i}: engine {their!r}, here {our!r}"
    if len(ours) != len(theirs):
        return f"the engine published {len(theirs)} events, {len(ours)} were made here"
    return None


def unfit_calls(capture: Capture, report: str) -> list[int]:
    """Numbers of the pool calls after which replayed events and resident set differ.

    Events are taken after every call. With ``residency`` there are none; the engine's own stream
    (``every_copy``) names a hash as removed while another block still holds it.
    """
    pool = capture.pool(report)
    reader = ResidentSet()
    unfit: list[int] = []
    calls = 0

    def after_call(_name: str) -> None:
        nonlocal calls
        reader.apply(pool.take_events())
        if reader.digest() != pool.digest():
            unfit.append(calls)
        calls += 1

    for _ in replay_requests(capture, pool, after_call):
        pass
    return unfit
