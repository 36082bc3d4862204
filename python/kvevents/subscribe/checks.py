"""Arguments of a subscriber that are judged before anything is opened."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvevents.errors import ConfigError
from kvevents.subscribe.items import Resume

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvevents.subscribe.actions import Limits
    from kvevents.subscribe.timing import Timing

__all__ = ["check_timeout", "checked"]


def check_timeout(timeout: float | None) -> None:
    """Refuse what is no time.

    :raises ConfigError: it is not a number.
    """
    if timeout is not None and (not isinstance(timeout, int | float) or math.isnan(timeout)):
        raise ConfigError(f"timeout: seconds or None were expected, saw {timeout!r}")


def checked(timing: Timing, limits: Limits, resume: Mapping[str, Resume] | None) -> dict[str, Resume]:
    """Judge what is given as numbers and points before it is used; a wait of nothing would be no wait.

    :returns: the points.
    :raises ConfigError: which of them is what it cannot be, and what was seen.
    """
    at_once = {"reorder_wait_s", "jitter_s", "slack_s"}
    for kind, values in (("timing", timing._asdict()), ("limits", limits._asdict())):
        for name, value in values.items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
            whole = kind == "timing" or name == "slack_s" or isinstance(value, int)
            if not number or not whole or value < 0 or (value == 0 and name not in at_once):
                least = "0 or more" if name in at_once else "above 0"
                raise ConfigError(f"{kind}.{name}: a number {least} was expected, saw {value!r}")
    points = {}
    for name, point in dict(resume or {}).items():
        try:
            last_seq, epoch, ts = point
            good = type(last_seq) is int and last_seq < 2**64 - 1
            good &= (epoch is None or isinstance(epoch, bytes)) and (
                ts is None or isinstance(ts, int | float)
            )
        except (TypeError, ValueError):
            good = False
        if not good:
            raise ConfigError(f"resume: {name!r}: a Resume was expected, saw {point!r}")
        points[name] = Resume(*point)
    return points
