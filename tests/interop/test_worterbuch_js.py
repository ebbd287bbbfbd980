"""The released npm client of Wörterbuch, unmodified, against our server (`make interop`; skipped without Node)."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import LiveServer, configure

PROGRAM = Path(__file__).parent / "worterbuch_js"
SECONDS = 250


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program and the packages that it needs, installed once."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("Node.js and npm are not installed: worterbuch-js was not run (Debian: apt-get install nodejs npm)")
    cache = os.environ.get("BABELBUS_INTEROP_FOLDER")
    folder = Path(cache, "worterbuch_js") if cache else tmp_path_factory.mktemp("worterbuch_js")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "run.js"):
        shutil.copy(PROGRAM / name, folder / name)
    if not (folder / "node_modules" / "worterbuch-js").is_dir():
        command = [npm, "install", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error"]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
        if ran.returncode:
            pytest.skip(f"npm could not install worterbuch-js: {ran.stderr.strip()[-300:]}")
    return folder


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(configure(tmp_path / "data")) as running:
        yield running


@pytest.mark.interop
@pytest.mark.parametrize("transport", ["ws", "tcp"])
def test_worterbuch_js_does_everything_that_its_interface_offers(
    program: Path, live: LiveServer, transport: str
) -> None:
    web, tcp = live.server.addresses["worterbuch"], live.server.addresses["worterbuch-tcp"]
    address = f"ws://{web}/ws" if transport == "ws" else f"tcp://{tcp}"
    ran = subprocess.run(
        ["node", "run.js", address, "js"], cwd=program, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.rstrip().endswith("done")
