"""The entry point that vLLM calls in every process: front end, engine core, each worker."""

from __future__ import annotations

import logging
import os
import time
from typing import NamedTuple

__all__ = ["PartState", "Report", "register", "report"]

log = logging.getLogger("vllm.kvevents")
"""Under vLLM's own logger, so that its level and its handler hold."""


class PartState(NamedTuple):
    """What became of one part in this process."""

    name: str
    state: str
    """``"on"``, ``"off"`` (not asked for) or ``"fallback"``: vLLM's own code runs."""
    detail: str
    """How it runs, or why it does not."""


class Report(NamedTuple):
    """What the plug-in did in this process."""

    vllm: str
    parts: tuple[PartState, ...]
    milliseconds: float

    def line(self) -> str:
        """All of it as one line."""
        parts = "; ".join(f"{p.name} {p.state}" + (f" ({p.detail})" if p.detail else "") for p in self.parts)
        return f"kvevents in vLLM {self.vllm}: {parts}"


_reports: list[Report] = []


def register() -> None:
    """Plug in what the environment asks for; a second call does nothing. Never raises.

    A part whose names are not those of a known version is left out with one warning that says why; vLLM's own
    code runs then.
    """
    if _reports:
        return
    start = time.perf_counter()
    try:
        found = _register()
    except Exception as e:
        log.warning("kvevents: nothing is plugged in, vLLM's own code runs: %s: %s", type(e).__name__, e)
        found = Report("?", (), 0.0)
    found = found._replace(milliseconds=(time.perf_counter() - start) * 1e3)
    _reports.append(found)
    if any(p.state == "on" for p in found.parts):
        log.info("%s", found.line())


def report() -> Report | None:
    """What :func:`register` did in this process; ``None`` before it was called."""
    return _reports[-1] if _reports else None


def _register() -> Report:
    from kvevents.integrations.vllm import settings  # noqa: PLC0415 - after the cheap test for a second call

    def warn(message: str) -> None:
        log.warning("kvevents: %s", message)

    asked = settings.read(os.environ, warn)
    off = [PartState(name, "off", "") for name in settings.PARTS if name not in asked.parts]
    if not asked.parts:
        return Report("not looked at", tuple(off), 0.0)
    import vllm  # noqa: PLC0415 - only inside vLLM

    states = [_plug(name, asked, vllm.__version__) for name in asked.parts]
    return Report(vllm.__version__, tuple(states + off), 0.0)


def _plug(name: str, asked: object, version: str) -> PartState:
    import importlib  # noqa: PLC0415

    from kvevents.integrations.vllm import names  # noqa: PLC0415

    why = names.problem(name, version)
    if why is None:
        try:
            part = importlib.import_module(f"kvevents.integrations.vllm.{name}")
            return PartState(name, "on", part.install(asked))
        except Exception as e:
            why = f"{type(e).__name__}: {e}"
    log.warning("kvevents: part %s is not plugged in, vLLM's own code runs: %s", name, why)
    return PartState(name, "fallback", why)
