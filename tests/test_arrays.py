"""When numpy is loaded: never in the event loop, where a server can know that it will be needed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

WATCH = """
import importlib.abc, json, sys, threading
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "numpy" and "in" not in seen:
            seen["in"] = threading.current_thread() is threading.main_thread()
seen = {}
sys.meta_path.insert(0, Watch())
"""
SERVER = """
import asyncio
from babelbus.config import load
from babelbus.core.access import SERVER as PRINCIPAL
from babelbus.server.app import Server

async def main():
    server = Server(load(None, {}, {"data.folder": sys.argv[1], "server.any_port": "true"}))
    await server.start()
    before = dict(seen)
    await use(server)
    after = dict(seen)
    await server.stop()
    print(json.dumps([before, after]))

asyncio.run(main())
"""


def run(code: str, *arguments: str) -> Any:
    command = [sys.executable, "-c", WATCH + code, *arguments]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_a_module_that_names_numpy_does_not_load_it_and_later_is_numpy() -> None:
    code = """
from babelbus.arrays import is_loaded, np
before = [is_loaded(), "numpy" in sys.modules]
number = int(np.arange(3).sum())
import numpy
print(json.dumps([*before, number, is_loaded(), vars(np) == vars(numpy), type(np) is type(numpy)]))
"""
    assert run(code) == [False, False, 3, True, True, True]


def test_threads_that_use_numpy_first_at_the_same_time_all_have_it() -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
from babelbus.arrays import np
barrier = threading.Barrier(8)
with ThreadPoolExecutor(8) as pool:
    sums = list(pool.map(lambda count: (barrier.wait(), int(np.arange(count).sum()))[1], range(8)))
print(json.dumps(sums))
"""
    assert run(code) == [sum(range(count)) for count in range(8)]


def test_the_first_topic_loads_numpy_in_a_thread(tmp_path: Path) -> None:
    use = """
async def use(server):
    await server.broker.create_topic("news", principal=PRINCIPAL)
"""
    assert run(use + SERVER, str(tmp_path / "data")) == [{}, {"in": False}]


def test_a_server_with_topics_loads_numpy_before_it_listens(tmp_path: Path) -> None:
    use = """
async def use(server):
    await server.broker.create_topic("news", principal=PRINCIPAL)
"""
    run(use + SERVER, str(tmp_path / "data"))
    before, _ = run("async def use(server): pass\n" + SERVER, str(tmp_path / "data"))
    assert before == {"in": True}


def test_the_first_value_of_the_state_loads_numpy_in_a_thread(tmp_path: Path) -> None:
    use = """
async def use(server):
    server.broker.state.set("plant/line", b"1")
    await server.broker.state.commit("test").wait()
    while "in" not in seen:
        await asyncio.sleep(0)
"""
    assert run(use + SERVER, str(tmp_path / "data")) == [{}, {"in": False}]
