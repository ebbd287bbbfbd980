"""CloudEvents against a real server: what subscribers of each transport get of attributes and data."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.protocols.eventmesh.test_grpc import Events
from tests.support.eventmesh import MeshClient
from tests.support.server import LiveServer


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
