"""Values of settings, checked by their annotations (msgspec itself checks only what it decodes)."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from kvevents.errors import ConfigError

__all__ = ["check_types"]


def check_types(settings: msgspec.Struct, unchecked: frozenset[str] = frozenset()) -> None:
    """Raise for a field of the wrong type, or for text that has no UTF-8 (as which topics travel).

    ``unchecked`` names fields that their owner checks.

    :raises ConfigError: the field, what was expected, what was seen.
    """
    fields = {name: getattr(settings, name) for name in settings.__struct_fields__}
    try:
        msgspec.convert(fields, _typed(type(settings), unchecked))
    except msgspec.ValidationError as e:
        what, _, where = str(e).partition(" - at ")
        name = where.strip("`$.")
        raise ConfigError(f"{name}: {what}, saw {_seen(fields.get(name))}") from None
    for name, value in fields.items():
        if name in unchecked or not isinstance(value, str):
            continue
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{name}: text in UTF-8 was expected, saw {_seen(value)}") from None


def _seen(value: object) -> str:
    seen = repr(value)
    return seen if len(seen) < 80 else seen[:77] + "..."


@cache
def _typed(settings: type[msgspec.Struct], unchecked: frozenset[str]) -> type:
    """A plain struct of the same fields, made when first needed."""
    return msgspec.defstruct(
        "_Typed",
        [
            (field.name, Any if field.name in unchecked else field.type)
            for field in msgspec.structs.fields(settings)
        ],
    )
