"""The command line: one file a command. Typer and rich are loaded here and nowhere else in the package."""

from __future__ import annotations

from kvevents.cli.app import main

__all__ = ["main"]
