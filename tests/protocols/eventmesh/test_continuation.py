"""Sessions over TCP that go on at another server: a scripted client of one hub, then of the next."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from babelbus.config import AccessSettings, EventmeshSettings
from babelbus.core.access import Principal, Row
from babelbus.core.record import Event
from babelbus.errors import BabelbusError
from babelbus.identities.proofs import Proofs
from babelbus.identities.tokens import make_token
from babelbus.protocols.connection import Connection
from babelbus.protocols.contract import Outbox
from babelbus.protocols.eventmesh.callers import Callers
from babelbus.protocols.eventmesh.continuation import KeptSession, decode_session
from babelbus.protocols.eventmesh.hub import Hub
from babelbus.protocols.eventmesh.service import ACK_STEP_SECONDS, EventmeshService
from babelbus.protocols.eventmesh.session import Session
from babelbus.storage.files import FileSystem
from tests.storage.faults import FaultyFiles
from tests.support.bus import Bus, in_loop, turns
from tests.support.clock import ManualClock
from tests.support.eventmesh import AGENT, HEAD, NEW, OLD, MeshClient, frame
from tests.support.server import LiveServer, configure
from tests.support.worterbuch import BYTES_MAX, Transport

TOKEN = make_token(0)
ALICE = Principal("alice", credentials=(TOKEN.credential,))
OTHER_TOKEN = Principal("alice", credentials=(make_token(0).credential,))
MAY_CONSUME = Row("alice", "consume", "news/#")


class House:
    """A hub on a bus of its own; the next one stands on the same files."""

    def __init__(
        self,
        files: FileSystem | None = None,
        *,
        clock: ManualClock | None = None,
        access: Literal["off", "enforce"] = "off",
        entries: tuple[Principal | Row, ...] = (ALICE, MAY_CONSUME),
    ) -> None:
        self.bus = Bus(files, clock=clock)
        gate = self.bus.open_gate(access)
        self.bus.broker.open_groups(self.bus.files, "data", 3600)
        proofs = Proofs("conf", self.bus.clock, self.bus.metrics, AccessSettings())
        gate.import_entries("test", entries)
        proofs.update({one.name: one.credentials for one in entries if isinstance(one, Principal)})
        callers = Callers(gate, proofs, self.bus.clock)
        self.hub = Hub(self.bus.broker, self.bus.clock, self.bus.metrics, EventmeshSettings(), callers)

    async def next(self, **options: Any) -> "House":
        """Stop this server in order; return the one that goes on."""
        await self.bus.broker.close()
        return House(self.bus.files, clock=self.bus.clock, **options)

    def kill(self, **options: Any) -> "House":
        """Kill this server; return the one that goes on."""
        files = self.bus.files
        assert isinstance(files, FaultyFiles)
        files.kill()
        return House(files, clock=self.bus.clock, **options)

    async def publish(self, *texts: str, topic: str = "news") -> None:
        await self.hub.publish([Event(topic, text.encode()) for text in texts]).wait()
        await turns()


class Talker:
    """One client of a hub."""

    def __init__(self, house: House, *, surplus: int = NEW, kept: KeptSession | None = None) -> None:
        self.surplus = surplus
        self.transport = Transport()
        self.outbox = Outbox(self.transport, BYTES_MAX)
        self._read = 0
        self.session = Session(house.hub, self.outbox, lambda: None, "10.0.0.1:5", kept)

    async def say(self, cmd: str, body: object = None, seq: str = "1", **properties: object) -> None:
        header = {"cmd": cmd, "command": cmd, "code": 0, "seq": seq, "properties": properties}
        self.outbox.holding = True
        self.session.receive_data(frame(self.surplus, header, body))
        self.outbox.release()
        while self.outbox.waiting:
            await turns()
        await turns()

    def heard(self) -> list[tuple[dict[str, Any], Any]]:
        """Everything that came since the last look: headers and bodies."""
        data = bytes(self.transport.written[self._read :])
        self._read += len(data)
        frames = []
        while data:
            _, length, size = HEAD.unpack_from(data)
            end = HEAD.size + length - self.surplus
            body = data[HEAD.size + size : end]
            frames.append((json.loads(data[HEAD.size : HEAD.size + size]), json.loads(body) if body else None))
            data = data[end:]
        return frames

    async def ask(self, cmd: str, body: object = None) -> int:
        """Send a request; return the code of its answer."""
        self.heard()
        await self.say(cmd, body)
        return int(self.heard()[0][0]["code"])

    async def hello(self, purpose: str = "sub", **agent: object) -> "Talker":
        assert await self.ask("HELLO_REQUEST", {**AGENT, "purpose": purpose, **agent}) == 0
        return self

    async def subscribe(self, topic: str = "news", mode: str = "CLUSTERING", kind: str = "ASYNC") -> "Talker":
        items = [{"topic": topic, "mode": mode, "type": kind}]
        assert await self.ask("SUBSCRIBE_REQUEST", {"topicList": items}) == 0
        return self

    async def listen(self, topic: str = "news", mode: str = "CLUSTERING", kind: str = "ASYNC") -> "Talker":
        await self.subscribe(topic, mode, kind)
        assert await self.ask("LISTEN_REQUEST") == 0
        return self

    def pushed(self) -> list[tuple[str, str]]:
        """The pushes since the last look: `seq` and text of each."""
        return [(header["seq"], body["body"]) for header, body in self.heard() if header["cmd"].endswith("_TO_CLIENT")]

    async def acknowledge(self, *seqs: str) -> None:
        for seq in seqs:
            await self.say("ASYNC_MESSAGE_TO_CLIENT_ACK", seq=seq)

    def commands(self) -> list[str]:
        return [header["cmd"] for header, _ in self.heard()]

    def copy(self) -> KeptSession:
        """Return a copy of the session, as its owner sends it each second."""
        assert self.session.is_copyable
        copies = []
        for _ in range(2):
            continuation = self.session.continuation()
            assert continuation is not None
            copies.append(decode_session(continuation.content))
        assert copies[0] == msgspec.structs.replace(copies[1], owner=copies[0].owner)
        assert self.session.is_copyable
        return copies[1]

    def keep(self) -> KeptSession:
        """Hand over the session."""
        continuation = self.session.continuation()
        assert continuation is not None
        kept = decode_session(continuation.content)
        assert kept.owner == continuation.owner
        self.outbox.close()
        self.session.leave()
        return kept


def is_copyable(talker: Talker) -> bool:
    """Return whether a copy of the session is made now."""
    return talker.session.is_copyable


@pytest.mark.parametrize("surplus", [OLD, NEW])
@in_loop
async def test_a_consumer_goes_on_and_only_what_it_did_not_acknowledge_comes_again(surplus: int) -> None:
    first = House()
    before = await (await Talker(first, surplus=surplus).hello()).listen()
    await first.publish("a", "b", "c")
    pushes = before.pushed()
    assert [text for _, text in pushes] == ["a", "b", "c"]
    await before.acknowledge(pushes[0][0], pushes[2][0])
    before.session.stay()
    await first.publish("d")
    assert before.heard() == []
    kept = before.keep()
    assert first.hub.peers == {}

    second = await first.next()
    after = Talker(second, surplus=surplus, kept=kept)
    await turns()
    again = after.pushed()
    assert [text for _, text in again] == ["b", "d"]
    assert not {seq for seq, _ in again} & {seq for seq, _ in pushes}
    await after.acknowledge(pushes[1][0], *(seq for seq, _ in again))
    await second.publish("e")
    assert [text for _, text in after.pushed()] == ["e"]
    assert second.bus.broker.groups.get("news", "G").info().in_flight == 1
    await second.bus.broker.close()


@in_loop
async def test_an_acknowledgement_that_comes_late_counts_for_no_other_push() -> None:
    first = House()
    before = await (await Talker(first).hello()).listen()
    await first.publish("a")
    [(late, _)] = before.pushed()
    kept = before.keep()
    second = await first.next()
    after = Talker(second, kept=kept)
    await turns()
    assert after.pushed() != []
    await after.acknowledge(late)
    assert second.bus.broker.groups.get("news", "G").info().in_flight == 1
    await second.bus.broker.close()


@in_loop
async def test_nothing_is_pushed_to_a_client_that_stays_while_its_server_stops_and_it_hears_no_goodbye() -> None:
    house = House()
    stays = await (await Talker(house).hello()).listen()
    other = await (await Talker(house).hello(group="other")).listen()
    await house.publish("a")
    assert len(stays.pushed()) == len(other.pushed()) == 1
    stays.session.stay()
    house.hub.stop()
    assert (stays.commands(), other.commands()) == ([], ["SERVER_GOODBYE_REQUEST"])
    await house.publish("b")
    stays.session.release()
    await turns()
    assert stays.commands() == other.commands() == []
    stays.session.end_waits()  # it cannot go on after all
    stays.session.end_waits()
    assert stays.commands() == ["SERVER_GOODBYE_REQUEST"]
    assert stays.session.continuation() is None
    await house.bus.broker.close()


@in_loop
async def test_a_topic_that_is_subscribed_to_while_the_server_stops_is_not_pushed_before_the_next_one() -> None:
    house = House()
    talker = await (await Talker(house).hello()).listen()
    talker.session.stay()
    await talker.subscribe("late")
    await house.publish("a", topic="late")
    assert talker.heard() == []
    kept = talker.keep()
    second = await house.next()
    after = Talker(second, kept=kept)
    await turns()
    assert [text for _, text in after.pushed()] == ["a"]
    await second.bus.broker.close()


@in_loop
async def test_a_broadcast_is_heard_once_whichever_server_it_comes_to() -> None:
    first = House()
    before = await (await Talker(first).hello()).listen(mode="BROADCASTING")
    before.session.stay()
    await first.publish("last")
    assert [text for _, text in before.pushed()] == ["last"]
    kept = before.keep()
    await first.publish("nobody's")
    second = await first.next()
    after = Talker(second, kept=kept)
    await second.publish("first")
    assert [text for _, text in after.pushed()] == ["first"]
    await second.bus.broker.close()


@in_loop
async def test_a_publisher_and_a_client_that_does_not_listen_yet_go_on() -> None:
    first = House()
    publisher = await Talker(first).hello("pub")
    reader = await (await Talker(first).hello()).subscribe()
    sessions = publisher.keep(), reader.keep()
    second = await first.next()
    publisher, reader = (Talker(second, kept=kept) for kept in sessions)
    assert await publisher.ask("ASYNC_MESSAGE_TO_SERVER", {"topic": "news", "body": "x"}) == 0
    assert await publisher.ask("LISTEN_REQUEST") == 1
    assert reader.heard() == []
    await reader.say("LISTEN_REQUEST")
    assert [text for _, text in reader.pushed()] == ["x"]
    await second.bus.broker.close()


@pytest.mark.parametrize("pid", [2**64 - 1, 2**64, -(2**63), -(2**63) - 1, "4711"])
@in_loop
async def test_a_client_goes_on_whatever_number_its_process_has(pid: int | str) -> None:
    first = House()
    kept = (await (await Talker(first).hello(pid=pid)).listen()).keep()
    assert str(kept.agent.pid) == str(pid)
    second = await first.next()
    after = Talker(second, kept=kept)
    await second.publish("a")
    assert [text for _, text in after.pushed()] == ["a"]
    await second.bus.broker.close()


@in_loop
async def test_a_responder_that_owes_nothing_goes_on_and_answers_at_the_next_server() -> None:
    first = House()
    before = await (await Talker(first).hello()).listen(kind="SYNC")
    assert first.bus.broker.responders.answers("news")
    before.session.stay()
    assert not first.bus.broker.responders.answers("news")  # requesters are told at once
    kept = before.keep()
    second = await first.next()
    after, requester = Talker(second, kept=kept), await Talker(second).hello("pub")
    await requester.say("REQUEST_TO_SERVER", {"topic": "news", "body": "?"})
    [(_, question)] = after.heard()
    await after.say("RESPONSE_TO_SERVER", {**question, "body": "!"})
    assert [body["body"] for _, body in requester.heard()] == ["!"]
    await second.bus.broker.close()


@in_loop
async def test_neither_a_requester_that_waits_nor_a_responder_that_owes_the_reply_goes_on() -> None:
    house = House()
    responder = await (await Talker(house).hello()).listen(kind="SYNC")
    requester = await Talker(house).hello("pub")
    await requester.say("REQUEST_TO_SERVER", {"topic": "news", "body": "?"})
    [(header, question)] = responder.heard()
    for talker in (responder, requester):
        assert not talker.session.is_portable
        assert talker.session.continuation() is None
    await responder.say("RESPONSE_TO_SERVER", {**question, "body": "!"})
    await responder.say("REQUEST_TO_CLIENT_ACK", seq=header["seq"])
    assert responder.session.is_portable
    assert requester.session.is_portable
    await house.bus.broker.close()


async def _say_nothing(talker: Talker) -> None:
    return


async def _leave(talker: Talker) -> None:
    await talker.hello()
    await talker.say("CLIENT_GOODBYE_REQUEST")


async def _hear_goodbye(talker: Talker) -> None:
    (await talker.hello()).session.say_goodbye("an administrator says so")


async def _be_redirected(talker: Talker) -> None:
    (await talker.hello()).session.redirect("10.0.0.2", 10_000)


@pytest.mark.parametrize("begin", [_say_nothing, _leave, _hear_goodbye, _be_redirected])
@in_loop
async def test_a_client_that_has_not_begun_or_that_leaves_does_not_go_on(begin: Callable[[Talker], Any]) -> None:
    house = House()
    talker = Talker(house)
    await begin(talker)
    assert not talker.session.is_portable
    assert talker.session.continuation() is None
    await house.bus.broker.close()


@in_loop
async def test_a_subscription_whose_topic_was_removed_does_not_go_on() -> None:
    first = House()
    before = await (await Talker(first).hello()).listen()
    await before.listen("other")
    await first.hub.remove_topic("news").wait()
    kept = before.keep()
    assert [item.topic for item in kept.subscriptions] == ["other"]
    second = await first.next()
    after = Talker(second, kept=kept)
    assert after.session.subscriptions == [("other", False)]
    await second.bus.broker.close()


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[tuple[LiveServer, EventmeshService, MeshClient]]:
    """A server, its service, and a client that holds a message."""
    with LiveServer(configure(tmp_path)) as live, MeshClient(live.server.addresses["eventmesh-tcp"]) as client:
        client.hello().listen("news")
        client.publish("news", "a")
        service = live.server.services["eventmesh"]
        assert isinstance(service, EventmeshService)
        yield live, service, client


def test_before_a_server_hands_over_clients_have_time_to_acknowledge_and_get_nothing_more(
    mesh: tuple[LiveServer, EventmeshService, MeshClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("babelbus.protocols.eventmesh.service.CLIENT_SECONDS", 1e6)
    live, service, client = mesh
    tasks: list[asyncio.Task[None]] = []
    live.call(lambda: tasks.append(asyncio.create_task(service.settle())))
    client.publish("news", "b")
    assert client.push()[1]["body"] == "a"
    live.until(tasks[0].done)
    client.send("HEARTBEAT_REQUEST")
    assert client.next()[0]["cmd"] == "HEARTBEAT_RESPONSE"


def test_a_server_that_hands_over_does_not_wait_for_ever_for_acknowledgements(
    mesh: tuple[LiveServer, EventmeshService, MeshClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("babelbus.protocols.eventmesh.service.CLIENT_SECONDS", ACK_STEP_SECONDS)
    live, service, client = mesh
    live.run(service.settle)
    assert client.push()[1]["body"] == "a"


async def proved() -> tuple[House, KeptSession]:
    """A client that has shown a token to a server, and its session."""
    house = House(access="enforce")
    house.bus.topic()
    return house, (await (await Talker(house).hello(token=TOKEN.secret)).listen()).keep()


@in_loop
async def test_a_client_goes_on_as_the_principal_that_it_has_proved_to_be() -> None:
    first, kept = await proved()
    second = await first.next(access="enforce")
    after = Talker(second, kept=kept)
    assert after.session.principal == "alice"
    assert await after.ask("ASYNC_MESSAGE_TO_SERVER", {"topic": "news", "body": "x"}) == 1  # it may not publish
    await second.bus.broker.close()


@pytest.mark.parametrize(
    "entries",
    [(), (OTHER_TOKEN, MAY_CONSUME), (ALICE,)],
    ids=["the principal is gone", "its token is gone", "its right is gone"],
)
@in_loop
async def test_a_client_whose_proof_or_right_is_gone_does_not_go_on(entries: tuple[Principal | Row, ...]) -> None:
    first, kept = await proved()
    second = await first.next(access="enforce", entries=entries)
    with pytest.raises(BabelbusError):
        Talker(second, kept=kept)
    assert second.hub.peers == {}
    assert second.bus.broker.groups.get("news", "G").info().members == 0
    await second.bus.broker.close()


@in_loop
async def test_a_proof_that_ends_meanwhile_proves_nothing_at_the_next_server() -> None:
    first, kept = await proved()
    ends = msgspec.structs.replace(kept.caller, until_ms=first.bus.clock.now_ms() + 1000)
    first.bus.clock.advance(1)
    second = await first.next(access="enforce")
    with pytest.raises(BabelbusError):
        Talker(second, kept=msgspec.structs.replace(kept, caller=ends))
    await second.bus.broker.close()


# -- copies, for the death of the owner ------------------------------------------------------------------------------


@pytest.mark.parametrize("are_saved", [False, True])
@in_loop
async def test_a_copied_consumer_works_on_and_its_copy_gets_all_it_did_not_acknowledge(are_saved: bool) -> None:
    first = House()
    before = await (await Talker(first, surplus=OLD).hello()).listen()
    before.copy()
    await first.publish("a", "b", "c")
    pushes = before.pushed()
    assert [text for _, text in pushes] == ["a", "b", "c"]
    await before.acknowledge(pushes[0][0], pushes[2][0])
    kept = before.copy()
    if are_saved:
        await first.bus.broker.groups.commit()
    second = first.kill()
    after = Talker(second, surplus=OLD, kept=kept)
    await turns()
    again = after.pushed()
    assert [text for _, text in again] == (["b"] if are_saved else ["a", "b", "c"])
    await after.acknowledge(pushes[1][0])  # comes late, and counts for no other push
    assert second.bus.broker.groups.get("news", "G").info().in_flight == len(again)
    await after.acknowledge(*(seq for seq, _ in again))
    await second.publish("d")
    assert [text for _, text in after.pushed()] == ["d"]
    await second.bus.broker.close()


@in_loop
async def test_messages_that_come_after_the_copy_and_before_the_death_reach_it_or_another_member() -> None:
    first = House()
    talkers = [await (await Talker(first).hello()).listen() for _ in range(2)]
    copies = [talker.copy() for talker in talkers]
    await first.publish("a", "b")
    assert sorted(text for talker in talkers for _, text in talker.pushed()) == ["a", "b"]
    second = first.kill()
    after = Talker(second, kept=copies[0])  # the other was sent something, so that its copy does not count
    await turns()
    assert sorted(text for _, text in after.pushed()) == ["a", "b"]
    await second.bus.broker.close()


@in_loop
async def test_a_copy_of_a_publisher_and_of_a_client_that_does_not_listen_yet_go_on() -> None:
    first = House()
    publisher = await Talker(first).hello("pub")
    reader = await (await Talker(first).hello()).subscribe(mode="BROADCASTING")
    copies = publisher.copy(), reader.copy()
    second = first.kill()
    publisher, reader = (Talker(second, kept=kept) for kept in copies)
    assert await reader.ask("LISTEN_REQUEST") == 0
    assert await publisher.ask("ASYNC_MESSAGE_TO_SERVER", {"topic": "news", "body": "x"}) == 0
    assert [text for _, text in reader.pushed()] == ["x"]
    await second.bus.broker.close()


@in_loop
async def test_a_client_that_hears_broadcasts_is_not_copied() -> None:
    house = House()
    talker = await (await Talker(house).hello()).listen(mode="BROADCASTING")
    assert talker.session.is_portable
    assert not is_copyable(talker)
    await house.bus.broker.close()


@in_loop
async def test_neither_a_requester_that_waits_nor_a_responder_that_owes_the_reply_is_copied() -> None:
    house = House()
    responder = await (await Talker(house).hello()).listen(kind="SYNC")
    requester = await Talker(house).hello("pub")
    assert is_copyable(responder)
    assert is_copyable(requester)
    await requester.say("REQUEST_TO_SERVER", {"topic": "news", "body": "?"})
    assert not is_copyable(responder)
    assert not is_copyable(requester)
    await house.bus.broker.close()


@pytest.mark.parametrize("begin", [_say_nothing, _leave, _hear_goodbye, _be_redirected])
@in_loop
async def test_a_client_that_has_not_begun_or_that_leaves_is_not_copied(begin: Callable[[Talker], Any]) -> None:
    house = House()
    talker = Talker(house)
    await begin(talker)
    assert not is_copyable(talker)
    await house.bus.broker.close()


@in_loop
async def test_a_client_whose_topic_was_removed_is_not_copied_until_it_subscribes_again() -> None:
    house = House()
    talker = await (await Talker(house).hello()).listen()
    await house.hub.remove_topic("news").wait()
    assert not is_copyable(talker)
    await talker.subscribe()
    assert is_copyable(talker)
    await house.bus.broker.close()


@in_loop
async def test_a_copy_from_before_a_right_was_lost_does_not_go_on() -> None:
    house = House(access="enforce")
    house.bus.topic()
    kept = (await (await Talker(house).hello(token=TOKEN.secret)).listen()).copy()
    second = house.kill(access="enforce", entries=(ALICE,))
    with pytest.raises(BabelbusError):
        Talker(second, kept=kept)
    assert second.hub.peers == {}
    await second.bus.broker.close()


def test_a_connection_gives_copies_of_a_client_that_holds_a_message_and_the_client_works_on(
    mesh: tuple[LiveServer, EventmeshService, MeshClient],
) -> None:
    live, service, client = mesh
    assert client.push()[1]["body"] == "a"
    [connection] = service.connections
    assert isinstance(connection, Connection)
    copies = [live.call(connection.copy) for _ in range(2)]
    assert None not in copies
    client.publish("news", "b")
    assert client.push()[1]["body"] == "b"
