"""Clients of EventMesh that leave while the server waits on their account."""

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import grpc
import pytest

from babelbus.config import EventmeshSettings, ServerSettings
from babelbus.core.access import SERVER
from babelbus.core.request import NoRespondersError, Question, Reply, Request, Requests
from babelbus.core.subject import exactly
from tests.protocols.eventmesh.test_grpc import Events, Legacy, Package
from tests.support.clock import ManualClock
from tests.support.eventmesh import MeshClient
from tests.support.server import LiveServer, configure
from tests.support.zbus import HttpClient, request_of

FOREVER_MS = "86400000"


@pytest.fixture
def requests(live: LiveServer) -> Iterator[Requests[object]]:
    """The requests that wait for a reply; a responder takes them and answers nothing."""
    waiting = live.server.broker.responders.requests
    with MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="silent") as responder:
        responder.listen("silent", kind="SYNC")
        assert waiting.in_flight == 0
        yield waiting  # type: ignore[misc]
        live.until(lambda: waiting.in_flight == 0)


@contextmanager
def serving(folder: Path) -> Iterator[LiveServer]:
    made = EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, admin_port=0, idle_seconds=1000.0)
    clock = ManualClock(1_700_000_000_000)
    with LiveServer(configure(folder, eventmesh=made), clock=clock) as live:
        yield live


def expire(live: LiveServer) -> None:
    """Let the time pass that a client may be silent, in the eyes of the hub."""
    hub = live.server.services["eventmesh"].hub  # type: ignore[attr-defined]

    def tick() -> None:
        hub.clock.advance(1001)
        hub.tick()

    live.call(tick)


def begin(live: LiveServer, requests: Requests[object]) -> None:
    live.until(lambda: requests.in_flight == 1)


def test_a_request_over_tcp_ends_with_its_connection(live: LiveServer, requests: Requests[object]) -> None:
    with MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="q") as client:
        client.send("REQUEST_TO_SERVER", {"topic": "silent", "body": "?", "properties": {"ttl": FOREVER_MS}})
        begin(live, requests)


def test_a_request_over_http_ends_with_its_connection(live: LiveServer, requests: Requests[object]) -> None:
    host, _, port = live.server.addresses["eventmesh-http"].rpartition(":")
    form = urlencode({"producergroup": "P", "topic": "silent", "content": "?", "ttl": FOREVER_MS}).encode()
    with socket.create_connection((host, int(port))) as client:
        client.sendall(request_of("POST", "/", form, code="101"))
        begin(live, requests)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset


@pytest.mark.parametrize("package", [Legacy, Events])
@pytest.mark.parametrize("end", ["cancel", "deadline", "connection"])
def test_a_request_over_grpc_ends_with_its_call(
    live: LiveServer, requests: Requests[object], package: type[Package], end: str
) -> None:
    with grpc.insecure_channel(live.server.addresses["eventmesh-grpc"]) as channel:
        events = package(channel)
        call = events._method("requestReply").future(
            events.publication("silent", "?"), timeout=0.5 if end == "deadline" else None
        )
        if end == "deadline":
            assert call.exception().code() is grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            begin(live, requests)
            if end == "cancel":
                call.cancel()
                live.until(lambda: requests.in_flight == 0)


def ask_for_ever(client: HttpClient, topic: str) -> None:
    form = urlencode({"producergroup": "P", "topic": topic, "content": "?", "ttl": FOREVER_MS}).encode()
    client.send(request_of("POST", "/", form, code="101"))


def test_a_request_over_http_is_answered_at_once_when_the_server_stops(tmp_path: Path) -> None:
    config = configure(tmp_path, server=ServerSettings(drain_seconds=3600))  # which nobody waits for
    with LiveServer(config) as live, HttpClient(live.server.addresses["eventmesh-http"]) as requester:
        requests = live.server.broker.responders.requests
        live.call(lambda: live.server.broker.responders.add(exactly("stop"), lambda _: None, principal=SERVER))
        ask_for_ever(requester, "stop")
        live.until(lambda: requests.in_flight == 1)
        live.ask_to_stop()
        assert b"the server stops" in requester.next().body


def test_requests_that_were_put_off_are_not_begun_when_the_server_has_ended_the_others(tmp_path: Path) -> None:
    config = configure(tmp_path, server=ServerSettings(outbox_bytes_max=65_536))
    with LiveServer(config) as live, HttpClient(live.server.addresses["eventmesh-http"]) as requester:
        questions: list[Question] = []
        live.call(lambda: live.server.broker.responders.add(exactly("stop"), questions.append, principal=SERVER))
        form = urlencode({"producergroup": "P", "topic": "stop", "content": "?", "ttl": FOREVER_MS}).encode()
        requester.send(request_of("POST", "/", form, code="101") * 500)
        live.until(lambda: bool(questions))
        live.call(live.server.broker.end_requests)
        count = len(questions)
        assert all(b"the server stops" in requester.next().body for _ in range(500))
        assert len(questions) == count < 500


def test_a_requester_is_told_when_the_last_responder_over_tcp_leaves(live: LiveServer) -> None:
    address = live.server.addresses["eventmesh-tcp"]
    with HttpClient(live.server.addresses["eventmesh-http"]) as requester:
        with MeshClient(address).hello(group="a") as one:
            one.listen("left", kind="SYNC")
            ask_for_ever(requester, "left")
            assert one.next()[0]["cmd"] == "REQUEST_TO_CLIENT"
        assert b"have gone" in requester.next().body


@pytest.mark.parametrize("end", ["close", "CLIENT_GOODBYE_REQUEST", "UNSUBSCRIBE_REQUEST"])
def test_a_requester_is_told_when_a_responder_over_tcp_leaves_that_has_acknowledged_the_question(
    live: LiveServer, end: str
) -> None:
    with (
        HttpClient(live.server.addresses["eventmesh-http"]) as requester,
        MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="a") as responder,
    ):
        responder.listen("acknowledged", kind="SYNC")
        ask_for_ever(requester, "acknowledged")
        responder.push()
        if end == "close":
            responder.socket.close()
        else:
            assert responder.ask(end)["code"] == 0
        assert b"have gone" in requester.next().body


def test_a_reply_over_tcp_counts_after_the_acknowledgement_and_before_it_after_an_unsubscription(
    live: LiveServer,
) -> None:
    with (
        HttpClient(live.server.addresses["eventmesh-http"]) as requester,
        MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="a") as responder,
    ):
        responder.listen("replied", kind="SYNC")
        ask_for_ever(requester, "replied")
        _, question = responder.push()
        responder.send("RESPONSE_TO_SERVER", {**question, "body": "late"})
        assert b"late" in requester.next().body
        for _ in range(2):
            ask_for_ever(requester, "replied")
        (_, first), (head, _) = responder.next(), responder.next()
        assert responder.ask("UNSUBSCRIBE_REQUEST")["code"] == 0
        responder.send("RESPONSE_TO_SERVER", {**first, "body": "still"})
        assert b"still" in requester.next().body
        responder.send("REQUEST_TO_CLIENT_ACK", "", seq=head["seq"])
        assert b"have gone" in requester.next().body


@pytest.mark.parametrize("protocol", ["tcp", "grpc"])
def test_each_of_thousands_of_requesters_is_told_when_a_responder_leaves(live: LiveServer, protocol: str) -> None:
    broker = live.server.broker
    requests: list[Request[Reply]] = []

    def ask() -> None:
        deadline = broker.responders.deadline(1e4)
        requests.extend(broker.request("thousands", b"?", (), deadline, SERVER) for _ in range(100))

    def serve(read: Callable[[], object]) -> None:
        for _ in range(12):
            live.call(ask)
            for _ in range(100):
                read()
        assert not any(request.done for request in requests)

    if protocol == "tcp":
        with MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="a") as tcp:
            serve(tcp.listen("thousands", kind="SYNC").next)
    else:
        with (
            grpc.insecure_channel(live.server.addresses["eventmesh-grpc"]) as channel,
            Legacy(channel).stream("a", "thousands", kind="SYNC") as stream,
        ):
            serve(stream.next)
    live.until(lambda: all(isinstance(request.error, NoRespondersError) for request in requests))


def test_no_question_is_remembered_whose_requester_is_gone(live: LiveServer, requests: Requests[object]) -> None:
    hub = live.server.services["eventmesh"].hub  # type: ignore[attr-defined]
    with MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="q") as client:
        client.send("REQUEST_TO_SERVER", {"topic": "silent", "body": "?", "properties": {"ttl": FOREVER_MS}})
        begin(live, requests)
        assert len(hub._questions) == 1
    live.until(lambda: requests.in_flight == 0)
    assert not hub._questions
    assert not any(session._requests._questions for session in list(hub.peers))


def test_a_requester_waits_for_another_responder_that_was_asked(live: LiveServer) -> None:
    address = live.server.addresses["eventmesh-tcp"]
    with (
        HttpClient(live.server.addresses["eventmesh-http"]) as requester,
        MeshClient(address).hello(group="b") as other,
    ):
        with MeshClient(address).hello(group="a") as one:
            for client in (one, other):
                client.listen("stayed", kind="SYNC")
            ask_for_ever(requester, "stayed")
            assert one.next()[0]["cmd"] == "REQUEST_TO_CLIENT"
        live.until(lambda: len(live.server.broker.groups.find("stayed", "a").members) == 0)  # type: ignore[union-attr]
        _, question = other.next()
        other.send("RESPONSE_TO_SERVER", {**question, "body": "me"})
        assert b"me" in requester.next().body


@pytest.mark.parametrize("package", [Legacy, Events])
def test_a_requester_is_told_when_the_last_responder_over_grpc_leaves(live: LiveServer, package: type[Package]) -> None:
    topic = f"left/{package.__name__}"
    with HttpClient(live.server.addresses["eventmesh-http"]) as requester:
        with (
            grpc.insecure_channel(live.server.addresses["eventmesh-grpc"]) as channel,
            package(channel).stream("g", topic, kind="SYNC") as stream,
        ):
            ask_for_ever(requester, topic)
            assert stream.text() == "?"
        assert b"have gone" in requester.next().body


@pytest.mark.parametrize("port", ["eventmesh-http", "eventmesh-admin"])
def test_a_silent_connection_for_http_is_closed(tmp_path: Path, port: str) -> None:
    with serving(tmp_path) as live, HttpClient(live.server.addresses[port]) as client:
        assert client.ask("GET", "/topic" if port == "eventmesh-admin" else "/?code=0").headers
        expire(live)
        assert client.is_closed()


def test_a_client_of_http_that_waits_is_not_silent_unless_it_will_send_nothing_more(tmp_path: Path) -> None:
    with serving(tmp_path) as live, HttpClient(live.server.addresses["eventmesh-http"]) as client:
        hub = live.server.services["eventmesh"].hub  # type: ignore[attr-defined]
        requests = live.server.broker.responders.requests
        answerers: list[Question] = []
        live.call(lambda: live.server.broker.responders.add(exactly("slow"), answerers.append, principal=SERVER))
        form = urlencode({"producergroup": "P", "topic": "slow", "content": "?", "ttl": FOREVER_MS}).encode()
        for _ in range(2):
            client.send(request_of("POST", "/", form, code="101"))
            live.until(lambda: requests.in_flight == 1)
            expire(live)
            assert requests.in_flight == 1
            if len(answerers) == 1:
                live.call(lambda: live.server.broker.respond(answerers[0].key, Reply(b"me")))
                assert b"me" in client.next().body
        client.socket.shutdown(socket.SHUT_WR)
        (session,) = hub.peers
        live.until(lambda: session._is_half_closed)
        expire(live)
        assert client.is_closed()
        live.until(lambda: requests.in_flight == 0)
