"""One bus: what jebp, sbus and Wörterbuch publish, as each of the three receives it.

See: docs/design/design.md, section 5.
"""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from babelbus.client import BlockingClient as JebpClient
from babelbus.client import Record
from babelbus.clients.sbus import Client as SbusClient
from babelbus.clients.worterbuch.blocking import BlockingClient, BlockingSubscription
from babelbus.clients.worterbuch.client import Event
from babelbus.clients.worterbuch.errors import NoSuchValueError
from babelbus.core.access import SERVER
from babelbus.protocols.sbus.messages import PACKET_BYTES_MAX, Publish
from tests.support.sbus import configured, heard_before_barrier, join
from tests.support.server import LiveServer

JSON_TYPE = ((b"content-type", b"application/json"),)
ARBITRARY = bytes(range(256))
LARGE = b"0123456789abcdef" * 2**16
SUBJECT = "bus/größe"
PAYLOADS: dict[str, tuple[bytes, Any, Any]] = {
    "text": ("schön".encode(), (), "schön"),
    "text that looks like JSON": (b'{"a":1}', (), '{"a":1}'),
    "JSON": (b'{"a": [1, null, "\xc3\xbc"]}', JSON_TYPE, {"a": [1, None, "ü"]}),
    "JSON of several lines": (b'{\n  "a": 1\r\n}', JSON_TYPE, {"a": 1}),
    "no JSON although it says so": (b'{"a":', JSON_TYPE, '{"a":'),
    "arbitrary bytes": (ARBITRARY, (), {"base64": base64.b64encode(ARBITRARY).decode()}),
    "nothing": (b"", (), ""),
    "1 MiB": (LARGE, (), LARGE.decode()),
}
"""What is published, its headers, and what Wörterbuch clients make of it."""


class Bus:
    """One server, and a client of each protocol that hears `bus` and what is below it."""

    def __init__(self, live: LiveServer) -> None:
        self.live = live
        live.call(lambda: live.server.broker.create_topic("bus", principal=SERVER))
        live.call(lambda: live.server.broker.create_topic(SUBJECT, principal=SERVER))
        live.call(lambda: live.server.broker.create_topic("kept", None, {"retain": "last"}, principal=SERVER))
        self.jebp = JebpClient(live.address, identity=live.admin)
        self.sbus: SbusClient = join(live, b"bus/", b"kept")
        self.tree = [self.tree_client(scheme) for scheme in ("tcp", "ws")]
        self.listeners = [client.psubscribe("#", live_only=True) for client in self.tree]

    def tree_client(self, scheme: str) -> BlockingClient:
        addresses = self.live.server.addresses
        if scheme == "tcp":
            return BlockingClient(f"tcp://{addresses['worterbuch-tcp']}")
        return BlockingClient(f"ws://{addresses['worterbuch']}/ws")

    def tree_heard(self) -> Event:
        """The next event below the two, the same in TCP and WebSocket."""
        found = [_next(listener) for listener in self.listeners]
        assert found[0] == found[1]
        return found[0]

    def sbus_heard(self) -> list[tuple[str, bytes | None]]:
        """What came to the sbus client until now."""
        heard: list[Publish] = heard_before_barrier(self.sbus)
        return [(one.key.decode(), one.payload) for one in heard]

    def records(self, topic: str) -> list[Record]:
        """Everything that a topic has recorded."""
        return list(self.jebp.follow(topic, offset=0, until_end=True))

    def dropped(self) -> float:
        """Events that sbus could not express."""
        sample = self.live.server.metrics.registry.get_sample_value
        labels = {"protocol": "sbus", "reason": "inexpressible"}
        return self.live.call(lambda: sample("babelbus_live_dropped_total", labels)) or 0


def _next(listener: BlockingSubscription) -> Event:
    while True:
        event: Event = next(listener)
        if not any(key.startswith("$SYS") for key in (*event.values, *event.deleted)):
            return event


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    with LiveServer(configured(tmp_path)) as live:
        made = Bus(live)
        with made.jebp, made.sbus, made.tree[0], made.tree[1]:
            yield made


def test_what_jebp_publishes(bus: Bus) -> None:
    for payload, headers, value in PAYLOADS.values():
        dropped = bus.dropped()
        bus.jebp.publish(SUBJECT, payload, headers=headers)
        assert bus.tree_heard() == Event({SUBJECT: value})
        if len(payload) < PACKET_BYTES_MAX:
            assert bus.sbus_heard() == [(SUBJECT, payload)]
        else:
            assert bus.sbus_heard() == []
            assert bus.dropped() == dropped + 1
    records = bus.records(SUBJECT)
    assert [record.payload for record in records] == [payload for payload, _, _ in PAYLOADS.values()]
    assert bus.records("bus") == []
    with pytest.raises(NoSuchValueError):
        bus.tree[0].get(SUBJECT)


def test_what_sbus_publishes(bus: Bus) -> None:
    subject = "bus/lärm/x"
    largest = b"y" * 100_000  # what the buffer of a socket always has room for
    sent = [payload for payload, headers, _ in PAYLOADS.values() if not headers and payload != LARGE]
    values = [value for payload, headers, value in PAYLOADS.values() if not headers and payload != LARGE]
    for payload, value in zip([*sent, largest], [*values, largest.decode()], strict=True):
        bus.sbus.publish(subject.encode(), payload)
        assert bus.tree_heard() == Event({subject: value})
        assert bus.sbus_heard() == [(subject, payload)]
    records = bus.records("bus")
    assert [record.payload for record in records] == [*sent, largest]
    assert {dict(record.headers)[b"ce_subject"] for record in records} == {subject.encode()}


@pytest.mark.parametrize("kind", ["set", "publish"])
@pytest.mark.parametrize("scheme", [0, 1], ids=["tcp", "ws"])
def test_what_worterbuch_publishes(bus: Bus, kind: str, scheme: int) -> None:
    client = bus.tree[scheme]
    subject = "bus/tür/y"
    values: list[object] = ["schön", {"a": [1, None, "ü"]}, None, True, 1.5, "", LARGE.decode()]
    for value in values:
        dropped = bus.dropped()
        getattr(client, kind)(subject, value)
        text = msgspec.json.encode(value)
        assert bus.tree_heard() == Event({subject: value})
        if len(text) < PACKET_BYTES_MAX:
            [(key, payload)] = bus.sbus_heard()
            assert key == subject
            assert payload is not None
            assert msgspec.json.decode(payload) == value
        else:
            assert bus.sbus_heard() == []
            assert bus.dropped() == dropped + 1
    records = bus.records("bus")
    assert [msgspec.json.decode(record.payload or b"") for record in records] == values
    headers = [dict(record.headers) for record in records]
    assert {one[b"content-type"] for one in headers} == {b"application/json"}
    assert {one[b"ce_source"] for one in headers} == {f"worterbuch:{client.client_id}".encode()}
    assert {record.key for record in records} == {subject.encode()}
    if kind == "set":
        assert client.get(subject) == LARGE.decode()
        client.delete(subject)
        assert bus.tree_heard() == Event(deleted={subject: LARGE.decode()})
        assert bus.records("bus")[-1].payload is None
    else:
        with pytest.raises(NoSuchValueError):
            client.get(subject)


def test_a_topic_that_retains_the_last_event_changes_the_state(bus: Bus) -> None:
    for payload, headers, value in PAYLOADS.values():
        bus.jebp.publish("kept", payload, headers=headers)
        assert bus.tree_heard() == Event({"kept": value})
        for client in bus.tree:
            assert client.get("kept") == value
    bus.sbus.publish(b"kept/t\xc3\xbcr", ARBITRARY)
    assert bus.tree_heard() == Event({"kept/tür": {"base64": base64.b64encode(ARBITRARY).decode()}})
    assert bus.tree[0].get("kept/tür") == {"base64": base64.b64encode(ARBITRARY).decode()}
    bus.jebp.publish("kept", None)
    assert bus.tree_heard() == Event(deleted={"kept": LARGE.decode()})
    with pytest.raises(NoSuchValueError):
        bus.tree[0].get("kept")
    assert [record.payload for record in bus.records("kept")][-2:] == [ARBITRARY, None]


def test_all_hear_all_in_the_order_of_publishing(bus: Bus) -> None:
    for number in range(30):
        subject = f"bus/{number % 3}"
        if number % 3 == 0:
            bus.sbus.publish(subject.encode(), b"%d" % number)
        elif number % 3 == 1:
            bus.tree[0].set(subject, number)
        else:
            bus.tree[1].publish(subject, number)
        event = bus.tree_heard()
        assert [str(value) for value in event.values.values()] == [str(number)]
    assert [int(payload or b"") for _, payload in bus.sbus_heard()] == list(range(30))
    assert [int(record.payload or b"") for record in bus.records("bus")] == list(range(30))


def test_names_that_another_protocol_cannot_say_are_dropped_there_and_nowhere_else(bus: Bus) -> None:
    bus.sbus.publish(b"bus/\xff", b"bytes")
    bus.tree[0].set("bus/nul\0", "nul")
    assert bus.tree_heard() == Event({"bus/nul\0": "nul"})
    assert heard_before_barrier(bus.sbus) == [Publish(b"bus/\xff", b"bytes")]
    assert [record.payload for record in bus.records("bus")] == [b"bytes", b'"nul"']
