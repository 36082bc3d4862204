"""A file of sources: what it may say, and when it is another one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvevents import Source
from kvevents.errors import ConfigError
from kvevents.subscribe import FileSources

if TYPE_CHECKING:
    from pathlib import Path


def test_a_line_is_a_source_or_the_ranks_of_an_engine(tmp_path: Path) -> None:
    path = tmp_path / "sources.jsonl"
    path.write_text(
        "# engines\n"
        '{"endpoint": "tcp://10.0.0.1:5557", "replay_endpoint": "tcp://10.0.0.1:5657", "topic": "t"}\n'
        '\n  {"endpoint": "tcp://10.0.0.2:5557", "name": "b", "ranks": 2, "first_seq": 1}\n'
    )
    want = [
        Source("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657", "t"),
        *Source.ranks("tcp://10.0.0.2:5557", 2, name="b", first_seq=1),
    ]
    assert FileSources(path).read() == want
    assert [s.endpoint for s in want[1:]] == ["tcp://10.0.0.2:5557", "tcp://10.0.0.2:5558"]
    toml = tmp_path / "sources.toml"
    toml.write_text(
        '[[source]]\nendpoint = "tcp://10.0.0.1:5557"\nreplay_endpoint = "tcp://10.0.0.1:5657"\ntopic = "t"\n'
        '[[source]]\nendpoint = "tcp://10.0.0.2:5557"\nname = "b"\nranks = 2\nfirst_seq = 1\n'
    )
    assert FileSources(toml).read() == want
    toml.write_text("")
    assert FileSources(toml).read() == []


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("s", '{"endpoint": "tcp://a:1"}\n{"endpoint": 7}', "line 2: .*endpoint"),
        ("s", '{"endpoint": "tcp://a:1", "topik": "x"}', "line 1: .*topik"),
        ("s", '{"endpoint": "tcp://*:1"}', "line 1: .*name a host"),
        ("s", '{"endpoint": "tcp://a:1", "ranks": 0}', "line 1: .*ranks"),
        ("s", "{'endpoint'", "line 1: a JSON object"),
        ("s", '{"endpoint": "tcp://a:1"}\n{"endpoint": "tcp://a:1"}', "two sources are named 'tcp://a:1'"),
        ("s.toml", "[[source]\n", "not TOML"),
        ("s.toml", "[source]\nendpoint = 'tcp://a:1'\n", r"\[\[source\]\]"),
        ("s.toml", "[[source]]\nendpoint = 1\n", "source 1: .*endpoint"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as e:
        FileSources(path).read()
    assert str(path) in str(e.value)


def test_a_file_has_changed_when_it_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    sources = FileSources(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        sources.read()
    assert not sources.changed()
    path.write_text('{"endpoint": "tcp://a:1"}')
    assert sources.changed()
    sources.read()
    assert not sources.changed()
    status = path.stat()
    other = tmp_path / "other"
    other.write_text('{"endpoint": "tcp://a:2"}')
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)
    # Same size and time: it is another file all the same.
    assert sources.changed()
    path.unlink()
    assert not sources.changed()
    with pytest.raises(ConfigError, match="every_s"):
        FileSources(path, every_s=0)
