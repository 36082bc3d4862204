"""Exit codes, and failures on the way to them."""

from __future__ import annotations

import sys

__all__ = ["EXIT_DIFFERENT", "EXIT_ENVIRONMENT", "EXIT_INTERRUPTED", "EXIT_USAGE", "Failure", "say"]

EXIT_DIFFERENT = 1
"""The answer is no: different, failed."""
EXIT_USAGE = 2
EXIT_ENVIRONMENT = 3
"""Port in use, file unreadable, peer silent."""
EXIT_INTERRUPTED = 130


class Failure(Exception):  # noqa: N818 - it carries an exit code, it is not an error of the package
    """Ends a command with one line on standard error and an exit code."""

    def __init__(self, message: str, code: int = EXIT_ENVIRONMENT) -> None:
        super().__init__(message)
        self.code = code


def say(message: str) -> None:
    """One line on standard error, whatever the message holds."""
    print("kvevents:", " ".join(message.split()), file=sys.stderr)
