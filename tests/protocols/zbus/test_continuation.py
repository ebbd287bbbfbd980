"""Connections that go on at another server: a scripted client of one hub, then of the next."""

import json
from pathlib import Path
from typing import Any

import pytest

from babelbus.core.access import SERVER, AccessRefusedError, Principal, Row
from babelbus.core.subject import exactly
from babelbus.identities.directory import Directory
from babelbus.identities.vault import Vault, make_api_key
from babelbus.protocols.zbus.codec import decode_message, encode_message
from babelbus.protocols.zbus.continuation import KeptSession, decode_session
from babelbus.protocols.zbus.errors import AuthenticationError, NotFoundError
from babelbus.protocols.zbus.messages import Mask
from babelbus.wire.websocket import encode_texts
from tests.protocols.zbus.peer import Client, House, Peer, command, request_of
from tests.storage.faults import FaultyFiles
from tests.support.bus import in_loop, turns
from tests.support.clock import ManualClock
from tests.support.signing import sign_frame

NOW = 1_700_000_000_000
KEYS = {"k": "secret"}


def keep(peer: Peer) -> KeptSession:
    """Hand over the connection of a client of a hub that stops."""
    continuation = peer.session.continuation()
    assert continuation is not None
    kept = decode_session(continuation.content)
    assert continuation.owner == kept.id == peer.session.session.id
    return kept


async def move(house: House, *peers: Peer) -> tuple[House, list[KeptSession]]:
    """Stop a house in order; return the next one on the same files, and the connections that go on there."""
    house.bus.broker.end_requests()
    house.hub.stop()
    sessions = [keep(peer) for peer in peers]
    for peer in peers:
        peer.outbox.close()
        peer.session.leave()
    return await house.restart(), sessions


def copy(peer: Peer) -> KeptSession:
    """Return a copy of the connection, as its owner sends it each second."""
    assert peer.session.is_copyable
    writes = len(peer.wire.writes)
    copies = [peer.session.continuation() for _ in range(2)]
    assert copies[0] == copies[1]
    assert (len(peer.wire.writes), peer.outbox.waiting, peer.session.is_copyable) == (writes, 0, True)
    assert copies[0] is not None
    return decode_session(copies[0].content)


def is_copyable(peer: Peer) -> bool:
    """Return whether a copy of the session is made now."""
    return peer.session.is_copyable


def kill(house: House) -> House:
    """Kill the process of a house; return the next one on the same files."""
    files = house.bus.files
    assert isinstance(files, FaultyFiles)
    files.kill()
    return House(files, clock=house.clock, **house.options)


def publish(house: House, *ids: str, mq: str = "Q") -> None:
    """Publish messages over a connection of its own."""
    client = Client(house)
    client.say(*[command("pub", "x", mq=mq, id=one) for one in ids])
    assert [one["status"] for one in client.messages()] == [200] * len(ids)
    client.leave()


def consume(client: Client, **how: Any) -> None:
    created = client.do("create", mq="Q", mqType="disk", channel="C")
    subscribed = client.do("sub", mq="Q", channel="C", **how)
    assert (created["status"], subscribed["status"]) == (200, 200)


def ids(messages: list[dict[str, Any]]) -> list[str]:
    return [one["headers"]["id"] for one in messages]


@in_loop
async def test_a_consumer_goes_on_behind_its_last_message_with_its_window_and_filter() -> None:
    first = House()
    before = Client(first)
    consume(before, window=3, filter="x.*")
    client = Client(first)
    client.say(*[command("pub", mq="Q", id=one, tag=tag) for one, tag in (("1", "x.a"), ("2", "y"))])
    client.messages()
    assert ids(await before.pushed()) == ["1"]
    second, [kept] = await move(first, before)
    client = Client(second)
    client.say(*[command("pub", mq="Q", id=one, tag="x.b") for one in ("3", "4", "5")], command("pub", mq="Q", tag="y"))
    after = Client(second, kept=kept)
    after.room()
    assert ids(await after.pushed()) == ["3", "4"]
    after.say(command("sub", mq="Q", channel="C", window=1, ack=False))
    assert ids(await after.pushed()) == ["5"]
    assert after.session.subscriptions == [("Q,C", False)]


@in_loop
async def test_nothing_is_delivered_to_a_consumer_that_has_not_come_yet() -> None:
    first = House()
    before, other = Client(first), Client(first)
    consume(before)
    consume(other)
    second, [kept, there] = await move(first, before, other)
    absent, present = Client(second, kept=kept), Client(second, kept=there)
    present.room()
    publish(second, "1", "2")
    assert ids(await present.pushed()) == ["1", "2"]
    assert absent.wire.writes == []
    present.leave()
    publish(second, "3")
    await turns()
    absent.room()
    assert ids(await absent.pushed()) == ["3"]


@in_loop
async def test_deliveries_that_wait_for_room_are_not_lost_in_a_move() -> None:
    first = House()
    before = Client(first)
    consume(before)
    before.wire.stuck = before.outbox.bytes_max
    publish(first, *[str(number) for number in range(100)])
    seen = ids(await before.pushed())
    publish(first, *[str(number) for number in range(100, 200)])
    seen += ids(await before.pushed())
    assert len(seen) < 200
    second, [kept] = await move(first, before)
    after = Client(second, kept=kept)
    after.room()
    assert seen + ids(await after.pushed()) == [str(number) for number in range(200)]


@in_loop
async def test_an_answer_reaches_the_caller_that_asked_at_the_last_server() -> None:
    first = House()
    service, caller = Client(first), Client(first)
    consume(service)
    caller.say(command("pub", "question", mq="Q", id="7", ack=False))
    assert caller.messages() == []
    [call] = await service.pushed()
    second, [caller_kept, service_kept] = await move(first, caller, service)
    waiting, answering = Client(second, kept=caller_kept), Client(second, kept=service_kept)
    answering.say({"headers": {"cmd": "route", "target": call["headers"]["source"], "id": "7"}, "body": "answer"})
    assert [one["body"] for one in waiting.messages()] == ["answer"]


@in_loop
async def test_a_request_to_another_protocol_is_answered_before_its_connection_goes_on() -> None:
    house = House()
    house.bus.broker.responders.add(exactly("elsewhere"), lambda _: None, principal=SERVER)
    client = Client(house)
    client.say({"url": "/elsewhere", "headers": {"id": "7"}})
    assert client.messages() == []
    await move(house, client)
    [answer] = client.messages()
    assert (answer["status"], answer["headers"]["id"]) == (504, "7")


@in_loop
async def test_a_connection_for_http_goes_on_when_its_request_is_answered_and_may_become_a_websocket() -> None:
    first = House()
    idle, caller = Peer(first), Peer(first)
    assert idle.session.continuation() is None
    idle.ask(cmd="create", mq="Q", channel="C")
    caller.send(request_of(cmd="pub", mq="Q", id="7", ack="false"))
    assert caller.responses() == []
    assert caller.outbox.waiting
    second, [kept, _] = await move(first, idle, caller)
    [answer] = caller.responses()
    assert (answer.status, answer.headers["id"]) == (504, "7")
    after = Peer(second, kept=kept)
    assert (after.session.established, after.session.session.id) == (True, kept.id)
    assert after.ask(cmd="query").status == 200
    after.upgrade()


@in_loop
async def test_a_request_of_which_a_part_has_come_keeps_its_connection_here() -> None:
    peer = Peer(House())
    assert peer.ask(cmd="query").status == 200
    peer.send(b"POST / HTTP/1.1\r\nhost: h\r\ncmd: query\r\ncontent-length: 5\r\n\r\n")
    assert peer.session.unfinished_bytes == 0
    assert peer.session.continuation() is None


@in_loop
async def test_a_message_whose_first_frame_is_empty_counts_as_unfinished() -> None:
    client = Client(House())
    assert client.session.unfinished_bytes == 0
    client.send(b"\x01\x80\x00\x00\x00\x00")
    assert client.session.unfinished_bytes > 0


@in_loop
async def test_a_consumer_whose_channel_is_gone_connects_again() -> None:
    first = House()
    before = Client(first)
    consume(before)
    second, [kept] = await move(first, before)
    await second.hub.remove_channel("Q", "C", SERVER).wait()
    with pytest.raises(NotFoundError):
        Client(second, kept=kept)
    assert (second.hub.peers, second.hub.subscribers) == ({}, {})


@in_loop
async def test_a_consumer_that_has_lost_its_channel_still_waits_for_it() -> None:
    first = House()
    before = Client(first)
    consume(before)
    assert before.do("remove", mq="Q", channel="C")["status"] == 200
    second, [kept] = await move(first, before)
    after = Client(second, kept=kept)
    after.room()
    publish(second, "1")
    assert await after.pushed() == []
    assert after.do("create", mq="Q", channel="C", offset=0)["status"] == 200
    assert ids(await after.pushed()) == ["1"]


@in_loop
async def test_bound_urls_are_those_of_the_last_server() -> None:
    first = House()
    client = Client(first)
    consume(client)
    client.do("bind", [{"url": "/a", "mq": "Q"}, {"url": "/ab", "mq": "Q"}], mq="Q")
    table = first.hub.bindings
    second = House()
    second.hub.bindings.restore(table.keep())
    assert second.hub.bindings.items() == table.items()
    assert second.hub.bindings.find("/abc") == "Q"


def signed(secret: str, cmd: str, **headers: str) -> bytes:
    message = decode_message(json.dumps(command(cmd, **headers)).encode())
    return encode_texts([encode_message(sign_frame(message, "k", secret))], mask=True)


@in_loop
async def test_a_signed_consumer_goes_on_as_its_principal_and_every_further_message_must_be_signed() -> None:
    first = House()
    before = Client(first, keys=KEYS)
    before.send(signed("secret", "create", mq="Q", mqType="disk", channel="C"))
    before.send(signed("secret", "sub", mq="Q", channel="C"))
    assert [one["status"] for one in before.messages()] == [200, 200]
    second, [kept] = await move(first, before)
    after = Client(second, kept=kept, keys=KEYS)
    after.room()
    assert after.session.principal == "k"
    publish(second, "1")
    assert ids(await after.pushed()) == ["1"]
    after.say(command("query", id="2"))
    assert [one["status"] for one in after.messages()] == [403]
    after.send(signed("secret", "query", id="3"))
    assert [one["status"] for one in after.messages()] == [200]


@in_loop
async def test_a_client_whose_key_is_gone_connects_again() -> None:
    first = House()
    before = Client(first, keys=KEYS)
    before.send(signed("secret", "create", mq="Q", mqType="disk", channel="C"))
    before.messages()
    second, [kept] = await move(first, before)
    with pytest.raises(AuthenticationError):
        Client(second, kept=kept, keys={"other": "secret"})
    assert second.hub.peers == {}


@in_loop
async def test_a_consumer_that_may_not_consume_any_more_connects_again(tmp_path: Path) -> None:
    vault, clock = Vault(str(tmp_path)), ManualClock(NOW)
    issued = make_api_key(vault, NOW, key="k", lifetime_ms=None)
    directory = Directory(vault, clock)
    directory.replace("alice", (issued.credential,))

    def open_house(*entries: Principal | Row) -> House:
        house = House(gate="enforce", directory=directory, clock=clock)
        house.gate.import_entries("test", entries)
        return house

    house = open_house(Principal("alice"), Row("alice", "*", "#"))
    before = Client(house)
    before.send(signed(issued.secret, "create", mq="Q", mqType="disk", channel="C"))
    before.send(signed(issued.secret, "sub", mq="Q", channel="C"))
    assert [one["status"] for one in before.messages()] == [200, 200]
    house.hub.stop()
    kept = keep(before)
    with pytest.raises(AuthenticationError):
        Client(open_house(), kept=kept)
    with pytest.raises(AccessRefusedError):
        Client(open_house(Principal("alice")), kept=kept)


# -- copies, for the death of the owner ------------------------------------------------------------------------------


@pytest.mark.parametrize("are_saved", [False, True])
@in_loop
async def test_a_copied_consumer_works_on_and_its_copy_loses_no_message_when_the_owner_dies(are_saved: bool) -> None:
    first = House()
    before = Client(first)
    consume(before, window=10)
    copy(before)
    publish(first, "1", "2")
    assert ids(await before.pushed()) == ["1", "2"]
    kept = copy(before)
    assert kept.subscriptions[0].window == 8
    if are_saved:
        await first.bus.broker.groups.commit()
    second = kill(first)
    after = Client(second, kept=kept)
    after.room()
    assert ids(await after.pushed()) == ([] if are_saved else ["1", "2"])
    publish(second, "3")
    assert ids(await after.pushed()) == ["3"]


@in_loop
async def test_messages_that_the_dead_owner_had_stored_and_not_sent_reach_the_copied_consumer() -> None:
    first = House()
    before = Client(first)
    consume(before, window=1)
    publish(first, "1", "2", "3")
    assert ids(await before.pushed()) == ["1"]
    kept = copy(before)
    after = Client(kill(first), kept=kept)
    after.room()
    after.say(command("sub", mq="Q", channel="C", window=9, ack=False))
    assert ids(await after.pushed())[-2:] == ["2", "3"]


@in_loop
async def test_a_consumer_of_an_mq_in_memory_gets_what_is_published_after_the_death() -> None:
    first = House()
    before = Client(first)
    for cmd in ("create", "sub"):
        assert before.do(cmd, mq="M", channel="C")["status"] == 200
    publish(first, "1", "2", mq="M")
    assert ids(await before.pushed()) == ["1", "2"]
    kept = copy(before)
    await first.bus.broker.groups.commit()
    second = kill(first)
    after = Client(second, kept=kept)
    after.room()
    publish(second, "3", mq="M")
    assert ids(await after.pushed()) == ["3"]


@in_loop
async def test_a_call_whose_service_works_while_the_owner_dies_is_answered() -> None:
    first = House()
    service, caller = Client(first), Client(first)
    consume(service)
    caller.say(command("pub", "question", mq="Q", id="7", ack=False))
    [call] = await service.pushed()
    caller_kept, service_kept = copy(caller), copy(service)
    second = kill(first)
    waiting, answering = Client(second, kept=caller_kept), Client(second, kept=service_kept)
    answering.say({"headers": {"cmd": "route", "target": call["headers"]["source"], "id": "7"}, "body": "answer"})
    assert [one["body"] for one in waiting.messages()] == ["answer"]


@in_loop
async def test_a_signed_client_is_copied_with_its_proof() -> None:
    first = House()
    before = Client(first, keys=KEYS)
    before.send(signed("secret", "create", mq="Q", mqType="disk", channel="C"))
    before.messages()
    kept = copy(before)
    after = Client(kill(first), kept=kept, keys=KEYS)
    assert after.session.principal == "k"


@in_loop
async def test_plain_http_is_not_copied() -> None:
    peer = Peer(House())
    assert peer.ask(cmd="query").status == 200
    assert not is_copyable(peer)
    peer.upgrade()
    assert is_copyable(peer)


@in_loop
async def test_a_client_that_has_bound_urls_is_not_copied_at_any_server() -> None:
    first = House()
    client = Client(first)
    consume(client)
    assert is_copyable(client)
    client.do("bind", [{"url": "/a", "mq": "Q"}], mq="Q")
    assert not is_copyable(client)
    second, [kept] = await move(first, client)
    after = Client(second, kept=kept)
    after.room()
    assert not is_copyable(after)


@in_loop
async def test_a_client_that_bound_urls_before_it_became_a_websocket_is_not_copied() -> None:
    peer = Peer(House())
    peer.ask(cmd="create", mq="Q")
    assert (
        peer.ask(cmd="bind", mq="Q", body=b'[{"url": "/a", "mq": "Q"}]', content_type="application/json").status == 200
    )
    peer.upgrade()
    assert not is_copyable(peer)


@in_loop
async def test_a_client_that_waits_for_a_responder_of_another_protocol_is_not_copied() -> None:
    house = House()
    house.bus.broker.responders.add(exactly("elsewhere"), lambda _: None, principal=SERVER)
    client = Client(house)
    assert is_copyable(client)
    client.say({"url": "/elsewhere", "headers": {"id": "7"}})
    assert not is_copyable(client)
    house.bus.broker.end_requests()
    assert [one["status"] for one in client.messages()] == [504]
    assert is_copyable(client)


@in_loop
async def test_a_consumer_without_its_channel_is_not_copied() -> None:
    house = House()
    client, other = Client(house), Client(house)
    consume(client)
    other.do("remove", mq="Q", channel="C")
    assert not is_copyable(client)
    other.do("create", mq="Q", channel="C")
    assert is_copyable(client)


@in_loop
async def test_a_consumer_whose_channel_others_may_take_over_is_not_copied() -> None:
    house = House()
    client = Client(house)
    consume(client)
    client.do("create", mq="Q", channel="C", channelMask=int(Mask.TAKEOVER))
    assert not is_copyable(client)


@in_loop
async def test_a_consumer_that_has_not_come_yet_or_takes_nothing_is_not_copied() -> None:
    first = House()
    before = Client(first)
    consume(before)
    before.wire.stuck = before.outbox.bytes_max
    publish(first, "1")
    await before.pushed()
    assert not is_copyable(before)
    before.wire.stuck = 0
    before.room()
    kept = copy(before)
    after = Client(kill(first), kept=kept)
    assert not is_copyable(after)
    after.room()
    assert is_copyable(after)
