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
