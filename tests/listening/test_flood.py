"""5,000 connections that begin and never go on, from eleven addresses, on a server with fewer descriptors than that."""

import contextlib
import json
import os
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from babelbus.clients.sbus import Client as SbusClient
from babelbus.clients.worterbuch.blocking import BlockingClient as TreeClient
from babelbus.config import (
    AdminSettings,
    Config,
    EventmeshSettings,
    JebpSettings,
    ServerSettings,
    WorterbuchSettings,
    ZbusSettings,
)
from tests.protocols.eventmesh.test_grpc import Legacy
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.child import Child
from tests.support.eventmesh import MeshClient
from tests.support.jebp import create, create_topic, said
from tests.support.server import configure
from tests.support.zbus import HttpClient, SocketClient

FLOOD = 5_000
ADDRESSES = 11
HANDSHAKES_MAX = 400
"""Unfinished handshakes of one address: ten addresses fill the descriptors, the first one passes this limit."""
DESCRIPTORS = 3_000
FIRST = 1_000
"""Connections of the first address."""
MEMORY_BYTES_MAX = 64 * 2**20
HTTP = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
BEGINNINGS = {
    "jebp": b"",
    "zbus": HTTP,
    "worterbuch": HTTP[:1],
    "eventmesh-tcp": b"EventMesh",
    "eventmesh-http": HTTP,
    "eventmesh-grpc": b"PRI * HTTP/2.0\r\n",
    "admin": HTTP,
}
"""Listener -> how a client begins that never goes on."""
LISTENERS = tuple(BEGINNINGS)
NEVER = 3_600.0
"""No handshake runs out of time: what is measured does not depend on the speed of the machine."""


def config_of(folder: Path) -> Config:
    config = configure(
        folder / "data",
        jebp=JebpSettings(port=0, handshake_seconds=NEVER),
        worterbuch=WorterbuchSettings(port=0, tcp_port=0, handshake_seconds=NEVER),
        zbus=ZbusSettings(port=0, handshake_seconds=NEVER),
        eventmesh=EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, handshake_seconds=NEVER),
        # Who measures and asks comes from 127.0.0.1, the flood from other addresses of this machine.
        server=ServerSettings(handshakes_per_address_max=HANDSHAKES_MAX, uncounted_networks="127.0.0.1/32"),
    )
    return msgspec.structs.replace(config, admin=AdminSettings(port=0, handshake_seconds=NEVER))


@pytest.fixture
def room() -> Iterator[None]:
    """Descriptors for both the flood and the rest of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FLOOD + 1_000
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Half:
    """Half connections: each has sent a part of a beginning, or nothing."""

    def __init__(self, addresses: dict[str, str], stack: contextlib.ExitStack) -> None:
        self._addresses = addresses
        self._stack = stack
        self.open: list[socket.socket] = []

    def begin(self, number: int, source: str) -> None:
        listener = LISTENERS[number % len(LISTENERS)]
        host, _, port = self._addresses[listener].rpartition(":")
        made = self._stack.enter_context(socket.socket())
        made.bind((source, 0))
        made.connect((host, int(port)))
        with contextlib.suppress(OSError):  # the server has closed it already
            made.sendall(BEGINNINGS[listener])
        self.open.append(made)


def descriptors_of(child: Child) -> int:
    return len(os.listdir(f"/proc/{child.pid}/fd"))


def memory_of(child: Child) -> int:
    lines = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii").splitlines()
    (size,) = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
    return int(size) * 1024


def metrics_of(operator: HttpClient) -> dict[str, float]:
    lines = operator.ask("GET", "/metrics").body.decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def refused(metrics: dict[str, float], reason: str) -> float:
    return sum(value for name, value in metrics.items()
               if name.startswith("babelbus_connections_refused_total{") and f'reason="{reason}"' in name)  # fmt: skip


def seen(metrics: dict[str, float]) -> float:
    """Connections that came so far, but those to the administration, where the test itself asks."""
    names = ("babelbus_connections_accepted_total{", "babelbus_connections_refused_total{")
    return sum(value for name, value in metrics.items() if name.startswith(names) and '"admin"' not in name)


def clients_of(child: Child, stack: contextlib.ExitStack) -> dict[str, Callable[[], Any]]:
    """An established client of each protocol: what it does, which fails if it is not served."""
    addresses, enter = child.addresses, stack.enter_context
    jebp, zbus = child.caller(), enter(SocketClient(addresses["zbus"]))
    stack.callback(jebp.close)
    tree = enter(TreeClient(f"tcp://{addresses['worterbuch-tcp']}"))
    web_tree = enter(TreeClient(f"ws://{addresses['worterbuch']}"))
    mesh = enter(MeshClient(addresses["eventmesh-tcp"])).hello(purpose="pub")
    web = enter(HttpClient(addresses["eventmesh-http"]))
    package = Legacy(enter(grpc.insecure_channel(addresses["eventmesh-grpc"])))
    sbus = enter(SbusClient(addresses["sbus"], timeout_seconds=SAFETY_NET_SECONDS))
    assert said(jebp.ask(create_topic("kept"))[0]) == "a130"
    return {
        "jebp": lambda: said(jebp.ask(create("kept", b"x"))[0]) == "a130",
        "zbus": lambda: zbus.do("create", mq="kept")["status"] == 200,
        "worterbuch": lambda: tree.set("kept", 1) is None,
        "worterbuch-websocket": lambda: web_tree.set("kept", 2) is None,
        "eventmesh-tcp": lambda: mesh.publish("kept", "x")["code"] == 0,
        "eventmesh-http": lambda: web.ask("POST", "/eventmesh/publish/kept", b"{}").status == 200,
        "eventmesh-grpc": lambda: package.code(package.ask("publish", package.publication("kept", "x"))) == "0",
        "sbus": lambda: sbus.whoami() is not None,
    }


@pytest.mark.usefixtures("room")
def test_5000_half_connections_leave_the_others_served(tmp_path: Path) -> None:
    with Child(config_of(tmp_path)) as child, contextlib.ExitStack() as stack:
        hard = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
        clients, operator = clients_of(child, stack), stack.enter_context(HttpClient(child.addresses["admin"]))
        for name, do in clients.items():
            assert do(), name
        before, seen_before = memory_of(child), seen(metrics_of(operator))
        flood = Half(child.addresses, stack.enter_context(contextlib.ExitStack()))

        for number in range(FIRST):
            flood.begin(number, "127.0.0.2")
        while refused(metrics_of(operator), "address_handshakes") < FIRST - HANDSHAKES_MAX:
            pass
        for number in range(FIRST, FLOOD):
            flood.begin(number, f"127.0.0.{3 + number % (ADDRESSES - 1)}")
            if not number % 500:
                for name, do in clients.items():  # in the middle of it, too
                    assert do(), name

        expected = seen_before + sum(LISTENERS[number % len(LISTENERS)] != "admin" for number in range(FLOOD))
        while seen(metrics := metrics_of(operator)) < expected:
            pass
        assert seen(metrics) == expected
        assert refused(metrics, "descriptors") > 0
        kept = FLOOD - refused(metrics, "descriptors") - refused(metrics, "address_handshakes")
        assert HANDSHAKES_MAX < kept < DESCRIPTORS
        assert descriptors_of(child) < DESCRIPTORS
        assert memory_of(child) - before < MEMORY_BYTES_MAX
        # What is left is for files: a topic is a folder with files that are open.
        token = (tmp_path / "data" / "conf" / "admin_token").read_text(encoding="ascii").strip()
        asked = {"authorization": f"Bearer {token}", "content_type": "application/json"}
        for number in range(20):
            body = json.dumps({"name": f"more{number}"}).encode()
            assert operator.ask("POST", "/api/topics", body, **asked).status == 201
        for name, do in clients.items():
            assert do(), name

        for one in flood.open:
            one.close()
        while metrics_of(operator)['babelbus_connections{protocol="jebp"}'] > 1:
            pass
        with child.caller() as late:
            assert said(late.ask(create("kept", b"late"))[0]) == "a130"
        child.stop()
