"""Sources that come and go while a subscriber runs."""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from plain_publisher import batch_of

from kvevents import Source, Subscriber
from kvevents.errors import ConfigError, EndpointInUseError
from kvevents.subscribe import Batch, FileSources, Timing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvevents.subscribe import Item

pytestmark = pytest.mark.timeout(60)
QUICK = Timing(replay_timeout_s=0.3, backoff_s=0.02, jitter_s=0, silence_s=0.15, cooldown_s=0.2)


def source(pub: Any, name: str) -> Source:
    return Source(pub.live, pub.replay, name=name)


def filled(publisher: Callable[..., Any], n: int = 5) -> Any:
    pub = publisher()
    for _ in range(n):
        pub.publish()
    return pub


def take(sub: Subscriber, n: int) -> list[tuple[str, int]]:
    got: list[tuple[str, int]] = []
    end = time.monotonic() + 20
    while len(got) < n:
        item = sub.poll(max(0.0, end - time.monotonic()))
        assert isinstance(item, Batch), got
        got.append((item.source, item.seq))
    return got


def test_a_source_is_added_while_another_thread_waits(publisher: Callable[..., Any]) -> None:
    first, second = filled(publisher), filled(publisher)
    got: list[Item] = []
    enough = threading.Event()

    def read() -> None:
        for item in sub:
            got.append(item)
            if len(got) == 10:
                enough.set()

    with Subscriber(source(first, "a"), timing=QUICK) as sub:
        thread = threading.Thread(target=read)
        thread.start()
        sub.add_source(source(second, "b"))
        with pytest.raises(ConfigError, match="'b' already"):
            sub.add_source(source(first, "b"))
        assert enough.wait(20)
        assert [s.name for s in sub.stats()] == ["a", "b"]
        sub.remove_source("a")
        sub.remove_source("b")
        with pytest.raises(ConfigError, match="no source is named 'a'; there are: none"):
            sub.remove_source("a")
    thread.join(20)
    assert not thread.is_alive()
    for name in "ab":
        assert [i.seq for i in got if isinstance(i, Batch) and i.source == name] == list(range(5))
    with pytest.raises(ConfigError, match="closed"):
        sub.add_source(source(first, "a"))


def test_a_removed_source_yields_nothing_afterwards(publisher: Callable[..., Any]) -> None:
    first, second = filled(publisher, 400), filled(publisher)
    with Subscriber([source(first, "a"), source(second, "b")], timing=QUICK) as sub:
        # Many items of it are queued by now.
        while True:
            item = sub.poll(10)
            assert item is not None
            if item.source == "a":
                break
        sub.remove_source("a")
        left: list[Item] = []
        second.publish()
        while not any(isinstance(i, Batch) and i.seq == 5 for i in left):
            item = sub.poll(10)
            assert item is not None
            left.append(item)
        assert {i.source for i in left} == {"b"}
        # It can come again, and then begins anew.
        sub.add_source(source(first, "a"))
        assert take(sub, 400) == [("a", i) for i in range(400)]


def test_the_last_source_may_go_and_another_come(publisher: Callable[..., Any]) -> None:
    pub = filled(publisher)
    with Subscriber(source(pub, "a"), timing=QUICK) as sub:
        sub.remove_source("a")
        assert sub.poll(0.05) is None
        sub.add_source(source(pub, "b"))
        assert take(sub, 5) == [("b", i) for i in range(5)]


def test_an_address_in_use_leaves_no_source_behind(publisher: Callable[..., Any]) -> None:
    pub = filled(publisher)
    with Subscriber(source(pub, "a"), timing=QUICK) as sub:
        with pytest.raises(EndpointInUseError):
            sub.add_source(Source(pub.live, bind=True, name="b"))
        assert [s.name for s in sub.stats()] == ["a"]
        assert take(sub, 5) == [("a", i) for i in range(5)]


def test_threads_add_and_remove_while_one_iterates(publisher: Callable[..., Any]) -> None:
    pub = filled(publisher, 20)
    problems: list[BaseException] = []

    def churn(name: str) -> None:
        try:
            for _ in range(15):
                sub.add_source(source(pub, name))
                sub.remove_source(name)
        except BaseException as e:
            problems.append(e)

    with Subscriber(source(pub, "stays"), timing=QUICK) as sub:
        threads = [threading.Thread(target=churn, args=(f"t{i}",)) for i in range(4)]
        for t in threads:
            t.start()
        while any(t.is_alive() for t in threads):
            sub.poll(0.01)
        assert not problems
        assert [s.name for s in sub.stats()] == ["stays"]
        pub.publish()
        while True:
            item = sub.poll(10)
            assert isinstance(item, Batch)
            assert item.source == "stays"
            if item.seq == 20:
                break


def lines(path: Path, *sources: dict[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(s) + "\n" for s in sources))
    new.replace(path)


def test_a_file_of_sources_is_followed(
    publisher: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = filled(publisher), filled(publisher)
    path = tmp_path / "sources.jsonl"
    entry_a = {"endpoint": a.live, "replay_endpoint": a.replay, "name": "a"}
    entry_b = {"endpoint": b.live, "replay_endpoint": b.replay, "name": "b"}
    changes: list[tuple[list[str | None], list[str | None]]] = []

    def changed(came: list[Source], left: list[Source]) -> None:
        changes.append(([s.name for s in came], [s.name for s in left]))

    lines(path)
    with Subscriber(FileSources(path, every_s=0.02, on_change=changed), timing=QUICK) as sub:
        assert sub.poll(0.05) is None
        lines(path, entry_a)
        assert take(sub, 5) == [("a", i) for i in range(5)]
        lines(path, entry_a, entry_b)
        assert take(sub, 5) == [("b", i) for i in range(5)]
        # A bad file changes nothing, and says so.
        with caplog.at_level(logging.WARNING, "kvevents.subscribe"):
            lines(path, entry_b, {"endpoint": 7})
            a.publish()
            assert take(sub, 1) == [("a", 5)]
            end = time.monotonic() + 10
            while "the sources stay as they are" not in caplog.text:
                assert sub.poll(0.02) is None
                assert time.monotonic() < end
        lines(path, entry_b)
        while len(changes) < 3:
            sub.poll(0.02)
        assert changes == [(["a"], []), (["b"], []), ([], ["a"])]
        a.publish()
        b.publish()
        assert take(sub, 1) == [("b", 5)]
        # The entry changes: the source begins anew.
        lines(path, {**entry_b, "replay_endpoint": a.replay})
        while len(changes) < 4:
            sub.poll(0.02)
        assert changes[-1] == (["b"], ["b"])
        path.unlink()
        assert [s.name for s in sub.stats()] == ["b"]


def test_a_file_cannot_take_the_name_of_a_listed_source(
    publisher: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pub = filled(publisher)
    path = tmp_path / "sources.jsonl"
    lines(path, {"endpoint": pub.live, "name": "a"})
    with pytest.raises(ConfigError, match="two sources are named 'a'"):
        Subscriber([source(pub, "a"), FileSources(path)])
    lines(path)
    with (
        Subscriber([source(pub, "a"), FileSources(path, every_s=0.02)], timing=QUICK) as sub,
        caplog.at_level(logging.WARNING, "kvevents.subscribe"),
    ):
        lines(path, {"endpoint": pub.live, "name": "a"})
        end = time.monotonic() + 10
        while "cannot be read" not in caplog.text:
            sub.poll(0.02)
            assert time.monotonic() < end
        # And its going from the file takes nothing away.
        lines(path)
        sub.poll(0.2)
        assert [s.name for s in sub.stats()] == ["a"]
    with pytest.raises(ConfigError, match="cannot be read"):
        Subscriber(FileSources(tmp_path / "none"))


def test_payloads_are_whole_from_sources_that_came_later(publisher: Callable[..., Any]) -> None:
    first, second = publisher(), filled(publisher)
    with Subscriber(source(first, "a"), timing=QUICK, decode=False) as sub:
        sub.add_source(source(second, "b"))
        for i in range(5):
            item = sub.poll(10)
            assert isinstance(item, Batch)
            assert item.payload == batch_of(i)
        assert sub.topic("b") == b""
        with pytest.raises(ConfigError, match="no source is named 'c'"):
            sub.topic("c")
