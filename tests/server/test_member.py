"""What a member of a cluster does in its event loop: it serves, and never waits there for NATS."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("nats", reason="clusters are not tested: the package nats-py is not installed")

from babelbus.config import ClusterSettings, Config, JetstreamSettings, ZbusSettings
from babelbus.core.access import SERVER
from babelbus.core.transactions import PartRef
from babelbus.records.format import encode_batch
from babelbus.records.record import Record
from babelbus.server.app import Server
from babelbus.server.member import Member
from babelbus.storage.jetstream.client import Nats
from tests.support.link import linked, until
from tests.support.nats import NatsServer
from tests.support.server import LiveServer, configure

LARGE = bytes(range(256)) * 2000


def member(folder: Path, nats: NatsServer, prefix: str) -> Config:
    """A member with an empty folder."""
    config = configure(folder, zbus=ZbusSettings(port=0))
    return msgspec.structs.replace(
        config,
        topics=msgspec.structs.replace(config.topics, engine="jetstream"),
        cluster=ClusterSettings(enabled=True),
        jetstream=JetstreamSettings(nats.url, prefix=prefix, replicas=1, shards=1),
    )


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls of NATS that made an event loop wait, after the start of its server."""
    found: list[str] = []
    serving: set[asyncio.AbstractEventLoop] = set()
    start, call = Server.start, Nats.call

    async def start_watched(server: Server) -> None:
        await start(server)
        serving.add(asyncio.get_running_loop())

    def call_watched(nats: Nats, work: Any, timeout_seconds: float | None = None) -> Any:
        try:
            if asyncio.get_running_loop() in serving:
                found.append(work.__qualname__)
        except RuntimeError:  # a thread without a loop may wait
            pass
        return call(nats, work, timeout_seconds)

    monkeypatch.setattr(Server, "start", start_watched)
    monkeypatch.setattr(Nats, "call", call_watched)
    yield found
    assert found == []


def test_a_member_says_why_it_serves_nobody_while_the_owner_ends(nats: NatsServer, tmp_path: Path) -> None:
    async def test() -> str:
        async with linked("tcp") as both:
            one: Any = Member(member(tmp_path, nats, "ends"))
            one._edge = both.edge
            one._owner_link = SimpleNamespace(trouble="")  # as a link to the owner leaves it
            both.edge.stand_in = lambda listener: one._waiting_room.make()
            both.edge.waiting.newcomers_max = 1
            both.core.stop_accepting()
            await until(lambda: both.edge._stops)
            reader, writer = await both.dial()
            writer.write(b"GET /ready HTTP/1.1\r\n\r\n")
            return (await reader.read()).decode()

    assert "reaches no owner of the cluster's data: the owner changes now" in asyncio.run(test())


def test_a_member_whose_port_for_links_is_taken_does_not_start_and_never_owns_the_data(
    nats: NatsServer, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = member(tmp_path, nats, "port")
        cluster = msgspec.structs.replace(config.cluster, port=taken.getsockname()[1])
        one = Member(msgspec.structs.replace(config, cluster=cluster))
        with pytest.raises(OSError, match="in use"):
            asyncio.run(one.run(asyncio.Event()))
    assert not hasattr(one, "_ownership")  # it has not even asked NATS


def stage(live: LiveServer, part: str, first_record: int, *payloads: bytes) -> None:
    async def staged() -> None:
        batch = encode_batch([Record(payload, None, (), 1) for payload in payloads])
        receipt = live.server.broker.staging.stage("t", 0, part, "orders", batch, first_record=first_record)
        await receipt.wait()

    live.run(staged)


@pytest.mark.usefixtures("waits")
def test_what_was_staged_before_a_take_over_is_committed_after_it(nats: NatsServer, tmp_path: Path) -> None:
    with LiveServer(member(tmp_path / "a", nats, "staged")) as live:
        live.call(lambda: live.server.broker.create_topic("orders", 1, {}, SERVER))
        stage(live, "p", 0, b"small")
        stage(live, "p", 1, LARGE, LARGE)
        stage(live, "q", 0, b"dropped")
        live.call(lambda: live.server.broker.staging.abort("t", 0, "q"))
    with LiveServer(member(tmp_path / "b", nats, "staged")) as live:
        stage(live, "p", 3, b"last")

        async def commit() -> int:
            receipt = live.server.broker.staging.commit("t", 0, [PartRef("p", 4)])
            await receipt.wait()
            return receipt.count

        assert live.run(commit) == 4
    with LiveServer(member(tmp_path / "a", nats, "staged")) as live:
        assert live.server.broker.staging.transaction("t").last_batch_id == 0
        partition = live.server.broker.topic("orders").partition(0)
        chunk = live.run(lambda: partition.ask(lambda: partition.log.read(0, 2**23)))
        assert chunk.next_offset == 4
        assert chunk.data.count(LARGE) == 2
        live.run(lambda: live.server.broker.staging.forget("t"))
        assert live.server.broker.staging.transaction("t").last_batch_id == -1


@pytest.mark.usefixtures("waits")
def test_topics_groups_and_state_are_changed_without_a_wait_of_the_loop(nats: NatsServer, tmp_path: Path) -> None:
    async def change(live: LiveServer) -> None:
        broker = live.server.broker
        await broker.create_topic("orders", 2, {}, SERVER)
        await broker.alter_topic("orders", {"partitions": 3, "retention_seconds": 60.0}, SERVER)
        await broker.create_topic("gone", 1, {}, SERVER)
        group = broker.groups.create("orders", "w", principal=SERVER)
        await group.saved.wait()
        broker.groups.create("gone", "w", principal=SERVER)
        await broker.remove_topic("gone", SERVER)
        broker.state.set("plant/line", b"7")
        await broker.state.commit("test").wait()
        await broker.clean()
        await broker.staging.expire()

    with LiveServer(member(tmp_path / "a", nats, "changed")) as live:
        live.run(lambda: change(live))
    with LiveServer(member(tmp_path / "b", nats, "changed")) as live:
        broker = live.server.broker
        topic = broker.topic("orders")
        assert (len(topic.partitions), topic.settings.retention_seconds) == (3, 60.0)
        assert not broker.has_topic("gone")
        assert [(group.topic.name, group.name) for group in broker.groups.all()] == [("orders", "w")]
        assert broker.state.find("plant/line") == b"7"
