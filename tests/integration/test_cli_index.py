"""`kvevents index` over real sockets: its answers are those of the engines' own pools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from kvevents import KVEventsConfig, TokenBlocks
from kvevents.publish import EventPublisherFactory
from kvevents.simulate import WORKLOADS, EngineConfig, MockEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(90)


def run(*args: object, code: int = 0) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvevents", "index", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def engines(free_ports: Callable[[int], list[int]]) -> Iterator[list[tuple[MockEngine, str, str]]]:
    """Two engines that publish; block sizes differ."""
    made: list[tuple[MockEngine, str, str]] = []
    publishers = []
    ports = free_ports(4)
    try:
        for i, block_size in enumerate((16, 32)):
            live, replay = (f"tcp://127.0.0.1:{p}" for p in ports[2 * i : 2 * i + 2])
            config = KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=live, replay_endpoint=replay
            )
            publishers.append(EventPublisherFactory.create(config, 0))
            engine = MockEngine(EngineConfig(num_blocks=400, block_size=block_size), publisher=publishers[-1])
            made.append((engine, live, replay))
        yield made
    finally:
        for publisher in publishers:
            publisher.shutdown()


def test_answers_are_those_of_the_pools(engines: list[Any], tmp_path: Path) -> None:
    requests = list(islice(WORKLOADS["shared-prefix"](seed=3, block_size=16, rate=10.0), 60))
    for i, request in enumerate(requests):
        if i < 50:
            engines[i % 2][0].serve(request)
    prompts = [list(r.prompt) for r in requests] + [[7] * 64]
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps(p) + "\n" for p in prompts[:-1])
        + json.dumps({"token_ids": prompts[-1], "name": "nobody knows"})
        + "\n\n"
    )
    live = [e[1] for e in engines]
    replay = [x for e in engines for x in ("--replay-endpoint", e[2])]
    out, _ = run(*live, *replay, "--find", file, "--settle", "0.5", "--json")
    answers = [json.loads(line) for line in out.splitlines()]
    assert len(answers) == len(prompts)
    found = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["tokens"] == len(prompt)
        got = {m["source"]: m["tokens"] for m in answer["matches"]}
        assert all(m["complete"] for m in answer["matches"])
        for engine, endpoint, _ in engines:
            size = engine.config.block_size
            blocks = TokenBlocks(size)
            blocks.extend(prompt)
            want = len(engine.pool.find_longest_cache_hit(blocks)) * size
            assert got.get(endpoint, 0) == want
            found += want > 0
    assert found > 20
    assert (answers[-1]["prompt"], answers[-1]["matches"]) == ("nobody knows", [])

    table, _ = run(*live, *replay, "--find", file, "--settle", "0.5")
    assert "nobody knows" in table
    assert live[0] in table


def test_a_dump_is_gone_on_with(engines: list[Any], tmp_path: Path) -> None:
    """Of the same engines, from a file that lists them; one of them restarts in between."""
    requests = list(islice(WORKLOADS["shared-prefix"](seed=4, block_size=16, rate=10.0), 40))
    listed = tmp_path / "engines.jsonl"
    listed.write_text(
        "".join(
            json.dumps({"endpoint": live, "replay_endpoint": replay, "name": f"e{i}"}) + "\n"
            for i, (_, live, replay) in enumerate(engines)
        )
    )
    dump, file = tmp_path / "index", tmp_path / "prompts.jsonl"
    for i, request in enumerate(requests[:20]):
        engines[i % 2][0].serve(request)
    run("--sources", listed, "--dump", dump, "--settle", "0.5")
    for i, request in enumerate(requests[20:]):
        engines[i % 2][0].serve(request)
    file.write_text("".join(json.dumps(list(r.prompt)) + "\n" for r in requests))
    out, err = run("--sources", listed, "--load", dump, "--find", file, "--settle", "0.5", "--json")
    assert "RESET" not in err.upper()
    found = 0
    for request, line in zip(requests, out.splitlines(), strict=True):
        matches = {m["source"]: m for m in json.loads(line)["matches"]}
        for i, (engine, _, _) in enumerate(engines):
            size = engine.config.block_size
            blocks = TokenBlocks(size)
            blocks.extend(request.prompt)
            want = len(engine.pool.find_longest_cache_hit(blocks)) * size
            got = matches.get(f"e{i}", {"tokens": 0, "complete": True})
            assert (got["tokens"], got["complete"]) == (want, True)
            found += want > 0
    assert found > 20

    # An engine of the dump that is no longer listed is left out, and said.
    listed.write_text(listed.read_text().splitlines()[0] + "\n")
    out, err = run("--sources", listed, "--load", dump, "--find", file, "--settle", "0.3", "--json")
    assert "e1 stands in the dump" in err
    assert {m["source"] for line in out.splitlines() for m in json.loads(line)["matches"]} == {"e0"}


def test_a_file_of_engines_is_followed(engines: list[Any], tmp_path: Path) -> None:
    """One engine is listed while the command runs, the other is taken out."""
    request = next(iter(WORKLOADS["shared-prefix"](seed=5, block_size=16, rate=10.0)))
    listed, file = tmp_path / "engines.jsonl", tmp_path / "prompts.jsonl"
    for engine, _, _ in engines:
        engine.serve(request)
    file.write_text(json.dumps(list(request.prompt)) + "\n")
    lines = [json.dumps({"endpoint": live, "replay_endpoint": replay}) for _, live, replay in engines]
    listed.write_text(lines[0] + "\n")
    with subprocess.Popen(
        [sys.executable, "-m", "kvevents", "index", "--sources", listed, "--find", file, "--settle", "3",
         "--json"],
        stdout=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        # It is there when it asks the first engine; then the list changes.
        end = time.monotonic() + 20
        while engines[0][0]._publisher.stats().replay.requests == 0:
            assert time.monotonic() < end
            time.sleep(0.02)
        new = tmp_path / "new.jsonl"
        new.write_text(lines[1] + "\n")
        new.replace(listed)
        out, _ = running.communicate(timeout=30)
    assert {m["source"] for m in json.loads(out)["matches"]} == {engines[1][1]}


def test_what_cannot_work_is_one_line_and_an_exit_code(engines: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('[1, 2, 3]\n{"token_ids": [1], "salt": 3}\n')
    live, replay = engines[0][1:]
    _, err = run(live, "--find", file, code=3)
    assert "line 2" in err
    assert "salt" in err
    _, err = run(live, "--find", tmp_path / "none", code=3)
    assert "none" in err
    file.write_text("[1, 2, 3]\n")
    _, err = run(live, "tcp://127.0.0.1:9", "--replay-endpoint", replay, "--find", file, code=2)
    assert "one for each" in err
    for wrong in (["--find", file], [live]):
        run(*wrong, code=2)
    bad = tmp_path / "no-dump"
    bad.write_bytes(b"nothing of the kind")
    _, err = run(live, "--find", file, "--load", bad, code=3)
    assert "dump" in err
    _, err = run(live, "--find", file, "--sources", tmp_path / "none", code=3)
    _, err = run("tcp://127.0.0.1:9", "--find", file, "--timeout", "0.3", code=3)
    assert "no connection to tcp://127.0.0.1:9" in err
    # An engine that has said nothing yet is a good answer all the same.
    out, _ = run(live, "--replay-endpoint", replay, "--find", file, "--settle", "0.3", "--json")
    assert json.loads(out)["matches"] == []
