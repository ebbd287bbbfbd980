"""The released Python client of zbus, unmodified, against our server. Run by `make interop`."""

import os
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.config import ZbusSettings
from tests.support.server import LiveServer, configure

PROGRAM = Path(__file__).parent / "zbuspy" / "run.py"
PACKAGES = ("zbuspy==1.0.10", "websocket-client==0.57.0")  # a later websocket-client calls zbuspy in another way
SECONDS = 120
KEYS = ("2ba912a8-4a8d-49d2-1a22-198fd285cb06", "461277322-943d-4b2f-b9b6-3f860d746ffd")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has zbuspy and what it needs, made once."""
    cache = os.environ.get("BABELBUS_INTEROP_FOLDER")
    folder = Path(cache, "zbuspy") if cache else tmp_path_factory.mktemp("zbuspy")
    found = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        command = [str(found), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if ran.returncode:
            pytest.skip(f"zbuspy could not be installed: {ran.stderr.strip()[-300:]}")
        ready.touch()
    return found


@pytest.fixture(params=["plain", "signed"])
def live(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LiveServer]:
    auth_file = None
    if request.param == "signed":
        auth_file = str(tmp_path / "keys")
        Path(auth_file).write_text(f"# apiKey secretKey\n{KEYS[0]} {KEYS[1]}\n", encoding="utf-8")
    with LiveServer(configure(tmp_path / "data", zbus=ZbusSettings(port=0, auth_file=auth_file))) as running:
        yield running


@pytest.mark.interop
def test_a_zbuspy_program_publishes_takes_subscribes_and_calls_services(python: Path, live: LiveServer) -> None:
    keys = KEYS if live.config.zbus.auth_file is not None else ()
    command = [str(python), "-W", "ignore", str(PROGRAM), live.server.addresses["zbus"], *keys]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.rstrip().endswith("done"), ran.stdout + ran.stderr
