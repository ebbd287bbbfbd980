"""Questions that no responder of EventMesh gets or takes, and how long requests wait at most."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlencode

import grpc
import pytest

from babelbus.config import EventmeshSettings, ServerSettings
from babelbus.core.access import SERVER
from babelbus.core.request import Question, Reply
from babelbus.core.subject import exactly
from babelbus.protocols.eventmesh.webhooks import PUSH_BYTES
from tests.protocols.eventmesh.test_bad_webhooks import peer
from tests.protocols.eventmesh.test_grpc import Events, Legacy, Package
from tests.protocols.eventmesh.test_http import Hook, subscribe
from tests.protocols.eventmesh.test_http import ask as call
from tests.support.eventmesh import MeshClient
from tests.support.server import LiveServer, configure
from tests.support.zbus import HttpClient, request_of

FOREVER_MS = "14400000"
LARGE = b"x" * 500_000
FILL_MAX = 100
"""So many large questions fill each buffer between the server and a client that does not read."""
TOO_SLOWLY = b"read too slowly"


@contextmanager
def serving(folder: Path, **settings: object) -> Iterator[tuple[LiveServer, HttpClient]]:
    """A server, and a client over HTTP that asks."""
    made = EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, webhook_networks="127.0.0.0/8", **settings)  # type: ignore[arg-type]
    config = configure(folder, eventmesh=made, server=ServerSettings(outbox_bytes_max=2**20))
    with LiveServer(config) as live, HttpClient(live.server.addresses["eventmesh-http"]) as requester:
        yield live, requester


def ask(client: HttpClient, topic: str, ttl: str = FOREVER_MS) -> None:
    form = urlencode({"producergroup": "P", "topic": topic, "content": "?", "ttl": ttl}).encode()
    client.send(request_of("POST", "/", form, code="101"))


def fill(live: LiveServer, topic: str) -> None:
    """Ask questions until the only responder of a topic takes no more."""
    broker = live.server.broker

    def is_refused() -> bool:
        return broker.request(topic, LARGE, (), broker.responders.deadline(1e4), SERVER).done

    for _ in range(FILL_MAX):
        if live.call(is_refused):
            return
    raise AssertionError("the responder takes questions without an end")


def test_a_requester_is_told_when_the_responder_over_tcp_reads_too_slowly(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as (live, requester),
        MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="g") as responder,
    ):
        responder.listen("slow", kind="SYNC")
        fill(live, "slow")
        ask(requester, "slow")
        assert TOO_SLOWLY in requester.next().body


def test_another_member_of_the_group_gets_what_a_slow_one_does_not_take(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as (live, requester),
        MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="g") as slow,
        MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="g") as other,
    ):
        slow.listen("slow", kind="SYNC")
        fill(live, "slow")
        other.listen("slow", kind="SYNC")
        for _ in range(3):
            ask(requester, "slow")
            _, question = other.next()
            other.send("RESPONSE_TO_SERVER", {**question, "body": "me"})
            assert b"me" in requester.next().body


@pytest.mark.parametrize("package", [Legacy, Events])
def test_a_requester_is_told_when_the_responder_over_grpc_reads_too_slowly(
    tmp_path: Path, package: type[Package]
) -> None:
    with (
        serving(tmp_path) as (live, requester),
        grpc.insecure_channel(live.server.addresses["eventmesh-grpc"]) as channel,
        package(channel).stream("g", "slow", kind="SYNC"),
    ):
        fill(live, "slow")
        ask(requester, "slow")
        assert TOO_SLOWLY in requester.next().body


def test_a_requester_is_told_when_too_many_questions_wait_for_a_webhook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("babelbus.protocols.eventmesh.webhooks.LIVE_BYTES_MAX", PUSH_BYTES)

    def hang(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while connection.recv(2**16):
                pass

    with serving(tmp_path, webhook_consent=False) as (live, requester), peer(hang) as url:
        items = json.dumps([{"topic": "slow", "type": "SYNC"}])
        fields = {"topic": items, "url": f"http://{url}", "consumerGroup": "g"}
        assert call(requester, "206", fields)["retCode"] == 0
        fill(live, "slow")
        ask(requester, "slow")
        assert TOO_SLOWLY in requester.next().body


def test_a_requester_is_told_when_the_webhook_does_not_take_the_question(live: LiveServer, web: HttpClient) -> None:
    with Hook((410, b"", {})) as hook:
        subscribe(web, hook, "refused", "g", kind="SYNC")
        ask(web, "refused")
        assert b"have failed" in web.next().body


@pytest.mark.parametrize("ttl", ["1e15", "86400001", "1e300"])
@pytest.mark.parametrize("client", ["tcp", "http", "java", "go", "events"])
def test_no_request_waits_longer_than_a_day(live: LiveServer, web: HttpClient, client: str, ttl: str) -> None:
    questions: list[Question] = []
    broker = live.server.broker
    responder = live.call(lambda: broker.responders.add(exactly("day"), questions.append, principal=SERVER))
    with (
        MeshClient(live.server.addresses["eventmesh-tcp"]).hello() as tcp,
        grpc.insecure_channel(live.server.addresses["eventmesh-grpc"]) as channel,
    ):
        if client == "tcp":
            tcp.send("REQUEST_TO_SERVER", {"topic": "day", "body": "?", "properties": {"ttl": ttl}})
        elif client == "http":
            ask(web, "day", ttl)
        else:
            package = Events(channel) if client == "events" else Legacy(channel)
            message = package.publication("day", "?")
            if client == "events":
                message.attributes["ttl"].ce_string = ttl
            else:
                message.ttl, message.header.language = ttl, client.upper()
            call = package._method("requestReply").future(message)  # cancels itself when it is forgotten
        live.until(lambda: len(questions) == 1)
        assert live.call(lambda: broker.responders.seconds_left(questions[0])) <= 24 * 3600
        live.call(lambda: broker.respond(questions[0].key, Reply(b"!")))
        if client in ("java", "go", "events"):
            assert package.text(call.result()) == "!"
        live.call(lambda: broker.responders.remove(responder))
