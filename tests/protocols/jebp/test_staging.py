"""Staged batches over jebp: the bytes both ways, each way to be malformed, and end to end against a real server."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.client import BlockingClient, Client, ClientError, Identity, Record, RequestError
from babelbus.clients.jebp.transactions import REQUESTS_ON_THE_WAY
from babelbus.config import JebpSettings
from babelbus.core.access import SERVER
from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.protocols.jebp.codec import decode_request, encode_request
from babelbus.protocols.jebp.fields import decode_numbers, encode_numbers
from babelbus.protocols.jebp.messages import (
    AbortBatch,
    AskTransaction,
    BatchCommitted,
    CommitBatch,
    Malformed,
    PartRecords,
    PartsDropped,
    RecordsStaged,
    StageRecords,
    StagingRequest,
    TransactionTold,
)
from babelbus.protocols.jebp.staging_codec import (
    decode_told,
    encode_told,
)
from babelbus.protocols.jebp.status import Outcome
from babelbus.records.format import encode_batch, encode_payloads
from babelbus.server.access import ClientEntry
from babelbus.server.app import Server
from tests.support.bus import SAFETY_NET_SECONDS, in_loop
from tests.support.server import configure, configure_to_return
from tests.support.staging import StagingChild

STORED = bytes.fromhex("00000000000000000000001ba97cdd57000000018bcfe56800ffffffff0000000568656c6c6f00")
REQUESTS: list[tuple[StagingRequest, str]] = [
    (
        StageRecords("etl", 7, "0.0", "news", -1, 2, STORED),
        "14010365746c0000000000000007" + "0103302e30" + "01046e657773" + "ffffffff0000000000000002" + STORED.hex(),
    ),
    (
        StageRecords("etl", 7, "0.0", "news", 1, 2, STORED, to_state=True),
        "17010365746c0000000000000007" + "0103302e30" + "01046e657773" + "000000010000000000000002" + STORED.hex(),
    ),
    (
        CommitBatch("etl", 7, (PartRecords("0.0", 3), PartRecords("1.0", 1)), "q1"),
        "15010365746c0000000000000007" + "01027131" + "00000002"
        "0103302e300000000000000003" + "0103312e300000000000000001",
    ),
    (CommitBatch("etl", 0, ()), "15010365746c0000000000000000" + "0100" + "00000000"),
    (AbortBatch("etl", 7, "0.0"), "16010365746c0000000000000007" + "0103302e30"),
    (AbortBatch("etl", 7), "16010365746c0000000000000007" + "0100"),
    (AskTransaction("etl"), "23010365746c"),
]
MALFORMED = [
    "14",
    "1400",
    "140103",
    "14010365746c",
    "14010365746c0000000000000007" + "0103302e30" + "01046e657773" + "ffffffff0000000000000002",  # no records
    "14010365746c0000000000000007" + "0103302e30" + "01046e657773" + "fffffffe0000000000000002" + "00",
    "14010365746c0000000000000007" + "0103302e30" + "01046e657773" + "ffffffffffffffffffffffff" + "00",
    "17010365746c0000000000000007" + "0103302e30" + "01046e657773" + "ffffffff0000000000000002",  # no records
    "14010365746cffffffffffffffff" + "0103302e30" + "01046e657773" + "ffffffff0000000000000002" + "00",
    "14010365746c0000000000000007" + "00" + "01046e657773" + "ffffffff0000000000000002" + "00",
    "14010365746c0000000000000007" + "0103302e30" + "01036e2c73" + "ffffffff0000000000000002" + "00",
    "150103ff746c0000000000000000" + "00" + "00000000",
    "15010365746c0000000000000000" + "00" + "00000001",
    "15010365746c0000000000000000" + "00" + "ffffffff",
    "15010365746c0000000000000000" + "00" + "0000000000",
    "15010365746c0000000000000000" + "00" + "000186a1",
    "16010365746c0000000000000007" + "0103302e",
    "16010365746c0000000000000007" + "0000",
    "23010365746c00",
    "23020201" + "78" * 513,
]


@pytest.mark.parametrize(("request_", "expected"), REQUESTS)
def test_a_request_has_these_bytes_and_they_are_read_back(request_: StagingRequest, expected: str) -> None:
    assert encode_request(request_).hex() == expected
    for content in (bytes.fromhex(expected), bytearray.fromhex(expected)):
        assert decode_request(content) == request_


@pytest.mark.parametrize("content", MALFORMED)
def test_a_request_without_its_form_is_answered_and_not_carried_out(content: str) -> None:
    found = decode_request(bytes.fromhex(content))
    assert found == Malformed(int(content[:2], 16), Outcome.STAGING_REFUSED)


@given(st.sampled_from([bytes.fromhex(content) for _, content in REQUESTS]), st.data())
def test_any_bytes_behind_the_command_are_a_request_or_malformed(content: bytes, data: st.DataObject) -> None:
    changed = bytearray(content)
    changed[data.draw(st.integers(1, len(content) - 1))] = data.draw(st.integers(0, 255))
    del changed[data.draw(st.integers(1, len(content))) :]
    decode_request(bytes(changed))


@pytest.mark.parametrize(
    "request_",
    [
        StageRecords("etl", 7, "0.0", "news", -1, 2, b""),
        StageRecords("", 7, "0.0", "news", -1, 2, STORED),
        StageRecords("etl", -1, "0.0", "news", -1, 2, STORED),
        StageRecords("etl", 7, "x" * 513, "news", -1, 2, STORED),
        CommitBatch("\ud800", 0, ()),
        CommitBatch("etl", 0, (PartRecords("a", 0),) * 100_001),
    ],
)
def test_what_the_protocol_cannot_carry_is_not_sent(request_: StagingRequest) -> None:
    with pytest.raises(LocalProtocolError):
        encode_request(request_)


def test_the_answers_have_these_bytes_and_are_read_back() -> None:
    assert encode_numbers(RecordsStaged(1, 3)).hex() == "000000010000000000000003"
    assert decode_numbers(RecordsStaged, encode_numbers(RecordsStaged(1, 3))) == RecordsStaged(1, 3)
    assert encode_numbers(BatchCommitted(4, True)).hex() == "000000000000000401"
    assert decode_numbers(BatchCommitted, encode_numbers(BatchCommitted(-1, False))) == BatchCommitted(-1, False)
    assert encode_numbers(PartsDropped(2)).hex() == "00000002"
    assert decode_numbers(PartsDropped, encode_numbers(PartsDropped(2))) == PartsDropped(2)
    told = TransactionTold(7, 4, -1, 0, "q1")
    assert encode_told(told).hex() == "00000000000000070000000000000004ffffffffffffffff00000000000000007131"
    assert decode_told(encode_told(told)) == told
    for kind in (RecordsStaged, BatchCommitted, PartsDropped):
        with pytest.raises(RemoteProtocolError):
            decode_numbers(kind, b"\0")
    with pytest.raises(RemoteProtocolError):
        decode_told(b"\0")
    with pytest.raises(RemoteProtocolError):
        decode_told(encode_told(told) + b"\xff")


# -- end to end ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(folder: Path, kind: type[Server] = Server) -> AsyncIterator[Server]:
    server = kind(configure(folder))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def admin_of(folder: Path) -> Identity:
    return Identity.load(folder / "conf" / "admin_key")


def client_of(server: Server, folder: Path, **options: object) -> Client:
    return Client(server.addresses["jebp"], identity=admin_of(folder), **options)  # type: ignore[arg-type]


async def payloads(client: Client, topic: str = "news") -> list[bytes | None]:
    return [record.payload async for record in client.follow(topic, until_end=True)]


@in_loop
async def test_two_writers_stage_and_one_call_commits_both(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, client_of(server, tmp_path) as driver:
        await driver.create_topic("news")
        parts = []
        for task in range(2):
            async with client_of(server, tmp_path) as executor:
                writer = executor.transaction("etl").writer(0, f"{task}.0")
                await writer.stage("news", [b"%d-%d" % (task, number) for number in range(3)], batch_records=2)
                parts.append(await writer.stage("news", [Record(b"", b"key", ((b"h", b"v"),))]))
        assert parts == [PartRecords("0.0", 4), PartRecords("1.0", 4)]
        assert await payloads(driver) == []
        batches = driver.transaction("etl")
        assert (await batches.ask()).last_batch_id == -1
        assert await batches.commit(0, parts[::-1], owner="q1") == BatchCommitted(8, False)
        assert await batches.commit(0, parts[::-1], owner="q1") == BatchCommitted(8, True)
        told = await batches.ask()
        assert (told.last_batch_id, told.last_records, told.owner, told.staged_bytes) == (0, 8, "q1", 0)
        assert await payloads(driver) == [b"1-0", b"1-1", b"1-2", b"", b"0-0", b"0-1", b"0-2", b""]


@in_loop
async def test_what_is_refused_says_why_and_leaves_the_connection(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, client_of(server, tmp_path) as client:
        await client.create_topic("news")
        batches = client.transaction("etl")
        with pytest.raises(RequestError, match="no topic 'nope'") as caught:
            await batches.writer(0, "p").stage("nope", [b"a"])
        assert not caught.value.repeat
        with pytest.raises(RequestError, match="is not staged"):
            await batches.commit(0, [PartRecords("p", 1)])
        staged = await batches.writer(0, "p").stage("news", [b"a"])
        with pytest.raises(RequestError, match="has 1 records, not 2"):
            await batches.commit(0, [PartRecords("p", 2)])
        await batches.commit(0, [staged], owner="q1")
        with pytest.raises(RequestError, match="is 'q1''s, not 'q2''s"):
            await batches.commit(1, [], owner="q2")
        writer = batches.writer(1, "p")
        await writer.stage("news", [b"b"])
        await writer.abort()
        assert await batches.abort(1) == 0
        assert await payloads(client) == [b"a"]


@in_loop
async def test_records_that_set_the_state_are_refused_by_a_topic_that_keeps_none(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, client_of(server, tmp_path) as client:
        await client.create_topic("news")
        records = encode_batch([Record(b"1", timestamp=1)])
        writer = client.transaction("etl").writer(0, "p")
        with pytest.raises(RequestError, match=r"'news' keeps no state.* --retain last") as caught:
            await writer.stage_stored("news", records.data, to_state=True)
        assert not caught.value.repeat
        await server.broker.alter_topic("news", {"retain": "last"}, principal=SERVER)
        await writer.put("news", [records], to_state=True)
        await client.transaction("etl").commit(0, [await writer.drain()])
        assert await payloads(client) == [b"1"]


@in_loop
async def test_transactions_of_another_identity_are_others(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, client_of(server, tmp_path) as client:
        await client.create_topic("news")
        guest = Identity.generate()
        server._lists.put(ClientEntry(guest.fingerprint, "guest", admin=False))
        async with Client(server.addresses["jebp"], identity=guest) as other:
            staged = await client.transaction("etl").writer(0, "p").stage("news", [b"a"])
            with pytest.raises(RequestError, match="is not staged"):
                await other.transaction("etl").commit(0, [staged])
            assert await other.transaction("etl").abort(0) == 0
            await client.transaction("etl").commit(0, [staged])
            assert (await other.transaction("etl").ask()).last_batch_id == -1


@in_loop
async def test_a_name_with_a_slash_gives_no_transaction_of_another_client(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, client_of(server, tmp_path) as admin:
        await admin.create_topic("news")
        aborted = []
        for name, transaction in (("a", "b/etl"), ("a/b", "etl"), ("a%2Fb", "etl"), ("a/b", "etl")):
            identity = Identity.generate()
            with (tmp_path / "conf" / "client_fingerprints").open("a", encoding="utf-8") as lists:
                lists.write(f"{identity.fingerprint} {name}\n")  # no client is called so any more
            await server.reload(SERVER)
            async with Client(server.addresses["jebp"], identity=identity) as client:
                aborted.append(await client.transaction(transaction).abort(0))
                await client.transaction(transaction).writer(0, "p").stage("news", [b"x"])
        assert aborted == [0, 0, 0, 1]
        assert server.broker.staging.transaction("a/b/etl").staged_bytes > 0  # as data folders have always had it


@in_loop
async def test_records_in_the_stored_form_are_staged_as_they_are(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, client_of(server, tmp_path) as client:
        await client.create_topic("news")
        records = [Record(b"v", b"k", ((b"h", None),), 1_700_000_000_000), Record(None, b"k", (), 1_700_000_000_001)]
        writer = client.transaction("etl").writer(0, "p")
        await writer.stage_stored("news", encode_batch(records).data)
        await client.transaction("etl").commit(0, [writer.staged])
        found = [record async for record in client.follow("news", until_end=True)]
        assert [(one.payload, one.key, one.timestamp) for one in found] == [
            (b"v", b"k", 1_700_000_000_000),
            (None, b"k", 1_700_000_000_001),
        ]


@in_loop
async def test_what_is_put_is_staged_in_order_when_it_is_waited_for(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, client_of(server, tmp_path) as client:
        await client.create_topic("news")
        batches = client.transaction("etl")
        writer = batches.writer(0, "p")
        for number in range(10):
            await writer.put("news", [encode_payloads([b"%d" % number, b"."], [1, 1])])
            assert writer.staged.records >= 2 * (number + 1 - REQUESTS_ON_THE_WAY)
        assert (await writer.stage_stored("news", encode_payloads([b"last"], [1]).data)).records == 21
        assert await writer.drain() == PartRecords("p", 21)
        await batches.commit(0, [writer.staged])
        assert await payloads(client) == [part for number in range(10) for part in (b"%d" % number, b".")] + [b"last"]


@in_loop
async def test_a_refusal_of_what_was_put_comes_with_the_next_call_and_the_part_can_be_dropped(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, client_of(server, tmp_path) as client:
        await client.create_topic("news")
        writer = client.transaction("etl").writer(0, "p")
        await writer.put("news", [encode_payloads([b"a"], [1])])
        await writer.put("nope", [encode_payloads([b"b"], [1])])
        with pytest.raises(RequestError, match="there is no topic 'nope'"):
            await writer.drain()
        await writer.abort()
        assert (await client.transaction("etl").ask()).staged_bytes == 0


def attempt(child: StagingChild, batch_id: int, number: int) -> None:
    """What a Spark query does with a batch, once: ask, stage in two parts, commit."""
    with BlockingClient(
        child.address, identity=child.admin, reconnect=False, request_timeout_seconds=SAFETY_NET_SECONDS
    ) as client:
        batches = client.transaction("etl")
        if batches.ask().last_batch_id >= batch_id:
            return
        parts = []
        for task in range(2):
            writer = batches.writer(batch_id, f"{task}.{number}")
            for step in range(3):
                values = [b"%d-%d-%d-%d." % (batch_id, task, step, at) + bytes(200) for at in range(50)]
                writer.stage("one" if task else "two", values)
            parts.append(writer.staged)
        batches.commit(batch_id, parts, owner="q1")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_killed_at_random_moments_each_batch_is_there_once(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    config = configure(tmp_path, jebp=JebpSettings(port=0))
    with StagingChild(config) as child, BlockingClient(child.address, identity=child.admin) as client:
        client.create_topic("one")
        client.create_topic("two")
    batches, kills, number = 4, 0, 0
    for batch_id in range(batches):
        done = False
        while not done:
            number += 1
            with StagingChild(config) as child:
                killer = threading.Timer(chance.uniform(0.0, 0.12), child.kill) if kills < 6 else None
                if killer is not None:
                    killer.start()
                try:
                    attempt(child, batch_id, number)
                    done = True
                except (ClientError, OSError):
                    kills += 1
                if killer is not None:
                    killer.cancel()
                    killer.join()
    with StagingChild(config) as child, BlockingClient(child.address, identity=child.admin) as client:
        for topic, task in (("one", 1), ("two", 0)):
            found = [(record.payload or b"").partition(b".")[0] for record in client.follow(topic, until_end=True)]
            assert found == [
                b"%d-%d-%d-%d" % (batch_id, task, step, at)
                for batch_id in range(batches)
                for step in range(3)
                for at in range(50)
            ]
        assert client.transaction("etl").ask().last_batch_id == batches - 1


@in_loop
async def test_a_lost_connection_and_a_restarted_server_are_waited_for(tmp_path: Path) -> None:
    config = configure_to_return(tmp_path)
    server = Server(config)
    await server.start()
    async with client_of(server, tmp_path, reconnect_seconds_max=0.05) as client:
        await client.create_topic("news")
        batches = client.transaction("etl")
        writer = batches.writer(0, "p")
        await writer.stage("news", [b"a"])
        await server.stop()
        going_on = asyncio.create_task(writer.stage("news", [b"b"]))
        again = Server(config)
        await again.start()
        staged = await going_on
        assert await batches.commit(0, [staged]) == BatchCommitted(2, False)
        assert await payloads(client) == [b"a", b"b"]
    await again.stop()
