"""The released Python client of zbus, unmodified, against our server. Run by `make interop`."""

import os
import subprocess
import threading
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.config import ZbusSettings
from babelbus.testing.ports import free_ports
from tests.support.child import Child
from tests.support.server import LiveServer, configure
from tests.support.zbus import SocketClient

PROGRAM = Path(__file__).parent / "zbuspy" / "run.py"
WORKER = Path(__file__).parent / "zbuspy" / "worker.py"
PACKAGES = ("zbuspy==1.0.10", "websocket-client==0.57.0")  # a later websocket-client calls zbuspy in another way
SECONDS = 250
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
        Path(auth_file).chmod(0o600)
    with LiveServer(configure(tmp_path / "data", zbus=ZbusSettings(port=0, auth_file=auth_file))) as running:
        yield running


@pytest.mark.interop
def test_a_zbuspy_program_publishes_takes_subscribes_and_calls_services(python: Path, live: LiveServer) -> None:
    keys = KEYS if live.config.zbus.auth_file is not None else ()
    command = [str(python), "-W", "ignore", str(PROGRAM), live.server.addresses["zbus"], *keys]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.rstrip().endswith("done"), ran.stdout + ran.stderr


@pytest.mark.interop
def test_a_zbuspy_worker_goes_on_with_its_disk_channel_after_a_kill_of_the_server(python: Path, tmp_path: Path) -> None:
    config = configure(tmp_path, zbus=ZbusSettings(port=free_ports(1)[0]))
    with Child(config) as child:
        address = child.addresses["zbus"]
        with (
            subprocess.Popen(
                [str(python), "-W", "ignore", str(WORKER), address], stdout=subprocess.PIPE, text=True
            ) as worker,
            Lines(worker) as lines,
        ):
            lines.wait_for("open")
            with SocketClient(address) as client:
                client.do("pub", "before", mq="work")
            lines.wait_for("got before")
            child.kill()
            with Child(config), SocketClient(address) as client:
                client.do("pub", "after", mq="work")
                lines.wait_for("open")
                lines.wait_for("got after")


class Lines:
    """What a program prints, and its end."""

    def __init__(self, program: "subprocess.Popen[str]") -> None:
        self._program = program
        self._guard = threading.Timer(SECONDS, program.kill)

    def __enter__(self) -> "Lines":
        self._guard.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._guard.cancel()
        self._program.kill()

    def wait_for(self, wanted: str) -> None:
        """Return when the program has printed this line; what it prints in front of it is passed."""
        assert self._program.stdout is not None
        for line in self._program.stdout:
            if line.strip() == wanted:
                return
        raise AssertionError(f"the program ended and did not say {wanted!r}")
