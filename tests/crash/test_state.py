"""SIGKILL under the state, on a real server: what was acknowledged is there, wills are executed, locks are gone.

Every writer has keys of its own and counts upwards in each, so that the value of a key says which set was the last.
The seed of a run is in the name of its test; BABELBUS_TEST_SEED chooses another first one.
"""

import json
import os
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from babelbus.clients.worterbuch.blocking import BlockingClient
from babelbus.clients.worterbuch.errors import NoSuchValueError
from babelbus.config import Config, StateSettings, WorterbuchSettings
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.child import Child
from tests.support.server import configure

SEED = int(os.environ.get("BABELBUS_TEST_SEED", "1"))
QUICK = range(SEED, SEED + 2)
SLOW = range(SEED + 2, SEED + 32)
KEYS = 7
CHECKPOINT = Path("state", "checkpoint")


def seeds() -> list[Any]:
    return [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)]


def settings(folder: Path, *, ack: str = "written", checkpoint_bytes: int = 16_384) -> Config:
    made = configure(folder, worterbuch=WorterbuchSettings(port=0, tcp_port=0, unix_path=str(folder / "w.sock")))
    state = StateSettings(ack=ack, checkpoint_bytes=checkpoint_bytes)  # type: ignore[arg-type]  # one of the three
    return Config(**{**{name: getattr(made, name) for name in made.__struct_fields__}, "state": state})


def url(folder: Path) -> str:
    return f"unix://{folder / 'w.sock'}"


class Writer(threading.Thread):
    """Sets its keys to 1, 2, 3, ..., pipelined and in bursts, until the server is gone; counts the acks."""

    def __init__(self, folder: Path, name: str, first: int, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(SAFETY_NET_SECONDS)
        self._socket.connect(str(folder / "w.sock"))
        self._lines = self._socket.makefile("rb")
        assert b"welcome" in self._lines.readline()
        self._chance = chance
        self._reached = threading.Condition()
        self.prefix = name
        self.sent = self.acknowledged = first
        self.refused: list[bytes] = []

    def run(self) -> None:
        try:
            while True:
                burst = self._chance.choice([1, 1, 3, 50, 400])
                numbers = range(self.sent + 1, self.sent + 1 + burst)
                self.sent += burst
                self._socket.sendall(b"".join(map(self._request, numbers)))
                for number in numbers:
                    line = self._lines.readline()
                    if not line:
                        raise ConnectionResetError
                    if line != b'{"ack":{"transactionId":%d}}\n' % number:
                        self.refused.append(line)
                    with self._reached:
                        self.acknowledged = number
                        self._reached.notify_all()
        except OSError:  # the server was killed
            self._lines.close()
            self._socket.close()

    def _request(self, number: int) -> bytes:
        message = {"transactionId": number, "key": f"{self.prefix}/{number % KEYS}", "value": [number, "x" * 50]}
        return json.dumps({"set": message}).encode() + b"\n"

    def wait_for(self, count: int) -> None:
        """Return when so many more are acknowledged."""
        with self._reached:
            begun = self.acknowledged
            assert self._reached.wait_for(lambda: self.acknowledged >= begun + count, SAFETY_NET_SECONDS)


def check(client: BlockingClient, writer: Writer) -> None:
    """Each key holds its last acknowledged value, or one that was sent after it; the order of sets is kept."""
    found = {key: value[0] for key, value in client.pget(f"{writer.prefix}/#").items()}
    for key, number in found.items():
        assert f"{writer.prefix}/{number % KEYS}" == key
    last = max(found.values(), default=0)
    assert writer.acknowledged <= last <= writer.sent
    for number in range(max(last - KEYS, 0) + 1, last + 1):  # what is there ends at one set, without gaps
        assert found[f"{writer.prefix}/{number % KEYS}"] == number


def leave_whole(folder: Path) -> None:
    """Do nothing to the checkpoint."""
    del folder


def tear(folder: Path) -> None:
    """Cut the checkpoint in half, as a crash of another program would."""
    path = folder / CHECKPOINT
    if path.exists():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(folder: Path) -> None:
    """Change one bit in the middle of the checkpoint."""
    path = folder / CHECKPOINT
    if path.exists():
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 16
        path.write_bytes(content)


def remove(folder: Path) -> None:
    """Take the checkpoint away."""
    (folder / CHECKPOINT).unlink(missing_ok=True)


@pytest.mark.parametrize("seed", seeds())
def test_after_a_kill_every_acknowledged_set_is_there_with_its_last_value(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    ack = ("written", "flushed")[seed % 2]
    lasts = [0, 0]
    for _ in range(2):  # the second run stands on what the first one left
        with Child(settings(tmp_path, ack=ack)) as child:
            writers = [Writer(tmp_path, f"w{number}", last, chance) for number, last in enumerate(lasts)]
            for writer in writers:
                writer.start()
            writers[0].wait_for(chance.choice([1, 50, 500, 2000]))
            child.kill()
            for writer in writers:
                writer.join(SAFETY_NET_SECONDS)
                assert not writer.refused
        damage: Callable[[Path], None] = chance.choice([leave_whole, leave_whole, tear, flip, remove])
        damage(tmp_path)
        with Child(settings(tmp_path, ack=ack)) as child, BlockingClient(url(tmp_path)) as client:
            for number, writer in enumerate(writers):
                check(client, writer)
                found = [value[0] for value in client.pget(f"w{number}/#").values()]
                lasts[number] = max(found, default=0)
            child.kill()


@pytest.mark.parametrize("damage", [leave_whole, tear, flip, remove])
def test_a_start_needs_no_checkpoint_to_know_everything(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with Child(settings(tmp_path)) as child:
        with BlockingClient(url(tmp_path)) as client:
            client.send_many((f"k/{number % 500}", [number, "x" * 50]) for number in range(3000))
            client.flush()
            client.cset("versioned", "v", 0)
            client.delete("k/7")
        assert child.stop() == 0
    assert (tmp_path / CHECKPOINT).exists()
    damage(tmp_path)
    with Child(settings(tmp_path)) as child, BlockingClient(url(tmp_path)) as client:
        expected = {f"k/{number % 500}": [number, "x" * 50] for number in range(2500, 3000)}
        del expected["k/7"]
        assert client.pget("k/#") == expected
        assert client.cget("versioned").version == 1
        with pytest.raises(NoSuchValueError):
            client.get("k/7")
        child.kill()


def test_wills_of_clients_that_vanished_with_the_server_are_executed_and_locks_are_gone(tmp_path: Path) -> None:
    with Child(settings(tmp_path)) as child:
        client, other = BlockingClient(url(tmp_path)), BlockingClient(url(tmp_path))
        client.set_grave_goods(["session/#", "$SYS/#"])
        client.set_last_will({"status": "gone", "session/kept": 1, "versioned": "will"})
        client.cset("versioned", "v", 0)
        client.set("session/x", 1)
        client.set("status", "here")
        client.lock("mine")
        other.set_last_will({"other": "gone"})
        other.set(f"$SYS/clients/{other.client_id}/lastWill", [])  # taken back
        child.kill()
        client.close()
        other.close()
    for _ in range(2):  # the second start has nothing left to do
        with Child(settings(tmp_path)) as child, BlockingClient(url(tmp_path)) as client:
            assert client.get("status") == "gone"
            assert client.pget("session/#") == {"session/kept": 1}
            assert (client.cget("versioned").value, client.cget("versioned").version) == ("will", 0)
            for key in ("other", "$SYS/locks/mine"):
                with pytest.raises(NoSuchValueError):
                    client.get(key)
            client.lock("mine")
            assert client.get("$SYS/clients") == 1
            assert len(client.ls("$SYS/clients")) == 1
            client.set("status", "gone")
            child.kill()


def test_a_client_that_is_killed_leaves_what_it_said_and_its_locks_go_on(tmp_path: Path) -> None:
    with Child(settings(tmp_path)) as child, BlockingClient(url(tmp_path)) as client:
        victim = socket.socket(socket.AF_UNIX)
        victim.connect(str(tmp_path / "w.sock"))
        lines = victim.makefile("rb")
        name = json.loads(lines.readline())["welcome"]["clientId"]
        will = [{"key": "status", "value": "gone"}]
        for request in (
            {"set": {"transactionId": 1, "key": f"$SYS/clients/{name}/lastWill", "value": will}},
            {"lock": {"transactionId": 2, "key": "l"}},
        ):
            victim.sendall(json.dumps(request).encode() + b"\n")
            assert b"ack" in lines.readline()
        status = client.subscribe("status")
        lines.close()
        victim.close()
        client.acquire_lock("l")
        assert next(status).values == {"status": "gone"}
        assert child.stop() == 0
