"""CloudEvents against a real server: what subscribers of each transport get of attributes and data."""

import base64
import json
from collections.abc import Iterator
from queue import Queue
from threading import Thread
from typing import Any

import grpc
import pytest

from babelbus.clients.worterbuch.blocking import BlockingClient
from babelbus.clients.worterbuch.client import Event
from tests.protocols.eventmesh.test_grpc import Events, Legacy
from tests.protocols.eventmesh.test_http import Hook, ask, subscribe
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.eventmesh import MeshClient
from tests.support.server import LiveServer
from tests.support.zbus import HttpClient


@pytest.fixture
def events(live: LiveServer) -> Iterator[Events]:
    with grpc.insecure_channel(live.server.addresses["eventmesh-grpc"]) as channel:
        yield Events(channel)


@pytest.fixture
def client(live: LiveServer) -> Iterator[MeshClient]:
    with MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="tcp") as client:
        yield client


def event_of(topic: str, **members: object) -> dict[str, Any]:
    return {"specversion": "1.0", "id": "i", "source": "/s", "type": "t", "subject": topic, **members}


def publish(client: MeshClient, event: dict[str, Any] | bytes) -> None:
    assert client.ask("ASYNC_MESSAGE_TO_SERVER", event, protocoltype="cloudevents")["code"] == 0


def test_names_of_no_cloud_event_are_made_legal_for_subscribers(client: MeshClient, events: Events) -> None:
    client.listen("ce/names")
    with events.stream("rpc", "ce/names") as stream:
        publish(client, event_of("ce/names", ext="e", My_Ext="m", i_d="x", data="d", _="y", ü="z"))
        body, message = client.push()[1], stream.next()
    assert set(body) == {
        "specversion", "id", "source", "type", "subject", "data", "ext", "myext",
        "datacontenttype", "protocoltype", "protocolversion", "protocoldesc",
    }  # fmt: skip
    assert (body["id"], body["data"], body["myext"]) == ("i", "d", "m")
    assert message.attributes["myext"].ce_string == "m"
    assert all(name.isascii() and name.isalnum() and name == name.lower() for name in message.attributes)


def test_forms_and_old_messages_have_the_extensions_under_their_names(web: HttpClient, events: Events) -> None:
    own = {"bizseqno": "b", "uniqueid": "u", "seqnum": "s", "tag": "g", "ttl": "60000", "producergroup": "p", "n": "e"}
    event = event_of("ce/forms", time="2026-01-02T03:04:05Z", dataschema="http://x", data="d", **own)
    with Hook() as hook, Legacy(events._channel).stream("old", "ce/forms") as stream:
        subscribe(web, hook, "ce/forms", "hook")
        ask(web, "104", {"producergroup": "P", "content": json.dumps(event)}, protocoltype="cloudevents")
        form, message = hook.next()[0], stream.next()
    assert (form["bizseqno"], form["uniqueId"], json.loads(form["extFields"])) == ("b", "u", own)
    assert (message.uniqueId, message.seqNum, message.tag, message.ttl) == ("u", "s", "g", "60000")
    assert (message.producerGroup, dict(message.properties)) == ("p", own)


def test_a_reply_in_another_flavour_is_a_whole_cloud_event(client: MeshClient, events: Events) -> None:
    with Legacy(events._channel).stream("old", "ce/reply", kind="SYNC") as responder:
        asked = events.publication("ce/reply", "?", protocoltype="cloudevents", datacontenttype="text/plain")
        future = events._method("requestReply").future(asked, timeout=SAFETY_NET_SECONDS)
        question = responder.next()
        question.properties["my_k"] = "v"
        responder.say(Legacy(events._channel).reply(question, "one"))
        answer = future.result()
        assert (answer.text_data, answer.attributes["datacontenttype"].ce_string) == ("one", "text/plain")
        assert answer.attributes["myk"].ce_string == "v"
        assert "correlation99id" not in answer.attributes

        client.send("REQUEST_TO_SERVER", event_of("ce/reply", ttl="60000", data=1), protocoltype="cloudevents")
        responder.say(Legacy(events._channel).reply(responder.next(), "two"))
        body = client.next()[1]
        assert (body["datacontenttype"], body["data"], body["ttl"]) == ("text/plain", "two", "60000")


def test_a_reply_over_grpc_keeps_what_the_cloud_event_says(client: MeshClient, events: Events) -> None:
    with events.stream("rpc", "ce/answer", kind="SYNC") as responder:
        asked = events.publication("ce/answer", "?", protocoltype="cloudevents", datacontenttype="text/plain")
        future = events._method("requestReply").future(asked, timeout=SAFETY_NET_SECONDS)
        reply = events.reply(responder.next(), '{"a":1}')
        reply.id, reply.source, reply.type = "my-id", "/my", "my.type"
        reply.attributes["datacontenttype"].ce_string, reply.attributes["n"].ce_string = "application/json", "v"
        responder.say(reply)
        answer = future.result()
        assert (answer.id, answer.source, answer.type, answer.text_data) == ("my-id", "/my", "my.type", '{"a":1}')
        assert (answer.attributes["datacontenttype"].ce_string, answer.attributes["n"].ce_string) == (
            "application/json", "v",
        )  # fmt: skip

        client.send("REQUEST_TO_SERVER", {"topic": "ce/answer", "body": "?", "properties": {"ttl": "60000"}})
        reply = events.reply(responder.next(), "text")
        reply.attributes["protocoltype"].ce_string, reply.attributes["n"].ce_string = "cloudevents", "v"
        responder.say(reply)
        body = client.next()[1]
        assert (body["body"], body["properties"]["n"]) == ("text", "v")


def test_a_cloud_event_as_a_reply_over_http_has_its_extensions_as_properties(
    live: LiveServer, client: MeshClient
) -> None:
    client.listen("ce/sync", kind="SYNC")
    form = {"producergroup": "P", "content": json.dumps(event_of("ce/sync", ttl="60000", data="?"))}
    answers: Queue[dict[str, Any]] = Queue()

    def request() -> None:
        with HttpClient(live.server.addresses["eventmesh-http"]) as web:
            answers.put(ask(web, "101", form, protocoltype="cloudevents"))

    thread = Thread(target=request)
    thread.start()
    question = client.push()[1]
    client.send("RESPONSE_TO_SERVER", {**question, "n": "v", "data": "!"}, protocoltype="cloudevents")
    thread.join(SAFETY_NET_SECONDS)
    reply = json.loads(answers.get()["retMsg"])
    assert (reply["body"], reply["properties"]["n"], reply["properties"]["ttl"]) == ('"!"', "v", "60000")


def test_the_time_of_an_event_is_a_time_stamp_over_grpc(client: MeshClient, events: Events) -> None:
    with events.stream("rpc", "ce/time") as stream:
        publish(client, event_of("ce/time", time="2026-01-02T03:04:05.5+01:00"))
        assert stream.next().attributes["time"].ce_timestamp.ToJsonString() == "2026-01-02T02:04:05.500Z"
        publish(client, event_of("ce/time", time="yesterday"))
        assert stream.next().attributes["time"].ce_string == "yesterday"
        message = events.publication("ce/time", "x", protocoltype="cloudevents")
        message.attributes["time"].ce_timestamp.FromJsonString("2026-01-02T03:04:05Z")
        assert events.code(events.ask("publish", message)) == "0"
        assert stream.next().attributes["time"] == message.attributes["time"]


def test_protobuf_that_is_no_any_comes_as_the_bytes_that_it_is(client: MeshClient, events: Events) -> None:
    kind = "application/protobuf"
    with events.stream("rpc", "ce/protobuf") as stream:
        for data in (b"\x08\x01", b"\x12\x01x", b"\xff", b""):
            encoded = base64.b64encode(data).decode()
            publish(client, event_of("ce/protobuf", datacontenttype=kind, data_base64=encoded))
            got = stream.next()
            assert (got.WhichOneof("data"), got.binary_data) == ("binary_data", data)
        message = events.publication("ce/protobuf", "", protocoltype="cloudevents", datacontenttype=kind)
        message.proto_data.type_url, message.proto_data.value = "type.googleapis.com/x.Y", b"\x08\x01"
        assert events.code(events.ask("publish", message)) == "0"
        assert stream.next().proto_data == message.proto_data


def test_an_event_of_version_0_3_becomes_one_of_1_0(client: MeshClient, events: Events) -> None:
    old = {"specversion": "0.3", "datacontenttype": "image/png", "schemaurl": "http://x"}
    client.listen("ce/old")
    with events.stream("rpc", "ce/old") as stream:
        publish(client, event_of("ce/old", **old, datacontentencoding="base64", data="/wA="))
        body, message = client.push()[1], stream.next()
        assert (body["specversion"], body["data_base64"], body["dataschema"]) == ("1.0", "/wA=", "http://x")
        assert not {"data", "datacontentencoding", "schemaurl"} & set(body)
        assert message.binary_data == b"\xff\0"
        publish(client, event_of("ce/old", specversion="0.3", data={"a": 1}))
        assert client.push()[1]["data"] == {"a": 1}
    sent = event_of("ce/old", **old, datacontentencoding="Base64", data="?")
    assert client.ask("ASYNC_MESSAGE_TO_SERVER", sent, protocoltype="cloudevents")["code"] == 1


def test_what_stands_beside_a_cloud_event_over_http_counts(web: HttpClient, client: MeshClient) -> None:
    client.listen("ce/beside", kind="SYNC")
    form = {"producergroup": "P", "content": json.dumps(event_of("ce/beside", uniqueid="inside"))}
    beside = {"protocoltype": "cloudevents", "ttl": "60000", "bizseqno": "b", "uniqueid": "outside"}
    assert ask(web, "104", form, **beside)["retCode"] == 0
    body = client.push()[1]
    own = {name: body[name] for name in ("ttl", "bizseqno", "uniqueid", "producergroup")}
    assert own == {"ttl": "60000", "bizseqno": "b", "uniqueid": "inside", "producergroup": "P"}
    answer = ask(web, "101", form, **beside | {"ttl": "1"})  # nobody answers: without its ttl it waits for hours
    assert answer["retCode"] == 4


@pytest.mark.parametrize(("package", "description"), [(Legacy, "grpc"), (Events, "grpc-cloud-event")])
def test_webhooks_of_grpc_get_the_data_alone(
    web: HttpClient, events: Events, package: type[Legacy | Events], description: str
) -> None:
    topic, said = f"ce/hook/{description}", package(events._channel)
    with Hook() as hook, Hook() as other:
        assert said.code(said.ask("subscribe", said.subscription("rpc", topic, url=hook.url))) == "0"
        subscribe(web, other, topic, "http")
        message = events.publication(topic, '{"a": 1}', protocoltype="cloudevents", datacontenttype="application/json")
        assert events.code(events.ask("publish", message)) == "0"
        form, headers = hook.next()
        assert (form["content"], form["bizseqno"], form["uniqueId"]) == ('{"a": 1}', "s1", "u1")
        own = [headers[name] for name in ("protocoltype", "protocoldesc", "protocolversion", "contenttype")]
        assert own == ["cloudevents", description, "1.0", "application/json"]
        form, headers = other.next()
        assert json.loads(form["content"])["data"] == {"a": 1}
        assert "contenttype" not in headers
        message.ClearField("text_data")
        message.binary_data = b"\xff\0"
        assert events.code(events.ask("publish", message)) == "0"
        form, _ = hook.next()
        assert (form["content"], json.loads(form["extFields"])["content-encoding"]) == ("/wA=", "base64")


def test_data_of_json_without_a_type_is_json_for_all(live: LiveServer, client: MeshClient, events: Events) -> None:
    address = live.server.addresses["worterbuch-tcp"]
    with events.stream("rpc", "ce/untyped") as stream, BlockingClient(f"tcp://{address}") as tree:
        heard = tree.subscribe("ce/untyped", live_only=True)
        for data, text in (({"a": 1}, '{"a":1}'), ("text", '"text"')):
            publish(client, event_of("ce/untyped", data=data))
            assert next(heard) == Event({"ce/untyped": data})
            got = stream.next()
            assert (got.text_data, got.attributes["datacontenttype"].ce_string) == (text, "application/json")
