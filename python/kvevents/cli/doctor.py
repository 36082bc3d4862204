"""``kvevents doctor``: what runs here, and what does not and why."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from kvevents.cli.exits import EXIT_DIFFERENT, EXIT_USAGE, Failure

__all__ = ["doctor"]


def doctor(
    vllm: Annotated[
        bool, typer.Option("--vllm", help="The plug-in in the vLLM of this Python environment.")
    ] = False,
) -> None:
    """Says what is plugged in, as an engine that is started here would have it.

    Exits 1 if a part that is asked for is not plugged in, 3 if there is no vLLM.
    """
    if not vllm:
        raise Failure("say what to look at: kvevents doctor --vllm", EXIT_USAGE)
    if importlib.util.find_spec("vllm") is None:
        raise Failure("there is no vLLM in this Python environment")
    from kvevents.integrations.vllm import plugin  # noqa: PLC0415 - vLLM is imported only here
    from kvevents.integrations.vllm.names import VERSIONS, release  # noqa: PLC0415

    plugin.register()
    report = plugin.report()
    if report is None:
        raise Failure("the plug-in did not report")
    known = VERSIONS.get(release(report.vllm))
    print(f"vLLM {report.vllm}" + (f" ({known} by this release of kvevents)" if known else ""))
    for part in report.parts:
        print(f"  {part.name:<10} {part.state:<9} {part.detail}".rstrip())
    print(f"  plugged in {report.milliseconds:.0f} ms, imports of vLLM among them")
    if any(part.state == "fallback" for part in report.parts):
        raise typer.Exit(EXIT_DIFFERENT)
