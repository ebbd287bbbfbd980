"""One bus: a zbus channel takes what jebp, sbus and Wörterbuch publish, and they hear what zbus publishes."""

import base64
import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from babelbus.client import BlockingClient as JebpClient
from babelbus.client import Record
from babelbus.clients.sbus import Client as SbusClient
from babelbus.clients.worterbuch.blocking import BlockingClient
from babelbus.clients.worterbuch.client import Event
from babelbus.protocols.sbus.messages import PACKET_BYTES_MAX
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.sbus import configured, heard_before_barrier, join
from tests.support.server import LiveServer

QUEUE = "queue"
JSON_TYPE = ((b"content-type", b"application/json"),)
ARBITRARY = bytes(range(256))
LARGE = b"0123456789abcdef" * 2**16
PAYLOADS: dict[str, tuple[bytes, Any, Any]] = {
    "text": ("schön".encode(), (), "schön"),
    "text that looks like JSON": (b'{"a":1}', (), '{"a":1}'),
    "JSON": (b'{"a": [1, null, "\xc3\xbc"]}', JSON_TYPE, {"a": [1, None, "ü"]}),
    "arbitrary bytes": (ARBITRARY, (), base64.b64encode(ARBITRARY).decode()),
    "nothing": (b"", (), ""),
    "1 MiB": (LARGE, (), LARGE.decode()),
}
"""What is published, its headers, and the body of the message that a zbus channel takes."""


class Zbus:
    """zbus in its plainest form: one HTTP request a command."""

    def __init__(self, live: LiveServer) -> None:
        self._connection = http.client.HTTPConnection(live.server.addresses["zbus"], timeout=SAFETY_NET_SECONDS)

    def ask(self, cmd: str, body: bytes = b"", *, kind: str = "text/plain", **headers: str) -> tuple[int, bytes]:
        """Send a command; give status and body of its answer."""
        self._connection.request("POST", "/", body, {"cmd": cmd, "content-type": kind, **headers})
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def do(self, cmd: str, body: bytes = b"", *, kind: str = "text/plain", **headers: str) -> None:
        """Send a command whose answer must be 200."""
        status, content = self.ask(cmd, body, kind=kind, **headers)
        assert status == 200, content

    def take(self) -> dict[str, Any]:
        """Give the next message of the channel, asking until it is stored: sbus has no acks to wait for."""
        until = time.monotonic() + SAFETY_NET_SECONDS
        while time.monotonic() < until:
            status, content = self.ask("take", mq=QUEUE, channel="all")
            if status == 200:
                [message] = json.loads(content)
                assert isinstance(message, dict)
                return message
            assert status == 604, content
        raise AssertionError("nothing came")

    def close(self) -> None:
        self._connection.close()


class Bus:
    """One server with the queue, and a client of each protocol."""

    def __init__(self, live: LiveServer) -> None:
        self.zbus = Zbus(live)
        self.zbus.do("create", mq=QUEUE, mqType="disk", channel="all")
        self.jebp = JebpClient(live.address, identity=live.admin)
        self.sbus: SbusClient = join(live, QUEUE.encode())
        self.tree = BlockingClient(f"tcp://{live.server.addresses['worterbuch-tcp']}")
        self.heard = self.tree.subscribe(QUEUE, live_only=True)


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    with LiveServer(configured(tmp_path)) as live:
        made = Bus(live)
        with made.jebp, made.sbus, made.tree:
            yield made
        made.zbus.close()


def test_a_channel_takes_what_jebp_publishes(bus: Bus) -> None:
    for payload, headers, body in PAYLOADS.values():
        bus.jebp.publish(QUEUE, payload, headers=headers)
        message = bus.zbus.take()
        assert message.get("body") == body
        assert (message["headers"].get("content-encoding") == "base64") is (payload == ARBITRARY)


def test_a_channel_takes_what_sbus_and_worterbuch_publish(bus: Bus) -> None:
    for payload, headers, body in PAYLOADS.values():
        if not headers and payload != LARGE:
            bus.sbus.publish(QUEUE.encode(), payload)
            heard_before_barrier(bus.sbus)
            assert bus.zbus.take().get("body") == body
    for value in ("schön", {"a": [1, None, "ü"]}, True, 1.5, LARGE.decode()):
        bus.tree.set(QUEUE, value)
        assert bus.zbus.take()["body"] == value
        bus.tree.publish(QUEUE, value)
        assert bus.zbus.take()["body"] == value


def test_the_others_hear_what_zbus_publishes(bus: Bus) -> None:
    sent = [
        ("text/plain; charset=utf-8", "schön".encode(), "schön"),
        ("application/json", b'{"a":[1,null,"\xc3\xbc"]}', {"a": [1, None, "ü"]}),
        ("application/octet-stream", ARBITRARY, {"base64": base64.b64encode(ARBITRARY).decode()}),
        ("text/plain", LARGE, LARGE.decode()),
    ]
    for kind, payload, value in sent:
        bus.zbus.do("pub", payload, kind=kind, mq=QUEUE)
        event: Event = next(bus.heard)
        assert event.values == {QUEUE: value}
        heard = [one.payload for one in heard_before_barrier(bus.sbus)]
        assert heard == ([payload] if len(payload) < PACKET_BYTES_MAX else [])
    records: list[Record] = list(bus.jebp.follow(QUEUE, offset=0, until_end=True))
    assert [record.payload for record in records] == [payload for _, payload, _ in sent]
    sources = {dict(record.headers)[b"ce_source"].partition(b":")[0] for record in records}  # type: ignore[union-attr]
    assert sources == {b"zbus"}
