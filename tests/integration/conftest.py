"""Fixtures of the tests over real sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from plain_publisher import MADE, PlainPublisher

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def publisher() -> Iterator[type[PlainPublisher]]:
    """Makes plain publishers; closes what is open at the end."""
    MADE.clear()
    yield PlainPublisher
    for p in MADE:
        if not p.context.closed:
            p.close()
