"""Containers on their way from workers to the scheduler."""

from __future__ import annotations

import copy
import pickle
from multiprocessing import get_context

import pytest

from kvevents import BlockStored, EventList, Quorum
from kvevents.connectors import KVConnectorKVEvents, LMCacheKVEvents, WorkerKVEvents
from kvevents.connectors.containers import PICKLE_VERSION, _load
from kvevents.errors import AggregatorError, PickleError


def stored(*hashes, parent=None) -> BlockStored:
    return BlockStored(list(hashes), parent, [1] * (4 * len(hashes)), 4, None, "CPU", None)


@pytest.mark.parametrize("cls", [WorkerKVEvents, LMCacheKVEvents])
def test_an_empty_container_is_falsy_and_events_alone_make_it_true(cls) -> None:
    container = cls()
    assert not container
    assert container.is_empty()
    container.add_events([])
    assert not container
    container.add_events([stored(1)])
    assert container
    assert len(container) == 1
    container.clear_events()
    assert not container


@pytest.mark.parametrize("cls", [WorkerKVEvents, LMCacheKVEvents])
@pytest.mark.parametrize("make", [list, EventList])
def test_merging_keeps_worker_borders(cls, make) -> None:
    """One worker that says a thing twice is not two workers, also after a merge."""
    for first, second, common in (([1, 1], [], []), ([1, 1], [1], [1]), ([1, 2], [2, 3], [2])):
        a, b = cls(), cls()
        a.add_events(make([stored(h) for h in first]))
        b.add_events(make([stored(h) for h in second]))
        assert a.merge(b) is a
        assert a.get_number_of_workers() == 2
        assert len(b) == len(second)
        a.aggregate()
        assert [h for e in a.get_all_events() for h in e.block_hashes] == common
        assert a.get_number_of_workers() == 1


def test_an_empty_container_is_a_worker_that_said_nothing() -> None:
    for a, b in (
        (WorkerKVEvents(), WorkerKVEvents([stored(1)])),
        (WorkerKVEvents([stored(1)]), WorkerKVEvents()),
    ):
        assert not a.merge(b).aggregate()


def test_eight_workers_by_tags_in_any_order() -> None:
    parts = [WorkerKVEvents([stored(1), stored(10 + w)]).tagged(w) for w in (3, 1, 0, 2)]
    combined = parts[0]
    for part in parts[1:]:
        combined.merge(part)
    assert combined.get_number_of_workers() == 4
    assert [w for w, _ in combined.by_worker()] == [3, 1, 0, 2]
    everything = combined.get_all_events()
    again = WorkerKVEvents(everything, num_workers=4)
    assert sorted(w for w, _ in again.by_worker()) == [0, 1, 2, 3]
    assert list(again.aggregate().get_all_events()) == [stored(1)]


def test_one_worker_in_two_containers_is_one_worker() -> None:
    a = WorkerKVEvents([stored(1)]).tagged(0)
    a.merge(WorkerKVEvents([stored(1)]).tagged(0))
    assert a.get_number_of_workers() == 1
    a.merge(WorkerKVEvents([stored(2)]).tagged(1))
    assert not a.aggregate()


def test_blocks_agree_however_runs_are_cut() -> None:
    a = WorkerKVEvents([stored(1, 2)])
    a.merge(WorkerKVEvents([stored(1), stored(2, parent=1)]))
    assert list(a.aggregate().get_all_events()) == [stored(1, 2)]


def test_rules_of_a_container() -> None:
    a = WorkerKVEvents([stored(1)], rule="any")
    a.merge(WorkerKVEvents([stored(2)]))
    assert len(a.aggregate().get_all_events()) == 2
    with pytest.raises(AggregatorError):
        WorkerKVEvents(rule=0)
    with pytest.raises(AggregatorError, match="3 workers"):
        WorkerKVEvents([stored(1)], rule=3).aggregate()
    with pytest.raises(AggregatorError):
        WorkerKVEvents(num_workers=0)


def test_the_engine_s_order_of_calls() -> None:
    combined = LMCacheKVEvents(1)
    combined.add_events([stored(1), stored(2)])
    for other in ([stored(1)], [stored(1), stored(2)]):
        container = LMCacheKVEvents(1)
        container.add_events(other)
        combined.add_events(container.get_all_events())
        combined.increment_workers(container.get_number_of_workers())
    assert combined.aggregate().get_all_events() == [stored(1)]
    assert combined.get_number_of_workers() == 1


def test_containers_of_others_merge() -> None:
    class Theirs(KVConnectorKVEvents):
        def __init__(self) -> None:
            self.events = [stored(1)]

        def add_events(self, events) -> None:
            self.events.extend(events)

        def aggregate(self):
            return self

        def increment_workers(self, count=1) -> None:
            pass

        def get_all_events(self) -> list:
            return self.events

        def get_number_of_workers(self) -> int:
            return 1

        def clear_events(self) -> None:
            self.events = []

    for cls in (WorkerKVEvents, LMCacheKVEvents):
        mine = cls()
        mine.add_events([stored(1), stored(2)])
        mine.merge(Theirs())
        assert list(mine.aggregate().get_all_events()) == [stored(1)]
    theirs = Theirs().merge(WorkerKVEvents([stored(2)]))
    assert theirs.get_all_events() == [stored(1), stored(2)]
    theirs.clear_events()
    assert not theirs


# ---------------------------------------------------------------- pickle


def containers() -> list:
    one = WorkerKVEvents([stored(1, 2)], num_workers=2, rule=Quorum([([0, 1], 1)]))
    many = WorkerKVEvents([stored(1)], rule=2).tagged(4)
    many.merge(WorkerKVEvents([stored(1), stored(2)]).tagged(1))
    lm = LMCacheKVEvents(2)
    lm.add_events([stored(1)])
    lm.add_events([])
    strings = LMCacheKVEvents(1)
    strings.add_events([BlockStored(["x"], None, [1], 1, None, None, None)])
    return [one, many, WorkerKVEvents(), lm, strings, LMCacheKVEvents()]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_keeps_events_and_workers(protocol) -> None:
    for container in containers():
        again = pickle.loads(pickle.dumps(container, protocol))
        assert type(again) is type(container)
        assert list(again.get_all_events()) == list(container.get_all_events())
        assert again.get_number_of_workers() == container.get_number_of_workers()
        assert repr(again) == repr(container)
        if isinstance(container, WorkerKVEvents):
            assert again == container
        assert list(again.aggregate().get_all_events()) == list(container.aggregate().get_all_events())


def test_a_pickle_is_one_string_of_columns() -> None:
    container = WorkerKVEvents([stored(i) for i in range(100)])
    _, (_, version, data, *scalars) = container.__reduce__()
    assert version == PICKLE_VERSION
    assert EventList.from_bytes(data) == container.get_all_events()
    assert len(pickle.dumps(scalars)) < 100


def test_large_columns_travel_out_of_band_where_the_transport_can() -> None:
    container = WorkerKVEvents([stored(i) for i in range(100)]).tagged(3)
    buffers: list = []
    small = pickle.dumps(container, 5, buffer_callback=buffers.append)
    assert len(small) < 400
    (columns,) = buffers
    for way in (columns, bytes(columns), memoryview(bytearray(columns))):
        assert pickle.loads(small, buffers=[way]) == container
    damaged = bytearray(columns)
    damaged[40] ^= 1
    with pytest.raises(PickleError):
        pickle.loads(small, buffers=[damaged])
    assert pickle.loads(pickle.dumps(container, 5)) == container
    assert copy.copy(container) == container


def test_pickles_of_other_versions_and_broken_ones_are_refused() -> None:
    for container in containers()[:4]:
        load, (cls, version, *state) = container.__reduce__()
        assert load is _load
        for other in (version + 1, 0, None, "1"):
            with pytest.raises(PickleError, match="version"):
                load(cls, other, *state)
        with pytest.raises(PickleError):
            load(cls, version)
        with pytest.raises(PickleError):
            load(cls, version, b"junk", *state[1:])
        with pytest.raises(PickleError):
            load(object, version, *state)
    _, (cls, version, data, workers, _, rule) = containers()[1].__reduce__()
    for split in (((0, 1),), ((0, 5),), 7, ((0, "x"),)):
        with pytest.raises(PickleError):
            _load(cls, version, data, workers, split, rule)


class Subclass(WorkerKVEvents):
    __slots__ = ()


def _work(conn, rank) -> None:
    conn.send(Subclass([stored(1), stored(100 + rank)]))


def test_across_a_real_process_border() -> None:
    context = get_context("spawn")
    received = []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, rank))
        process.start()
        assert ours.poll(60)
        received.append(ours.recv())
        process.join(60)
        assert process.exitcode == 0
        ours.close()
        theirs.close()
    assert all(type(r) is Subclass for r in received)
    assert list(received[0].merge(received[1]).aggregate().get_all_events()) == [stored(1)]
