"""For ``pytest -p kvevents.integrations.vllm.pytest_plugin``: vLLM's own tests with the plug-in in place."""

from __future__ import annotations

from kvevents.integrations.vllm import plugin

plugin.register()


def pytest_report_header() -> str:
    """What was plugged in, in the header of the run."""
    report = plugin.report()
    return "kvevents: nothing is plugged in" if report is None else report.line()
