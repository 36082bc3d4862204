"""What several connectors of one worker report: a container of containers, one per child."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import KVConnectorKVEvents

__all__ = ["ChildKVEvents"]


class ChildKVEvents(KVConnectorKVEvents):  # type: ignore[misc]
    """Each child's own container, by its position; ``None`` for a child that reported nothing.

    Travels by pickle, as its children's containers do. Where vLLM's own code merges two workers' containers,
    by ``add_events(get_all_events())`` and ``increment_workers(1)``, the list holds ``(child, container)``
    pairs, and the number of workers is raised in those children that reported: each child sees what it would
    see alone.
    """

    def __init__(self, children: list[Any]) -> None:
        self.children = children

    def add_events(self, events: list[Any]) -> None:
        """Merge another worker's ``(child, container)`` pairs."""
        for index, container in events:
            held = self.children[index]
            if held is None:
                self.children[index] = container
            elif isinstance(held, ChildKVEvents):
                held.add_events(container.get_all_events())
            else:
                held.add_events(container.get_all_events())
                held.increment_workers(1)

    def get_all_events(self) -> list[Any]:
        """``(child, container)`` pairs of the children that reported."""
        return [(i, c) for i, c in enumerate(self.children) if c is not None]

    def aggregate(self) -> ChildKVEvents:
        """Let each child's container aggregate its own."""
        self.children = [None if c is None else c.aggregate() for c in self.children]
        return self

    def increment_workers(self, count: int = 1) -> None:
        """Nothing: who reported was counted by :meth:`add_events`, child by child."""

    def get_number_of_workers(self) -> int:
        """The largest number of workers of a child."""
        return max((c.get_number_of_workers() for c in self.children if c is not None), default=1)

    def clear_events(self) -> None:
        """Forget all events."""
        self.children = [None] * len(self.children)

    def __repr__(self) -> str:
        return f"<ChildKVEvents {self.children!r}>"
