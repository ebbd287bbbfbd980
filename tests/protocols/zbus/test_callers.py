"""Clients of zbus while the gate is on: keys that expire or cannot be used, bodies of those who may send nothing."""

import json
from pathlib import Path

import pytest

from babelbus.core.access import Principal, Row
from babelbus.identities.directory import Directory
from babelbus.identities.vault import Vault, make_api_key
from babelbus.protocols.zbus.callers import KEYS_ORIGIN, KeyRing, principals_of
from babelbus.protocols.zbus.codec import decode_message, encode_message
from babelbus.wire.websocket import encode_texts
from tests.protocols.zbus.peer import Client, House, Peer, command
from tests.support.bus import in_loop
from tests.support.clock import ManualClock
from tests.support.signing import sign_frame

NOW = 1_700_000_000_000


def make_house(folder: Path, lifetime_ms: int | None = None) -> tuple[House, str]:
    """Return a house with the principal alice and the secret of its key."""
    clock = ManualClock(NOW)
    vault = Vault(str(folder))
    issued = make_api_key(vault, clock.now_ms(), key="key", lifetime_ms=lifetime_ms)
    directory = Directory(vault, clock)
    directory.replace("alice", (issued.credential,))
    house = House(gate="enforce", clock=clock, directory=directory)
    house.gate.import_entries("test", [Principal("alice"), Row("alice", "*", "#")])
    return house, issued.secret


def say_signed(client: Client, secret: str, cmd: str, **headers: str) -> str:
    """Send a signed command, and return the body of the answer."""
    message = decode_message(json.dumps(command(cmd, **headers)).encode())
    client.send(encode_texts([encode_message(sign_frame(message, "key", secret))], mask=True))
    [answer] = client.messages()
    return str(answer["body"])


@in_loop
async def test_a_key_that_expires_closes_the_connection_that_it_has_opened(tmp_path: Path) -> None:
    house, secret = make_house(tmp_path, lifetime_ms=60_000)
    client = Client(house)
    assert say_signed(client, secret, "create", mq="Q", channel="C")[:2] == "OK"
    house.clock.advance(59)
    states = []
    for seconds in (0, 2):
        house.clock.advance(seconds)
        house.hub.tick()
        states.append(client.closed)
    assert states == [False, True]
    assert say_signed(Client(house), secret, "query") == "apiKey not exists"


@in_loop
async def test_a_key_whose_secret_cannot_be_opened_proves_nothing_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house, secret = make_house(tmp_path)
    other = Vault(str(tmp_path / "other"))
    assert house.hub.directory is not None
    house.hub.directory.replace("alice", (make_api_key(other, NOW, key="key").credential,))
    assert say_signed(Client(house), secret, "query") == "secretKey not exists"
    assert "an API key of zbus cannot be used" in caplog.text
    assert secret not in caplog.text


@in_loop
async def test_a_large_body_is_not_waited_for_from_who_may_publish_nothing(tmp_path: Path) -> None:
    house, _ = make_house(tmp_path)
    for headers, trusted in (("", False), ("apiKey: key\r\n", True), ("apiKey: other\r\n", False)):
        peer = Peer(house)
        peer.send(
            f"POST / HTTP/1.1\r\nhost: localhost\r\ncmd: pub\r\n{headers}content-length: 9000000\r\n\r\nx".encode()
        )
        assert peer.session.trusted == trusted, headers


@in_loop
async def test_a_key_of_the_file_proves_no_principal_of_another_origin() -> None:
    house = House(gate="enforce")
    house.gate.import_entries("client lists", [Principal("admin", ("admin",))])
    keys = {"admin": "secret", "mine": "secret"}
    house.gate.import_entries(KEYS_ORIGIN, principals_of(keys))
    ring = KeyRing(keys, house.gate, None)
    assert (ring.principal("mine"), ring.get("mine")) == ("mine", "secret")
    assert (ring.principal("admin"), ring.get("admin")) == (None, None)
