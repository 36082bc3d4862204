"""What the environment asks of the plug-in. Nothing here imports vLLM; bad values are told, never raised."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from kvevents.config import Overflow
from kvevents.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["DEFAULT_PARTS", "PARTS", "Options", "Settings", "read"]

PARTS_VARIABLE = "KVEVENTS_VLLM"
OPTIONS_VARIABLE = "KVEVENTS_VLLM_OPTIONS"

PARTS = ("publisher", "aggregator", "multi", "pool")
DEFAULT_PARTS = ("publisher", "aggregator", "multi")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the publisher and the pool that vLLM's own configuration has no place for."""

    overflow: Overflow = "drop_oldest"
    """``publish()`` at a full queue; ``"block"`` waits, as vLLM's does."""
    report: str = "every_copy"
    """What the pool announces: ``"every_copy"``, as vLLM does, or ``"residency"``. Only for part ``pool``."""
    dialect: str | None = None
    """Wire dialect; ``None``: what this version of vLLM itself writes."""
    buffer_bytes: int = 256 * 1024 * 1024
    """Payload bytes kept for replay, beside vLLM's ``buffer_steps``."""
    bind: bool | None = None
    """Whether the live socket binds; ``None``: vLLM's rule (``*``, IPv6, ipc and inproc bind)."""


class Settings(msgspec.Struct, frozen=True):
    """Parts that are asked for, in the order of :data:`PARTS`, and their options."""

    parts: tuple[str, ...] = DEFAULT_PARTS
    options: Options = Options()


def read(environ: Mapping[str, str], warn: Callable[[str], Any]) -> Settings:
    """Settings from ``KVEVENTS_VLLM`` and ``KVEVENTS_VLLM_OPTIONS``.

    ``warn`` is told once about unknown parts and once about options that cannot be taken; then those options
    are the defaults.
    """
    text = environ.get(PARTS_VARIABLE)
    asked = DEFAULT_PARTS if text is None else [name.strip() for name in text.split(",") if name.strip()]
    unknown = sorted(set(asked) - set(PARTS))
    if unknown:
        warn(f"{PARTS_VARIABLE}: unknown part {', '.join(unknown)}; known are {', '.join(PARTS)}")
    return Settings(tuple(name for name in PARTS if name in asked), _options(environ, warn))


def _options(environ: Mapping[str, str], warn: Callable[[str], Any]) -> Options:
    text = environ.get(OPTIONS_VARIABLE, "")
    if not text.strip():
        return Options()
    try:
        options = msgspec.convert(json.loads(text), Options)
        _check(options)
    except (ValueError, ConfigError) as e:
        names = ", ".join(Options.__struct_fields__)
        warn(f"{OPTIONS_VARIABLE}: {e}; a JSON object with any of {names} was expected, defaults are taken")
        return Options()
    return options


def _check(options: Options) -> None:
    from kvevents._core import dialects  # noqa: PLC0415 - only where somebody sets options

    if options.dialect is not None and options.dialect not in dialects():
        raise ConfigError(f"dialect {options.dialect!r} is none of {', '.join(dialects())}")
    if options.report not in {"every_copy", "residency"}:
        raise ConfigError(f"report {options.report!r} is neither every_copy nor residency")
    if options.overflow not in get_args(Overflow):
        raise ConfigError(f"overflow {options.overflow!r} is none of {', '.join(get_args(Overflow))}")
    if not 0 <= options.buffer_bytes < 2**63:
        raise ConfigError(f"buffer_bytes {options.buffer_bytes} is not from 0 to 2^63-1")
