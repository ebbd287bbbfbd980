"""Recorded conversations, altered and cut anywhere: what comes of it is answers or the end of that one connection.

A mistake of our own shows: it is logged as an error, or leaves the session as another exception.
"""

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.errors import PeerLeavesError, RemoteProtocolError
from babelbus.wire.websocket import encode_texts
from tests.protocols.zbus.peer import Client, House, Peer, command, request_of
from tests.support.bus import in_loop, turns

MESSAGES: list[dict[str, Any]] = [
    command("create", mq="Q", channel="C", mqType="memory", mqMask=0, id="1"),
    command("sub", mq="Q", channel="C", window=2, id="2"),
    *(command("pub", f"body {number}", mq="Q", id=str(number)) for number in range(6)),
    command("pub", {"a": [1, None, 2.5, "ü"]}, mq="Q", tag="a.b", ack=False),
    command("take", mq="Q", channel="C", window=9, id="3"),
    command("sub", mq="Q", channel="C", window=5, filter="a.*;b", ack=False),
    command("bind", [{"url": "/u", "mq": "Q"}], mq="Q", id="4"),
    {"headers": {"id": "5"}, "url": "/u/x?y=z", "method": "GET", "body": [1, 2]},
    {"url": "/?cmd=query&mq=Q"},
    command("route", "answer", target="nobody", ack=True, id="6"),
    command("create", mq="Q", channel="C", offset=1, checksum="1", id="7"),
    command("query", mq="Q", id="8"),
    command("ping"),
    command("remove", mq="Q", channel="C", id="9"),
    command("remove", mq="Q", id="10"),
]
FRAMES = encode_texts([msgspec.json.encode(message) for message in MESSAGES], mask=True)
REQUESTS = b"".join(
    [
        request_of(cmd="create", mq="Q", channel="C", id="1"),
        *(
            request_of(body=b"text", cmd="pub", mq="Q", id=str(number), content_type="text/plain")
            for number in range(6)
        ),
        request_of(body=b'{"a":1}', cmd="pub", mq="Q", content_type="application/json", tag="t"),
        request_of(body=b"a=1&b=2", cmd="pub", mq="Q", content_type="application/x-www-form-urlencoded"),
        request_of(
            body=b'--x\r\ncontent-disposition: form-data; name="n"\r\n\r\nv\r\n--x--',
            cmd="pub",
            mq="Q",
            content_type="multipart/form-data; boundary=x",
        ),
        b"POST / HTTP/1.1\r\nhost: h\r\ncmd: pub\r\nmq: Q\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        request_of(cmd="take", mq="Q", channel="C", window="9"),
        request_of("GET", "/?cmd=query&mq=Q"),
        request_of("HEAD", "/"),
        request_of("GET", "/nowhere%20at+all"),
        request_of(body=b'[{"url":"/u","mq":"Q"}]', cmd="bind", mq="Q", content_type="application/json"),
        request_of("GET", "/u/x"),
        request_of(cmd="remove", mq="Q", connection="close"),
    ]
)


@st.composite
def altered(draw: st.DrawFn, recorded: bytes) -> list[bytes]:
    """What a read brings each, of a conversation with some bytes changed, doubled or left out."""
    data = bytearray(recorded)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data) - 1))
        size = draw(st.integers(1, 40))
        match draw(st.sampled_from(["change", "drop", "double", "insert"])):
            case "change":
                data[at] = draw(st.integers(0, 255))
            case "drop":
                del data[at : at + size]
            case "double":
                data[at:at] = data[at : at + size]
            case _:
                data[at:at] = draw(st.binary(max_size=8))
        if not data:
            return []
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [bytes(data[start:stop]) for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]


async def tell(peer: Peer, reads: list[bytes]) -> None:
    """Do what a connection does: it ends with the first error, in whatever call that comes."""
    ended = False

    def carefully(step: Callable[[], None]) -> None:
        nonlocal ended
        if not ended:
            try:
                step()
            except (RemoteProtocolError, PeerLeavesError):
                ended = True

    peer.outbox.on_drained = lambda: carefully(peer.room)
    for data in reads:
        carefully(lambda data=data: peer.send(data))  # type: ignore[misc]
        await turns()
        carefully(peer.room)
    peer.leave()


async def check_still_works(house: House) -> None:
    """The server goes on for others."""
    client = Client(house)
    assert client.do("create", mq="fine", channel="C")["status"] == 200
    assert client.do("pub", 1, mq="fine")["status"] == 200
    assert client.do("take", mq="fine", channel="C")["body"][0]["body"] == 1
    client.leave()
    assert house.hub.peers == {}
    assert house.hub.subscribers == {}


@pytest.fixture(autouse=True)
def no_mistake_is_logged(caplog: pytest.LogCaptureFixture) -> Any:
    yield
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@given(altered(FRAMES))
def test_an_altered_conversation_over_websocket_breaks_nothing_but_itself(reads: list[bytes]) -> None:
    @in_loop
    async def run() -> None:
        house = House()
        await tell(Client(house), reads)
        await check_still_works(house)

    run()


@given(altered(REQUESTS))
def test_an_altered_conversation_over_http_breaks_nothing_but_itself(reads: list[bytes]) -> None:
    @in_loop
    async def run() -> None:
        house = House()
        await tell(Peer(house), reads)
        await check_still_works(house)

    run()


@given(altered(FRAMES))
def test_an_altered_conversation_without_signatures_does_nothing(reads: list[bytes]) -> None:
    @in_loop
    async def run() -> None:
        house = House()
        await tell(Client(house, keys={"key": "secret"}), reads)
        assert not house.hub.exists("Q")
        await check_still_works(house)

    run()
