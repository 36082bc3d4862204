"""The ``kvevents`` command: its subcommands, and how every failure becomes one line and an exit code."""

from __future__ import annotations

import functools
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvevents import __version__
from kvevents.cli.conform import conform
from kvevents.cli.demo import demo
from kvevents.cli.doctor import doctor
from kvevents.cli.exits import EXIT_ENVIRONMENT, EXIT_INTERRUPTED, EXIT_USAGE, Failure, say
from kvevents.cli.index import index
from kvevents.cli.record import record
from kvevents.cli.replay import replay
from kvevents.cli.simulate import simulate
from kvevents.cli.tail import tail
from kvevents.errors import ConfigError, KVEventsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

__all__ = ["app", "main"]

app = typer.Typer(
    name="kvevents",
    help="KV-cache events of LLM engines: simulate, watch and check them.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Turn Ctrl-C into our own failure, before the library prints something of its own."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            raise Failure("interrupted", EXIT_INTERRUPTED) from None

    return run


for _command in (demo, simulate, tail, index, record, replay, conform, doctor):
    app.command()(_interruptible(_command))

# Typer carries its own copy of click (older versions import click), so the base class of its errors has
# no public name that all versions share; this one is the parent of the public BadParameter everywhere.
_ClickError: type[Exception] = typer.BadParameter.__bases__[0].__bases__[0]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvevents {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="The version, and exit."),
    ] = False,
) -> None:
    """KV-cache events of LLM engines: simulate, watch and check them."""


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0 good, 1 the answer is no, 2 usage, 3 environment, 130 interrupted. A failure is one line on standard
    error. SIGTERM ends a command as Ctrl-C does.
    """
    # A shell starts its background jobs with SIGINT ignored; `kill -INT` is to end them all the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        code = app(args=args or ["--help"], prog_name="kvevents", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output went away (`kvevents tail ... | head`): that is its good right.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, typer.Abort):
        say("interrupted")
        return EXIT_INTERRUPTED
    except Failure as e:
        say(str(e))
        return e.code
    except ConfigError as e:
        say(str(e))
        return EXIT_USAGE
    except (KVEventsError, OSError) as e:
        say(str(e))
        return EXIT_ENVIRONMENT
    except _ClickError as e:
        say(getattr(e, "format_message", e.__str__)())
        return EXIT_USAGE
    except Exception as e:
        if os.environ.get("KVEVENTS_DEBUG"):
            traceback.print_exc()
        say(f"internal error, please report: {type(e).__name__}: {e} (KVEVENTS_DEBUG=1 shows where)")
        return EXIT_ENVIRONMENT
    if not args:
        return EXIT_USAGE
    return code if isinstance(code, int) else 0
