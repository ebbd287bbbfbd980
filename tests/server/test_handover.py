"""Clients keep their sessions when the owner of a cluster changes in order."""

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

pytest.importorskip("nats", reason="clusters are not tested: the package nats-py is not installed")

from babelbus.link.transport import Absence, LinkedTransport
from babelbus.protocols.jebp.codec import encode_request
from babelbus.protocols.jebp.messages import FROM_OFFSET, FetchPartition
from babelbus.protocols.service import Continued, StreamService
from babelbus.server.app import Server
from babelbus.server.handover import Handover, _Session, _Sessions
from babelbus.storage.files import LocalFiles
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.eventmesh import MeshClient
from tests.support.http import Response
from tests.support.jebp import create, fetch, fetched, said
from tests.support.jebp import subscribe as subscribe_topic
from tests.support.members import Party, make_topic
from tests.support.nats import NatsServer
from tests.support.server import configure
from tests.support.web import WebSocket
from tests.support.worterbuch import ack, get, named, pstate, psubscribe, put, state, subscribe
from tests.support.zbus import HttpClient, SocketClient, request_of


class Lines:
    """One client of the TCP port of a member."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=SAFETY_NET_SECONDS)
        self._file = self._socket.makefile("rb")
        self.client_id: str = self.hear()["welcome"]["clientId"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def say(self, message: object) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        line = self._file.readline()
        assert line, "the connection ended"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def ask(self, message: object) -> dict[str, Any]:
        self.say(message)
        return self.hear()


@pytest.fixture
def party(nats: NatsServer, tmp_path: Path) -> Iterator[Party]:
    party = Party(nats, tmp_path, lease_seconds=3600.0)
    yield party
    party.close()


def lines(party: Party, name: str) -> Lines:
    return Lines(party.children[name].addresses["worterbuch-tcp"])


def mesh(party: Party, name: str, **agent: object) -> MeshClient:
    return MeshClient(party.children[name].addresses["eventmesh-tcp"]).hello(**agent)  # type: ignore[arg-type]


def taken(client: MeshClient) -> str:
    """Take a push; return its text when the owner has the acknowledgement."""
    _, body = client.push()
    assert client.ask("HEARTBEAT_REQUEST")["code"] == 0
    return str(body["body"])


def start(party: Party, *names: str) -> None:
    for name in names:
        party.start(name)
        party.until_ready(name)
    party.until_all_present(names[0], *names)


def begin_work(device: Lines, rival: Lines, page: WebSocket) -> None:
    """Let a device leave a testament and lock a job that a rival waits for; the rival and a page subscribe."""
    will = f"$SYS/clients/{device.client_id}/lastWill"
    assert device.ask(put(1, will, [{"key": "state", "value": "off"}])) == ack(1)
    assert device.ask(put(2, "state", "on")) == ack(2)
    assert device.ask(named("lock", 3, "job")) == ack(3)
    rival.say(named("acquireLock", 4, "job"))
    assert rival.ask(psubscribe(5, "rooms/#", liveOnly=True)) == ack(5)
    assert page.ask(subscribe(6, "state", liveOnly=True)) == ack(6)


def test_subscriptions_locks_and_testaments_of_another_member_survive_moves_of_the_data(party: Party) -> None:
    start(party, "a", "b", "c")
    with lines(party, "b") as device, lines(party, "b") as rival, WebSocket(party.children["b"]) as page:
        begin_work(device, rival, page)
        for number, owner in enumerate(("c", "a", "b"), start=10):
            party.move("b", owner)
            assert device.ask(get(number, "state")) == state(number, "on")
            assert device.ask(put(number, "rooms/one", number)) == ack(number)
            assert rival.hear() == pstate(5, "rooms/#", {"rooms/one": number})
        assert device.ask(named("releaseLock", 20, "job")) == ack(20)
        assert rival.hear() == ack(4)
        device.close()
        assert page.next() == state(6, "off")


def test_clients_of_the_owner_itself_go_on_when_it_moves_the_data_and_end_with_its_process(party: Party) -> None:
    start(party, "a", "b")
    with lines(party, "a") as device, lines(party, "b") as watcher, WebSocket(party.children["a"]) as page:
        will = f"$SYS/clients/{device.client_id}/lastWill"
        device.ask(put(1, will, [{"key": "state", "value": "off"}]))
        device.ask(named("lock", 2, "job"))
        watcher.say(named("acquireLock", 3, "job"))
        assert watcher.ask(subscribe(4, "state")) == ack(4)
        assert page.ask(subscribe(4, "state")) == ack(4)
        for number, owner in enumerate(("b", "a"), start=10):
            party.move("b", owner)
            assert device.ask(put(number, "state", number)) == ack(number)
            assert (watcher.hear(), page.next()) == (state(4, number), state(4, number))
        assert party.children["a"].stop() == 0
        assert [watcher.hear(), watcher.hear()] in ([ack(3), state(4, "off")], [state(4, "off"), ack(3)])
        with pytest.raises(AssertionError, match="the connection ended"):
            device.hear()


def test_clients_of_jebp_publish_and_read_on_through_moves(party: Party) -> None:
    start(party, "a", "b", "c")
    make_topic(party, "a")
    with party.caller("a") as first, party.caller("b") as second:
        for number, owner in enumerate(("b", "c", "a")):
            assert said(first.ask(create("orders", b"%d of a" % number))[0]) == "a130"
            second.ask(subscribe_topic("orders"))
            party.move("c", owner)
            large = b"%d of b" % number * 4_000  # the front of a member leaves it sealed
            answers = second.ask(create("orders", b"%d of b" % number), create("orders", large))
            assert [said(answer) for answer in answers] == ["a130", "a130"]
            [answer] = second.ask(fetch(3 * number))
            assert fetched(answer)["orders", 0] == [b"%d of a" % number, b"%d of b" % number, large]


def test_a_fetch_that_waits_is_answered_before_the_owner_changes(party: Party) -> None:
    start(party, "a", "b")
    make_topic(party, "a")
    with party.caller("b") as caller:
        caller.send(encode_request(FetchPartition("orders", 0, FROM_OFFSET, 0, -1, 1000, wait_ms=60_000)))
        party.move("b", "b")
        assert said(caller.hear()[0]).startswith("a030")
        assert said(caller.ask(create("orders", b"1"))[0]) == "a130"


def test_a_page_with_a_compressor_connects_again(party: Party) -> None:
    start(party, "a", "b")
    with WebSocket(party.children["b"], deflate=True) as page:
        party.move("b", "b")
        assert page.rest() == b""


def test_an_owner_that_is_terminated_hands_over_too(party: Party) -> None:
    start(party, "a", "b")
    with lines(party, "b") as client:
        assert client.ask(psubscribe(1, "rooms/#", liveOnly=True)) == ack(1)
        assert party.children["a"].stop() == 0
        assert client.ask(put(2, "rooms/one", 1)) in (ack(2), pstate(1, "rooms/#", {"rooms/one": 1}))
        assert "1 of 1 sessions of the last owner go on" in party.children["b"].said


def test_the_sessions_of_clients_that_do_not_come_end(party: Party) -> None:
    start(party, "a", "b", "c")
    with lines(party, "c") as watcher:
        assert watcher.ask(subscribe(1, "state")) == ack(1)
        device = lines(party, "b")
        device.ask(put(1, f"$SYS/clients/{device.client_id}/lastWill", [{"key": "state", "value": "off"}]))
        party.children["b"].kill()
        party.move("c", "c")
        assert watcher.hear() == state(1, "off")
        device.close()


def test_consumers_of_eventmesh_go_on_at_each_owner_and_lose_nothing(party: Party) -> None:
    start(party, "a", "b", "c")
    with (
        mesh(party, "b", group="here") as here,
        mesh(party, "a", group="there") as there,
        mesh(party, "b", group="slow") as slow,
        mesh(party, "a", group="all") as hears,
        mesh(party, "c", purpose="pub", group="p") as publisher,
    ):
        for client in (here, there, slow):
            client.listen("orders")
        hears.listen("orders", mode="BROADCASTING")
        assert publisher.publish("orders", "held")["code"] == 0
        assert [taken(client) for client in (here, there, hears)] == ["held"] * 3
        seqs = {slow.next()[0]["seq"]}
        for number, owner in enumerate(("b", "c", "a")):
            party.move("c", owner)
            header, body = slow.next()  # it has not acknowledged: the next owner pushes it again
            assert body["body"] == "held"
            seqs.add(header["seq"])
            assert publisher.publish("orders", str(number))["code"] == 0
            assert [taken(client) for client in (here, there, hears)] == [str(number)] * 3
            pushed = slow.next()
            assert pushed[1]["body"] == str(number)
            slow.send("ASYNC_MESSAGE_TO_CLIENT_ACK", seq=pushed[0]["seq"])
            assert slow.ask("HEARTBEAT_REQUEST")["code"] == 0
        assert len(seqs) == 4
        status, group = party.ask("c", "/api/topics/orders/groups/here")
        assert (status, group["lag"], group["members"]) == (200, 0, 1)


def test_requests_of_eventmesh_are_answered_by_the_same_client_at_each_owner(party: Party) -> None:
    start(party, "a", "b")
    with mesh(party, "a", group="s") as responder, mesh(party, "b", purpose="pub", group="q") as requester:
        responder.listen("sums", kind="SYNC")
        for number, owner in enumerate(("b", "a")):
            party.move("a", owner)
            requester.send("REQUEST_TO_SERVER", {"topic": "sums", "body": "?", "properties": {"ttl": "60000"}})
            _, question = responder.next()
            responder.send("RESPONSE_TO_SERVER", {**question, "body": str(number)})
            assert requester.next()[1]["body"] == str(number)


def test_a_client_of_eventmesh_hears_goodbye_only_where_its_session_ends(party: Party) -> None:
    start(party, "a", "b")
    with mesh(party, "a", group="mine") as mine, mesh(party, "b", group="other") as other:
        for client in (mine, other):
            client.listen("orders")
        assert party.children["a"].stop() == 0
        assert mine.next()[0]["cmd"] == "SERVER_GOODBYE_REQUEST"
        assert mine.is_closed()
        with mesh(party, "b", purpose="pub", group="p") as publisher:
            assert publisher.publish("orders", "x")["code"] == 0
        assert taken(other) == "x"


def zbus(party: Party, name: str) -> str:
    return party.children[name].addresses["zbus"]


def ids(client: SocketClient, last: str) -> list[str]:
    """Read deliveries up to one."""
    received: list[str] = []
    while last not in received:
        received.append(client.next()["headers"]["id"])
    return received


def test_consumers_and_producers_of_zbus_go_on_and_get_every_message_once_while_the_data_moves(party: Party) -> None:
    start(party, "a", "b", "c")
    with (
        SocketClient(zbus(party, "a")) as near,
        SocketClient(zbus(party, "b")) as far,
        SocketClient(zbus(party, "c")) as producer,
        HttpClient(zbus(party, "b")) as web,
    ):
        for consumer, channel in ((near, "near"), (far, "far")):
            assert consumer.do("create", mq="Q", mqType="disk", channel=channel)["status"] == 200
            assert consumer.do("sub", mq="Q", channel=channel, window=100)["status"] == 200
        asked, sent = web.do("query", mq="Q"), list[str]()
        for owner in ("b", "c", "a"):
            for number in range(10):
                sent += [f"{owner}{number}", f"{owner}{number} of http"]
                producer.say("pub", "x", mq="Q", id=sent[-2])
                web.send(request_of("POST", "/", b"x", cmd="pub", mq="Q", id=sent[-1]))
            party.move("b", owner)
            assert [producer.next()["headers"]["id"] for _ in range(10)] == sent[-20::2]
            assert [web.next().headers["id"] for _ in range(10)] == sent[-19::2]
        assert producer.do("pub", "x", mq="Q", id="last")["status"] == 200
        for consumer in (near, far):
            received = ids(consumer, "last")
            assert (sorted(received[:-1]), received[-1]) == (sorted(sent), "last")
            assert [one for one in received if one in sent[::2]] == sent[::2]
        assert subscribers(web.do("query", mq="Q")) == {
            channel: (client, 100 - len(sent) - 1) for channel, (client, _) in subscribers(asked).items()
        }


def subscribers(answer: Response) -> dict[str, tuple[str, int]]:
    """Return id and window of the client of each channel."""
    found = [one for channel in json.loads(answer.body)["channels"] for one in channel["subscriptions"]]
    return {one["channel"]: (one["clientId"], one["window"]) for one in found}


def test_a_service_of_zbus_keeps_its_urls_and_is_called_at_the_next_owner(party: Party) -> None:
    start(party, "a", "b")
    with SocketClient(zbus(party, "a")) as service, HttpClient(zbus(party, "b")) as caller:
        for cmd in ("create", "sub"):
            assert service.do(cmd, mq="Svc", channel="Svc")["status"] == 200
        assert service.do("bind", [{"url": "/greet", "mq": "Svc"}], mq="Svc")["status"] == 200
        assert caller.do("query").status == 200
        party.move("b", "b")
        caller.send(request_of("GET", "/greet/you"))
        call = service.next()
        assert call["url"] == "/greet/you"
        headers = {"cmd": "route", "target": call["headers"]["source"], "id": call["headers"]["id"]}
        service.say_all([{"headers": headers, "body": "hello", "status": 200}])
        answer = caller.next()
        assert (answer.status, answer.body) == (200, b'"hello"')


def read(folder: Path, epoch: int) -> list[str]:
    return asyncio.run(Handover(LocalFiles(), str(folder), epoch).read())


def test_only_the_next_owner_continues_sessions_and_only_once(tmp_path: Path) -> None:
    def write() -> None:
        session = msgspec.Raw(msgspec.msgpack.encode(_Session("id", "worterbuch", "owner", None, None, None, b"")))
        Handover(LocalFiles(), str(tmp_path), 4)._write(_Sessions(4, [session]))

    write()
    assert read(tmp_path, 5) == ["owner"]
    assert read(tmp_path, 5) == []
    for other in (3, 4, 6):
        write()
        assert read(tmp_path, other) == []


def test_a_file_that_holds_no_sessions_costs_the_sessions_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sessions").write_bytes(b"\x00garbage")
    assert read(tmp_path, 5) == []
    assert "the sessions of the last owner do not go on" in caplog.text


def test_a_session_of_another_release_ends_and_costs_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        server = Server(configure(tmp_path))
        await server.start()
        try:
            for name in ("worterbuch", "jebp"):
                service = server.services[name]
                assert isinstance(service, StreamService)
                transport = LinkedTransport(Absence(), 0, None, {"peername": ("127.0.0.1", 1)})
                assert await service.continue_sessions([Continued("owner", b"\x01", transport)]) == set()
                assert transport.is_lost
                assert not service.connections
        finally:
            await server.stop()

    with caplog.at_level(logging.INFO):
        asyncio.run(test())
    assert caplog.text.count("closing: the session is of another release") == 2
