"""Where a stream comes from."""

from __future__ import annotations

import msgspec

from kvevents._settings import check_types
from kvevents.errors import ConfigError
from kvevents.publish.endpoints import Endpoint, check_ranges, offset, parse

__all__ = ["Source"]


class Source(msgspec.Struct, frozen=True):
    """One publisher, that is one data-parallel rank of one engine.

    Who a source is, is said by ``name``, never by the socket: every source has a socket and a sequence state
    of its own. Values are checked at construction.

    :raises ConfigError: which setting, what was seen, and what would be right.
    """

    endpoint: str
    """The publisher's live address."""
    replay_endpoint: str | None = None
    """Its replay address; without one a lost batch is a :class:`~kvevents.subscribe.Gap`."""
    topic: str = ""
    """Compared exactly (ZeroMQ compares only how a topic begins). Empty: the topic of the first message that
    is heard on a connection; messages of other topics are counted and left out."""
    name: str | None = None
    """What items call this source; ``None``: the endpoint, and the topic where one is given."""
    bind: bool = False
    """Listen at ``endpoint`` for a publisher that connects."""
    first_seq: int = 0
    """The number with which publishers begin: 0 for vLLM, SGLang and ours, 1 for Mooncake's."""

    def __post_init__(self) -> None:
        """Check every value, and make up the name."""
        check_types(self)
        for what, text in (("endpoint", self.endpoint), ("replay_endpoint", self.replay_endpoint)):
            if text is not None:
                _check(parse(text, what), what, bind=self.bind and what == "endpoint")
        if not 0 <= self.first_seq < 2**63:
            raise ConfigError(f"first_seq: {self.first_seq} (0 to 2^63-1)")
        if self.name is None:
            name = f"{self.endpoint}#{self.topic}" if self.topic else self.endpoint
            msgspec.structs.force_setattr(self, "name", name)

    @property
    def label(self) -> str:
        """The name, which is always set."""
        return self.name or self.endpoint

    @classmethod
    def ranks(
        cls,
        endpoint: str,
        size: int,
        replay_endpoint: str | None = None,
        topic: str = "",
        name: str | None = None,
        *,
        bind: bool = False,
        first_seq: int = 0,
    ) -> list[Source]:
        """The sources of ``size`` data-parallel ranks of one engine, by the engines' rule.

        Rank r has the ports plus r, or the suffix ``_dpr`` for ipc and inproc; its name is ``name/dpr``.
        """
        if size < 1:
            raise ConfigError(f"size: {size} ranks (1 or more)")
        live = parse(endpoint)
        replay = None if replay_endpoint is None else parse(replay_endpoint, "replay_endpoint")
        if replay is not None:
            check_ranges(live, replay, size)
        return [
            cls(
                str(offset(live, r)),
                None if replay is None else str(offset(replay, r, "replay_endpoint")),
                topic,
                f"{name or endpoint}/dp{r}",
                bind,
                first_seq,
            )
            for r in range(size)
        ]


def _check(endpoint: Endpoint, what: str, *, bind: bool) -> None:
    if bind:
        return
    if endpoint.wildcard:
        raise ConfigError(
            f"{what} {str(endpoint)!r}: that is an address to listen at; to connect, name a host, "
            f"for example tcp://127.0.0.1:{endpoint.port}"
        )
    if endpoint.scheme == "tcp" and not endpoint.port:
        raise ConfigError(f"{what} {str(endpoint)!r}: to connect, a port is needed")
