"""A whole cluster on loopback: three servers of NATS, and three of ours that reach NATS and each other over ways.

Each member is a process of `babelbus serve` with a configuration file, and a supervisor that starts it again when it
ends without being told to, as systemd does.
"""

import asyncio
import base64
import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

from babelbus.protocols.jebp.identity import Identity
from babelbus.testing.ports import free_ports
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.nats import NatsServer, nats_cluster
from tests.support.way import Way

ROOT = Path(__file__).parent.parent.parent
BABELBUS = str(Path(sys.executable).parent / "babelbus")
LOOK_SECONDS = 0.05
"""How often a condition in another process is looked at again."""
RESTART_SECONDS = 0.5
"""How long the supervisor waits before it starts a member again."""
SAID_CHARACTERS = 200_000
ERROR_CHARACTERS = 2_000
LISTENERS = (
    "jebp.port", "worterbuch.port", "worterbuch.tcp_port", "zbus.port",
    "eventmesh.tcp_port", "eventmesh.http_port", "eventmesh.grpc_port", "admin.port",
)  # fmt: skip
Sections = dict[str, dict[str, Any]]


def until(condition: Callable[[], bool], seconds: float = SAFETY_NET_SECONDS) -> bool:
    """Return True when a condition holds, False if the time passes before."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def render(sections: Sections) -> str:
    """Return the text of a configuration file."""
    lines = []
    for name, values in sections.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


class Member:
    """One server of ours: its process, its ports, and its ways to NATS."""

    def __init__(self, folder: Path, name: str, ways: list[Way], link: Way, sections: Sections) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir()
        self.ways = ways
        self.link = link
        """The way that other members take to it."""
        self.addresses = {}
        for key in LISTENERS:
            section, _, port = key.partition(".")
            label = section if port == "port" else f"{section}-{port.removesuffix('_port')}"
            self.addresses[label] = f"127.0.0.1:{sections[section][port]}"
        self.addresses["sbus"] = str(self.folder / "data" / "run" / "sbus.socket")
        self._config = self.folder / "babelbus.toml"
        self._config.write_text(render({**sections, "data": {"folder": str(self.folder / "data")}}))
        self.log = self.folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._runs = False
        self.restarts = 0
        """How often it has ended by itself."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process, and a supervisor of it."""
        with self._lock:
            self._runs = True
            self._launch()
        threading.Thread(target=self._supervise, daemon=True).start()

    def _launch(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [BABELBUS, "serve", "--json", "--config", str(self._config)],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
                stdout=log,
                stderr=log,
            )

    def _supervise(self) -> None:
        process = self._process
        while process is not None:
            process.wait()
            if self._runs and self._process is process:
                self.restarts += 1
                time.sleep(RESTART_SECONDS)
            with self._lock:
                if not self._runs or self._process is not process:
                    return
                self._launch()
                process = self._process

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        with self._lock:
            if self._process is not None:
                self._process.send_signal(number)

    def end(self, number: int = SIGKILL) -> None:
        """End the process with a signal, and wait until it is gone."""
        with self._lock:
            self._runs = False
            process = self._process
        if process is not None:
            process.send_signal(number)
            try:
                process.wait(SAFETY_NET_SECONDS)
            finally:
                process.kill()
                process.wait()

    def gives_the_data_away(self) -> bool:
        """Return whether this owner begins to give the data to another member."""
        token = (self.folder / "data/conf/admin_token").read_text().strip()
        connection = http.client.HTTPConnection(self.addresses["admin"], timeout=SAFETY_NET_SECONDS)
        try:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request("POST", "/api/cluster/move", b"{}", headers)
            return connection.getresponse().status == 202
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def pause(self) -> None:
        """Stop the process in the middle of whatever it does."""
        self.signal(SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        self.signal(SIGCONT)

    def edges(self) -> list[int]:
        """Return the ids of the processes that accept clients for this one."""
        found: list[int] = []
        for thread in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended
                children = [Path("/proc", child) for child in thread.read_text().split()]
                found += [int(one.name) for one in children if b"server.edge" in (one / "cmdline").read_bytes()]
        return found

    def errors(self) -> list[str]:
        """Return what it has logged of errors of ours, with what stands behind each."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return [f"Traceback{error[:ERROR_CHARACTERS]}" for error in text.split("Traceback")[1:]]

    def said(self) -> str:
        """Return the last of what it has logged, over all its runs."""
        return self.log.read_text(errors="replace")[-SAID_CHARACTERS:] if self.log.exists() else ""


class BusCluster:
    """The six servers; each member has `processes` that accept clients, if more than one."""

    def __init__(self, folder: Path, servers: list[NatsServer], *, lease_seconds: float, processes: int = 1) -> None:
        self.folder = folder
        self.servers = servers
        self.lease_seconds = lease_seconds
        self.processes = processes
        self.disk: SmallDisk | None = None
        """The disk of the last server of NATS, if it has one of its own."""
        self.members: list[Member] = []
        for number in range(3):
            ports = free_ports(len(LISTENERS) + 1)
            ways = [Way(f"127.0.0.1:{server.port}") for server in servers]
            link = Way(f"127.0.0.1:{ports[-1]}")
            sections = self._sections(ports, ways)
            sections["cluster"] = {
                "enabled": True,
                "name": f"m{number}",
                "host": "127.0.0.1",
                "port": ports[-1],
                "advertise": link.address,
            }
            self.members.append(Member(folder, f"m{number}", ways, link, sections))

    def _sections(self, ports: list[int], ways: list[Way]) -> Sections:
        sections: Sections = {}
        for key, port in zip(LISTENERS, ports, strict=False):
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = port
        sections["eventmesh"]["webhook_networks"] = "127.0.0.0/8"
        sections["topics"] = {"engine": "jetstream", "ack": "replicated"}
        sections["jetstream"] = {
            "servers": ", ".join(f"nats://{way.address}" for way in ways),
            "replicas": 3,
            "shards": 2,
            "lease_seconds": self.lease_seconds,
        }
        sections["server"] = {"processes": self.processes}
        sections["log"] = {"level": "info"}
        return sections

    @property
    def identity(self) -> Identity:
        """The administrator's identity, which all members know."""
        for member in self.members:
            key = member.folder / "data" / "conf" / "admin_key"
            if key.exists():
                return Identity.load(key)
        raise FileNotFoundError("no member has an administrator's key yet")

    def start(self) -> None:
        """Start all members, the first one first, and wait until each takes clients."""
        first, *others = self.members
        first.start()
        assert until(lambda: listens(first.addresses["jebp"])), f"{first.name} does not listen:\n{first.said()[-2000:]}"
        for member in others:
            member.start()
            assert until(partial(listens, member.addresses["jebp"])), (
                f"{member.name} does not listen:\n{member.said()[-2000:]}"
            )

    def stop(self) -> None:
        """End all members at once, and their ways."""
        for member in self.members:
            member.resume()
            member.end()
        for member in self.members:
            for way in (*member.ways, member.link):
                way.heal()
                way.close()

    # -- who owns and leads ------------------------------------------------------------------------------------------

    def lease(self) -> str:
        """Return the record of the lease as text."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [record for record in [self._read_lease()] if record is not None]
            return bool(found)

        assert until(look), "NATS does not tell who has the lease"
        return found[0]

    def _read_lease(self) -> str | None:
        answer = self.ask_nats("$JS.API.STREAM.MSG.GET.bb-lease", {"last_by_subj": "bb.lease"})
        if answer is None or "message" not in answer:
            return None
        return base64.b64decode(answer["message"]["data"]).decode()

    def owner(self) -> Member:
        """Return the member that the lease names."""
        found: list[Member] = []

        def look() -> bool:
            fields = json.loads(self.lease())
            found[:] = [member for member in self.members if member.name == fields.get("name")]
            return bool(found)

        assert until(look), f"no member has the lease: {self.lease()}"
        return found[0]

    def has_moved_from(self, record: str) -> bool:
        """Return whether another process has the lease than in a record."""
        fields = json.loads(self.lease())
        return not fields.get("released", False) and bool(fields["owner"] != json.loads(record)["owner"])

    def leader(self, stream: str) -> NatsServer:
        """Return the server of NATS that leads a stream."""
        found: list[NatsServer] = []

        def look() -> bool:
            answer = self.ask_nats(f"$JS.API.STREAM.INFO.{stream}", {}) or {}
            leader = answer.get("cluster", {}).get("leader")
            found[:] = [server for server in self.servers if server.name == leader]
            return bool(found)

        assert until(look), f"stream {stream} has no leader"
        return found[0]

    def ask_nats(self, subject: str, request: object) -> Any:
        """Ask the API of JetStream on the short way; None if no server answers."""
        return asyncio.run(_ask([server.url for server in self.servers], subject, json.dumps(request).encode()))


async def _ask(urls: list[str], subject: str, request: bytes) -> Any:
    import nats
    import nats.errors

    async def ignore(_: Exception) -> None:
        """Leave errors of single addresses to the caller, who sees that nobody answers."""

    try:
        client = await nats.connect(
            urls, connect_timeout=1, max_reconnect_attempts=1, allow_reconnect=False, error_cb=ignore
        )
    except (TimeoutError, OSError, nats.errors.Error):
        return None
    try:
        return json.loads((await client.request(subject, request, timeout=2)).data)
    except (TimeoutError, OSError, nats.errors.Error):
        return None
    finally:
        await client.close()


def listens(address: str) -> bool:
    """Return whether somebody accepts connections at an address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


class SmallDisk:
    """A disk of its own for a server of NATS, that can be filled. Only root may mount one."""

    def __init__(self, folder: Path, size: str = "256m") -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.mounted = (
            os.geteuid() == 0
            and shutil.which("mount") is not None
            and subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
            ).returncode
            == 0
        )

    def fill(self) -> None:
        """Leave no byte."""
        with (self.folder / "ballast").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(2**20))
            except OSError:
                pass  # full, as it should be

    def free(self) -> None:
        """Give the room back."""
        (self.folder / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it."""
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


@contextmanager
def bus_cluster(*, lease_seconds: float, processes: int = 1, folder: Path | None = None) -> Iterator[BusCluster]:
    """Run the six servers."""
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="babelbus-cluster-")))
        disk = SmallDisk(folder / "disk")
        stack.callback(disk.close)
        stores = ("", "", str(disk.folder) if disk.mounted else "")
        servers = stack.enter_context(nats_cluster(sync="always", stores=stores))
        cluster = BusCluster(folder, servers, lease_seconds=lease_seconds, processes=processes)
        cluster.disk = disk if disk.mounted else None
        stack.callback(cluster.stop)
        yield cluster
