"""Publishers by name."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

from kvevents.errors import ConfigError
from kvevents.publish.null import NullEventPublisher
from kvevents.publish.zmq import ZmqEventPublisher

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvevents.config import KVEventsConfig
    from kvevents.publish.base import EventPublisher

__all__ = ["EventPublisherFactory"]

_NOT_OPTIONS = frozenset({"enable_kv_cache_events", "publisher", "extra"})


class EventPublisherFactory:
    """Makes the publisher that a configuration names. vLLM's interface."""

    _registry: ClassVar[dict[str, Callable[..., EventPublisher]]] = {
        "null": NullEventPublisher,
        "zmq": ZmqEventPublisher,
    }

    @classmethod
    def register_publisher(cls, name: str, ctor: Callable[..., EventPublisher]) -> None:
        """Make a publisher known by a name; one that is taken is a ``KeyError``, as in vLLM.

        The constructor gets, by keyword, ``data_parallel_rank`` and the configuration's fields as far as it
        names them (all of them if it takes ``**kwargs``), and every option of ``extra``.
        """
        if name in cls._registry:
            raise KeyError(f"publisher {name!r} is registered already")
        cls._registry[name] = ctor

    @classmethod
    def create(cls, config: KVEventsConfig | None, data_parallel_rank: int = 0) -> EventPublisher:
        """The publisher of one rank; a null publisher for no configuration and for events switched off.

        Raises :class:`~kvevents.errors.ConfigError` for a name that is not known (it lists those that are)
        and for an option that the class does not take, and what the constructor raises.
        """
        if config is None or not config.enable_kv_cache_events or config.publisher == "null":
            return NullEventPublisher(data_parallel_rank)
        ctor = cls._registry.get(config.publisher or "")
        if ctor is None:
            known = ", ".join(sorted(cls._registry))
            raise ConfigError(f"publisher: {config.publisher!r} is not known; known are {known}")
        fields = {
            name: getattr(config, name) for name in config.__struct_fields__ if name not in _NOT_OPTIONS
        }
        fields["data_parallel_rank"] = data_parallel_rank
        return ctor(**_accepted(ctor, fields, config.extra, str(config.publisher)))


def _accepted(
    ctor: Callable[..., Any], fields: dict[str, Any], extra: dict[str, Any], name: str
) -> dict[str, Any]:
    """The keyword arguments for a constructor: what it names of the fields, and all of ``extra``."""
    try:
        parameters = inspect.signature(ctor).parameters.values()
    except (TypeError, ValueError):
        return fields | extra  # a class that does not say what it takes
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return fields | extra
    names = {p.name for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}}
    unknown = sorted(extra.keys() - names)
    if unknown:
        raise ConfigError(
            f"extra: publisher {name!r} takes no option {', '.join(unknown)}; "
            f"it takes {', '.join(sorted(names))}"
        )
    return {key: value for key, value in fields.items() if key in names} | extra
