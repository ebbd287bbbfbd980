"""What somebody on the way has recorded of a client does nothing when it is sent again, at each door."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import grpc
import msgspec
import pytest

from babelbus.client import BlockingClient as JebpClient
from babelbus.clients.sbus import Client as SbusClient
from babelbus.clients.worterbuch.blocking import BlockingClient as TreeClient
from babelbus.config import SbusSettings, TlsSettings, ZbusSettings
from babelbus.core.access import ANONYMOUS
from babelbus.protocols.sbus.codec import encode
from babelbus.protocols.sbus.messages import Publish
from babelbus.protocols.sbus.packets.listeners import ABSTRACT
from babelbus.protocols.zbus.codec import decode_message, encode_message
from babelbus.protocols.zbus.messages import Message
from babelbus.wire.websocket import encode_texts
from tests.access.house import House, Proof, configured
from tests.protocols.eventmesh.test_grpc import Events as CloudEvents
from tests.protocols.eventmesh.test_grpc import Legacy
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.certificates import Authority
from tests.support.eventmesh import AGENT, MeshClient
from tests.support.passage import Passage
from tests.support.signing import sign_frame, sign_request
from tests.support.zbus import HttpClient, SocketClient

SUBJECT = "walk/a"
PAYLOAD = b'{"captured":1}'
STRANGER = 12_345
"""A user whom no principal is."""


class Tap(Passage):
    """A way to a listener that records what the client sends; `with` ends when its connections have ended."""

    def __init__(self, address: str) -> None:
        self.recorded = bytearray()
        super().__init__(address)

    def send(self, target: socket.socket, data: bytes, is_answer: bool) -> None:
        if not is_answer:
            self.recorded += data
        super().send(target, data, is_answer)

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.close()

    def send_again(self) -> None:
        """Send what was recorded over a new connection, and wait until the server has closed the connection."""
        thief = socket.create_connection(self.target, timeout=SAFETY_NET_SECONDS)
        with closing(thief), suppress(OSError):  # the server may close first
            thief.sendall(bytes(self.recorded))
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
    zbus = ZbusSettings(port=0, monitor_port=0, tls=False, replay_window_seconds=3600)
    tls, sbus = TlsSettings(cert_file=str(cert), key_file=str(key)), SbusSettings(address=ABSTRACT)
    config = msgspec.structs.replace(config, tls=tls, zbus=zbus, sbus=sbus)
    with House(Path(config.data.folder).parent, config) as house:
        house.grant("alice * #")
        yield house


def sign(proof: Proof, request_id: str) -> Message:
    """An event of alice as a request of zbus: signed, and not encrypted."""
    headers = {"cmd": "pub", "id": request_id, "mq": SUBJECT, "content-type": "application/json"}
    names = ",".join(["url", "method", "body", *(f"h.{name}" for name in headers)])
    return sign_request(Message(headers, "/", "POST", None, PAYLOAD), proof.api_key, proof.api_secret, names)


@contextmanager
def published(door: str, address: str, proof: Proof, authority: Authority) -> Iterator[None]:
    """Publish one event as alice; the connection is open until the end."""
    context = authority.client_context()
    proof_fields = {"username": proof.name, "passwd": proof.password}
    port = address.rpartition(":")[2]
    with ExitStack() as stack:
        match door:
            case "jebp":
                client = JebpClient(address, identity=proof.identity, reconnect=False)
                stack.enter_context(closing(client)).__enter__()
                client.publish(SUBJECT, PAYLOAD)
            case "zbus" | "zbus-monitor":
                http = stack.enter_context(HttpClient(address))
                assert http.ask("POST", "/", PAYLOAD, **sign(proof, f"captured at {door}").headers).status == 200
            case "zbus-websocket":
                web = stack.enter_context(SocketClient(address))
                head = {"cmd": "pub", "id": "captured at a socket", "mq": SUBJECT}
                event = {"headers": head, "body": json.loads(PAYLOAD)}
                signed = sign_frame(decode_message(msgspec.json.encode(event)), proof.api_key, proof.api_secret)
                web.send(encode_texts([encode_message(signed)], mask=True))
                assert web.next()["status"] == 200
            case "worterbuch":
                http = stack.enter_context(HttpClient(address, context))
                path, kind, bearer = f"/api/v1/publish/{SUBJECT}", "application/json", f"Bearer {proof.jwt}"
                assert http.ask("POST", path, PAYLOAD, authorization=bearer, content_type=kind).status == 200
            case "worterbuch-websocket" | "worterbuch-tcp":
                scheme = {"worterbuch-websocket": "wss", "worterbuch-tcp": "tcps"}[door]
                tree = TreeClient(f"{scheme}://localhost:{port}", token=proof.jwt, tls=context)
                stack.enter_context(tree).publish(SUBJECT, json.loads(PAYLOAD))
            case "eventmesh-http":
                http = stack.enter_context(HttpClient(address, context))
                answer = http.ask("POST", f"/eventmesh/publish/{SUBJECT}", PAYLOAD, **proof_fields)
                assert b'"retCode":0' in answer.body
            case "eventmesh-tcp":
                mesh = stack.enter_context(MeshClient(address, context=context))
                agent = {**AGENT, "username": proof.name, "password": proof.password, "purpose": "pub"}
                assert mesh.ask("HELLO_REQUEST", agent)["code"] == 0
                assert mesh.publish(SUBJECT, PAYLOAD.decode())["code"] == 0
            case "eventmesh-grpc" | "eventmesh-cloudevents":
                trust = grpc.ssl_channel_credentials(authority.path.read_bytes())
                channel = stack.enter_context(grpc.secure_channel(f"localhost:{port}", trust))
                package = {"eventmesh-grpc": Legacy, "eventmesh-cloudevents": CloudEvents}[door]
                rpc = package(channel, proof.name, proof.password)
                assert rpc.code(rpc.ask("publish", rpc.publication(SUBJECT, PAYLOAD.decode()))) == "0"
            case "eventmesh-admin":
                event = {"specversion": "1.0", "id": "1", "source": "/", "type": "t", "subject": SUBJECT}
                content = {"datacontenttype": "application/json", "data": json.loads(PAYLOAD)}
                body = json.dumps(event | content, separators=(",", ":")).encode()
                http = stack.enter_context(HttpClient(address, context))
                assert http.ask("POST", "/event", body, **proof_fields).status == 200
            case "admin":
                body = msgspec.json.encode({"subject": SUBJECT, "payload": PAYLOAD.decode()})
                kind, bearer = "application/json", f"Bearer {proof.token}"
                http = stack.enter_context(HttpClient(address, context))
                assert http.ask("POST", "/api/send", body, authorization=bearer, content_type=kind).status == 200
        yield


DOORS = {
    **{listener: listener for listener in ("jebp", "zbus", "zbus-monitor", "worterbuch", "admin")},
    **{listener: listener for listener in ("worterbuch-tcp", "eventmesh-tcp", "eventmesh-http", "eventmesh-grpc")},
    "eventmesh-admin": "eventmesh-admin",
    "zbus-websocket": "zbus",
    "worterbuch-websocket": "worterbuch",
    "eventmesh-cloudevents": "eventmesh-grpc",
}
"""Door -> its listener."""
ELSEWHERE = {
    "sbus": "the kernel tells who a process is: the test below",
    "worterbuch-unix": "a unix socket: nobody is on the way",
}


def count(house: House) -> int:
    """How many events came that were published as the one which was recorded."""
    house.emit(SUBJECT)  # behind it, all that was published before is heard
    return house.call(lambda: sum(PAYLOAD in (payload or b"") for _, payload in house.heard))


@pytest.mark.parametrize("door", DOORS)
def test_what_was_recorded_of_a_client_does_nothing_the_second_time(
    house: House, authority: Authority, door: str
) -> None:
    before = count(house)
    with Tap(house.server.addresses[DOORS[door]]) as tap:
        with published(door, tap.address, house.alice, authority):
            assert count(house) == before + 1
            assert tap.recorded
            tap.send_again()  # beside the connection that it was recorded of
            assert count(house) == before + 1
        for _ in range(2):
            tap.send_again()
        assert count(house) == before + 1


def test_each_listener_is_listened_to(house: House) -> None:
    assert {*DOORS.values(), *ELSEWHERE} == set(house.server.addresses)


def send_as(uid: int, address: str, packets: list[bytes]) -> None:
    """Send packets from a process of a user, and wait until the server has handled them."""
    child = os.fork()
    if not child:
        try:
            os.setgid(uid)
            os.setuid(uid)
            with SbusClient(address, timeout_seconds=SAFETY_NET_SECONDS) as client:
                for packet in packets:
                    client.socket.send(packet)
                client.whoami()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def test_packets_of_sbus_are_those_of_the_process_that_sends_them(house: House) -> None:
    """They hold no proof: sent by another user they are that user's, and by the same user a further act of it."""
    address, packets = house.server.addresses["sbus"], [encode(Publish(SUBJECT.encode(), PAYLOAD))]
    before = count(house)
    send_as(os.getuid(), address, packets)
    assert count(house) == before + 1
    if os.getuid() == 0:
        send_as(STRANGER, address, packets)
        assert count(house) == before + 1
        assert [one for one in house.audit() if one.get("principal") == ANONYMOUS and one["action"] == "publish"]
    send_as(os.getuid(), address, packets)
    assert count(house) == before + 2
