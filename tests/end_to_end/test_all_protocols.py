"""One bus: what each of the five protocols publishes, as a consumer of each receives it, in every kind of payload.

The table of losses is in docs/protocols/eventmesh.md; EventMesh is heard over TCP, by a webhook and on a stream.
"""

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from babelbus.client import BlockingClient as JebpClient
from babelbus.clients.worterbuch.blocking import BlockingClient
from babelbus.clients.worterbuch.client import Event
from babelbus.config import Config, EventmeshSettings
from babelbus.protocols.sbus.messages import PACKET_BYTES_MAX
from tests.protocols.eventmesh.test_grpc import Events
from tests.protocols.eventmesh.test_http import Hook, publish, subscribe
from tests.support.eventmesh import MeshClient
from tests.support.sbus import configured, heard_before_barrier, join
from tests.support.server import LiveServer
from tests.support.zbus import HttpClient

TOPIC = "bus"
JSON_TYPE = "application/json"
ARBITRARY = bytes(range(256))
LARGE = b"0123456789abcdef" * 2**16
KINDS: dict[str, tuple[bytes, bool]] = {
    "JSON": (b'{"a":[1,null,"\xc3\xbc"]}', True),
    "text": ("schön".encode(), False),
    "arbitrary bytes": (ARBITRARY, False),
    "nothing": (b"", False),
    "1 MiB": (LARGE, False),
}
"""Payloads, and whether the publisher says that they are JSON."""


def text_of(payload: bytes) -> str:
    """The payload as protocols have it that carry text alone."""
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return base64.b64encode(payload).decode()


class Bus:
    """One server, a publisher of each protocol and a consumer of each."""

    def __init__(self, live: LiveServer, stack: ExitStack) -> None:
        self.live = live
        addresses = live.server.addresses
        enter = stack.enter_context
        self.jebp = enter(JebpClient(live.address, identity=live.admin))
        self.jebp.create_topic(TOPIC)
        self.zbus = enter(HttpClient(addresses["zbus"]))
        self.zbus.do("create", mq=TOPIC, channel="z", offset="0")
        self.tree = enter(BlockingClient(f"tcp://{addresses['worterbuch-tcp']}"))
        self.tree_events = self.tree.subscribe(TOPIC, live_only=True)
        self.sbus = enter(join(live, TOPIC.encode()))
        self.mesh = enter(MeshClient(addresses["eventmesh-tcp"])).hello(group="tcp").listen(TOPIC)
        self.mesh_publisher = enter(MeshClient(addresses["eventmesh-tcp"])).hello("pub", group="p")
        self.web = enter(HttpClient(addresses["eventmesh-http"]))
        self.hook = enter(Hook())
        subscribe(self.web, self.hook, TOPIC, "hook")
        self.rpc = Events(enter(grpc.insecure_channel(addresses["eventmesh-grpc"])))
        self.stream = enter(self.rpc.stream("grpc", TOPIC))

    # -- publishers: each returns the payload and whether it is JSON for the others ----------------------------------

    def by_jebp(self, payload: bytes, is_json: bool) -> tuple[bytes, bool]:
        self.jebp.publish(TOPIC, payload, headers=((b"content-type", JSON_TYPE.encode()),) if is_json else ())
        return payload, is_json

    def by_zbus(self, payload: bytes, is_json: bool) -> tuple[bytes, bool]:
        headers = {"content_type": JSON_TYPE} if is_json else {}
        assert self.zbus.do("pub", payload, mq=TOPIC, **headers).status == 200
        return payload, is_json

    def by_worterbuch(self, payload: bytes, is_json: bool) -> tuple[bytes, bool]:
        value = json.loads(payload) if is_json else text_of(payload)
        self.tree.publish(TOPIC, value)
        return msgspec.json.encode(value), True

    def by_sbus(self, payload: bytes, is_json: bool) -> tuple[bytes, bool]:
        payload = payload[:100_000]  # its packets carry no more
        self.sbus.publish(TOPIC.encode(), payload)
        return payload, False

    def by_mesh(self, payload: bytes, is_json: bool) -> tuple[bytes, bool]:
        message: dict[str, Any] = {"topic": TOPIC, "body": text_of(payload), "properties": {}}
        if text_of(payload).encode() != payload:
            message["properties"]["content-encoding"] = "base64"
        if is_json:
            message["headers"] = {"datacontenttype": JSON_TYPE}
        assert self.mesh_publisher.ask("ASYNC_MESSAGE_TO_SERVER", message)["code"] == 0
        return payload, is_json

    def by_mesh_http(self, payload: bytes, is_json: bool) -> tuple[bytes, bool]:
        more = {} if text_of(payload).encode() == payload else {"extFields": '{"content-encoding":"base64"}'}
        if not payload:  # the field `content` must not be empty
            return self.by_mesh(payload, is_json)
        assert publish(self.web, TOPIC, text_of(payload), **more)["retCode"] == 0
        return payload, False

    def by_mesh_grpc(self, payload: bytes, is_json: bool) -> tuple[bytes, bool]:
        kind = JSON_TYPE if is_json else "application/octet-stream"
        message = self.rpc.publication(TOPIC, "", protocoltype="cloudevents", datacontenttype=kind)
        if is_json:
            message.text_data = payload.decode()
        else:
            message.binary_data = payload
        assert self.rpc.code(self.rpc.ask("publish", message)) == "0"
        return payload, is_json

    # -- consumers ---------------------------------------------------------------------------------------------------

    def check(self, payload: bytes, is_json: bool, flavour: str) -> None:
        """Check that every consumer got the payload, as far as its protocol can carry it."""
        expected = json.loads(payload) if is_json else text_of(payload)
        is_text = text_of(payload).encode() == payload
        assert next(self.tree_events) == Event({TOPIC: expected if is_text else {"base64": expected}})
        heard = [one.payload for one in heard_before_barrier(self.sbus)]
        assert heard == ([payload] if len(payload) < PACKET_BYTES_MAX else [])
        body = self.mesh.push()[1]  # the topic has recorded the event by now
        *_, record = self.jebp.follow(TOPIC, offset=0, until_end=True)
        assert record.payload == payload
        (taken,) = json.loads(self.zbus.do("take", mq=TOPIC, channel="z").body)
        if taken["headers"].get("content-encoding") == "base64":
            assert base64.b64decode(taken["body"]) == payload
        else:
            is_own = "url" in taken  # JSON that a zbus client published over HTTP comes back as its text
            assert taken.get("body", "") == (expected if is_json and not is_own else text_of(payload))
        content = self.hook.next()[0]["content"]
        message = self.stream.next()
        if flavour == "cloudevents":
            for event in (body, json.loads(content)):
                if "data_base64" in event:
                    assert base64.b64decode(event["data_base64"]) == payload
                else:
                    assert event.get("data", "") == expected
            assert (message.text_data.encode() if is_json else message.binary_data) == payload
        else:
            assert (body["body"], content, message.text_data) == (text_of(payload),) * 3
            encoding = None if is_text else "base64"
            assert body["properties"].get("content-encoding") == encoding


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    config: Config = configured(tmp_path)
    mesh = EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, webhook_networks="127.0.0.0/8")
    with LiveServer(msgspec.structs.replace(config, eventmesh=mesh)) as live, ExitStack() as stack:
        yield Bus(live, stack)


@pytest.mark.parametrize(
    "publisher",
    [Bus.by_jebp, Bus.by_zbus, Bus.by_worterbuch, Bus.by_sbus, Bus.by_mesh, Bus.by_mesh_http, Bus.by_mesh_grpc],
    ids=["jebp", "zbus", "worterbuch", "sbus", "eventmesh-tcp", "eventmesh-http", "eventmesh-grpc"],
)
def test_what_one_protocol_publishes_every_protocol_receives(
    bus: Bus, publisher: Callable[[Bus, bytes, bool], tuple[bytes, bool]]
) -> None:
    flavour = "cloudevents" if publisher is Bus.by_mesh_grpc else "eventmeshmessage"
    for payload, is_json in KINDS.values():
        bus.check(*publisher(bus, payload, is_json), flavour)
