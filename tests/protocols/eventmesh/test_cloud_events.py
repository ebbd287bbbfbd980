"""CloudEvents against a real server: what subscribers of each transport get of attributes and data."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.protocols.eventmesh.test_grpc import Events, Legacy
from tests.protocols.eventmesh.test_http import Hook, ask, subscribe
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
        "protocoltype", "protocolversion", "protocoldesc",
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
