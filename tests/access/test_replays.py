"""What somebody on the way has recorded of a client does nothing when it is sent again, at each door."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest

from babelbus.client import BlockingClient as JebpClient
from babelbus.config import TlsSettings, ZbusSettings
from babelbus.protocols.zbus.messages import Message
from tests.access.house import House, Proof, configured
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.certificates import Authority
from tests.support.eventmesh import AGENT, MeshClient
from tests.support.signing import sign_request
from tests.support.zbus import HttpClient

SUBJECT = "walk/a"
PAYLOAD = b'{"captured":1}'


class Tap:
    """A way to a listener that records what the client sends; `with` ends it."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.target = host, int(port)
        self.recorded = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            client, _ = self._listener.accept()
            server = socket.create_connection(self.target)
            self._ends += (client, server)
            for one, other, is_recorded in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._pump, args=(one, other, is_recorded), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, one: socket.socket, other: socket.socket, is_recorded: bool) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                if is_recorded:
                    self.recorded += data
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def __enter__(self) -> "Tap":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in list(self._threads):
            thread.join(SAFETY_NET_SECONDS)
        for end in self._ends:
            end.close()

    def send_again(self) -> None:
        """Send what was recorded over a new connection, and wait until the server has closed the connection."""
        thief = socket.create_connection(self.target, timeout=SAFETY_NET_SECONDS)
        with closing(thief), suppress(OSError):  # the server may close first
            thief.sendall(self.recorded)
            thief.shutdown(socket.SHUT_WR)
            while thief.recv(65536):
                pass


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[House]:
    cert, key = authority.issue("localhost", dns_names=("localhost",))
    config = configured(tmp_path_factory.mktemp("replays"))
    zbus = ZbusSettings(port=0, tls=False, replay_window_seconds=3600)
    config = msgspec.structs.replace(config, tls=TlsSettings(cert_file=str(cert), key_file=str(key)), zbus=zbus)
    with House(Path(config.data.folder).parent, config) as house:
        house.grant("alice * #")
        yield house


def publish(door: str, address: str, proof: Proof, authority: Authority) -> None:
    """Publish one event as alice, and close."""
    context = authority.client_context()
    proof_fields = {"username": proof.name, "passwd": proof.password}
    match door:
        case "jebp":
            with closing(JebpClient(address, identity=proof.identity, reconnect=False)) as client:
                client.__enter__()
                client.publish(SUBJECT, PAYLOAD)
        case "zbus":  # signed, and not encrypted
            headers = {"cmd": "pub", "id": "captured", "mq": SUBJECT, "content-type": "application/json"}
            names = ",".join(["url", "method", "body", *(f"h.{name}" for name in headers)])
            message = Message(headers, "/", "POST", None, PAYLOAD)
            signed = sign_request(message, proof.api_key, proof.api_secret, names)
            with HttpClient(address) as client:
                assert client.ask("POST", "/", PAYLOAD, **signed.headers).status == 200
        case "worterbuch":
            bearer = f"Bearer {proof.jwt}"
            with HttpClient(address, context) as client:
                path, kind = f"/api/v1/publish/{SUBJECT}", "application/json"
                assert client.ask("POST", path, PAYLOAD, authorization=bearer, content_type=kind).status == 200
        case "eventmesh-http":
            with HttpClient(address, context) as client:
                answer = client.ask("POST", f"/eventmesh/publish/{SUBJECT}", PAYLOAD, **proof_fields)
                assert b'"retCode":0' in answer.body
        case "eventmesh-tcp":
            with MeshClient(address, context=context) as client:
                agent = {**AGENT, "username": proof.name, "password": proof.password, "purpose": "pub"}
                assert client.ask("HELLO_REQUEST", agent)["code"] == 0
                assert client.publish(SUBJECT, PAYLOAD.decode())["code"] == 0
        case "admin":
            body = msgspec.json.encode({"subject": SUBJECT, "payload": PAYLOAD.decode()})
            with HttpClient(address, context) as client:
                kind = "application/json"
                bearer = f"Bearer {proof.token}"
                assert client.ask("POST", "/api/send", body, authorization=bearer, content_type=kind).status == 200


@pytest.mark.parametrize("door", ["jebp", "zbus", "worterbuch", "eventmesh-http", "eventmesh-tcp", "admin"])
def test_what_was_recorded_of_a_client_does_nothing_the_second_time(
    house: House, authority: Authority, door: str
) -> None:
    def count() -> int:
        house.emit(SUBJECT)  # behind it, all that was published before is heard
        return house.call(lambda: sum(PAYLOAD in (payload or b"") for _, payload in house.heard))

    before = count()
    with Tap(house.server.addresses[door]) as tap:
        publish(door, tap.address, house.alice, authority)
    assert count() == before + 1
    assert tap.recorded
    for _ in range(2):
        tap.send_again()
    assert count() == before + 1
