"""``kvevents index``: who holds the longest prefix of some prompts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from kvevents.cli.exits import EXIT_USAGE, Failure, say
from kvevents.errors import TraceError
from kvevents.index import PrefixIndex
from kvevents.subscribe import FileSources, Source, Subscriber

if TYPE_CHECKING:
    from kvevents.index import Matches

__all__ = ["index"]


class Prompt(msgspec.Struct, forbid_unknown_fields=True):
    """What is asked: token ids, and what else is part of a block's content."""

    token_ids: list[int]
    name: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    mm: list[tuple[str, int, int]] | None = None


def index(
    endpoints: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ENDPOINT...]", help="Where the engines publish: tcp://127.0.0.1:5557."),
    ] = None,
    find: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts: a JSON list of token ids a line, or an object."),
    ] = None,
    sources: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A file that lists the engines, one JSON object a line; it is followed."
        ),
    ] = None,
    load: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Begin with what an earlier index wrote, and go on from there."),
    ] = None,
    dump: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the index, for --load of a later one.")
    ] = None,
    replay_endpoint: Annotated[
        list[str] | None,
        typer.Option(help="Where to ask for what was missed: none, or one for each ENDPOINT, in order."),
    ] = None,
    topic: Annotated[str, typer.Option(help="Only messages of exactly this topic.")] = "",
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel ranks of each engine (port plus rank).")] = 1,
    settle: Annotated[
        float, typer.Option(min=0.0, help="Answer when nothing was heard for so many seconds.")
    ] = 1.0,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Answer after so many seconds, also where streams never pause.")
    ] = 30.0,
    timeout: Annotated[
        float, typer.Option(min=0.0, help="Give up, with exit code 3, when an engine is not there so soon.")
    ] = 10.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a prompt, for programs.")
    ] = False,
) -> None:
    """Follow engines' streams, and tell who holds how much of each prompt of a file.

    Lengths are tokens from the start of the prompt. Reads what the engines' replay still has, and what they
    publish meanwhile; `complete` says whether that is everything. With --load only what came since is read;
    an engine that lives another life by now is begun anew.
    """
    if not endpoints and sources is None:
        raise Failure("name an ENDPOINT, or --sources with a file that lists some", EXIT_USAGE)
    if find is None and dump is None:
        raise Failure("nothing to do: --find answers prompts, --dump writes the index", EXIT_USAGE)
    endpoints = endpoints or []
    prompts = [] if find is None else read_prompts(find)
    replays: list[str | None] = list(replay_endpoint or [])
    if replays and len(replays) != len(endpoints):
        raise Failure(
            f"{len(replays)} --replay-endpoint for {len(endpoints)} ENDPOINT: none, or one for each",
            EXIT_USAGE,
        )
    listed: list[Source | FileSources] = []
    for live, replay in zip(endpoints, replays or [None] * len(endpoints), strict=True):
        listed += Source.ranks(live, dp, replay, topic) if dp > 1 else [Source(live, replay, topic)]
    known = PrefixIndex() if load is None else PrefixIndex.load(load.read_bytes())
    if sources is not None:
        with sources.open("rb"):
            pass  # an unreadable file is no usage error
        listed.append(FileSources(sources, every_s=0.2, on_change=lambda _, left: _forget(known, left)))
    with Subscriber(listed, resume=known.resume_points()) as stream:
        if load is not None:
            _forget_others(known, stream)
        _follow(stream, known, settle=settle, seconds=seconds, timeout=timeout)
    if dump is not None:
        _write(dump, known.dump())
    if find is None:
        return
    answers = [
        known.find(p.token_ids, lora_name=p.lora_name, cache_salt=p.cache_salt, mm=p.mm) for p in prompts
    ]
    if as_json:
        for prompt, matches in zip(prompts, answers, strict=True):
            typer.echo(json.dumps(_as_object(prompt, matches)))
    else:
        _show(prompts, answers)


def _forget(known: PrefixIndex, left: list[Source]) -> None:
    """An engine that is no longer listed answers nothing."""
    for source in left:
        known.drop(source.label)


def _forget_others(known: PrefixIndex, stream: Subscriber) -> None:
    """Of the engines of the dump those that nobody follows any more."""
    followed = {s.name for s in stream.stats()}
    for name in {s["source"] for s in known.stats() if not s["owner"]} - followed:
        say(f"{name} stands in the dump and is not followed: left out")
        known.drop(name)


def _write(path: Path, data: bytes) -> None:
    """Whole, or not at all: what is there is replaced when everything is on the disk."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a file.

    :raises TraceError: a line that is none; says which, and what was seen.
    """
    prompts = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = msgspec.json.decode(line, type=list[int] | Prompt)
            except msgspec.DecodeError as e:
                raise TraceError(
                    f"{path}: line {number}: a list of token ids or an object with token_ids was "
                    f"expected: {e}; saw {line[:60]!r}"
                ) from e
            prompt = found if isinstance(found, Prompt) else Prompt(found)
            prompt.name = prompt.name or f"line {number}"
            prompts.append(prompt)
    return prompts


def _follow(stream: Subscriber, known: PrefixIndex, *, settle: float, seconds: float, timeout: float) -> None:
    """Until nothing more is heard of anybody, or time is up."""
    began = heard = time.monotonic()
    everybody = False
    while True:
        item = stream.poll(min(0.05, settle))
        now = time.monotonic()
        if item is not None:
            known.apply_item(item)
            heard = now
        if now - began >= seconds:
            say(f"after {seconds:g} s the streams still go on; these are the answers of now")
            return
        if item is not None:
            continue
        stats = stream.stats()
        if not everybody:
            away = [s.name for s in stats if not s.connected]
            if away and now - began >= timeout:
                raise Failure(f"no connection to {', '.join(away)} within {timeout:g} s")
            everybody = not away
            heard = now
        elif now - heard >= settle and not any(s.state == "repairing" for s in stats):
            return


def _as_object(prompt: Prompt, matches: Matches) -> dict[str, Any]:
    return {
        "prompt": prompt.name,
        "tokens": len(prompt.token_ids),
        "matches": [
            {
                "source": m.source,
                "rank": m.rank,
                "tokens": m.tokens,
                "blocks": m.blocks,
                "alone": m.alone,
                "cumulative": m.cumulative,
                "complete": m.complete,
                "owner": m.owner,
            }
            for m in matches
        ],
    }


def _show(prompts: list[Prompt], answers: list[Matches]) -> None:
    table = Table(title="kvevents index", title_justify="left")
    for name in ("prompt", "tokens", "source", "rank", "usable", "by tier", "complete"):
        table.add_column(name, justify="right" if name in {"tokens", "rank", "usable"} else "left")
    for prompt, matches in zip(prompts, answers, strict=True):
        head = (str(prompt.name), f"{len(prompt.token_ids):,}")
        if not len(matches):
            table.add_row(*head, "nobody", "", "0", "", "")
        for m in matches:
            tiers = ", ".join(f"{tier} {tokens:,}" for tier, tokens in m.alone.items())
            table.add_row(*head, m.source, str(m.rank), f"{m.tokens:,}", tiers, "yes" if m.complete else "no")
            head = ("", "")
    Console().print(table)
