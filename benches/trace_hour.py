"""An hour of a chat service through the pool: hit rate, rate of work, and a proof on the way.

Every request of a trace in Mooncake's format (one at a time, output tokens private to the request) is served
by the mock engine on a pool of 3 M tokens. The stream of events is encoded, decoded and replayed into a
resident set, whose digest must equal the pool's own at every 1,000th request and at the end. Then the same
requests run through a pool that never evicts, which shows how much reuse the traffic holds.

    python benches/trace_hour.py [TRACE]      (or: make trace ARGS="--requests 2000")

Exit code 0 when every comparison agrees, 1 when one does not, 3 when the trace cannot be read.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import islice
from pathlib import Path

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvevents import ResidentSet, decode, encode
from kvevents.errors import KVEventsError
from kvevents.simulate import EngineConfig, MockEngine, TraceRecord, TraceTokens, read_trace
from kvevents.simulate.trace import TOKENS_PER_ID
from kvevents.simulate.workloads import Request

BLOCK = 16
SHARED = Path(os.environ.get("KVEVENTS_SHARED", Path(__file__).resolve().parents[2] / "shared"))
DEFAULT_TRACE = SHARED / "traces" / "mooncake_conversation.jsonl"


def ids_hit(record: TraceRecord, hit_tokens: int) -> int:
    """How many ids of the request were found whole (of the last one: the blocks that can be hit)."""
    reachable = (record.input_length - 1) // BLOCK * BLOCK
    return sum(
        hit_tokens >= min((p + 1) * TOKENS_PER_ID, reachable) > p * TOKENS_PER_ID
        for p in range(len(record.hash_ids))
    )


def requests(records: list[TraceRecord], seed: int):
    """The requests one by one: their tokens are made when they are needed, the whole hour would not fit."""
    tokens = TraceTokens(seed)
    for n, record in enumerate(records):
        yield (
            record,
            Request(
                f"trace-{n}",
                tokens.prompt(record.hash_ids, record.input_length),
                tokens.output(n, max(1, record.output_length)),
            ),
        )


def bounded(records: list[TraceRecord], blocks: int, seed: int, every: int, progress: Progress) -> bool:
    """Serve through a pool that evicts; prints what was seen, returns whether every comparison agreed."""
    resident = ResidentSet()
    engine = MockEngine(
        EngineConfig(num_blocks=blocks + 1, block_size=BLOCK, max_running=1, tokens_per_step=BLOCK),
        before_publish=lambda _n, batch: resident.apply(decode(encode(batch)).events),
    )
    task = progress.add_task(f"{blocks * BLOCK / 1e6:.1f} M tokens", total=len(records))
    compared = agreed = ids = hits = 0
    start = time.perf_counter()
    for n, (record, request) in enumerate(requests(records, seed), start=1):
        before = engine.stats.hit_tokens
        engine.serve(request)
        ids += len(record.hash_ids)
        hits += ids_hit(record, engine.stats.hit_tokens - before)
        if n % every == 0 or n == len(records):
            compared += 1
            same = resident.digest() == engine.pool.digest()
            agreed += same
            if not same:
                progress.console.print(f"request {n}: the replayed set differs from the pool's")
        progress.update(task, completed=n)
    seconds = time.perf_counter() - start
    s = engine.stats
    print(f"pool of {blocks:,} blocks of {BLOCK} tokens")
    print(f"  requests                {s.finished:,} served, {s.refused:,} larger than the pool")
    print(f"  tokens found in cache   {s.hit_rate:.2%} of {s.prompt_tokens:,}")
    print(f"  trace ids found         {hits / ids:.2%} of {ids:,}")
    print(f"  blocks                  {s.blocks_stored:,} stored, {s.blocks_removed:,} removed")
    print(
        f"  resident set            {len(resident):,} blocks, identical at {agreed} of {compared} comparisons"
    )
    print(
        f"  rate of work            {s.blocks_stored / seconds:,.0f} blocks/s in {seconds:.1f} s, with making"
    )
    print("                          the tokens, encoding, decoding and replaying")
    return agreed == compared


def unbounded(records: list[TraceRecord], seed: int, progress: Progress) -> None:
    """Serve through a pool that never evicts, events off, and print the share of ids that was found."""
    tokens = sum(r.input_length + max(1, r.output_length) for r in records)
    engine = MockEngine(
        EngineConfig(
            num_blocks=tokens // BLOCK + len(records) + 2,
            block_size=BLOCK,
            max_running=1,
            tokens_per_step=BLOCK,
            enable_kv_cache_events=False,
        )
    )
    task = progress.add_task("never evicts", total=len(records))
    ids = hits = 0
    start = time.perf_counter()
    for n, (record, request) in enumerate(requests(records, seed), start=1):
        before = engine.stats.hit_tokens
        engine.serve(request)
        ids += len(record.hash_ids)
        hits += ids_hit(record, engine.stats.hit_tokens - before)
        progress.update(task, completed=n)
    seconds = time.perf_counter() - start
    print(f"pool that never evicts ({engine.config.num_blocks:,} blocks, events off)")
    print(f"  tokens found in cache   {engine.stats.hit_rate:.2%} of {engine.stats.prompt_tokens:,}")
    print(f"  trace ids found         {hits / ids:.2%} of {ids:,}")
    print(f"  rate of work            {engine.stats.finished / seconds:,.0f} requests/s; {seconds:.1f} s")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "trace", nargs="?", type=Path, default=DEFAULT_TRACE, help="trace file (Mooncake's format)"
    )
    parser.add_argument("--requests", type=int, default=None, help="only the first N requests")
    parser.add_argument("--blocks", type=int, default=187_500, help="blocks of 16 tokens in the pool")
    parser.add_argument("--every", type=int, default=1000, help="compare at every Nth request")
    parser.add_argument("--seed", type=int, default=0, help="of the tokens behind the ids")
    args = parser.parse_args()
    try:
        records = list(islice(read_trace(args.trace), args.requests))
    except (OSError, KVEventsError) as e:
        print(e, file=sys.stderr)
        return 3
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, transient=True) as progress:
        same = bounded(records, args.blocks, args.seed, args.every, progress)
        unbounded(records, args.seed, progress)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
