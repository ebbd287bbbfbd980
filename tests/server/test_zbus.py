"""zbus through real sockets: one port for HTTP and WebSocket, TLS, keys, a restart."""

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from babelbus.config import ServerSettings, TopicDefaults, ZbusSettings, load
from babelbus.errors import ConfigError
from babelbus.server.zbus import read_keys
from babelbus.wire.http_client import ResponseDecoder
from babelbus.wire.upgrade import encode_upgrade_request, make_key
from babelbus.wire.websocket import Decoder, Message, encode_texts
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.server import LiveServer, configure


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(configure(tmp_path, zbus=ZbusSettings(port=0, monitor_port=0))) as running:
        yield running


def ask(
    live: LiveServer, method: str, url: str, body: bytes | None = None, *, port: str = "zbus", **headers: str
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(live.server.addresses[port], timeout=SAFETY_NET_SECONDS)
    connection.request(method, url, body, headers)
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


class Client:
    """A WebSocket client."""

    def __init__(self, live: LiveServer, context: ssl.SSLContext | None = None) -> None:
        host, port = live.server.addresses["zbus"].rsplit(":", 1)
        plain = socket.create_connection((host, int(port)), timeout=SAFETY_NET_SECONDS)
        self.socket = plain if context is None else context.wrap_socket(plain, server_hostname="localhost")
        self.socket.sendall(encode_upgrade_request("here", "/any/path", make_key()))
        responses = ResponseDecoder()
        while not (found := responses.responses()):
            responses.receive_data(self.socket.recv(2**16))
        assert found[0].status == 101
        self._decoder = Decoder(is_server=False, message_bytes_max=2**30)
        self._decoder.receive_data(responses.unread())
        self._came: list[dict[str, Any]] = []

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def next(self) -> dict[str, Any]:
        while not self._came:
            self._came += [json.loads(one.data) for one in self._decoder.events() if isinstance(one, Message)]
            if not self._came:
                data = self.socket.recv(2**16)
                assert data, "closed"
                self._decoder.receive_data(data)
        return self._came.pop(0)

    def say(self, cmd: str, body: Any = None, **headers: Any) -> None:
        message = {"headers": {"cmd": cmd, **headers}, **({} if body is None else {"body": body})}
        self.socket.sendall(encode_texts([json.dumps(message).encode()], mask=True))

    def do(self, cmd: str, body: Any = None, **headers: Any) -> dict[str, Any]:
        self.say(cmd, body, **headers)
        return self.next()


def test_http_and_websocket_share_one_port_and_one_set_of_queues(live: LiveServer) -> None:
    assert ask(live, "GET", "/?cmd=create&mq=Q&channel=C&mqType=disk")[0] == 200
    with Client(live) as client:
        client.do("sub", mq="Q", channel="C", window=1)
        assert ask(live, "POST", "/", b"hi", cmd="pub", mq="Q") == (200, b"OK, PUB (mq=Q)")
        delivery = client.next()
        assert (delivery["headers"]["window"], delivery["headers"]["offset"]) == ("0", "0")


def test_the_monitor_listens_on_its_own_port(live: LiveServer) -> None:
    ask(live, "GET", "/?cmd=create&mq=Q")
    status, body = ask(live, "GET", "/", port="zbus-monitor")
    assert (status, [queue["name"] for queue in json.loads(body)]) == (200, ["Q"])


def test_a_backlog_reaches_a_consumer_that_reads_slowly_whole_and_in_order(live: LiveServer) -> None:
    count, body = 3000, "x" * 10_000
    with Client(live) as publisher, Client(live) as consumer:
        publisher.do("create", mq="Q", channel="C", mqType="disk")
        consumer.do("sub", mq="Q", channel="C")
        for _ in range(count):
            publisher.say("pub", body, mq="Q", ack=False)
        assert [int(consumer.next()["headers"]["offset"]) for _ in range(count)] == list(range(count))


def test_disk_channels_go_on_at_their_position_after_a_restart(tmp_path: Path) -> None:
    config = configure(tmp_path, topics=TopicDefaults(ack="written"))
    for first in (0, 2):
        with LiveServer(config) as live, Client(live) as client:
            client.do("create", mq="D", channel="C", mqType="disk")
            if not first:
                for number in range(4):
                    client.do("pub", number, mq="D")
            client.do("sub", mq="D", channel="C", window=2)
            assert [client.next()["body"] for _ in range(2)] == [first, first + 1]


def test_a_listener_with_a_certificate_speaks_tls(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    settings = ZbusSettings(port=0, tls_cert_file=str(cert), tls_key_file=str(key))
    context = ssl.create_default_context(cafile=str(cert))
    with LiveServer(configure(tmp_path / "data", zbus=settings)) as live, Client(live, context) as client:
        assert client.do("create", mq="Q")["status"] == 200


def make_certificate(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2020, 1, 1))
        .not_valid_after(datetime(2099, 1, 1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    cert_path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert_path, key_path


def test_a_file_of_keys_is_read_and_a_wrong_one_refused_without_showing_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# who may\n\nkey  secret\nother word\n", encoding="utf-8")
    assert read_keys(str(path)) == {"key": "secret", "other": "word"}
    for content in ("key hush\nkey hush\n", "hush\n", "a hush b\n", "# none\n"):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            read_keys(str(path))
        assert "hush" not in str(caught.value)


def test_without_keys_the_listener_stays_on_loopback() -> None:
    with pytest.raises(ConfigError, match=r"without zbus\.auth_file"):
        load(flags={"zbus.host": "0.0.0.0"})
    assert load(flags={"zbus.host": "0.0.0.0", "server.insecure": True}).server == ServerSettings(insecure=True)


def test_one_half_of_a_certificate_is_refused(tmp_path: Path) -> None:
    settings = ZbusSettings(port=0, tls_cert_file="cert.pem")
    with pytest.raises(ConfigError, match="go together"), LiveServer(configure(tmp_path, zbus=settings)):
        pass
