"""sbus clients for tests: blocking, with a time limit instead of a hang."""

from collections.abc import Callable
from pathlib import Path

import pytest

from babelbus.clients.sbus import Client
from babelbus.config import (
    AdminSettings,
    Config,
    DataSettings,
    EventmeshSettings,
    JebpSettings,
    SbusSettings,
    WorterbuchSettings,
    ZbusSettings,
)
from babelbus.protocols.sbus.messages import Control, Publish
from babelbus.protocols.sbus.service import SbusService
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.server import LiveServer


def configured(folder: Path, **sbus: object) -> Config:
    """A configuration with these settings of sbus."""
    return Config(
        data=DataSettings(str(folder)),
        jebp=JebpSettings(port=0),
        admin=AdminSettings(enabled=False, port=0),
        worterbuch=WorterbuchSettings(port=0, tcp_port=0),
        zbus=ZbusSettings(port=0),
        eventmesh=EventmeshSettings(enabled=False),
        sbus=SbusSettings(**sbus),  # type: ignore[arg-type]  # as the test gives them
    )


def service_of(live: LiveServer) -> SbusService:
    """The sbus of a server."""
    service = live.server.services["sbus"]
    assert isinstance(service, SbusService)
    return service


def join(live: LiveServer, *patterns: bytes, controls: tuple[bytes, ...] = ()) -> Client:
    """A client whose subscriptions and wishes are in force."""
    client = Client(live.server.addresses["sbus"], timeout_seconds=SAFETY_NET_SECONDS)
    for control in controls:
        client.control(control)
    for pattern in patterns:
        client.subscribe(pattern)
    client.whoami()
    return client


def payloads(client: Client, count: int) -> list[bytes | None]:
    """The payloads of the next messages."""
    found = []
    for _ in range(count):
        message = client.receive()
        assert isinstance(message, Publish), message
        found.append(message.payload)
    return found


def heard_before_barrier(client: Client) -> list[Publish]:
    """What came to a client before the answer to whoami, which it asks for now."""
    client.control(b"!/cred/whoami")
    heard: list[Publish] = []
    while not isinstance(message := client.receive(), Control):
        assert isinstance(message, Publish)
        heard.append(message)
    return heard


def is_cut(client: Client) -> bool:
    """Whether the server closes this connection."""
    try:
        while True:
            client.receive_packet()
    except ConnectionResetError:
        return True
    except TimeoutError:
        pytest.fail("the server keeps the connection")


def publish_until_stopped(live: LiveServer, client: Client, key: bytes, make: Callable[[int], bytes]) -> int:
    """Publish `make(0)`, `make(1)`, ... until the server reads no more from this client; give how many were sent."""
    connections = service_of(live).server.connections
    sent, stopped = 0, False
    timeout = client.socket.gettimeout()
    client.socket.setblocking(False)
    while True:
        try:
            client.publish(key, make(sent))
            sent += 1
        except BlockingIOError:  # full for now, or for as long as somebody does not read
            if stopped:
                client.socket.settimeout(timeout)
                return sent
            stopped = live.call(lambda: any(one._stopped_by for one in connections))
