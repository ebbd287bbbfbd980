"""Batches of fronts at the core: rights, roots, sources and figures are those of clients without a front."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from babelbus.clock import SystemClock
from babelbus.config import QuotaSettings
from babelbus.core.access import SERVER
from babelbus.core.receipt import Receipt, join
from babelbus.core.record import Event
from babelbus.core.subject import EVERYTHING
from babelbus.link.client import EdgeListener
from babelbus.link.edge import Edge
from babelbus.link.transport import LinkedTransport
from babelbus.listening.sockets import open_sockets
from babelbus.protocols.jebp.batch_codec import ClientBatch, encode_batch
from babelbus.protocols.jebp.batches import Batches, _Group
from babelbus.protocols.jebp.box import KEY_BYTES, NONCE_BYTES
from babelbus.protocols.jebp.continuation import KeptSession, encode_session
from babelbus.protocols.jebp.front import JebpFronts
from babelbus.protocols.jebp.service import JebpService
from babelbus.protocols.jebp.status import answers
from babelbus.protocols.service import Continued
from babelbus.storage.errors import DiskFullError
from tests.access.house import House
from tests.support.bus import NOW
from tests.support.jebp import Caller, create, create_topic, said, subscribe
from tests.support.server import LiveServer, configure


@contextlib.contextmanager
def fronted(live: LiveServer) -> Iterator[str]:
    """The address of an edge with fronts in the event loop of the server."""
    edge = Edge("1", SystemClock(), make_fronts={"jebp": JebpFronts})

    async def begin() -> str:
        ours, theirs = socket.socketpair()
        await asyncio.gather(live.server.core_end.adopt(ours, "1"), edge.connect_socket(theirs))
        sockets = await open_sockets("127.0.0.1", 0)
        await edge.open([EdgeListener("jebp", sockets)])
        return "{}:{}".format(*sockets[0].getsockname()[:2])

    address = live.run(begin)
    try:
        yield address
    finally:
        live.run(edge.stop)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("house")) as house:
        yield house


def counted(live: LiveServer, name: str, **labels: str) -> float:
    return live.server.metrics.registry.get_sample_value(f"babelbus_{name}", labels) or 0.0


def test_each_client_has_its_own_rights_root_and_source(house: House) -> None:
    carol = house.prove("carol", root="walk")
    heard: list[tuple[str, bytes | None, bytes | None]] = []

    def hear(events: Sequence[Event]) -> None:
        heard.extend((one.subject, one.payload, dict(one.headers).get(b"ce_source")) for one in events)

    house.grant("alice publish walk/a", "alice publish walk/a/#", "carol publish walk/#", "bob publish walk/b")
    subscription = house.call(lambda: house.broker.subscribe(EVERYTHING, hear, principal=SERVER))
    with fronted(house) as address:
        seen = []
        for at in (house.address, address):
            heard.clear()
            refusals = counted(house, "access_refusals_total", action="publish")
            with contextlib.ExitStack() as stack:
                proofs = (house.alice, house.bob, carol)
                callers = [stack.enter_context(Caller(at, proof.identity).connect()) for proof in proofs]
                said_by: list[list[str]] = [[], [], []]
                for topic in ("walk/a", "a", "$audit", "walk/b"):
                    for caller in callers:
                        caller.send(create(topic, b"%s" % topic.encode()))
                    for answer, caller in zip(said_by, callers, strict=True):
                        answer.append(said(caller.hear()[0]))
            refused = counted(house, "access_refusals_total", action="publish") - refusals
            seen.append((said_by, sorted(heard), refused))
    house.call(lambda: house.broker.unsubscribe(subscription))
    assert seen[0] == seen[1]
    assert seen[0][0][0] == ["a130", "b330", "b330", "b330"]
    assert seen[0][0][2][1] == "a130"
    assert {source for _, _, source in seen[0][1]} >= {b"jebp:alice", b"jebp:carol"}


def connection_of(live: LiveServer, caller: Caller) -> Any:
    address = "{}:{}".format(*caller.socket.getsockname())
    (found,) = [one for one in live.connections if one.peer == address]
    return found


def test_records_of_a_client_that_is_not_read_wait_for_its_session(house: House) -> None:
    house.grant("alice publish walk/a", "alice publish walk/a/#")
    with fronted(house) as address, Caller(address, house.alice.identity).connect() as caller:
        assert said(caller.ask(create("walk/a", b"1"))[0]) == "a130"
        connection = connection_of(house, caller)
        transport = connection.transport
        assert isinstance(transport, LinkedTransport)
        before = house.end_of("walk/a")
        house.call(transport.pause_reading)
        caller.send(create("walk/a", b"2"))
        house.until(lambda: transport.held_bytes > 0)
        caller.send(create("walk/a", b"3"), create("walk/a", b"4"))
        with Caller(address, house.alice.identity).connect() as other:
            assert said(other.ask(create("walk/a", b"other"))[0]) == "a130"
        assert house.end_of("walk/a") == before + 1
        house.call(transport.resume_reading)
        assert [said(one) for one in caller.hear(3)] == ["a130"] * 3
        assert house.end_of("walk/a") == before + 4
        assert said(caller.ask(create("walk/a", b"5"))[0]) == "a130"


def test_bytes_are_counted_as_without_a_front(house: House) -> None:
    house.grant("alice publish walk/a", "alice publish walk/a/#")
    figures = []
    with fronted(house) as address:
        for at in (house.address, address):
            with Caller(at, house.alice.identity).connect() as caller:
                caller.ask(subscribe())
                connection = connection_of(house, caller)
                before = house.call(connection.describe)
                for requests in ([create("walk/a", b"x" * 50)], [create("walk/a", b"y")] * 3, [subscribe()]):
                    caller.ask(*requests)
                for size in (218, 219, 8_000):  # from 219 bytes on, the length of the request has two bytes
                    caller.ask(create("walk/a", b"x" * size))
                after = house.call(connection.describe)
                figures.append((after.received_bytes - before.received_bytes, after.sent_bytes - before.sent_bytes))
                assert after.is_encrypted
    assert figures[0] == figures[1]


@pytest.mark.parametrize("is_fronted", [False, True])
def test_requests_that_were_put_off_are_answered_before_a_client_that_broke_the_protocol_is_closed(
    house: House, is_fronted: bool
) -> None:
    name = f"walk/made-{is_fronted}"
    house.grant("alice manage walk/#", "alice publish walk/#", "alice read walk/#")
    with fronted(house) as front, Caller(front if is_fronted else house.address, house.alice.identity) as caller:
        caller.connect()
        requests = create_topic(name), create(name, b"x"), subscribe(name)  # the others wait for the topic
        caller.socket.sendall(caller.wire.seal(requests) + b"broken")
        assert [said(one) for one in caller.hear(3)] == ["a130", "a130", "a030"]
        assert caller.is_closed()


def test_a_stop_waits_for_the_answers_to_batches(house: House) -> None:
    service = house.server.services["jebp"]
    assert isinstance(service, JebpService)
    assert not service.unsent
    service._batches.unanswered += 1
    unsent = service.unsent
    service._batches.unanswered -= 1
    assert unsent


class Counted:
    """The connection of a client, as far as answers are counted."""

    sent = 0

    def count_sent(self, size_bytes: int) -> None:
        self.sent += size_bytes


def test_each_record_has_the_outcome_of_its_partition(house: House) -> None:
    batches = Batches(house.broker, answers(), None)
    connections = [Counted(), Counted()]
    group = _Group(SERVER, "t", ())
    group.connections, group.ranges = connections, [(1, 3), (3, 6)]  # type: ignore[assignment]
    parts = [Receipt(count=2), Receipt(count=2), Receipt(count=1)]
    receipt = join(parts)
    for part in parts:
        part.resolve(DiskFullError("no room") if part is parts[1] else None)
    answer = batches._answer(6, [(group, receipt)])
    assert [answer[at : at + 2].hex() for at in range(0, 12, 2)] == ["0000", "a130", "b331", "a130", "a130", "b331"]
    assert [one.sent for one in connections] == [42, 63]


def test_who_has_no_certificate_of_a_principal_is_closed(house: House) -> None:
    with fronted(house) as address, Caller(address, house.forged().identity).connect() as caller:
        caller.send(create("walk/a", b"x"))
        assert caller.is_closed()


def test_records_of_a_client_that_goes_on_count_for_its_quota(tmp_path: Path) -> None:
    config = msgspec.structs.replace(configure(tmp_path), quotas=QuotaSettings(publish_bytes_per_second=1))
    with LiveServer(config) as live:
        live.call(lambda: live.server.broker.create_topic("t", principal=SERVER))
        service = live.server.services["jebp"]
        assert isinstance(service, JebpService)
        box = bytes(KEY_BYTES), bytes(NONCE_BYTES), 0
        content = encode_session(KeptSession(live.admin.fingerprint, box, box, [], fronted=True))
        batch = encode_batch(ClientBatch(b"t", [1], [1], [NOW], [b"x" * 100]))
        answered: list[bytes] = []

        async def go_on() -> LinkedTransport:
            transport = LinkedTransport.absent({"peername": ("127.0.0.1", 1), "sockname": None})
            assert await service.continue_sessions([Continued("owner", content, transport)]) == {"owner"}
            service._batches.receive(batch, {1: transport}.get, answered.append)
            return transport

        transport = live.run(go_on)
        live.until(lambda: bool(answered))
        assert answered[0].hex() == "a130"
        assert not transport.is_reading()
