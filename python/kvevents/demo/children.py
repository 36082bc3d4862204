"""Child processes that shake hands, report, and never outlive their parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from kvevents.errors import KVEventsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

__all__ = ["ChildError", "ChildGroup"]

Message: TypeAlias = tuple[str, Any]
"""What a child says: a word, and what belongs to it."""


class ChildError(KVEventsError, RuntimeError):
    """A process of the demo failed, died, or fell silent; says which and what was heard last."""


_ENDED = "ended"
_ENDING = {signal.SIGINT, signal.SIGTERM}


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let a child be born whole: an interrupt that comes meanwhile is raised afterwards.

    A child whose birth is cut short would print a traceback. It inherits the blocked signals, and lets them
    through in :func:`_entry`, so that Ctrl-C cannot hit it while it imports either.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals only ever interrupt the main thread
        return
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda n, _frame: came.append(n)) for number in _ENDING}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for one in came:
            signal.raise_signal(one)


def _entry(main: Callable[..., None], pipe: Connection, args: tuple[Any, ...]) -> None:
    # Ctrl-C reaches the whole process group: the parent decides what then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    try:
        main(pipe, *args)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone: so are we
    except Exception as e:
        pipe.send(("failed", f"{type(e).__name__}: {e}"))


class ChildGroup:
    """Spawned processes, each with a two-way pipe; leaving the context ends all of them."""

    def __init__(self, silence_s: float) -> None:
        self._spawn = multiprocessing.get_context("spawn")
        self._silence_s = silence_s
        self._pipes: dict[str, Connection] = {}
        self._processes: dict[str, multiprocessing.process.BaseProcess] = {}

    def start(self, name: str, main: Callable[..., None], *args: Any, has_children: bool = False) -> None:
        """Start ``main(pipe, *args)`` in a fresh interpreter.

        Only a process that ``has_children`` may start others; it has to end them itself.
        """
        ours, theirs = self._spawn.Pipe()
        process = self._spawn.Process(
            target=_entry, args=(main, theirs, args), name=name, daemon=not has_children
        )
        with _undisturbed():
            process.start()
            theirs.close()
            self._pipes[name] = ours
            self._processes[name] = process

    def send(self, name: str, word: str, value: Any = None) -> None:
        """Say something to a child.

        :raises ChildError: where it has ended.
        """
        try:
            self._pipes[name].send((word, value))
        except (BrokenPipeError, ConnectionResetError) as e:
            raise self._gone(name) from e

    def expect(self, name: str, word: str, on_other: Callable[[str, str, Any], None] | None = None) -> Any:
        """Wait until child ``name`` says ``word``; everything else goes to ``on_other``.

        :raises ChildError: where one failed or died, or none said anything for too long.
        """
        while True:
            heard = self._hear(self._silence_s)
            if heard is None:
                listening = ", ".join(self._pipes)
                raise ChildError(f"no process of {listening} reported anything for {self._silence_s:g} s")
            who, said, value = heard
            if said == _ENDED:
                if who == name:
                    raise self._gone(who)
                continue
            if (who, said) == (name, word):
                return value
            if on_other is not None:
                on_other(who, said, value)

    def listen(self, seconds: float, on_said: Callable[[str, str, Any], None]) -> None:
        """Hand on what is said for so long.

        :raises ChildError: where one failed or died.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            heard = self._hear(left)
            if heard is not None and heard[1] != _ENDED:
                on_said(*heard)

    def pids(self) -> dict[str, int]:
        """Process ids of the children that have not been ended."""
        return {n: p.pid for n, p in self._processes.items() if n in self._pipes and p.pid is not None}

    def end(self, name: str, *, kill: bool = False) -> None:
        """End a child: its pipe is closed, or it is killed. Its name may then be used again."""
        pipe, process = self._pipes.pop(name, None), self._processes[name]
        if kill:
            process.kill()
        if pipe is not None:
            pipe.close()
        process.join(self._silence_s)

    def _hear(self, seconds: float) -> tuple[str, str, Any] | None:
        """The next thing that somebody says; :data:`_ENDED` of one who has done its part."""
        by_pipe = {pipe: who for who, pipe in self._pipes.items()}
        ready = wait(list(by_pipe), seconds)
        if not ready:
            return None
        who = by_pipe[ready[0]]  # type: ignore[index]  # only connections were waited for
        try:
            said, value = self._pipes[who].recv()
        except (EOFError, ConnectionResetError) as e:
            self._processes[who].join(2.0)
            if self._processes[who].exitcode != 0:
                raise self._gone(who) from e
            self._pipes.pop(who).close()
            return who, _ENDED, None
        if said == "failed":
            raise ChildError(f"the {who} process failed: {value}")
        return who, said, value

    def _gone(self, name: str) -> ChildError:
        self._processes[name].join(2.0)
        return ChildError(f"the {name} process ended early (exit code {self._processes[name].exitcode})")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Children end when their pipe does; those that do not are ended."""
        for pipe in self._pipes.values():
            pipe.close()
        deadline = time.monotonic() + (3.0 if kind is None else 0.5)
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes.values():
            if process.is_alive():
                process.terminate()
                process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()
