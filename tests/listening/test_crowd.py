"""Caps for each address: connections that are open, and those whose client has not proved who it is."""

import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.config import Config, ServerSettings, TlsSettings
from babelbus.errors import ConfigError
from babelbus.listening.crowd import Crowd
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.certificates import Authority
from tests.support.jebp import subscribe
from tests.support.server import LiveServer, configure
from tests.support.zbus import SocketClient

LISTENERS = ["jebp", "zbus", "worterbuch", "eventmesh-tcp", "eventmesh-http", "admin"]


def settings(connections: int = 2_000, handshakes: int = 500) -> ServerSettings:
    return ServerSettings(
        connections_per_address_max=connections, handshakes_per_address_max=handshakes, uncounted_networks=None
    )


def config_of(folder: Path, server: ServerSettings, tls: TlsSettings | None = None) -> Config:
    return configure(folder / "data", server=server, admin=True, tls=tls)


@contextlib.contextmanager
def dial(live: LiveServer, listener: str) -> Iterator[socket.socket]:
    host, _, port = live.server.addresses[listener].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=SAFETY_NET_SECONDS) as client:
        yield client


def is_cut(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def refused(live: LiveServer, protocol: str, reason: str) -> float:
    labels = {"protocol": protocol, "reason": reason}
    sample = live.server.metrics.registry.get_sample_value
    return live.call(lambda: sample("babelbus_connections_refused_total", labels)) or 0.0


@pytest.mark.parametrize("listener", LISTENERS)
def test_unfinished_handshakes_of_one_address_have_a_cap(
    tmp_path: Path, listener: str, caplog: pytest.LogCaptureFixture
) -> None:
    protocol = listener.partition("-")[0]
    with LiveServer(config_of(tmp_path, settings(handshakes=3))) as live, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(dial(live, "jebp")) for _ in range(3)]
        live.until(lambda: len(live.connections) == 3)
        assert is_cut(stack.enter_context(dial(live, listener)))
        assert refused(live, protocol, "address_handshakes") == 1
        assert "3 clients of its address have not proved who they are" in caplog.text
        for one in silent:
            one.close()
        live.until(lambda: not live.connections)
        with live.caller(), live.caller(), live.caller(), live.caller():  # finished ones do not count
            pass


def test_connections_of_one_address_have_a_cap_over_all_listeners(tmp_path: Path) -> None:
    with LiveServer(config_of(tmp_path, settings(connections=2))) as live:
        crowd = live.server.services["zbus"].listeners._door.crowd  # type: ignore[attr-defined]
        with live.caller(), dial(live, "admin") as client:
            client.sendall(b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
            for listener in LISTENERS:
                with dial(live, listener) as third:
                    assert is_cut(third)
                assert refused(live, listener.partition("-")[0], "address_connections") > 0
        live.until(lambda: not crowd._counts)
        with live.caller(), SocketClient(live.server.addresses["zbus"]) as zbus:
            assert zbus.do("create", mq="Q")["status"] == 200


@pytest.mark.parametrize("use_uvloop", [True, False])
def test_tls_handshakes_count_and_give_their_places_back(tmp_path: Path, use_uvloop: bool) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    config = config_of(tmp_path, settings(handshakes=2), TlsSettings(cert_file=str(cert), key_file=str(key)))
    with LiveServer(config, use_uvloop=use_uvloop) as live:
        address = live.server.addresses["zbus"]
        with dial(live, "worterbuch") as first, dial(live, "admin") as second:
            # A half handshake, one that does not begin, and plain bytes count alike.
            first.sendall(b"\x16\x03\x01\x02\x00")
            service = live.server.services["zbus"]
            crowd = service.listeners._door.crowd  # type: ignore[attr-defined]
            live.until(lambda: crowd._counts and crowd._counts["127.0.0.1"].handshakes == 2)
            with dial(live, "zbus") as third:
                assert is_cut(third)
            second.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert is_cut(second)
            with SocketClient(address, authority.client_context()) as zbus:
                assert zbus.do("create", mq="Q")["status"] == 200
        live.until(lambda: not crowd._counts)


def test_a_stop_ends_handshakes_that_are_under_way(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).issue("server")
    config = config_of(tmp_path, ServerSettings(), TlsSettings(cert_file=str(cert), key_file=str(key)))
    with contextlib.ExitStack() as stack:
        with LiveServer(config) as live:
            silent = [stack.enter_context(dial(live, listener)) for listener in ("zbus", "admin")]
            door = live.server.services["zbus"].listeners._door  # type: ignore[attr-defined]
            live.until(lambda: len(door.arriving) == 1)
        assert all(map(is_cut, silent))
        assert not door.arriving
        assert not door.count


def test_many_half_connections_leave_the_others_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = config_of(tmp_path, ServerSettings(handshakes_per_address_max=50, uncounted_networks="::1/128"))
    with LiveServer(config) as live, contextlib.ExitStack() as stack:
        served = stack.enter_context(live.caller())
        for number in range(300):
            client = stack.enter_context(dial(live, LISTENERS[number % len(LISTENERS)]))
            with contextlib.suppress(OSError):  # closed already
                client.sendall(b"G")
        live.until(lambda: len(live.connections) <= 51)
        assert len(served.ask(subscribe("kept"))) == 1
        assert len(caplog.records) < 150  # not a line for each


def test_loopback_and_unix_sockets_are_not_counted_unless_asked_for(tmp_path: Path) -> None:
    crowd = Crowd(ServerSettings())
    for address in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", ""):
        assert crowd.key_of(address) is None
    assert crowd.key_of("192.0.2.7") == crowd.key_of("::ffff:192.0.2.7") == "192.0.2.7"
    assert crowd.key_of("2001:db8::1") == crowd.key_of("2001:db8::ffff:2") != crowd.key_of("2001:db8:0:1::1")
    config = configure(tmp_path, server=ServerSettings(handshakes_per_address_max=1))
    with LiveServer(config) as live, contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(dial(live, "jebp"))
        live.until(lambda: len(live.connections) == 5)


def test_a_wrong_network_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"server\.uncounted_networks"):
        Crowd(ServerSettings(uncounted_networks="10.1.0.0/99"))
