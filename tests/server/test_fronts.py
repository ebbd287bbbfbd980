"""Clients of jebp at the edge processes of a server: the same answers, errors and limits as in one process."""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from babelbus.clock import SystemClock
from babelbus.config import JebpSettings, QuotaSettings, ServerSettings
from babelbus.core.access import SERVER
from babelbus.core.receipt import Receipt
from babelbus.link.edge import Edge
from babelbus.protocols.jebp.batches import Batches
from babelbus.protocols.jebp.codec import encode_request
from babelbus.protocols.jebp.frames import encode_frame
from babelbus.protocols.jebp.messages import AskTransaction, FetchPartition, TellPositions
from babelbus.web.clients import ClientLine
from tests.access.house import House, configured
from tests.support.jebp import GUEST, Caller, create, create_many, create_topic, fetch, said, subscribe
from tests.support.server import LiveServer, configure

MIB = 2**20


def live_server(folder: Path, processes: int) -> LiveServer:
    jebp = JebpSettings(port=0, frame_bytes_max=2 * MIB)
    return LiveServer(configure(folder, server=ServerSettings(processes=processes), jebp=jebp))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, LiveServer]]:
    """A server of one process, and one with an edge process."""
    with (
        live_server(tmp_path_factory.mktemp("alone"), 1) as alone,
        live_server(tmp_path_factory.mktemp("fronted"), 2) as fronted,
    ):
        for live in (alone, fronted):
            with live.caller() as caller:
                assert said(caller.ask(create_topic("t"))[0]) == "a130"
        yield alone, fronted


def counted(live: LiveServer, name: str, **labels: str) -> float:
    return live.server.metrics.registry.get_sample_value(f"babelbus_{name}", labels) or 0.0


def stored(live: LiveServer, topic: str) -> int:
    found = live.server.broker.find_topic(topic)
    assert found is not None
    return found.partitions[0].high_watermark


def test_the_same_requests_have_the_same_answers(both: tuple[LiveServer, LiveServer]) -> None:
    script = [
        [create("t", b"1")],
        [create("t", b"2"), create("t", b"3")],
        [create("t", b"x", valid=False)],
        [create("unknown", b"x")],
        [create("$state", b"x")],
        [create("t", b"4"), subscribe("t"), fetch(0), create("t", b"5")],
        [b"", b"\x99", b"\x12\x01"],
        [create("t", bytes(3 * 2**13)), create("t", b"6")],
        [create("t", bytes(MIB)), create_many("t", [b"7", b"8"]), create("t", b"9")],
        [create("t", b"%d" % number) for number in range(100)],
        [encode_request(TellPositions(("t",)))],
        [encode_request(FetchPartition("t", 0, 0xC1, 0, -1, MIB))],
        [encode_request(AskTransaction("none"))],
        [fetch(10**6)],
    ]
    answers = []
    for live in both:
        with live.caller() as caller:
            answers.append([[said(one)[:4] for one in caller.ask(*requests)] for requests in script])
            live.until(lambda live=live: stored(live, "t") > 108)  # type: ignore[misc]
            (found,) = live.connections
            described = found.describe()
            answers[-1].append([str(described.is_encrypted), str(found.principal_name)])
    assert answers[0] == answers[1]
    assert stored(both[0], "t") == stored(both[1], "t")


def test_records_of_clients_that_wait_come_in_batches(
    both: tuple[LiveServer, LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, live = both
    answers: list[int] = []
    publish = Batches._publish

    def count(batches: Batches, group: object, batch: object) -> object:
        answers.append(len(group.connections))  # type: ignore[attr-defined]
        return publish(batches, group, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Batches, "_publish", count)
    before, published = stored(live, "t"), counted(live, "records_published_total", protocol="jebp", topic="t")
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(live.caller()) for _ in range(16)]
        for _ in range(5):
            for caller in callers:
                caller.send(create("t", b"x"))
            for caller in callers:
                assert said(caller.hear()[0]) == "a130"
    assert sum(answers) == 80
    assert len(answers) < 80
    assert stored(live, "t") == before + 80
    assert counted(live, "records_published_total", protocol="jebp", topic="t") == published + 80


def test_a_stranger_and_a_client_that_breaks_the_protocol_are_counted_and_closed(
    both: tuple[LiveServer, LiveServer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for live in both:
        refused = counted(live, "connections_refused_total", protocol="jebp", reason="identity")
        errors = counted(live, "protocol_errors_total", protocol="jebp")
        caplog.clear()
        with Caller(live.address, GUEST).connect() as stranger:
            stranger.send(create("t", b"x"))
            assert stranger.is_closed()
        assert counted(live, "connections_refused_total", protocol="jebp", reason="identity") == refused + 1
        with live.caller() as caller:
            caller.send(create("t", b"last"))
            caller.socket.sendall(encode_frame(bytes(40)))
            assert said(caller.hear()[0]) == "a130"
            assert caller.is_closed()
        with live.dial() as caller:
            caller.socket.sendall(encode_frame(b"no key"))
            with contextlib.suppress(ConnectionResetError):
                while caller.socket.recv(100):
                    pass
        with live.dial() as caller:
            caller.socket.sendall(b"\x16\x03\x01 a client that speaks TLS")
            with contextlib.suppress(ConnectionResetError):
                while caller.socket.recv(100):
                    pass
        live.until(lambda live=live: not live.connections)  # type: ignore[misc]
        assert counted(live, "protocol_errors_total", protocol="jebp") == errors + 4
        assert counted(live, "connections_refused_total", protocol="jebp", reason="tls") == 1
        for text in (f"{GUEST.fingerprint} is not trusted", "does not decrypt", "public key of 6 bytes, not 32"):
            assert text in caplog.text, text


def test_a_client_that_leaves_behind_its_records_has_them_stored_and_answered(
    both: tuple[LiveServer, LiveServer],
) -> None:
    _, live = both
    before = stored(live, "t")
    with live.caller() as caller:
        caller.send(create("t", b"1"))
        caller.socket.shutdown(socket.SHUT_WR)
        assert said(caller.hear()[0]) == "a130"
        assert caller.is_closed()
    with live.caller() as caller:
        caller.send(create("t", b"2"))
    live.until(lambda: stored(live, "t") == before + 2)


def test_a_client_with_a_full_window_harms_nobody_and_has_its_answers_in_order(
    both: tuple[LiveServer, LiveServer],
) -> None:
    _, live = both
    links = set(live.server.core_end.links)
    with live.caller(receive_bytes=4096) as slow, live.caller() as other:
        slow.ask(create("t", bytes(MIB)), subscribe("t"))
        sent = [fetch(0, 2 * MIB - 100)] * 16 + [create("t", bytes(MIB))] * 6 + [create("t", b"last")]
        sender = threading.Thread(target=slow.send, args=sent)
        sender.start()
        live.until(lambda: any(one.outbox_bytes > MIB and one._paused for one in live.connections))
        for _ in range(3):
            assert said(other.ask(create("t", b"x"))[0]) == "a130"
        assert [said(one)[:4] for one in slow.hear(len(sent))] == ["a030"] * 16 + ["a130"] * 7
        sender.join()
    assert set(live.server.core_end.links) == links


def test_a_client_that_is_removed_is_closed(both: tuple[LiveServer, LiveServer]) -> None:
    _, live = both
    live.run(lambda: live.server.put_client(ClientLine("guest", GUEST.fingerprint, False)))
    with Caller(live.address, GUEST).connect() as guest, live.caller() as other:
        assert said(guest.ask(create("t", b"x"))[0]) == "a130"
        live.run(lambda: live.server.remove_client(GUEST.fingerprint))
        assert guest.is_closed()
        assert said(other.ask(create("t", b"x"))[0]) == "a130"


def test_edges_of_other_machines_get_no_keys(tmp_path: Path) -> None:
    with live_server(tmp_path, 1) as live:
        live.run(lambda: live.server.core_end.listen("127.0.0.1", 0, key="k"))
        host, _, port = live.server.core_end.address.rpartition(":")

        async def greet() -> None:
            edge = Edge("other", SystemClock())
            welcome = await edge.connect(host, int(port), key="k")
            assert welcome.listeners == []
            await edge.stop()

        asyncio.run(greet())


@pytest.mark.parametrize("reads", [True, False])
def test_who_loses_a_right_gets_no_records_that_wait_behind_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    held: list[Receipt] = []
    publish = Batches._publish

    def hold(batches: Batches, group: Any, batch: Any) -> Receipt:
        publish(batches, group, batch)
        held.append(Receipt())
        return held[0]

    monkeypatch.setattr(Batches, "_publish", hold)
    config = msgspec.structs.replace(configured(tmp_path), server=ServerSettings(processes=2))
    with House(tmp_path, config) as house:
        house.grant("alice publish walk/a/#", "alice read walk/a/#")
        with Caller(house.address, house.alice.identity).connect() as alice:
            assert [said(one)[:4] for one in alice.ask(subscribe("walk/a"), fetch(0))] == ["a030"] * 2
            (connection,) = house.connections
            alice.send(create("walk/a", b"x"))
            house.until(lambda: bool(held))
            if reads:
                before = connection.describe().sent_bytes
                alice.send(fetch(0))
                house.until(lambda: connection.describe().sent_bytes != before)
            house.grant("alice publish walk/a/#")
            house.call(held[0].resolve)
            if reads:
                assert alice.is_closed()
            else:
                assert said(alice.hear()[0]) == "a130"


@pytest.mark.parametrize("processes", [1, 2])
def test_who_has_read_too_much_has_its_records_handled_later(tmp_path: Path, processes: int) -> None:
    server, quotas = ServerSettings(processes=processes), QuotaSettings(read_bytes_per_second=1)
    with LiveServer(msgspec.structs.replace(configure(tmp_path, server=server), quotas=quotas)) as live:
        live.call(lambda: live.server.broker.create_topic("t", principal=SERVER))
        with live.caller() as caller:
            assert said(caller.ask(create("t", b"x"))[0]) == "a130"
            caller.send(create("t", b"later"))
            (connection,) = live.connections
            live.until(lambda: connection.busy)
            assert stored(live, "t") == 1
