"""TLS on the listeners of a server: one setting for all, clients with and without certificates, new files."""

import contextlib
import logging
import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from babelbus.config import (
    AdminSettings,
    Config,
    EventmeshSettings,
    ServerSettings,
    TlsSettings,
    WorterbuchSettings,
    ZbusSettings,
    load,
)
from babelbus.core.access import SERVER
from babelbus.errors import ConfigError
from babelbus.listening.certificates import Certificates, PeerCertificate, Tls
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.certificates import Authority
from tests.support.clock import ShiftedClock
from tests.support.eventmesh import AGENT, NEW
from tests.support.eventmesh import frame as mesh_frame
from tests.support.server import LiveServer, configure

ROOT = Path(__file__).parents[2]
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
HELLO = mesh_frame(NEW, {"cmd": "HELLO_REQUEST", "seq": "1"}, AGENT)
# The first request over each TCP listener with TLS, and how the answer begins.
FIRST = {
    "zbus": (GET, b"HTTP/1.1"),
    "zbus-monitor": (GET, b"HTTP/1.1 200"),
    "worterbuch": (GET, b"HTTP/1.1"),
    "worterbuch-tcp": (b"", b'{"welcome"'),
    "worterbuch-tcp-0.10": (b"", b"{"),
    "eventmesh-tcp": (HELLO, b"EventMesh0000"),
    "eventmesh-http": (GET, b"HTTP/1.1"),
    "eventmesh-admin": (GET, b"HTTP/1.1"),
    "admin": (GET.replace(b" / ", b" /ready "), b"HTTP/1.1 200"),
}
DAY_MS = 86_400_000
OTHERS = {"jebp", "sbus", "eventmesh-grpc"}
"""A handshake of its own, a unix socket, and a listener that gRPC opens."""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


def settings_of(authority: Authority, **more: Any) -> TlsSettings:
    cert, key = authority.issue("server")
    return TlsSettings(cert_file=str(cert), key_file=str(key), **more)


def all_listeners(folder: Path, tls: TlsSettings, seconds: float = 30.0, processes: int = 1) -> Config:
    return configure(
        folder / "data",
        zbus=ZbusSettings(port=0, monitor_port=0, handshake_seconds=seconds),
        worterbuch=WorterbuchSettings(port=0, tcp_port=0, more_endpoints="tcp:0=0.10", handshake_seconds=seconds),
        eventmesh=EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, admin_port=0, handshake_seconds=seconds),
        admin=True,
        tls=tls,
        server=ServerSettings(processes=processes),
    )


@contextlib.contextmanager
def connected(
    live: LiveServer, listener: str, context: ssl.SSLContext | None, session: ssl.SSLSession | None = None
) -> Iterator[Any]:
    host, _, port = live.server.addresses[listener].rpartition(":")
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(socket.create_connection((host, int(port)), timeout=SAFETY_NET_SECONDS))
        if context is None:
            yield plain
        else:
            yield stack.enter_context(context.wrap_socket(plain, server_hostname="localhost", session=session))


def ask(client: socket.socket, listener: str) -> None:
    request, beginning = FIRST[listener]
    if request:
        client.sendall(request)
    answer = b""
    while len(answer) < len(beginning):
        data = client.recv(65536)
        assert data, "closed"
        answer += data
    assert answer.startswith(beginning), answer


def ask_again(client: socket.socket) -> None:
    client.sendall(GET)
    assert client.recv(65536)


def read_to_end(client: socket.socket) -> bytes:
    read = b""
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(65536):
            read += data
    return read


def refusals(live: LiveServer, protocol: str, reason: str) -> float:
    """How many connections were refused, asked in the event loop."""
    labels = {"protocol": protocol, "reason": reason}
    return live.server.metrics.registry.get_sample_value("babelbus_connections_refused_total", labels) or 0.0


def refused(live: LiveServer, protocol: str, reason: str = "tls") -> float:
    return live.call(lambda: refusals(live, protocol, reason))


@pytest.mark.parametrize("use_uvloop", [True, False])
def test_one_certificate_makes_every_listener_speak_tls_alone(
    tmp_path: Path, authority: Authority, use_uvloop: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with LiveServer(all_listeners(tmp_path, settings_of(authority)), use_uvloop=use_uvloop) as live:
        assert live.server.addresses.keys() == FIRST.keys() | OTHERS
        for listener in FIRST:
            with connected(live, listener, authority.client_context()) as client:
                ask(client, listener)
            caplog.clear()
            with connected(live, listener, None) as client:
                client.sendall(GET)
                assert not read_to_end(client).startswith(b"HTTP/1.1 200")
            live.until(lambda: "speaks plain HTTP, and this listener speaks TLS alone" in caplog.text)
        assert {protocol: refused(live, protocol) for protocol in ("zbus", "worterbuch", "eventmesh", "admin")} == {
            "zbus": 2, "worterbuch": 3, "eventmesh": 3, "admin": 1,
        }  # fmt: skip
        with live.caller():  # jebp as ever
            pass


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the commands of docs/security.md need openssl")
def test_certificates_made_as_the_page_says_are_taken(tmp_path: Path) -> None:
    commands = re.search(
        r"^```\n(openssl .*?)^```", (ROOT / "docs" / "security.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert commands is not None
    subprocess.run(["bash", "-ec", commands[1]], cwd=tmp_path, check=True, capture_output=True)
    tls = TlsSettings(cert_file=str(tmp_path / "bus.example.pem"), key_file=str(tmp_path / "bus.example.key"))
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    with (
        LiveServer(configure(tmp_path / "data", worterbuch=WorterbuchSettings(port=0), tls=tls)) as live,
        connected(live, "worterbuch", client) as connection,
    ):
        ask(connection, "worterbuch")


def call_grpc(channel: grpc.Channel) -> str:
    """The status of a call of a method that does not exist: it came as far as the server."""
    try:
        channel.unary_unary("/babelbus.Nobody/nothing")(b"", timeout=SAFETY_NET_SECONDS)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


@pytest.mark.parametrize("processes", [1, 2])
def test_grpc_speaks_tls_with_the_certificate_of_all(tmp_path: Path, authority: Authority, processes: int) -> None:
    with LiveServer(all_listeners(tmp_path, settings_of(authority), processes=processes)) as live:
        address = live.server.addresses["eventmesh-grpc"].replace("127.0.0.1", "localhost")
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority.path.read_bytes())) as channel:
            assert call_grpc(channel) == "UNIMPLEMENTED"
        with grpc.insecure_channel(address) as channel:
            assert call_grpc(channel) == "UNAVAILABLE"


def test_a_section_can_leave_tls_out(tmp_path: Path, authority: Authority) -> None:
    config = all_listeners(tmp_path, settings_of(authority))
    worterbuch = msgspec.structs.replace(config.worterbuch, tls=False)
    admin = msgspec.structs.replace(config.admin, tls=False)
    with LiveServer(msgspec.structs.replace(config, worterbuch=worterbuch, admin=admin)) as live:
        for listener in FIRST:
            is_plain = listener.startswith("worterbuch") or listener == "admin"
            with connected(live, listener, None if is_plain else authority.client_context()) as client:
                ask(client, listener)


@pytest.mark.parametrize(
    "listener", ["zbus", "worterbuch", "worterbuch-tcp", "eventmesh-tcp", "eventmesh-http", "admin"]
)
def test_a_client_that_speaks_tls_to_a_listener_without_is_told_to_the_operator(
    tmp_path: Path, authority: Authority, listener: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with LiveServer(all_listeners(tmp_path, TlsSettings())) as live:
        with pytest.raises(OSError), connected(live, listener, authority.client_context()):
            pass
        live.until(lambda: "speaks TLS, and this listener does not" in caplog.text)
        assert refused(live, listener.partition("-")[0]) == 1


@pytest.mark.parametrize("listener", ["zbus", "worterbuch-tcp", "eventmesh-tcp", "admin"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_handshake_that_does_not_end_is_ended_and_counted(
    tmp_path: Path, authority: Authority, listener: str, processes: int
) -> None:
    config = all_listeners(tmp_path, settings_of(authority), seconds=0.05, processes=processes)
    config = msgspec.structs.replace(config, admin=AdminSettings(port=0, handshake_seconds=0.05))
    with LiveServer(config) as live:
        for beginning in (b"", b"\x16\x03\x01\x02\x00"):
            with connected(live, listener, None) as client:
                client.sendall(beginning)
                assert read_to_end(client) == b""
        live.until(lambda: refusals(live, listener.partition("-")[0], "handshake") == 2)


# -- certificates of clients -----------------------------------------------------------------------------------------


def peer_certificates(live: LiveServer) -> list[PeerCertificate | None]:
    return live.call(lambda: [one._outbox.peer_certificate for one in live.connections])


@pytest.mark.parametrize("processes", [1, 2])
def test_a_session_sees_the_certificate_of_its_client(tmp_path: Path, authority: Authority, processes: int) -> None:
    tls = settings_of(authority, client_ca_file=str(authority.path), client_certificates="optional")
    identity = authority.issue("billing", uris=("spiffe://example/billing",), dns_names=("billing.example",))
    with LiveServer(all_listeners(tmp_path, tls, processes=processes)) as live:
        with connected(live, "worterbuch-tcp", authority.client_context()) as client:
            ask(client, "worterbuch-tcp")
            assert peer_certificates(live) == [None]
        live.until(lambda: not live.connections)
        with connected(live, "worterbuch-tcp", authority.client_context(identity)) as client:
            ask(client, "worterbuch-tcp")
            [seen] = peer_certificates(live)
            assert seen is not None
            assert seen.uris == ("spiffe://example/billing",)
            assert seen.dns_names == ("billing.example", "localhost")
            assert seen.common_names == ("billing",)
            assert len(seen.fingerprint) == 64


@pytest.mark.parametrize("listener", FIRST)
def test_a_required_certificate_is_required_on_every_listener(
    tmp_path: Path, authority: Authority, listener: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tls = settings_of(authority, client_ca_file=str(authority.path), client_certificates="required")
    strangers = Authority(tmp_path / "strangers")
    stranger = authority.client_context(strangers.issue("billing"))
    with LiveServer(all_listeners(tmp_path, tls)) as live:
        with connected(live, listener, authority.client_context(authority.issue("billing"))) as client:
            ask(client, listener)
        for context in (authority.client_context(), stranger):
            # Of TLS 1.3, the client learns of the refusal behind its handshake.
            with pytest.raises((OSError, AssertionError)), connected(live, listener, context) as client:
                ask(client, listener)
        live.until(lambda: "the client showed no certificate" in caplog.text)
        live.until(lambda: "certificate verify failed" in caplog.text)


@pytest.mark.parametrize("processes", [1, 2])
def test_grpc_requires_a_certificate_too(tmp_path: Path, authority: Authority, processes: int) -> None:
    tls = settings_of(authority, client_ca_file=str(authority.path), client_certificates="required")
    cert, key = authority.issue("billing")
    root = authority.path.read_bytes()
    with LiveServer(all_listeners(tmp_path, tls, processes=processes)) as live:
        address = live.server.addresses["eventmesh-grpc"].replace("127.0.0.1", "localhost")
        known = grpc.ssl_channel_credentials(root, key.read_bytes(), cert.read_bytes())
        for credentials, status in ((known, "UNIMPLEMENTED"), (grpc.ssl_channel_credentials(root), "UNAVAILABLE")):
            with grpc.secure_channel(address, credentials) as channel:
                assert call_grpc(channel) == status


@pytest.mark.parametrize("processes", [1, 2])
def test_a_connection_ends_when_the_certificate_of_its_client_expires(
    tmp_path: Path, authority: Authority, processes: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tls = settings_of(authority, client_ca_file=str(authority.path), client_certificates="optional")
    context = authority.client_context(authority.issue("billing", last_day=datetime.now(UTC) + timedelta(hours=20)))
    clock = ShiftedClock()
    with (
        LiveServer(all_listeners(tmp_path, tls, processes=processes), clock=clock) as live,
        contextlib.ExitStack() as stack,
    ):
        clients = {listener: stack.enter_context(connected(live, listener, context)) for listener in FIRST}
        stranger = stack.enter_context(connected(live, "worterbuch-tcp", authority.client_context()))
        for listener, client in clients.items():
            ask(client, listener)
        live.call(live.server.certified.expire)
        ask_again(clients["worterbuch"])
        clock.shift_ms = DAY_MS
        live.call(live.server.certified.expire)
        for client in clients.values():
            read_to_end(client)
        ask(stranger, "worterbuch-tcp")
        assert "closing: the certificate of the client has expired" in caplog.text


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_session_of_tls_is_not_resumed_once_its_certificate_has_expired(
    tmp_path: Path, authority: Authority, processes: int, version: ssl.TLSVersion
) -> None:
    tls = settings_of(authority, client_ca_file=str(authority.path), client_certificates="optional")
    context = authority.client_context(authority.issue("billing", last_day=datetime.now(UTC) + timedelta(hours=20)))
    context.maximum_version = version
    clock = ShiftedClock()
    with LiveServer(all_listeners(tmp_path, tls, processes=processes), clock=clock) as live:
        with connected(live, "worterbuch", context) as client:
            ask(client, "worterbuch")
            session = client.session
        with connected(live, "worterbuch", context, session) as client:
            ask(client, "worterbuch")
            assert client.session_reused or processes > 1  # the other process of an edge begins a session anew
        clock.shift_ms = DAY_MS
        with contextlib.suppress(OSError), connected(live, "worterbuch", context, session) as client:
            client.sendall(GET)
            assert read_to_end(client) == b""
        live.until(lambda: refusals(live, "worterbuch", "tls") == 1)


def test_an_old_version_of_tls_is_refused(tmp_path: Path, authority: Authority) -> None:
    tls = settings_of(authority, minimum_version="1.3")
    context = authority.client_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with LiveServer(all_listeners(tmp_path, tls)) as live, pytest.raises(OSError), connected(live, "zbus", context):
        pass


# -- new files -------------------------------------------------------------------------------------------------------


def serial_of(client: socket.socket) -> str:
    assert isinstance(client, ssl.SSLSocket)
    certificate = client.getpeercert()
    assert certificate
    return str(certificate["serialNumber"])


def reload(live: LiveServer) -> None:
    live.run(partial(live.server.reload, SERVER))


@pytest.mark.parametrize("renew", [reload, lambda live: live.server.certificates.check()], ids=["signal", "watch"])
def test_a_new_certificate_holds_for_new_connections_and_open_ones_stay(
    tmp_path: Path, authority: Authority, renew: Callable[[LiveServer], None]
) -> None:
    context = authority.client_context()
    with LiveServer(all_listeners(tmp_path, settings_of(authority))) as live:
        for listener in ("zbus", "admin"):
            with connected(live, listener, context) as before:
                ask(before, listener)
                authority.issue("server")
                renew(live)
                with connected(live, listener, context) as after:
                    ask(after, listener)
                    assert serial_of(after) != serial_of(before)
                ask(before, listener)


@pytest.mark.parametrize("processes", [1, 2])
def test_grpc_takes_a_new_certificate(tmp_path: Path, authority: Authority, processes: int) -> None:
    with LiveServer(all_listeners(tmp_path, settings_of(authority), processes=processes)) as live:
        host, _, port = live.server.addresses["eventmesh-grpc"].rpartition(":")
        context = authority.client_context()
        context.set_alpn_protocols(["h2"])

        def serial() -> str:
            with (
                socket.create_connection((host, int(port)), timeout=SAFETY_NET_SECONDS) as plain,
                context.wrap_socket(plain, server_hostname="localhost") as client,
            ):
                return serial_of(client)

        first = serial()
        authority.issue("server")
        reload(live)
        assert serial() != first


def test_wrong_new_files_leave_the_certificate_in_use_and_are_told_once(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    context = authority.client_context()
    tls = settings_of(authority)
    cert = Path(tls.cert_file or "")
    content = cert.read_bytes()
    with LiveServer(all_listeners(tmp_path, tls)) as live:
        certificates = live.server.certificates
        certificates.check()
        assert "stays in use" not in caplog.text
        cert.write_bytes(b"nonsense")
        certificates.check()
        lines = caplog.text.count("stays in use")
        assert lines > 0
        certificates.check()
        assert caplog.text.count("stays in use") == lines
        with pytest.raises(ConfigError, match=r"tls\.cert_file"):
            reload(live)
        with connected(live, "zbus", context) as client:
            ask(client, "zbus")
        cert.write_bytes(content)
        certificates.check()
        with connected(live, "zbus", context) as client:
            ask(client, "zbus")


def test_a_reload_names_all_wrong_files_and_loads_the_others(authority: Authority) -> None:
    certificates = Certificates(TlsSettings())
    made: dict[str, Tls] = {}
    for section in ("zbus", "worterbuch", "eventmesh", "admin"):
        cert, key = map(str, authority.issue("both" if section in ("worterbuch", "eventmesh") else section))
        tls = certificates.make_tls(section, cert_file=cert, key_file=key)
        assert tls is not None
        made[section] = tls
    before = {section: tls.context for section, tls in made.items()}
    for section in ("zbus", "worterbuch"):
        Path(made[section].cert_file).write_bytes(b"nonsense")
    with pytest.raises(ConfigError) as caught:
        certificates.reload()
    assert [section for section in made if f"{section}.tls_cert_file" in str(caught.value)] == [
        "zbus",
        "worterbuch",
        "eventmesh",
    ]
    assert [section for section, tls in made.items() if tls.context is not before[section]] == ["admin"]


def test_the_watch_finds_new_files_while_the_server_runs(tmp_path: Path, authority: Authority) -> None:
    with LiveServer(all_listeners(tmp_path, settings_of(authority, reload_seconds=0.01))) as live:
        [first, *_] = live.server.certificates._all
        assert isinstance(first, Tls)
        context = first.context
        authority.issue("server")
        live.until(lambda: first.context is not context)


# -- wrong settings --------------------------------------------------------------------------------------------------


def make(tls: TlsSettings, chosen: bool | None = None) -> None:
    Certificates(tls).make_tls("zbus", chosen)


def test_wrong_settings_are_refused_with_their_names(tmp_path: Path, authority: Authority) -> None:
    tls = settings_of(authority)
    replace = msgspec.structs.replace
    other_key = str(authority.issue("other")[1])
    empty = tmp_path / "empty"
    empty.touch(mode=0o600)
    wrong = {
        "go together": replace(tls, key_file=None),
        "no such file": replace(tls, key_file=str(tmp_path / "nothing")),
        "key values mismatch": replace(tls, key_file=other_key),
        "no start line|PEM": replace(tls, key_file=str(empty)),
        "goes with": replace(tls, client_certificates="required"),
        "goes with tls.client_certificates": replace(tls, client_ca_file=str(authority.path)),
        "client_ca_file: .*empty": replace(tls, client_ca_file=str(empty), client_certificates="optional"),
    }
    for text, settings in wrong.items():
        with pytest.raises(ConfigError, match=f"(?i){text}"):
            make(settings)
    with pytest.raises(ConfigError, match=r"zbus\.tls needs tls\.cert_file"):
        make(TlsSettings(), True)
    with pytest.raises(ConfigError, match=r"zbus\.tls = false contradicts"):
        Certificates(tls).make_tls("zbus", False, cert_file="x", key_file="y")


def test_a_key_that_others_may_read_is_refused(authority: Authority) -> None:
    tls = settings_of(authority)
    assert tls.key_file is not None
    for mode in (0o640, 0o604, 0o660):
        os.chmod(tls.key_file, mode)
        with pytest.raises(ConfigError, match="'chmod 600' it"):
            make(tls)
    os.chmod(tls.key_file, 0o400)
    make(tls)


def test_required_certificates_let_a_listener_beyond_loopback(authority: Authority) -> None:
    flags: dict[str, object] = {"admin.host": "0.0.0.0", "tls.cert_file": "c", "tls.key_file": "k"}
    with pytest.raises(ConfigError, match=r"admin\.host"):
        load(flags=flags)
    flags |= {"tls.client_ca_file": "a", "tls.client_certificates": "required"}
    load(flags=flags)
    with pytest.raises(ConfigError, match=r"admin\.host"):
        load(flags=flags | {"admin.tls": False})
