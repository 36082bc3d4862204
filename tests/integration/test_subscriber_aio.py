"""The subscriber for asyncio: the same items, and the loop stays free."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from plain_publisher import batch_of

from kvevents import ResidentSet, Source, decode
from kvevents.errors import ConfigError
from kvevents.subscribe import AsyncSubscriber, Batch, FileSources, Gap, Item, Reset, Subscriber, Timing

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)
QUICK = Timing(replay_timeout_s=0.3, backoff_s=0.02, jitter_s=0, silence_s=0.15, cooldown_s=0.2)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 40))


def source(pub: Any, name: str = "a") -> Source:
    return Source(pub.live, pub.replay, name=name)


async def take(sub: AsyncSubscriber, n: int) -> list[Item]:
    got: list[Item] = []
    while len(got) < n:
        item = await sub.poll(20)
        assert item is not None, got
        got.append(item)
    return got


def test_lost_batches_are_replayed_and_in_order(publisher: Callable[..., Any]) -> None:
    pub = publisher()
    for i in range(40):
        pub.publish(send=i % 7 != 0)

    async def main() -> None:
        got = []
        async with AsyncSubscriber(source(pub), timing=QUICK) as sub:
            async for item in sub:
                got.append(item)
                if len(got) == 40:
                    break
            for i in range(40, 60):
                pub.publish(send=i not in {45, 46, 59})
            got += await take(sub, 20)
            assert sub.stats()[0].complete
        assert [i.seq for i in got if isinstance(i, Batch)] == list(range(60))
        assert isinstance(got[3], Batch)
        assert got[3].batch == decode(batch_of(3))
        assert await sub.poll() is None

    run(main())


def test_both_subscribers_yield_the_same_of_the_same_stream(publisher: Callable[..., Any]) -> None:
    """Losses that nothing brings back, and a restart."""
    pub = publisher()
    for i in range(20):
        pub.publish(log=i not in {4, 5})

    async def both(async_items: list[Item], sync: Subscriber, sync_items: list[Item]) -> None:
        async with AsyncSubscriber(source(pub), timing=QUICK) as sub:
            async_items += await take(sub, 4)
            sync_items += await asyncio.to_thread(lambda: [sync.poll(20) for _ in range(4)])
            pub.publish()
            async_items += await take(sub, 16)
            sync_items += await asyncio.to_thread(lambda: [sync.poll(20) for _ in range(16)])
            new = pub.restart()
            for _ in range(3):
                new.publish()
            async_items += await take(sub, 4)
            sync_items += await asyncio.to_thread(lambda: [sync.poll(20) for _ in range(4)])

    async_items: list[Item] = []
    sync_items: list[Item] = []
    with Subscriber(source(pub), timing=QUICK) as sync:
        run(both(async_items, sync, sync_items))

    def plain(items: list[Item]) -> list[Item]:
        return [i._replace(replayed=False) if isinstance(i, Batch) else i for i in items]

    assert plain(async_items) == plain(sync_items)
    assert Gap("a", 4, 5, "missing") in async_items
    assert Reset("a", "restart") in async_items
    resident = ResidentSet()
    for item in async_items:
        resident.apply(item)
    assert len(resident) == 3


def test_the_loop_stays_free_while_nothing_comes_and_while_much_does(publisher: Callable[..., Any]) -> None:
    pub = publisher()

    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(tick())
        async with AsyncSubscriber(source(pub), timing=QUICK) as sub:
            assert await sub.poll(0.05) is None
            assert ticks > 10
            for _ in range(3000):
                pub.publish()
            before = ticks
            items = await take(sub, 3000)
            assert ticks - before >= 3
        assert [i.seq for i in items if isinstance(i, Batch)] == list(range(3000))
        other.cancel()

    run(main())


def test_a_cancelled_wait_loses_nothing(publisher: Callable[..., Any]) -> None:
    pub = publisher()

    async def main() -> None:
        got: list[Item] = []
        async with AsyncSubscriber(source(pub), timing=QUICK) as sub:
            for i in range(60):
                pub.publish()
                try:
                    async with asyncio.timeout(0.0005 * (i % 5)):
                        item = await sub.poll()
                        assert item is not None
                        got.append(item)
                except TimeoutError:
                    pass
            got += await take(sub, 60 - len(got))
        assert [i.seq for i in got if isinstance(i, Batch)] == list(range(60))

    run(main())


def test_tasks_take_turns_and_time_out(publisher: Callable[..., Any]) -> None:
    pub = publisher()

    async def main() -> None:
        async with AsyncSubscriber(source(pub), timing=QUICK) as sub:
            long = asyncio.create_task(sub.poll())
            await asyncio.sleep(0)
            assert await sub.poll(0.02) is None
            pub.publish()
            assert isinstance(await long, Batch)
            waiting = [asyncio.create_task(sub.poll(20)) for _ in range(10)]
            for _ in range(10):
                pub.publish()
            items = await asyncio.gather(*waiting)
            assert sorted(i.seq for i in items if isinstance(i, Batch)) == list(range(1, 11))

    run(main())


def test_close_ends_a_waiting_iteration_and_closes_every_socket(publisher: Callable[..., Any]) -> None:
    pub = publisher()

    async def main() -> None:
        sub = AsyncSubscriber(source(pub), timing=QUICK)

        async def read() -> int:
            return len([item async for item in sub])

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.02)
        sub.close()
        assert await reading == 0
        sub.close()
        assert await sub.poll(1) is None
        with pytest.raises(ConfigError, match="closed"):
            sub.add_source("tcp://127.0.0.1:1")
        # Closed before anything waited.
        AsyncSubscriber(source(pub)).close()
        assert sub._context.closed

    run(main())


def test_sources_come_and_go_while_a_task_waits(publisher: Callable[..., Any], tmp_path: Path) -> None:
    a, b = publisher(), publisher()
    for pub in (a, b):
        for _ in range(5):
            pub.publish()
    path = tmp_path / "sources"
    path.write_text("")

    async def main() -> None:
        async with AsyncSubscriber([source(a), FileSources(path, every_s=0.02)], timing=QUICK) as sub:
            await take(sub, 5)
            waiting = asyncio.create_task(take(sub, 5))
            await asyncio.sleep(0.02)
            sub.remove_source("a")
            sub.add_source(source(b, "b"))
            assert {i.source for i in await waiting} == {"b"}
            waiting = asyncio.create_task(take(sub, 5))
            path.write_text(json.dumps({"endpoint": a.live, "replay_endpoint": a.replay, "name": "c"}))
            assert [(i.source, i.seq) for i in await waiting if isinstance(i, Batch)] == [
                ("c", i) for i in range(5)
            ]

    run(main())
