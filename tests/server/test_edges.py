"""Edge processes of a server, and an edge that is another server of the cluster."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from babelbus.clock import SystemClock
from babelbus.config import Config, ServerSettings, ZbusSettings
from babelbus.errors import BabelbusError, ConfigError, StorageError
from babelbus.link import core
from babelbus.link.client import EdgeListener
from babelbus.link.edge import Edge
from babelbus.listening.certificates import Certificates
from babelbus.listening.sockets import open_sockets
from babelbus.server import edges
from babelbus.server.member import Member
from babelbus.server.own_listeners import ADMIN, openings_of
from tests.server.test_descriptors import ROOM, limited
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.http import ResponseDecoder
from tests.support.jebp import Caller, create, create_topic, said
from tests.support.server import LiveServer, configure

RECORDS = 200


def configured(folder: Path, processes: int = 2) -> Config:
    return configure(folder, server=ServerSettings(processes=processes), admin=True)


def pids(live: LiveServer) -> dict[str, int]:
    assert live.server._edges is not None
    return {name: process.pid for name, process in live.server._edges.processes.items()}


def edge_of(live: LiveServer, caller: Caller) -> str:
    """The name of the edge that has the connection of a client."""
    address = "{}:{}".format(*caller.socket.getsockname())
    (connection,) = [one for one in live.connections if one.peer == address]
    return str(connection.transport.get_extra_info("edge"))


def counted(live: LiveServer, name: str, **labels: str) -> float:
    return live.server.metrics.registry.get_sample_value(f"babelbus_{name}", labels) or 0.0


def test_clients_are_spread_over_the_edges_and_shown_with_their_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "HELLO_SECONDS", 0.001)  # a busy machine takes long to start a process
    with LiveServer(configured(tmp_path)) as live, contextlib.ExitStack() as stack:
        callers = [stack.enter_context(live.caller()) for _ in range(32)]
        names = {edge_of(live, caller) for caller in callers}
        assert names == {"1", "2"}
        assert counted(live, "links") == 2
        assert sum(counted(live, "edge_connections", edge=name) for name in names) == 32
        assert all(counted(live, "edge_bytes", edge=name) > 0 for name in names)
        assert {one.describe().edge for one in live.connections} == names


def test_a_killed_edge_ends_its_clients_alone_and_is_started_again(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path)) as live, contextlib.ExitStack() as stack:
        with live.caller() as caller:
            caller.ask(create_topic("kept"), create("kept", b"first"))
        before = pids(live)
        callers = [stack.enter_context(live.caller()) for _ in range(16)]
        victim = edge_of(live, callers[0])
        lost = [caller for caller in callers if edge_of(live, caller) == victim]
        others = [caller for caller in callers if caller not in lost]
        acknowledged: list[bytes] = []

        def publish(caller: Caller, name: int) -> None:
            with contextlib.suppress(OSError, AssertionError):
                for number in range(10**9):
                    payload = b"%d %d" % (name, number)
                    caller.ask(create("kept", payload))
                    acknowledged.append(payload)

        threads = [threading.Thread(target=publish, args=(caller, at)) for at, caller in enumerate(lost)]
        for thread in threads:
            thread.start()
        while len(acknowledged) < RECORDS:
            pass
        os.kill(before[victim], signal.SIGKILL)
        for thread in threads:
            thread.join()
        live.until(lambda: len(live.connections) == len(others))
        for caller in others:
            assert said(caller.ask(create("kept", b"goes on"))[0]) == "a130"
        live.until(lambda: pids(live)[victim] != before[victim] and len(live.server.core_end.links) == 2)
        assert counted(live, "edge_starts_total", edge=victim) == 2
        with live.caller() as caller:
            caller.ask(create("kept", b"last"))
        topic = live.server.broker.find_topic("kept")
        assert topic is not None
        # What was acknowledged is there; a record whose ack was lost with the edge may be.
        assert topic.partitions[0].high_watermark >= len(acknowledged) + len(others) + 2


class Lines:
    """A client of Wörterbuch."""

    def __init__(self, live: LiveServer) -> None:
        host, _, port = live.server.addresses["worterbuch-tcp"].rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=SAFETY_NET_SECONDS)
        self._file = self.socket.makefile("rb")
        self.client_id = self.next()["welcome"]["clientId"]
        address = "{}:{}".format(*self.socket.getsockname())
        (connection,) = [one for one in live.connections if one.peer == address]
        self.edge = connection.transport.get_extra_info("edge")

    def next(self) -> Any:
        return json.loads(self._file.readline())

    def ask(self, **message: Any) -> Any:
        self.socket.sendall(json.dumps(message).encode() + b"\n")
        return self.next()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.socket.close()


def test_a_killed_edge_frees_locks_and_fires_wills_once(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path)) as live, contextlib.ExitStack() as stack:
        victim = stack.enter_context(Lines(live))
        waiter = stack.enter_context(Lines(live))
        while waiter.edge == victim.edge:
            waiter = stack.enter_context(Lines(live))
        will = [{"key": "will", "value": "gone"}]
        victim.ask(set={"transactionId": 1, "key": f"$SYS/clients/{victim.client_id}/lastWill", "value": will})
        assert "ack" in victim.ask(lock={"transactionId": 2, "key": "l"})
        waiter.ask(subscribe={"transactionId": 1, "key": "will", "unique": False, "liveOnly": True})
        assert "err" in waiter.ask(lock={"transactionId": 2, "key": "l"})
        waiter.socket.sendall(b'{"acquireLock": {"transactionId": 3, "key": "l"}}\n')
        os.kill(pids(live)[victim.edge], signal.SIGKILL)
        heard = [waiter.next(), waiter.next()]
        assert sorted(next(iter(message)) for message in heard) == ["ack", "state"]
        (event,) = [message["state"] for message in heard if "state" in message]
        assert event["value"] == "gone"
        # Nothing comes twice: the next thing that is heard is the answer to the next question.
        assert "state" in waiter.ask(get={"transactionId": 9, "key": "will"})


def test_edges_end_with_their_link_and_one_that_hangs_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edges, "END_SECONDS", 0.5)
    with LiveServer(configured(tmp_path)) as live:
        os.kill(pids(live)["1"], signal.SIGSTOP)
        for link in list(live.server.core_end.links):
            live.call(lambda link=link: link.end("a test"))  # type: ignore[misc]
        before = set(pids(live).values())
        live.until(lambda: not before & set(pids(live).values()) and len(live.server.core_end.links) == 2)
        for pid in before:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_a_member_whose_lease_ends_begins_again_when_its_edges_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LiveServer(configured(tmp_path)) as live:
        before = pids(live)
        member = Member(live.server.config)
        member._core = live.server
        left: list[list[Path]] = []
        member.on_ended = lambda: left.append([path for path in map(process_of, before.values()) if path.exists()])
        live.call(lambda: member._lose(StorageError("a test")))  # a loop that hangs cannot keep the edges
        assert left == [[]]
        live.until(lambda: caplog.text.count("cannot be started: the core ends") >= len(before))
        assert pids(live) == before


def process_of(pid: int) -> Path:
    return Path("/proc", str(pid))


def test_edges_let_a_stop_of_the_group_of_processes_to_the_core(tmp_path: Path) -> None:
    with LiveServer(configured(tmp_path)) as live, live.caller() as caller:
        for pid in pids(live).values():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(pid, number)
        for _ in range(3):
            caller.ask(create("kept", b"x"))
        left = pids(live)
    for pid in left.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_address_that_is_taken_is_refused_at_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = configure(tmp_path, server=ServerSettings(processes=2), zbus=ZbusSettings(port=other.getsockname()[1]))
        with pytest.raises(OSError, match="in use"), LiveServer(config):
            pass


def test_edges_need_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(ConfigError, match="needs Linux"), LiveServer(configured(tmp_path)):
        pass


def test_an_edge_that_cannot_start_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "MODULE", "babelbus.server.nothing")
    with pytest.raises(BabelbusError, match="closed"), LiveServer(configured(tmp_path)):
        pass


@contextlib.contextmanager
def member(live: LiveServer, config: Config) -> Iterator[dict[str, tuple[str, int]]]:
    """An edge in a thread of its own, linked over TCP, with the listeners of its own configuration; their addresses."""
    addresses: dict[str, tuple[str, int]] = {}
    ready, done = threading.Event(), threading.Event()

    async def run() -> None:
        edge = Edge("other", SystemClock())
        listeners, certificates = [], Certificates(config.tls)
        for one in openings_of(config):
            sockets = await open_sockets(one.host, one.port)
            tls, is_admin = one.make_tls(certificates), one.name == ADMIN
            listeners.append(EdgeListener(one.name, sockets, tls, one.handshake_seconds, is_admin=is_admin))
        addresses.update({one.name: one.sockets[0].getsockname() for one in listeners})
        await edge.open(listeners)
        host, _, port = live.server.core_end.address.rpartition(":")
        await edge.connect(host, int(port))
        ready.set()
        await asyncio.get_running_loop().run_in_executor(None, done.wait)
        await edge.stop()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(SAFETY_NET_SECONDS)
    try:
        yield addresses
    finally:
        done.set()
        thread.join()


def test_a_member_relays_every_listener_the_administration_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with LiveServer(configured(tmp_path / "owner", processes=1)) as live:
        live.run(lambda: live.server.core_end.listen("127.0.0.1", 0))
        with member(live, configured(tmp_path / "other")) as addresses:
            assert addresses.keys() == live.server.entrances.by_name.keys()
            with Caller("{}:{}".format(*addresses["jebp"]), live.admin).connect() as caller:
                caller.ask(create("kept", b"x"))
                assert edge_of(live, caller) == "other"
            for name, path, status in (("admin", "/ready", 200), ("admin", "/metrics", 200), ("zbus", "/", 200)):
                with socket.create_connection(addresses[name], timeout=SAFETY_NET_SECONDS) as client:
                    client.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
                    data = b""
                    while part := client.recv(65536):
                        data += part
                    decoder = ResponseDecoder(body_bytes_max=2**24)
                    decoder.receive_data(data)
                    assert int(data.split(b" ", 2)[1]) == status, (name, data[:200])
            assert b"babelbus_links 1.0" in data or name == "zbus"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_clients_of_a_member_leave_descriptors_to_the_administration(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        live = stack.enter_context(LiveServer(configured(tmp_path / "owner", processes=1)))
        live.run(lambda: live.server.core_end.listen("127.0.0.1", 0))
        addresses = stack.enter_context(member(live, configured(tmp_path / "other")))
        stack.enter_context(limited((len(os.listdir("/proc/self/fd")) + ROOM) * 4 // 3))

        def dial(name: str) -> socket.socket:
            return stack.enter_context(socket.create_connection(addresses[name], SAFETY_NET_SECONDS))

        def is_refused() -> bool:
            with contextlib.suppress(ConnectionResetError):
                return not dial("jebp").recv(100)
            return True

        assert any(is_refused() for _ in range(ROOM))
        client = dial("admin")
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
