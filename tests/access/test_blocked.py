"""Whoever reads too slowly gets nothing more of what was taken from its rights meanwhile."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import ClassVar, cast

import pytest

from babelbus.clients.jebp.errors import ClientError as JebpError
from babelbus.core.access import SERVER
from babelbus.core.publish import Publication
from babelbus.core.record import Event
from babelbus.core.request import NoRespondersError, Reply, Request
from babelbus.protocols.eventmesh.calls import CONNECTIONS_MAX
from tests.access.drivers import (
    Admin,
    Driver,
    JebpCalls,
    MeshEvents,
    MeshGrpc,
    MeshHttp,
    MeshTcp,
    Sbus,
    Tree,
    TreeRest,
    TreeSocket,
    calls_under_way,
)
from tests.access.drivers import ZbusSocket as ZbusDriver
from tests.access.house import END, House
from tests.protocols.eventmesh.test_http import Hook, _Handler
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.passage import Passage
from tests.support.server import connections_of
from tests.support.zbus import HttpClient, request_of

EVENT_BYTES = 16_384
WAITING_BYTES = 20 * EVENT_BYTES
EVENTS_MAX = 2_000
MARKER = re.compile(rb"event-(\d{6})")


class Valve(Passage):
    """A way to a listener that stops to read from the server while it is shut; `passed` are the bytes that came."""

    def __init__(self, address: str) -> None:
        self._open = threading.Event()
        self._open.set()
        self.passed = bytearray()
        super().__init__(address)

    def connect(self) -> socket.socket:
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.connect(self.target)
        return server

    def receive(self, source: socket.socket, is_answer: bool) -> bytes:
        if is_answer:
            self._open.wait()
        return super().receive(source, is_answer)

    def send(self, target: socket.socket, data: bytes, is_answer: bool) -> None:
        if not is_answer:
            super().send(target, data, is_answer)
            return
        self.passed += data
        with suppress(OSError):  # what comes for a client that has gone counts, too
            super().send(target, data, is_answer)

    def shut(self) -> None:
        """Read nothing more from the server."""
        self._open.clear()

    def open(self) -> None:
        """Read on."""
        self._open.set()

    def drain(self) -> bytes:
        """Return all that came, when the clients have gone."""
        self.wait()
        return bytes(self.passed)

    def close(self) -> None:
        self.open()
        super().close()


class Zbus(ZbusDriver):
    """A subscriber of zbus, which is a member of a channel without a window."""

    right: ClassVar = "consume"
    listener: ClassVar = "zbus"

    def subscribe(self, subject: str, *, below: bool = False) -> bool:
        place = {"mq": subject, "channel": f"blocked{self.house.next_number()}"}
        assert self.ask("create", **place, offset=self.house.end_of(subject))["status"] == 200
        return bool(self.ask("sub", **place)["status"] == 200)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("blocked")) as house:
        yield house


def flood(house: House, number: int, *subjects: str) -> None:
    """Publish an event that names its number under each of these subjects, in their order."""

    async def publish() -> None:
        payload = b'"event-%06d%b"' % (number, b"x" * EVENT_BYTES)
        for subject in subjects:
            await house.broker.publish(Publication(SERVER, "test", [Event(subject, payload)])).wait()

    house.run(publish)


def waiting_bytes(house: House) -> int:
    """Bytes that wait in the server for the client that has most of them."""
    server = house.server
    sizes = [one.outbox_bytes for one in connections_of(server)]
    rpc = server.services["eventmesh"]._rpc  # type: ignore[attr-defined]
    for session in () if rpc is None else rpc.sessions:
        waiting = [len(one[1] or b"") for stream in session.streams.values() for one in stream.waiting]
        sizes.append(session._calls.answers.unsent_bytes + sum(waiting))
    web = server.administration.endpoint
    if web is not None:
        transports = [request.transport for request, _, _ in web._callers._open.values()]
        written = [one.get_write_buffer_size() for one in transports if one is not None]
        sizes.append(max(written, default=0) + max((feed._size_bytes for feed in web.api.live._feeds), default=0))
    return max(sizes, default=0)


def behind(driver: type[Driver], valve: Valve) -> type[Driver]:
    """The driver, with its connection through a valve."""

    class Behind(driver):  # type: ignore[valid-type, misc]
        address = valve.address

        def __init_subclass__(cls) -> None:
            """Take no listener of its own."""

    Behind.listener = driver.listener
    return Behind


def make_letters(house: House) -> None:
    """Make a topic of dead letters from below `walk`, whose rights it needs beside its own."""
    if house.broker.find_topic("letters") is None:
        house.run(lambda: house.broker.create_topic("letters", principal=SERVER, source="walk/a").wait())


SLOW = (JebpCalls, Tree, TreeSocket, TreeRest, Zbus, MeshTcp, MeshGrpc, MeshEvents, Admin)


@pytest.mark.parametrize("topic", ["walk/a", "letters"])
@pytest.mark.parametrize("driver", SLOW, ids=lambda driver: driver.name)
def test_what_waits_for_a_slow_reader_does_not_go_out_when_its_right_is_taken(
    house: House, driver: type[Driver], topic: str
) -> None:
    make_letters(house)
    action = getattr(driver, "right", "subscribe")
    house.grant(f"alice {action} walk/#", f"alice {action} letters/#")
    with Valve(house.server.addresses[driver.listener]) as valve:
        with behind(driver, valve)(house, house.alice) as client:
            assert client.subscribe(topic)
            valve.shut()
            published = 0
            while house.call(lambda: waiting_bytes(house)) < WAITING_BYTES and published < EVENTS_MAX:
                flood(house, published, topic)
                published += 1
            waiting = house.call(lambda: waiting_bytes(house))
            assert waiting >= WAITING_BYTES
            house.grant(f"alice {action} letters/#")
            valve.open()
            flood(house, published, topic)
            heard = bytearray()
            if isinstance(client, JebpCalls):  # the bytes are sealed
                with suppress(JebpError):
                    for event in client.subscription:
                        heard += event.payload or b""
        numbers = {int(number) for number in MARKER.findall(valve.drain() + heard)}
        assert 0 < len(numbers) <= published - waiting // EVENT_BYTES + 1


def test_values_that_wait_for_a_slow_reader_do_not_go_out_when_its_right_is_taken(house: House) -> None:
    house.grant("alice subscribe walk/#")
    numbers = range(600)

    async def write() -> None:
        for number in numbers:
            house.broker.state.set(f"walk/big/{number}", b'"event-%06d%b"' % (number, b"x" * EVENT_BYTES))
        await house.broker.state.commit("test").wait()

    house.run(write)
    with Valve(house.server.addresses["worterbuch"]) as valve:
        valve.shut()
        with HttpClient(valve.address) as client:
            client.send(request_of("GET", "/api/v1/pget/walk/%23", authorization=f"Bearer {house.alice.jwt}"))
            house.until(lambda: waiting_bytes(house) >= WAITING_BYTES)
            house.grant()
            valve.open()
            house.until(lambda: not waiting_bytes(house))
        assert len({*MARKER.findall(valve.drain())}) < len(numbers) - WAITING_BYTES // EVENT_BYTES + 1


def test_events_behind_the_window_of_a_subscriber_go_out_as_far_as_they_are_granted(house: House) -> None:
    house.grant("alice subscribe walk/#")
    with JebpCalls(house, house.alice) as alice, alice.client.subscribe("walk/#", END, window=1) as subscription:
        subscription.begin()
        flood(house, 0, "walk/a", "walk/a", "walk/b", "walk/a", END)
        house.grant("alice subscribe walk/b")
        heard = list(iter(lambda: next(subscription).subject, END))
        assert heard in (["walk/a", "walk/b"], ["walk/b"])  # the first was on its way already


def test_packets_that_wait_at_a_socket_of_sbus_go_out_as_far_as_they_are_granted(house: House) -> None:
    house.grant("alice subscribe walk/#")
    with Sbus(house, house.alice) as alice:
        alice.subscribe("walk", below=True)
        (connection,) = house.server.services["sbus"].server.connections  # type: ignore[attr-defined]
        published = 0
        while not connection.backlog:
            flood(house, published, "walk/a")
            published += 1
        flood(house, published, "walk/a", "walk/b", END)
        house.grant("alice subscribe walk/b")
        heard = alice.hear()
        assert heard == ["walk/a"] * (published - 1) + ["walk/b"]
        house.grant("alice subscribe walk/#")
        flood(house, published, "walk/a", END)
        assert alice.hear() == ["walk/a"]


class LateHook(Hook):
    """A webhook that answers nothing before `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.RequestHandlerClass = _LateHandler


class _LateHandler(_Handler):
    def do_POST(self) -> None:  # noqa: N802  # the name of the library
        hook = cast("LateHook", self.server)
        hook.gate.wait(SAFETY_NET_SECONDS)
        super().do_POST()


@pytest.mark.parametrize("topic", ["walk/a", "letters"])
def test_calls_that_wait_for_a_slow_webhook_are_not_made_when_its_right_is_taken(house: House, topic: str) -> None:
    make_letters(house)
    house.grant("alice subscribe walk/#", "alice subscribe letters")
    hook = LateHook()
    with hook, MeshHttp(house, house.alice) as client:
        client._hook = hook
        assert client._listen(topic, "BROADCASTING")
        pools = house.server.services["eventmesh"].webhooks.calls._pools  # type: ignore[attr-defined]
        for number in range(CONNECTIONS_MAX + 5):
            flood(house, number, topic)
        *_, pool = pools.values()
        house.until(lambda: len(pool.waiting) == 5 and len(pool.connections) == CONNECTIONS_MAX)
        house.grant("alice subscribe letters")
        hook.gate.set()
        for _ in range(CONNECTIONS_MAX):
            hook.next()
        house.until(lambda: not calls_under_way(house))
        assert hook.pushes.empty()


def test_questions_that_wait_for_a_slow_responder_are_not_sent_when_its_right_is_taken(house: House) -> None:
    house.grant("alice subscribe walk/#")
    broker, deadline = house.broker, house.server.clock.monotonic() + SAFETY_NET_SECONDS
    asked: list[Request[Reply]] = []

    def ask() -> int:
        """Send a request; return how many questions wait for the responder."""
        payload = b"event-%06d%b" % (len(asked), b"x" * 16 * EVENT_BYTES)
        asked.append(broker.request("walk/a", payload, (), deadline, SERVER))
        ((responder, _),) = house.server.administration.api._requests._responders.values()  # type: ignore[union-attr]
        return len(responder._lines)

    with Valve(house.server.addresses["admin"]) as valve:
        with behind(Admin, valve)(house, house.alice) as alice:
            assert isinstance(alice, Admin)
            assert alice.open("GET", "/api/respond", subject="walk/a", window="100").readline()
            valve.shut()
            while (waiting := house.call(ask)) < 3:
                pass
            house.grant()
            house.until(lambda: all(one.done for one in asked))  # at once, and not at the deadline
            valve.open()
        numbers = {int(number) for number in MARKER.findall(valve.drain())}
        assert len(numbers) <= len(asked) - waiting
    assert {type(one.error) for one in asked} == {NoRespondersError}
