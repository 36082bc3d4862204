"""Sources that stand in a file, which is looked at again and again."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvevents.errors import ConfigError
from kvevents.subscribe.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FileSources"]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One source of a file, or the data-parallel ranks of one engine."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    name: str | None = None
    bind: bool = False
    first_seq: int = 0
    ranks: int | None = None

    def sources(self) -> list[Source]:
        """By the rule of ports, where ranks are named."""
        if self.ranks is None:
            return [
                Source(self.endpoint, self.replay_endpoint, self.topic, self.name, self.bind, self.first_seq)
            ]
        return Source.ranks(
            self.endpoint,
            self.ranks,
            self.replay_endpoint,
            self.topic,
            self.name,
            bind=self.bind,
            first_seq=self.first_seq,
        )


class FileSources:
    """The sources that a file lists; a subscriber follows it while it runs.

    The file has one JSON object a line (empty lines and lines that begin with ``#`` are left out), or, where
    its name ends with ``.toml``, one ``[[source]]`` table each. Keys are the fields of
    :class:`~kvevents.subscribe.Source`, and ``ranks``: so many data-parallel ranks, by
    :meth:`Source.ranks <kvevents.subscribe.Source.ranks>`.

    The subscriber looks for another modification time, size or file in its place every ``every_s`` seconds.
    What is new is opened, what is gone is closed and yields nothing afterwards, an entry that changed is
    both, and what did not change is not touched. A file that is missing leaves everything as it is, and so
    does one with an error, with a warning. Write a new one beside it and rename it, so that nobody reads
    half of it.

    :param every_s: how often to look.
    :param on_change: called with the sources that came and those that left, in the thread that iterates,
        before anything of the new ones is yielded.
    :raises ConfigError: ``every_s`` is not above 0.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every_s: float = 1.0,
        on_change: Callable[[list[Source], list[Source]], object] | None = None,
    ) -> None:
        if not 0 < every_s < float("inf"):
            raise ConfigError(f"every_s: {every_s!r} (above 0)")
        self.path = Path(path)
        self.every_s = every_s
        self.on_change = on_change
        self._seen: tuple[int, ...] | None = None

    def changed(self) -> bool:
        """Whether the file is another one than at the last :meth:`read`; a missing one has not changed."""
        try:
            return _signature(self.path.stat()) != self._seen
        except FileNotFoundError:
            return False

    def read(self) -> list[Source]:
        """Read the sources of the file as it is now.

        :raises ConfigError: it cannot be read, or an entry is wrong; names the line and what was seen.
        """
        try:
            with self.path.open("rb") as file:
                # Before the content: a change in between is then seen at the next look.
                self._seen = _signature(os.fstat(file.fileno()))
                data = file.read()
        except OSError as e:
            raise ConfigError(f"{self.path}: the list of sources cannot be read: {e.strerror or e}") from e
        found: list[Source] = []
        for where, raw in self._entries(data):
            try:
                found += msgspec.convert(raw, _Entry).sources()
            except (msgspec.ValidationError, ConfigError) as e:
                raise ConfigError(f"{self.path}: {where}: {e}") from e
        names = [s.label for s in found]
        if twice := {n for n in names if names.count(n) > 1}:
            raise ConfigError(f"{self.path}: two sources are named {', '.join(map(repr, sorted(twice)))}")
        return found

    def _entries(self, data: bytes) -> list[tuple[str, Any]]:
        if self.path.suffix == ".toml":
            try:
                tables = tomllib.loads(data.decode()).get("source", [])
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
                raise ConfigError(f"{self.path}: not TOML: {e}") from e
            if not isinstance(tables, list):
                raise ConfigError(f"{self.path}: [[source]] tables were expected, saw one [source]")
            return [(f"source {i}", table) for i, table in enumerate(tables, 1)]
        entries = []
        for number, line in enumerate(data.splitlines(), 1):
            text = line.strip()
            if not text or text.startswith(b"#"):
                continue
            try:
                entries.append((f"line {number}", msgspec.json.decode(text)))
            except msgspec.DecodeError as e:
                raise ConfigError(f"{self.path}: line {number}: a JSON object was expected: {e}") from e
        return entries


def _signature(s: os.stat_result) -> tuple[int, ...]:
    return (s.st_mtime_ns, s.st_size, s.st_ino, s.st_dev)
