"""Ids that come back from the pool stand beside lists of ids, on either side."""

from __future__ import annotations

import pytest

from kvevents import BlockIds, errors


def test_ids_and_lists_concatenate_from_both_sides() -> None:
    ids = BlockIds([1, 2])
    assert list(ids + [3]) == [1, 2, 3]
    assert list([3] + ids) == [3, 1, 2]
    assert list((3,) + ids) == [3, 1, 2]
    assert list([] + ids + ids) == [1, 2, 1, 2]
    with pytest.raises(errors.BlockTypeError):
        ["a"] + ids
