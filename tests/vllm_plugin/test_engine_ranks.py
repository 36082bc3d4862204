"""Two data-parallel ranks of a real engine: ports by vLLM's rule, a rank in each batch, an epoch each."""

from __future__ import annotations

import pytest
from engine_process import EngineProcess, Reader, free_port, hello, ids, make_site, needs_engine, warnings

from kvevents.subscribe import Batch

pytestmark = [needs_engine, pytest.mark.timeout(1800)]


def test_each_rank_publishes_at_its_port_under_its_number(tmp_path):
    (tmp_path / "site").mkdir()
    port, log = free_port(ranks=2), tmp_path / "engine.log"
    readers = [Reader(port), Reader(port + 1)]
    with (
        readers[0],
        readers[1],
        EngineProcess(
            make_site(tmp_path / "site"), port, log=log, ranks=True, data_parallel_size=2
        ) as engine,
    ):
        for reader in readers:
            reader.connected()
        told = engine.ask(do="sources")["sources"]
        expected = {str(r): [f"tcp://*:{port + r}", f"tcp://*:{port + 1000 + r}"] for r in (0, 1)}
        assert told == expected
        engine.generate(ids(1, 100), rank=0, seconds=300.0)
        engine.generate(ids(2, 140), ids(1, 100), rank=1, seconds=300.0)
        readers[0].read(lambda: len(readers[0].resident) == 3)
        readers[1].read(lambda: len(readers[1].resident) == 7)
        for rank, reader in enumerate(readers):
            assert {item.batch.data_parallel_rank for item in reader.of(Batch)} == {rank}
            assert [item.seq for item in reader.of(Batch)] == list(range(len(reader.of(Batch))))
        epochs = [hello(port + rank)["epoch"] for rank in (0, 1)]
        assert epochs[0] != epochs[1]
        engine.ask(do="end")
    assert warnings(log) == []
