"""A planned move of the data waits for nothing that cannot come: members read nothing of their clients meanwhile."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import pytest

pytest.importorskip("nats", reason="clusters are not tested: the package nats-py is not installed")

from babelbus.clients.sbus import Client as SbusClient
from babelbus.config import Config, ServerSettings
from babelbus.protocols.jebp.codec import encode_request
from babelbus.protocols.jebp.items import ERROR, OPEN
from babelbus.protocols.jebp.messages import CallItems
from tests.protocols.eventmesh.test_rpc import PUBLISH, REQUEST, listen, publication
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.eventmesh import MeshClient
from tests.support.http2 import DATA, END_HEADERS, GOAWAY, HEADERS, RawClient, block, body_of, call, frame
from tests.support.jebp import create, create_many, fetch, said, subscribe
from tests.support.members import Party, make_topic
from tests.support.nats import NatsServer
from tests.support.zbus import HttpClient, SocketClient, request_of

DRAIN_SECONDS = 3600.0
"""How long a stop would wait for answers: a move that waits for them fails."""
FOREVER_MS = "86400000"


class Patient(Party):
    """Members with all the time that answers could take."""

    def config(self, name: str, url: str | None = None) -> Config:
        return msgspec.structs.replace(super().config(name, url), server=ServerSettings(drain_seconds=DRAIN_SECONDS))


@pytest.fixture
def party(nats: NatsServer, tmp_path: Path) -> Iterator[Patient]:
    party = Patient(nats, tmp_path, lease_seconds=3600.0)
    for name in ("a", "b"):
        party.start(name)
        party.until_ready(name)
    party.until_all_present("a", "a", "b")
    yield party
    party.close()


def address(party: Party, name: str, listener: str) -> str:
    return party.children[name].addresses[listener]


def mesh(party: Party, name: str, **agent: object) -> MeshClient:
    return MeshClient(address(party, name, "eventmesh-tcp")).hello(**agent)  # type: ignore[arg-type]


def rpc(party: Party, name: str) -> RawClient:
    return RawClient(address(party, name, "eventmesh-grpc"))


def test_requests_between_clients_end_and_both_ends_keep_their_sessions(party: Patient) -> None:
    form = urlencode({"producergroup": "P", "topic": "sums", "content": "?", "ttl": FOREVER_MS}).encode()
    with (
        mesh(party, "a", group="s") as responder,
        mesh(party, "b", purpose="pub", group="q") as requester,
        HttpClient(address(party, "a", "eventmesh-http")) as over_http,
        HttpClient(address(party, "b", "zbus")) as web,
        SocketClient(address(party, "b", "zbus")) as page,
        rpc(party, "b") as over_grpc,
        party.caller("b") as caller,
    ):
        make_topic(party, "a")
        responder.listen("sums", kind="SYNC")
        requester.send("REQUEST_TO_SERVER", {"topic": "sums", "body": "?", "properties": {"ttl": FOREVER_MS}})
        over_http.send(request_of("POST", "/", form, code="101"))
        web.send(request_of("GET", "/sums"))
        page.say_all([{"headers": {"id": "1"}, "url": "/sums"}])
        over_grpc.send(call(1, publication("sums", "?"), block(path=REQUEST)))
        asking = msgspec.msgpack.encode(("request", ("sums", b"?", (), 3600.0)))
        caller.send(encode_request(CallItems([(1, OPEN, asking)])))
        for _ in range(6):
            assert responder.next()[0]["cmd"] == "REQUEST_TO_CLIENT"
        party.move("b", "b")
        assert b"the server stops" in over_http.next().body
        assert (web.next().status, page.next()["status"]) == (504, 504)
        over_grpc.until_closed()
        assert b"the server stops" in body_of(over_grpc.came, 1)
        assert said(caller.ask(create("orders", b"x"))[0]) == "a130"
        [(number, kind, error)] = caller.wire.items
        assert (number, kind, msgspec.msgpack.decode(error)[0]) == (1, ERROR, "gone")

        requester.send("REQUEST_TO_SERVER", {"topic": "sums", "body": "again", "properties": {"ttl": FOREVER_MS}})
        _, question = responder.next()
        assert question["body"] == "again"
        responder.send("RESPONSE_TO_SERVER", {**question, "body": "reply"})
        assert requester.next()[1]["body"] == "reply"
        assert web.do("query").status == page.do("query")["status"] == 200


def test_clients_over_grpc_hear_that_the_owner_goes_whether_they_answer_or_not(party: Patient) -> None:
    with rpc(party, "a") as near, rpc(party, "b") as far:
        for client in (near, far):
            client.send(listen("news"))
            client.until(DATA, 1)
            client.send(frame(HEADERS, END_HEADERS, 3, block(path=PUBLISH)))  # its message never comes
        party.move("b", "b")
        for client in (near, far):
            assert client.status(1)["grpc-status"] in ("0", "14")
            assert client.status(3)["grpc-status"] == "14"
            goodbyes = [one.payload[:4] for one in client.until_closed() if one.kind == GOAWAY]
            assert goodbyes == [(2**31 - 1).to_bytes(4, "big"), (3).to_bytes(4, "big")]


def test_clients_that_do_not_read_hold_nobody_up(party: Patient) -> None:
    make_topic(party, "a")
    with (
        SocketClient(address(party, "b", "zbus")) as far,
        SocketClient(address(party, "a", "zbus")) as near,
        rpc(party, "b") as stream,
        party.caller("b") as fetching,
        party.caller("a") as publisher,
        mesh(party, "b", purpose="pub", group="p") as mesh_publisher,
        SbusClient(address(party, "a", "sbus"), timeout_seconds=SAFETY_NET_SECONDS) as process,
    ):
        process.subscribe(b"orders")
        process.whoami()
        for number, consumer in enumerate((far, near)):
            consumer.do("create", mq="orders", channel=f"c{number}")
            assert consumer.do("sub", mq="orders", channel=f"c{number}")["status"] == 200
        stream.send(listen("orders"))
        stream.until(DATA, 1)
        for _ in range(12):
            publisher.ask(create_many("orders", [b"x" * 65_536] * 16))
        assert said(fetching.ask(subscribe("orders"))[0]) == "a030"
        fetching.send(*[fetch(0, 2**20)] * 100)
        assert mesh_publisher.publish("orders", "x")["code"] == 0
        party.move("b", "b")
        assert mesh_publisher.publish("orders", "x")["code"] == 0
