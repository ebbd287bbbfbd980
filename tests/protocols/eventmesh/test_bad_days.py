"""EventMesh over TCP on bad days: lengths that lie, deep JSON, clients that never acknowledge, late replies."""

import json
from functools import partial
from pathlib import Path

import pytest

from babelbus.client import BlockingClient
from babelbus.config import EventmeshSettings
from babelbus.core.access import SERVER
from babelbus.core.publish import Publication
from babelbus.core.record import Event
from babelbus.core.request import NoRespondersError, Question, Reply
from babelbus.core.subject import exactly
from babelbus.protocols.eventmesh.frames import FRAME_BYTES_MAX
from tests.support.eventmesh import AGENT, HEAD, NEW, OLD, MeshClient, frame
from tests.support.server import LiveServer, configure


def dial(live: LiveServer, surplus: int = NEW) -> MeshClient:
    return MeshClient(live.server.addresses["eventmesh-tcp"], surplus)


def with_settings(folder: Path, **settings: object) -> LiveServer:
    made = EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, **settings)  # type: ignore[arg-type]
    return LiveServer(configure(folder, eventmesh=made))


# -- frames ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "size"), [(-1, 5), (10, -1), (10, 0), (2**31 - 1, 5), (5 * 2**20, 5), (5 * 2**20, 2**22 + 1), (5, 60)]
)
@pytest.mark.parametrize("says_hello", [True, False])
def test_lengths_that_lie_close_the_connection(live: LiveServer, length: int, size: int, says_hello: bool) -> None:
    with dial(live) as client:
        if says_hello:
            client.hello()
        client.socket.sendall(HEAD.pack(b"EventMesh0000", length, size))
        assert client.is_closed()


def test_a_header_of_four_mebibytes_is_read_after_hello_and_refused_before(live: LiveServer) -> None:
    large = {"cmd": "HEARTBEAT_REQUEST", "seq": "large", "desc": "x" * (4 * 2**20 - 200)}
    with dial(live).hello() as client:
        client.socket.sendall(frame(NEW, large))
        assert client.next()[0]["seq"] == "large"
    with dial(live) as client:
        client.socket.sendall(frame(NEW, large)[:100])
        assert client.is_closed()


@pytest.mark.parametrize(
    "header",
    [
        b'{"cmd":"HEARTBEAT_REQUEST","x":%b%b}' % (b"[" * 20_000, b"]" * 20_000),
        b'{"cmd":"\xff"}',
        b"\xff\xfe",
    ],
)
def test_a_header_that_cannot_be_read_closes_the_connection(live: LiveServer, header: bytes) -> None:
    with dial(live).hello() as client:
        client.socket.sendall(frame(NEW, header, b""))
        assert client.is_closed()


@pytest.mark.parametrize("body", [b"\xff\xfe", b"[" * 1000, b'{"topic":"x","properties":' + b'{"a":' * 1000 + b"}"])
@pytest.mark.parametrize("kind", ["eventmeshmessage", "cloudevents"])
def test_bodies_that_cannot_be_read_are_answered(live: LiveServer, body: bytes, kind: str) -> None:
    with dial(live).hello() as client:
        answer = client.ask("ASYNC_MESSAGE_TO_SERVER", body, protocoltype=kind)
        assert (answer["cmd"], answer["code"]) == ("ASYNC_MESSAGE_TO_SERVER_ACK", 1)
        client.send("RESPONSE_TO_SERVER", body, protocoltype=kind)
        client.send("REQUEST_TO_SERVER", body, protocoltype=kind)
        assert client.ask("HEARTBEAT_REQUEST")["code"] == 0


def test_a_hello_that_cannot_be_read_is_answered(live: LiveServer) -> None:
    with dial(live) as client:
        answer = client.ask("HELLO_REQUEST", b'{"version":"1","purpose":"\xff"}')
        assert (answer["cmd"], answer["code"]) == ("HELLO_RESPONSE", 1)
        assert client.is_closed()


def test_a_message_over_the_limit_is_answered_with_the_limit(tmp_path: Path) -> None:
    with with_settings(tmp_path, content_bytes_max=1000) as live, dial(live).hello() as client:
        assert client.publish("t", "x" * 1000)["code"] == 0
        answer = client.publish("t", "x" * 1001)
        assert (answer["code"], answer["desc"]) == (1, "event size exceeds the limit: 1000")


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_second_hello_does_not_change_the_group(live: LiveServer) -> None:
    with dial(live).hello(group="first") as client:
        assert client.ask("HELLO_REQUEST", {**AGENT, "group": "second"})["code"] == 0
        client.listen("two/hellos")
        topic = live.call(lambda: live.server.broker.find_topic("two/hellos"))
        assert topic is not None
        assert live.call(lambda: [group.name for group in live.server.broker.groups.on_topic("two/hellos")]) == [
            "first"
        ]


@pytest.mark.parametrize("command", ["REGISTER", "UNREGISTER"])
def test_commands_that_no_client_needs_are_answered(live: LiveServer, command: str) -> None:
    with dial(live).hello() as client:
        answer = client.ask(f"{command}_REQUEST")
        assert (answer["cmd"], answer["code"]) == (f"{command}_RESPONSE", 0)


@pytest.mark.parametrize("kind", ["eventmeshmessage", "cloudevents"])
def test_a_question_without_a_session_is_refused_with_a_body_that_java_can_read(live: LiveServer, kind: str) -> None:
    with dial(live, OLD) as client:
        client.send("REQUEST_TO_SERVER", {"topic": "t", "body": "?"}, seq="q", protocoltype=kind)
        header, body = client.next()
        assert (header["cmd"], header["seq"], header["code"]) == ("RESPONSE_TO_CLIENT", "q", 1)
        assert "no session is found" in header["desc"]
        assert body["body"] if kind == "eventmeshmessage" else body["specversion"] == "1.0"


def test_a_client_that_has_said_goodbye_and_stays_is_closed(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("babelbus.protocols.eventmesh.session.GOODBYE_SECONDS", 0.0)
    with dial(live).hello() as client:
        assert client.ask("CLIENT_GOODBYE_REQUEST")["code"] == 0
        assert client.is_closed()


def test_a_topic_that_is_removed_before_listening_refuses_the_listener(live: LiveServer) -> None:
    with dial(live).hello() as client:
        assert client.ask("SUBSCRIBE_REQUEST", {"topicList": ["removed"]})["code"] == 0
        live.call(lambda: live.server.broker.remove_topic("removed", principal=SERVER))
        live.until(lambda: live.server.broker.find_topic("removed") is None)
        answer = client.ask("LISTEN_REQUEST")
        assert (answer["code"], "removed" in answer["desc"]) == (1, True)
        client.listen("removed")
        client.publish("removed", "x")
        assert client.push()[1]["body"] == "x"


@pytest.mark.parametrize("what", ["topic", "group"])
def test_a_listener_whose_topic_or_group_was_removed_subscribes_again(live: LiveServer, what: str) -> None:
    broker, topic = live.server.broker, f"gone/{what}"
    with dial(live).hello(group="g") as client:
        client.listen(topic)
        if what == "topic":
            live.call(lambda: broker.remove_topic(topic, principal=SERVER))
            live.until(lambda: broker.find_topic(topic) is None)
        else:
            live.call(lambda: broker.groups.remove(topic, "g", SERVER))
        assert client.ask("SUBSCRIBE_REQUEST", {"topicList": [topic]})["code"] == 0
        client.publish(topic, "x")
        assert client.push()[1]["body"] == "x"


def test_a_group_that_somebody_has_alone_refuses_the_listener(live: LiveServer) -> None:
    groups = live.server.broker.groups
    with dial(live).hello(group="own") as client:
        assert client.ask("SUBSCRIBE_REQUEST", {"topicList": ["owned"]})["code"] == 0
        owner = live.call(lambda: groups.get("owned", "own").join(lambda _: None, exclusive=True, principal=SERVER))
        answer = client.ask("LISTEN_REQUEST")
        assert (answer["code"], "exclusive" in answer["desc"]) == (1, True)
        live.call(owner.leave)
        client.listen("owned")
        client.publish("owned", "x")
        assert client.push()[1]["body"] == "x"


# -- deliveries --------------------------------------------------------------------------------------------------------


def test_a_message_that_is_never_acknowledged_goes_to_another_session(tmp_path: Path) -> None:
    with (
        with_settings(tmp_path, ack_seconds=0.05) as live,
        dial(live).hello(group="lazy") as lazy,
        dial(live, OLD).hello(group="lazy") as busy,
        dial(live).hello("pub") as publisher,
    ):
        lazy.listen("lease")
        publisher.publish("lease", "x")
        seen = [lazy.next()[1]["body"]]
        busy.listen("lease")
        seen.append(busy.push()[1]["body"])
        assert seen == ["x", "x"]
        lazy.send("ASYNC_MESSAGE_TO_CLIENT_ACK", seq="1")  # too late, and for no push that is known
        assert lazy.ask("HEARTBEAT_REQUEST")["code"] == 0


OLD_TIME = 1_000_000_000_000


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("explicit", ["grpc", "none", "wrong"]), ("none", ["short", "grpc", "none", "wrong"]), ("all", ["none", "wrong"])],
)  # fmt: skip
def test_messages_older_than_their_time_to_live_are_not_delivered(
    tmp_path: Path, rule: str, expected: list[str]
) -> None:
    with (
        with_settings(tmp_path, expire=rule) as live,
        dial(live).hello() as client,
        BlockingClient(live.address, identity=live.admin) as jebp,
    ):
        assert client.ask("SUBSCRIBE_REQUEST", {"topicList": ["aged"]})["code"] == 0
        marked = ((b"ttl", b"4000"), (b"seqnum", b"1"))
        for payload, headers in (
            ("short", ((b"ttl", b"1000"),)), ("grpc", marked), ("none", ()), ("wrong", ((b"ttl", b"x"),)),
        ):  # fmt: skip
            jebp.publish("aged", payload.encode(), headers=headers, timestamp=OLD_TIME)
        client.publish("aged", "last", ttl="3600000")
        assert client.ask("LISTEN_REQUEST")["code"] == 0
        assert [client.push()[1]["body"] for _ in range(len(expected) + 1)] == [*expected, "last"]


# -- replies -----------------------------------------------------------------------------------------------------------


def test_a_reply_without_an_id_answers_the_only_question_that_is_open(live: LiveServer) -> None:
    with dial(live).hello(group="s") as responder, dial(live).hello(group="q") as requester:
        responder.listen("replies", kind="SYNC")
        for seq in ("unanswered", "answered"):
            request = {"topic": "replies", "body": seq, "properties": {"ttl": "60000"}}
            requester.send("REQUEST_TO_SERVER", request, seq=seq)
            header, body = responder.next()
            if seq == "answered":
                responder.send("RESPONSE_TO_SERVER", {"topic": "replies", "body": "me"})
            responder.send("REQUEST_TO_CLIENT_ACK", json.dumps(body), seq=header["seq"])
        header, body = requester.next()
        assert (header["seq"], body["body"]) == ("answered", "me")


def test_a_reply_to_a_message_answers_no_question(live: LiveServer) -> None:
    with dial(live).hello(group="s") as responder, dial(live).hello(group="q") as requester:
        responder.listen("mixed", kind="SYNC")
        requester.publish("mixed", "message")
        message, _ = responder.next()
        request = {"topic": "mixed", "body": "question", "properties": {"ttl": "60000"}}
        requester.send("REQUEST_TO_SERVER", request, seq="q")
        question, body = responder.next()
        responder.send("RESPONSE_TO_SERVER", {"topic": "mixed", "body": "to the message"})
        responder.send("REQUEST_TO_CLIENT_ACK", "x", seq=message["seq"])
        responder.send("RESPONSE_TO_SERVER", {**body, "body": "to the question"})
        responder.send("REQUEST_TO_CLIENT_ACK", "x", seq=question["seq"])
        assert requester.next()[1]["body"] == "to the question"


# -- messages that no frame carries ------------------------------------------------------------------------------------

LARGE = b"x" * FRAME_BYTES_MAX


def test_a_message_over_the_frame_limit_becomes_a_dead_letter_and_the_next_is_delivered(live: LiveServer) -> None:
    broker = live.server.broker
    with dial(live).hello(group="small") as client:
        client.listen("large/queue")
        client.listen("large/all", mode="BROADCASTING")
        for topic in ("large/queue", "large/all"):
            for payload in (LARGE, b"small"):
                publication = Publication(SERVER, "test", [Event(topic, payload)])
                live.call(partial(broker.publish, publication))
            assert client.push()[1]["body"] == "small"
        live.until(lambda: broker.find_topic("dead-letters/small") is not None)


def test_a_question_or_a_reply_over_the_frame_limit_is_not_sent(live: LiveServer) -> None:
    broker = live.server.broker
    with dial(live).hello(group="small") as client:
        client.listen("large/question", kind="SYNC")
        deadline = broker.responders.deadline(1e4)
        request = live.call(lambda: broker.request("large/question", LARGE, (), deadline, SERVER))
        live.until(lambda: isinstance(request.error, NoRespondersError))
        questions: list[Question] = []
        live.call(lambda: broker.responders.add(exactly("large/reply"), questions.append, principal=SERVER))
        for seq, payload in (("large", LARGE), ("small", b"small")):
            client.send("REQUEST_TO_SERVER", {"topic": "large/reply", "body": "?"}, seq=seq)
            live.until(lambda: bool(questions))
            live.call(partial(broker.respond, questions.pop().key, Reply(payload)))
        header, body = client.next()
        assert (header["seq"], body["body"]) == ("small", "small")
