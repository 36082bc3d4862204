"""Fixtures for every test: sockets that cannot leak or hang, hypothesis profiles, the conformance data."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

import kvevents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"

hypothesis.settings.register_profile(
    "fast",
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "slow", max_examples=2000, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile(os.environ.get("KVEVENTS_HYPOTHESIS", "fast"))


def pytest_configure() -> None:
    """With `make test` the installed wheel is what is tested, never the source tree."""
    where = Path(kvevents.__file__).resolve()
    if os.environ.get("KVEVENTS_TEST_INSTALLED") and where.is_relative_to(ROOT / "python"):
        pytest.exit(
            f"the tests would run on the source tree ({where}), not on the installed wheel", returncode=3
        )


def shared_dir() -> Path | None:
    """Where the conformance data lies: KVEVENTS_SHARED, ../shared, else tests/golden; None where absent."""
    named = os.environ.get("KVEVENTS_SHARED")
    for path in [Path(named)] if named else [ROOT.parent / "shared", GOLDEN]:
        if (path / "conformance").is_dir():
            return path
    return None


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with `conformance/` and `traces/`; skips where there is none."""
    path = shared_dir()
    if path is None:
        pytest.skip("no conformance data: set KVEVENTS_SHARED")
    return path


@pytest.fixture(scope="session")
def golden(shared: Path) -> Callable[[str], Path]:
    """Finds a file below the conformance folder by its relative name; skips where it is absent."""

    def find(name: str) -> Path:
        path = shared / "conformance" / name
        if not path.exists():
            path = path.with_name(path.name + ".gz")
        if not path.exists():
            pytest.skip(f"no {name} in the conformance data")
        return path

    return find


def unused_ports(n: int) -> list[int]:
    """Different free TCP ports of loopback; prefer binding to port 0 where the code under test can."""
    held = [socket.socket() for _ in range(n)]
    try:
        for s in held:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in held]
    finally:
        for s in held:
            s.close()


@pytest.fixture
def free_ports() -> Callable[[int], list[int]]:
    """`free_ports(n)`: n TCP ports of loopback that were free a moment ago."""
    return unused_ports


@pytest.fixture
def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    return unused_ports(1)[0]


class Sockets:
    """Makes ZMQ sockets of one context with time-outs, and closes all of them without lingering."""

    def __init__(self) -> None:
        import zmq

        self.zmq = zmq
        self.context = zmq.Context()
        self.made: list[Any] = []

    def __call__(
        self, kind: int, *, connect: str | None = None, bind: str | None = None, **options: Any
    ) -> Any:
        """A socket of `kind`; receive and send time out after 10 seconds, so that a hang is a failure."""
        s = self.context.socket(kind)
        self.made.append(s)
        s.linger = 0
        s.rcvtimeo = s.sndtimeo = 10_000
        for name, value in options.items():
            setattr(s, name, value)
        if bind is not None:
            s.bind(bind)
        if connect is not None:
            s.connect(connect)
        return s

    def close(self) -> None:
        """Closes everything; a context that cannot end is a leaked socket, said as such."""
        for s in self.made:
            s.close(linger=0)
        ended = threading.Thread(target=self.context.term, daemon=True)
        ended.start()
        ended.join(10)
        assert not ended.is_alive(), "the test left a socket of its context open"


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """A factory of sockets: `sockets(zmq.SUB, connect=endpoint, subscribe=b"")`."""
    made = Sockets()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_thread_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves a thread of this package running fails."""
    before = set(threading.enumerate())
    yield
    if request.node.get_closest_marker("leaves_threads"):
        return
    left = [t for t in threading.enumerate() if t not in before and t.name.startswith("kvevents")]
    for t in left:
        t.join(5)
    left = [t for t in left if t.is_alive()]
    assert not left, f"threads left running: {[t.name for t in left]}"
