"""The README's code runs as it stands, one side against the other."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def block_after(heading):
    section = README[README.index(heading) :].split("\n## ")[0]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]


@pytest.mark.timeout(60)
def test_the_readers_ten_lines_rebuild_what_the_engines_ten_lines_publish(free_ports):
    ports = free_ports(2)

    def code(heading):
        text = block_after(heading)
        return text.replace(":5557", f":{ports[0]}").replace(":5657", f":{ports[1]}")

    engine: dict = {}
    exec(code("## For an engine author"), engine)
    try:
        assert engine["publisher"].stats()
        reader: dict = {}
        heard = threading.Event()
        problem: list[BaseException] = []

        def said(*args):
            heard.set()

        def run():
            reader["print"] = said
            try:
                exec(code("## For a reader author"), reader)
            except BaseException as e:
                problem.append(e)
                heard.set()

        thread = threading.Thread(target=run)
        thread.start()
        assert heard.wait(30)
        reader["stream"].close()
        thread.join(20)
        assert not thread.is_alive()
        assert not problem
        assert len(reader["resident"]) == 100 // 16
        assert reader["resident"].digest() == engine["pool"].digest()
    finally:
        engine["publisher"].shutdown()


@pytest.mark.timeout(60)
def test_the_routers_lines_find_what_the_engines_lines_publish(free_ports):
    ports = free_ports(2)
    engine: dict = {}
    exec(
        block_after("## For an engine author")
        .replace(":5557", f":{ports[0]}")
        .replace(":5657", f":{ports[1]}"),
        engine,
    )
    try:
        code = block_after("## For a router author").replace("{p + 100}", str(ports[1]))
        code = code.replace("(5557, 5558)", f"({ports[0]},)")
        found: list[tuple] = []
        router: dict = {}
        heard = threading.Event()

        def said(*args):
            found.append(args)
            heard.set()

        router["print"] = said
        thread = threading.Thread(target=exec, args=(code, router))
        thread.start()
        assert heard.wait(30)
        router["stream"].close()
        thread.join(20)
        assert not thread.is_alive()
        assert found[0][1:] == (0, 96, {"GPU": 96}, True)
    finally:
        engine["publisher"].shutdown()
