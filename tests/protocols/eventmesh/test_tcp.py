"""EventMesh over TCP against a real server: sessions, publishing, groups, broadcasting, requests."""

import json
from pathlib import Path
from typing import Any

import pytest

from babelbus.config import EventmeshSettings
from tests.support.eventmesh import AGENT, NEW, OLD, MeshClient, frame
from tests.support.jebp import create, create_topic, said
from tests.support.server import LiveServer, configure
from tests.support.zbus import HttpClient

BOTH = pytest.mark.parametrize("surplus", [OLD, NEW])


def dial(live: LiveServer, surplus: int = NEW) -> MeshClient:
    return MeshClient(live.server.addresses["eventmesh-tcp"], surplus)


# -- sessions ----------------------------------------------------------------------------------------------------------


@BOTH
def test_the_whole_life_of_a_session(live: LiveServer, surplus: int) -> None:
    with dial(live, surplus).hello() as client:
        assert client.ask("HELLO_REQUEST", {**AGENT, "group": "other"})["code"] == 0  # keeps the session
        assert client.ask("HEARTBEAT_REQUEST")["cmd"] == "HEARTBEAT_RESPONSE"
        client.listen(f"life{surplus}")
        assert client.publish(f"life{surplus}", "one")["cmd"] == "ASYNC_MESSAGE_TO_SERVER_ACK"
        header, body = client.push()
        assert (header["cmd"], header["properties"]) == (
            "ASYNC_MESSAGE_TO_CLIENT", {"protocoltype": "eventmeshmessage"},
        )  # fmt: skip
        assert (body["topic"], body["body"]) == (f"life{surplus}", "one")
        assert client.ask("UNSUBSCRIBE_REQUEST")["code"] == 0
        client.publish(f"life{surplus}", "unheard")
        assert client.ask("CLIENT_GOODBYE_REQUEST")["cmd"] == "CLIENT_GOODBYE_RESPONSE"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (None, "cannot be read"),
        ({**AGENT, "version": None}, "version cannot be null"),
        ({**AGENT, "purpose": "both"}, "purpose config is error"),
        ({**AGENT, "group": " "}, "group cannot be null"),
    ],
)
def test_a_hello_that_says_too_little_is_answered_and_closed(live: LiveServer, body: object, reason: str) -> None:
    with dial(live) as client:
        answer = client.ask("HELLO_REQUEST", body)
        assert (answer["cmd"], answer["code"]) == ("HELLO_RESPONSE", 1)
        assert reason in answer["desc"]
        assert client.is_closed()


def test_clients_of_java_1_2_name_their_group_by_purpose(live: LiveServer) -> None:
    agent = {"version": "1", "purpose": "pub", "producerGroup": "P"}
    with dial(live, OLD) as client:
        client.socket.sendall(frame(OLD, {"command": "HELLO_REQUEST", "seq": "1"}, agent))
        assert client.next()[0]["code"] == 0


@pytest.mark.parametrize("command", ["SUBSCRIBE", "LISTEN", "HEARTBEAT", "UNSUBSCRIBE", "CLIENT_GOODBYE"])
def test_nothing_is_done_without_a_session(live: LiveServer, command: str) -> None:
    with dial(live) as client:
        answer = client.ask(f"{command}_REQUEST")
        assert (answer["cmd"], answer["code"]) == (f"{command}_RESPONSE", 1)
        assert "no session is found" in answer["desc"]
        assert client.publish("none", "x")["code"] == 1
        client.hello()


@pytest.mark.parametrize("data", [frame(NEW, {"cmd": "WHAT", "seq": "1"}), b"x" * 100])
def test_who_breaks_the_protocol_loses_its_connection_alone(live: LiveServer, data: bytes) -> None:
    with dial(live).hello() as other:
        with dial(live) as client:
            client.socket.sendall(data)
            assert client.is_closed()
        assert other.ask("HEARTBEAT_REQUEST")["code"] == 0


def test_a_publisher_cannot_subscribe_or_listen(live: LiveServer) -> None:
    with dial(live).hello("pub") as client:
        for command in ("SUBSCRIBE_REQUEST", "LISTEN_REQUEST"):
            answer = client.ask(command, {"topicList": [{"topic": "x"}]})
            assert (answer["code"], answer["desc"]) == (1, "client purpose config is not sub")
        assert client.publish("from-pub", "x")["code"] == 0


@pytest.mark.parametrize(
    "body", [None, {}, {"topicList": []}, {"topicList": [{"topic": "a", "mode": "UNRECOGNIZED"}]},
             {"topicList": ["a\0"]}, {"topicList": ["$state"]}]
)  # fmt: skip
def test_a_wrong_subscription_is_refused_and_the_session_stays(live: LiveServer, body: object) -> None:
    with dial(live).hello() as client:
        answer = client.ask("SUBSCRIBE_REQUEST", body)
        assert (answer["cmd"], answer["code"]) == ("SUBSCRIBE_RESPONSE", 1)
        client.listen("right")


def test_a_server_that_stops_says_goodbye(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path)) as live, dial(live).hello() as client:
        live.ask_to_stop()
        header, _ = client.next()
        assert (header["cmd"], header["code"]) == ("SERVER_GOODBYE_REQUEST", 0)
        assert client.is_closed()


def test_a_client_that_is_silent_is_closed(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path)) as live, dial(live).hello() as client:
        (peer,) = live.server.services["eventmesh"].hub.peers  # type: ignore[attr-defined]
        live.call(lambda: setattr(peer, "heard_at", peer.heard_at - live.config.eventmesh.idle_seconds))
        assert client.is_closed()


# -- groups and broadcasting -------------------------------------------------------------------------------------------


@BOTH
def test_each_group_gets_each_message_once_in_order(live: LiveServer, surplus: int) -> None:
    topic = f"shared{surplus}"
    with (
        dial(live, NEW).hello(group="a") as first,
        dial(live, OLD).hello(group="a") as second,
        dial(live).hello(group="b") as other,
        dial(live, surplus).hello("pub", group="p") as publisher,
    ):
        for client in (first, second, other):
            client.listen(topic)
        publisher.socket.sendall(
            b"".join(publisher.frame("ASYNC_MESSAGE_TO_SERVER", {"topic": topic, "body": str(n)}) for n in range(20))
        )
        assert [publisher.next()[0]["code"] for _ in range(20)] == [0] * 20
        halves = [[int(client.push()[1]["body"]) for _ in range(10)] for client in (first, second)]
        assert all(half == sorted(half) for half in halves)
        assert sorted(halves[0] + halves[1]) == list(range(20))
        assert [int(other.push()[1]["body"]) for _ in range(20)] == list(range(20))


def test_messages_without_an_ack_go_to_another_session_when_theirs_is_gone(live: LiveServer) -> None:
    with dial(live).hello() as publisher:
        with dial(live).hello(group="r") as first:
            first.listen("again")
            publisher.publish("again", "x")
            assert first.next()[1]["body"] == "x"
        with dial(live).hello(group="r") as second:
            second.listen("again")
            assert second.push()[1]["body"] == "x"
        with dial(live).hello(group="r") as third:
            third.listen("again")
            publisher.publish("again", "y")
            assert third.push()[1]["body"] == "y"  # x was acknowledged


def test_a_group_keeps_its_place_while_nobody_is_there(live: LiveServer) -> None:
    with dial(live).hello(group="k") as client:
        client.listen("kept")
    with dial(live).hello("pub") as publisher:
        publisher.publish("kept", "meanwhile")
    with dial(live).hello(group="k") as client:
        client.listen("kept")
        assert client.push()[1]["body"] == "meanwhile"


def test_broadcasting_reaches_every_session_that_listens(live: LiveServer) -> None:
    with dial(live).hello(group="w") as first, dial(live, OLD).hello(group="w") as second, dial(live).hello() as sender:
        for client in (first, second):
            client.listen("all", mode="BROADCASTING")
        answer = sender.ask("BROADCAST_MESSAGE_TO_SERVER", {"topic": "all", "body": "hear"})
        assert answer["cmd"] == "BROADCAST_MESSAGE_TO_SERVER_ACK"
        for client in (first, second):
            header, body = client.push()
            assert (header["cmd"], body["body"]) == ("BROADCAST_MESSAGE_TO_CLIENT", "hear")


def test_a_slow_subscriber_holds_no_more_than_its_window(tmp_path: Path) -> None:
    settings = EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, window=3)
    with LiveServer(configure(tmp_path, eventmesh=settings)) as live, dial(live).hello() as client:
        client.listen("slow")
        for number in range(5):
            client.publish("slow", str(number))
        pushes = [client.next() for _ in range(3)]
        assert client.ask("HEARTBEAT_REQUEST")["code"] == 0  # nothing came between
        client.send("ASYNC_MESSAGE_TO_CLIENT_ACK", seq=pushes[1][0]["seq"])
        assert client.push()[1]["body"] == "3"


# -- messages ----------------------------------------------------------------------------------------------------------


def test_old_subscribers_get_exactly_the_members_that_they_know(live: LiveServer) -> None:
    message = {
        "topic": "strict", "body": "t", "properties": {"keys": "k", "n": 3, "username": "u", "passwd": "p", "ip": "i"},
        "headers": {"datacontenttype": "text/plain", "more": "m"},
    }  # fmt: skip
    with dial(live, OLD).hello(group="o") as old, dial(live).hello(group="n") as new, dial(live).hello() as publisher:
        old.listen("strict")
        new.listen("strict")
        assert publisher.ask("ASYNC_MESSAGE_TO_SERVER", message, token="secret", tag="g")["code"] == 0
        _, body = old.push()
        assert sorted(body) == ["body", "properties", "topic"]
        assert (body["properties"]["keys"], body["properties"]["n"], body["properties"]["tag"]) == ("k", "3", "g")
        assert not {"username", "passwd", "ip", "token"} & set(body["properties"])
        _, body = new.push()
        assert body["headers"] == {"datacontenttype": "text/plain", "more": "m"}


@pytest.mark.parametrize(
    ("event", "data"),
    [
        ({"datacontenttype": "application/json", "data": {"a": [1, "x"]}}, {"data": {"a": [1, "x"]}}),
        ({"data": {"a": 1}}, {"data": {"a": 1}}),
        ({"datacontenttype": "text/plain", "data": "text"}, {"data": "text"}),
        ({"datacontenttype": "image/png", "data_base64": "gP8="}, {"data_base64": "gP8="}),
        ({"datacontenttype": "application/json", "data": "a text"}, {"data": "a text"}),
        ({"datacontenttype": "application/json", "data_base64": "aGVsbG8="}, {"data_base64": "aGVsbG8="}),
        ({"datacontenttype": "application/json"}, {}),
        ({}, {}),
    ],
)
def test_cloud_events_come_as_they_were_sent(live: LiveServer, event: dict[str, Any], data: dict[str, Any]) -> None:
    sent = {"specversion": "1.0", "id": "i", "source": "/s", "type": "t", "subject": "ce", "ext": "e", **event}
    with dial(live).hello() as client:
        client.listen("ce")
        assert client.ask("ASYNC_MESSAGE_TO_SERVER", sent, protocoltype="cloudevents", protocoldesc="Xa1")["code"] == 0
        header, body = client.push()
        client.ask("HEARTBEAT_REQUEST")  # behind the acknowledgement
        assert header["properties"]["protocoltype"] == body["protocoltype"] == "cloudevents"
        assert {name: body.get(name) for name in sent if not name.startswith("data")} == {
            name: value for name, value in sent.items() if not name.startswith("data")
        }
        assert {name: value for name, value in body.items() if name in ("data", "data_base64")} == data


@pytest.mark.parametrize(
    ("body", "properties", "reason"),
    [
        ({"body": "x"}, {}, "no topic"),
        (None, {}, "no EventMeshMessage"),
        (b"\xff", {}, "no EventMeshMessage"),
        ({"topic": "a\0b", "body": "x"}, {}, "a\\x00b"),
        ({"topic": "$state", "body": "x"}, {}, "$state"),
        ({"topic": "x"}, {"protocoltype": "openmessage"}, "openmessage"),
        ({"subject": "x"}, {"protocoltype": "cloudevents"}, "specversion"),
        ({"specversion": "1.0"}, {"protocoltype": "cloudevents"}, "subject"),
        (b"[" * 1000, {"protocoltype": "cloudevents"}, "no CloudEvent"),
    ],
)
def test_a_message_that_cannot_be_published_is_answered(
    live: LiveServer, body: object, properties: dict[str, str], reason: str
) -> None:
    with dial(live).hello() as client:
        answer = client.ask("ASYNC_MESSAGE_TO_SERVER", body, **properties)
        assert (answer["cmd"], answer["code"]) == ("ASYNC_MESSAGE_TO_SERVER_ACK", 1)
        assert reason in answer["desc"]
        assert client.publish("right", "x")["code"] == 0


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [True, False], ids=["copies properties", "answers in order"])
@pytest.mark.parametrize("surplus", [OLD, NEW])
def test_a_request_is_answered_once_by_one_responder(live: LiveServer, surplus: int, copies: bool) -> None:
    topic = f"ask{surplus}{copies}"
    with dial(live).hello(group="s") as responder, dial(live, surplus).hello(group="q") as requester:
        responder.listen(topic, kind="SYNC")
        requester.send("REQUEST_TO_SERVER", {"topic": topic, "body": "2+2", "properties": {"ttl": "60000"}}, seq="r1")
        header, body = responder.next()
        assert (header["cmd"], body["body"]) == ("REQUEST_TO_CLIENT", "2+2")
        assert {"correlation99id", "reply99to99client", "cluster"} <= set(body["properties"])
        reply = {"topic": topic, "body": "4", "properties": body["properties"] if copies else {}}
        responder.send("RESPONSE_TO_SERVER", reply, seq="random")
        responder.send("RESPONSE_TO_SERVER", reply, seq="random")
        responder.send("REQUEST_TO_CLIENT_ACK", json.dumps(body), seq=header["seq"])
        header, body = requester.next()
        assert (header["cmd"], header["seq"], header["code"]) == ("RESPONSE_TO_CLIENT", "r1", 0)
        assert (body["body"], "correlation99id" in body["properties"]) == ("4", False)
        assert requester.ask("HEARTBEAT_REQUEST")["code"] == 0  # no second answer
        assert responder.ask("HEARTBEAT_REQUEST")["code"] == 0


def test_a_request_that_nobody_answers_gets_silence(live: LiveServer) -> None:
    with dial(live).hello() as client:
        client.send("REQUEST_TO_SERVER", {"topic": "nobody", "body": "?"})
        assert client.ask("HEARTBEAT_REQUEST")["code"] == 0


def test_a_message_to_a_sync_subscriber_comes_as_a_request(live: LiveServer) -> None:
    with dial(live).hello() as client:
        client.listen("sync", kind="SYNC")
        client.publish("sync", "x")
        assert client.push()[0]["cmd"] == "REQUEST_TO_CLIENT"


# -- one bus -----------------------------------------------------------------------------------------------------------


def test_a_message_with_too_many_properties_spoils_no_other_of_its_chunk(live: LiveServer) -> None:
    with dial(live).hello() as client:
        properties = {f"p{number}": "x" for number in range(125)}
        chunk = [
            client.frame("ASYNC_MESSAGE_TO_SERVER", {"topic": "many", "properties": found, "body": "x"}, seq)
            for seq, found in (("few", {}), ("many", properties))
        ]
        client.socket.sendall(b"".join(chunk))
        answers = [client.next()[0] for _ in chunk]
        assert [(answer["seq"], answer["code"]) for answer in answers] == [("few", 0), ("many", 1)]
        assert "128 properties" in answers[1]["desc"]


def test_what_other_protocols_publish_is_heard_and_the_other_way_round(live: LiveServer) -> None:
    with live.caller() as jebp, dial(live).hello(group="bus") as mesh:
        assert said(jebp.ask(create_topic("one"))[0]) == "a130"
        mesh.listen("one")
        for payload, text, more in ((b"text", "text", {}), (b"\xff\0", "/wA=", {"content-encoding": "base64"})):
            assert said(jebp.ask(create("one", payload))[0]) == "a130"
            _, body = mesh.push()
            assert (body["body"], {k: v for k, v in body["properties"].items() if k in more}) == (text, more)
        mesh.publish("one", "from the mesh", colour="red")
        with HttpClient(live.server.addresses["zbus"]) as web:
            web.do("create", mq="one", channel="z", offset="2")
            (taken,) = json.loads(web.do("take", mq="one", channel="z").body)
            assert (taken["body"], taken["headers"]["colour"]) == ("from the mesh", "red")
