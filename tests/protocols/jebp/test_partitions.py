"""Partitions by number over jebp: the bytes both ways, each way to be malformed, and end to end with a real server."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.client import (
    BlockingClient,
    Client,
    Identity,
    OffsetOutOfRangeError,
    PartitionPositions,
    Record,
    RecordTooLargeError,
    RequestError,
    TopicPositions,
    UnknownPartitionError,
    UnknownTopicError,
)
from babelbus.config import Config, JebpSettings
from babelbus.core.access import SERVER, Rights
from babelbus.core.groups.settings import BEGINNING
from babelbus.core.partition import Partition
from babelbus.core.record import Event
from babelbus.core.subject import exactly
from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.protocols.jebp.codec import decode_request, encode_request
from babelbus.protocols.jebp.fields import decode_numbers, encode_numbers
from babelbus.protocols.jebp.messages import (
    FROM_OFFSET,
    FROM_TIMESTAMP,
    FetchPartition,
    Malformed,
    MoveGroup,
    OffsetBounds,
    PartitionFetched,
    PartitionRequest,
    PositionsTold,
    TellPositions,
)
from babelbus.protocols.jebp.partition_codec import (
    decode_partition_fetched,
    decode_positions,
    encode_topic_positions,
    fetched_head,
    positions_head,
)
from babelbus.protocols.jebp.session import Session
from babelbus.protocols.jebp.status import Outcome, answers
from babelbus.server.access import ClientEntry
from babelbus.server.app import Server
from babelbus.storage.disk.log import Log
from tests.support.bus import in_loop
from tests.support.jebp import create_singly
from tests.support.server import configure, connections_of

NOW = 1_700_000_000_000
NONE = "ffffffffffffffff"
REQUESTS: list[tuple[PartitionRequest, str]] = [
    (TellPositions(), "24" + NONE + "00"),
    (TellPositions(("a", "news"), NOW, "Z"), "24" + "0000018bcfe56800" + "01015a" + "010161" + "01046e657773"),
    (
        FetchPartition("news", 2, FROM_OFFSET, 7, -1, 65536),
        "25" + "01046e657773" + "00000002" + "c1" + "0000000000000007" + NONE + "00010000" + "00000000",
    ),
    (
        FetchPartition("a", 0, FROM_TIMESTAMP, NOW, 9, 0, 60_000),
        "25" + "010161" + "00000000" + "c0" + "0000018bcfe56800" + "0000000000000009" + "00000000" + "0000ea60",
    ),
]
REQUESTS += [
    (MoveGroup("news", "me", ((2, 9),)), "26" + "01046e657773" + "026d65" + "00000002" + "0000000000000009"),
    (
        MoveGroup("a", "é", ((0, 0), (1, 2**62))),
        "26" + "010161" + "02c3a9" + "00" * 12 + "000000014000000000000000",
    ),
]
FETCH_TAIL = "c1" + "0000000000000007" + NONE + "00010000" + "00000000"
MALFORMED = [
    "24",
    "24" + NONE,
    "24" + "fffffffffffffffe" + "00",
    "24" + NONE + "01",
    "24" + NONE + "01012c",
    "24" + NONE + "00" + "0101",
    "24" + NONE + "00" + "0100",
    "25",
    "25" + "0100" + "00000000" + FETCH_TAIL,
    "25" + "010161" + "00000000" + FETCH_TAIL + "00",
    "25" + "010161" + "00000000" + FETCH_TAIL[:-2],
    "25" + "010161" + "ffffffff" + FETCH_TAIL,
    "25" + "010161" + "00000000" + "c2" + FETCH_TAIL[2:],
    "25" + "010161" + "00000000" + "c1" + NONE + FETCH_TAIL[18:],
    "25" + "010161" + "00000000" + "c1" + "0000000000000007" + "fffffffffffffffe" + "00010000" + "00000000",
    "25" + "010161" + "00000000" + "c1" + "0000000000000007" + NONE + "ffffffff" + "00000000",
    "25" + "010161" + "00000000" + "c1" + "0000000000000007" + NONE + "00010000" + "0000ea61",
    "25" + "010161" + "00000000" + "c1" + "0000000000000007" + NONE + "00010000" + "ffffffff",
]
MALFORMED += [
    "26",
    "26" + "010161",
    "26" + "010161" + "016d",
    "26" + "010161" + "00" + "00" * 12,
    "26" + "010161" + "02ffff" + "00" * 12,
    "26" + "010161" + "fa" + "6d" * 250 + "00" * 12,
    "26" + "010161" + "016d" + "00" * 11,
    "26" + "010161" + "016d" + "ffffffff" + "00" * 8,
    "26" + "010161" + "016d" + "00000000" + NONE,
]
TOLD = TopicPositions("news", "0a1b", "disk", (PartitionPositions(3, 10, 700), PartitionPositions(0, 0, 0, 0)))
TOLD_BYTES = (
    "01046e657773" + "0430613162" + "046469736b" + "00000002"
    "0000000000000003" + "000000000000000a" + "00000000000002bc" + NONE + "00" * 32
)  # fmt: skip


@pytest.mark.parametrize(("request_", "expected"), REQUESTS)
def test_a_request_has_these_bytes_and_they_are_read_back(request_: PartitionRequest, expected: str) -> None:
    assert encode_request(request_).hex() == expected
    for content in (bytes.fromhex(expected), bytearray.fromhex(expected), memoryview(bytes.fromhex(expected))):
        assert decode_request(content) == request_


@pytest.mark.parametrize("content", MALFORMED)
def test_a_request_without_its_form_is_answered_and_not_carried_out(content: str) -> None:
    assert decode_request(bytes.fromhex(content)) == Malformed(int(content[:2], 16), Outcome.PARTITION_REFUSED)


def test_ten_thousand_topics_may_be_named_and_no_more() -> None:
    names = tuple(f"t{number:05}" for number in range(10_000))
    content = encode_request(TellPositions(names))
    assert decode_request(content) == TellPositions(names)
    assert decode_request(content + b"\x01\x01z") == Malformed(0x24, Outcome.PARTITION_REFUSED)
    with pytest.raises(LocalProtocolError, match="10001 topics"):
        encode_request(TellPositions((*names, "z")))


@given(st.sampled_from([bytes.fromhex(content) for _, content in REQUESTS]), st.data())
def test_any_bytes_behind_the_command_are_a_request_or_malformed(content: bytes, data: st.DataObject) -> None:
    changed = bytearray(content)
    changed[data.draw(st.integers(1, len(content) - 1))] = data.draw(st.integers(0, 255))
    del changed[data.draw(st.integers(1, len(content))) :]
    decode_request(bytes(changed))


@pytest.mark.parametrize(
    "request_",
    [
        TellPositions(("a,b",)),
        TellPositions((), -2),
        TellPositions((), 2**63),
        FetchPartition("", 0, FROM_OFFSET, 0, -1, 0),
        FetchPartition("a", -1, FROM_OFFSET, 0, -1, 0),
        FetchPartition("a", 2**31, FROM_OFFSET, 0, -1, 0),
        FetchPartition("a", 0, FROM_OFFSET, -1, -1, 0),
        FetchPartition("a", 0, FROM_OFFSET, 0, -2, 0),
        FetchPartition("a", 0, FROM_OFFSET, 0, -1, -1),
        FetchPartition("a", 0, FROM_OFFSET, 0, -1, 0, 60_001),
        FetchPartition("a", 0, 0, 0, -1, 0),
        MoveGroup("", "me", ((0, 0),)),
        MoveGroup("a", "", ((0, 0),)),
        MoveGroup("a", "m" * 250, ((0, 0),)),
        MoveGroup("a", "me", ()),
        MoveGroup("a", "me", ((0, -1),)),
        MoveGroup("a", "me", ((2**31, 0),)),
    ],
)
def test_what_the_protocol_cannot_carry_is_not_sent(request_: PartitionRequest) -> None:
    with pytest.raises(LocalProtocolError):
        encode_request(request_)


def test_the_answers_have_these_bytes_and_are_read_back() -> None:
    assert encode_topic_positions(TOLD).hex() == TOLD_BYTES
    assert decode_positions(positions_head(more=True) + bytes.fromhex(TOLD_BYTES)) == PositionsTold((TOLD,), True)
    assert decode_positions(memoryview(positions_head(more=False))) == PositionsTold((), False)
    head = fetched_head(5, 0, 9)
    assert head.hex() == "0000000000000005" + "0000000000000000" + "0000000000000009"
    assert decode_partition_fetched(head + b"records") == PartitionFetched(5, 0, 9, b"records")
    bounds = OffsetBounds(3, 10)
    assert encode_numbers(bounds).hex() == "0000000000000003" + "000000000000000a"
    assert decode_numbers(OffsetBounds, encode_numbers(bounds)) == bounds


def test_the_bytes_of_the_documentation_are_those() -> None:
    page = (Path(__file__).parents[3] / "docs" / "protocols" / "jebp.md").read_text()
    section = page.partition("commands 24, 25 and 26)\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line[:3] == "| `"]
    positions, told, fetch, fetched, bounds, move = [
        bytes.fromhex("".join(re.findall("`([0-9a-f ]+)`", row))) for row in rows[-6:]
    ]
    assert decode_request(move) == MoveGroup("news", "me", ((2, 9),))
    assert decode_request(positions) == TellPositions(("news",), NOW)
    there = PartitionPositions(3, 10, 700, 4)
    assert decode_positions(told[2:]) == PositionsTold((TopicPositions("news", "0a1b", "disk", (there,)),), False)
    assert decode_request(fetch) == FetchPartition("news", 2, FROM_OFFSET, 7, -1, 65536)
    assert decode_partition_fetched(fetched[2:]) == PartitionFetched(9, 3, 10, b"")
    assert decode_numbers(OffsetBounds, bounds[2:]) == OffsetBounds(3, 10)
    codes = answers()
    for content, outcome in (
        (told, Outcome.POSITIONS_TOLD),
        (fetched, Outcome.PARTITION_FETCHED),
        (bounds, Outcome.PARTITION_NO_OFFSET),
    ):
        assert content[:2] == codes[outcome]


def test_answers_that_are_none_are_refused() -> None:
    whole = bytes.fromhex("00" + TOLD_BYTES)
    for end in [0, *range(2, len(whole))]:
        with pytest.raises(RemoteProtocolError):
            decode_positions(whole[:end])
    for wrong in (
        b"\x02",
        whole.replace(b"disk", b"dis\xff"),
        whole.replace(b"\x02\xbc", b"\x02\xbc")[:1] + b"\x01\x01,",
    ):
        with pytest.raises(RemoteProtocolError):
            decode_positions(wrong)
    impossible = msgspec.structs.replace(TOLD, partitions=(PartitionPositions(4, 3, 0),))
    with pytest.raises(RemoteProtocolError, match="impossible positions of topic 'news'"):
        decode_positions(b"\0" + encode_topic_positions(impossible))
    for content in (b"", fetched_head(0, 0, 0)[:-1], bytes.fromhex(NONE) + bytes(16)):
        with pytest.raises(RemoteProtocolError):
            decode_partition_fetched(content)
    with pytest.raises(RemoteProtocolError):
        decode_numbers(OffsetBounds, bytes(15))


# -- end to end ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(folder: Path, config: Config | None = None) -> AsyncIterator[Server]:
    server = Server(config or configure(folder))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def client_of(server: Server, folder: Path, **options: object) -> Client:
    identity = Identity.load(folder / "conf" / "admin_key")
    return Client(server.addresses["jebp"], identity=identity, **options)  # type: ignore[arg-type]


async def until(condition: Callable[[], object]) -> None:
    """Let the others have their turns until something holds; it has no event of its own."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def numbered(count: int, first: int = 0) -> list[Record]:
    return [Record(b"%d" % number, timestamp=NOW + number) for number in range(first, first + count)]


@in_loop
async def test_positions_of_one_topic_some_and_all(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, client_of(server, tmp_path) as client:
        await server.broker.create_topic("b", 3, {"engine": "memory"}, principal=SERVER)
        await server.broker.create_topic("a", 1, principal=SERVER)
        await client.publish_many("b", numbered(20), partition=2)
        (told,) = await client.positions(["b"], NOW + 5)
        assert (told.topic, told.engine) == ("b", "memory")
        assert [(one.first_offset, one.high_watermark, one.time_offset) for one in told.partitions] == [
            (0, 0, -1),
            (0, 0, -1),
            (0, 20, 5),
        ]
        assert (told.partitions[0].size_bytes, told.partitions[2].size_bytes > 500) == (0, True)
        assert [one.topic for one in await client.positions(["b", "a", "b"])] == ["a", "b"]
        assert [one.topic for one in await client.positions()] == ["$state", "a", "b"]
        assert await client.positions([]) == []
        with pytest.raises(UnknownTopicError, match=r"no topic 'nope', 'zip', or no right"):
            await client.positions(["nope", "a", "zip"])


@in_loop
async def test_all_topics_come_over_several_answers(tmp_path: Path) -> None:
    config = configure(tmp_path)
    config = msgspec.structs.replace(config, jebp=msgspec.structs.replace(config.jebp, frame_bytes_max=1024))
    async with serving(tmp_path, config) as server, client_of(server, tmp_path) as client:
        for number in range(20):
            await server.broker.create_topic(f"t{number:02}", 2, {"engine": "memory"}, principal=SERVER)
        names = [f"t{number:02}" for number in range(20)]
        assert [one.topic for one in await client.positions()] == ["$state", *names]
        assert [one.topic for one in await client.positions(names[::-1])] == names
        await server.broker.create_topic("wide", 100, {"engine": "memory"}, principal=SERVER)
        with pytest.raises(RequestError, match="over the server's frame limit"):
            await client.positions(["wide"])


@in_loop
async def test_a_topic_that_is_made_again_has_another_id_and_one_that_stays_keeps_it(tmp_path: Path) -> None:
    async def ids(client: Client) -> dict[str, str]:
        return {one.topic: one.id for one in await client.positions(["here", "fleeting"])}

    async with serving(tmp_path) as server, client_of(server, tmp_path) as client:
        await server.broker.create_topic("here", principal=SERVER)
        await server.broker.create_topic("fleeting", 1, {"engine": "memory"}, principal=SERVER)
        first = await ids(client)
        await server.broker.alter_topic("here", {"partitions": 2}, principal=SERVER)
        assert await ids(client) == first
    async with serving(tmp_path) as server, client_of(server, tmp_path) as client:
        second = await ids(client)
        assert second["here"] == first["here"]
        assert second["fleeting"] != first["fleeting"]  # its records are gone
        await client.remove_topic("here")
        await client.create_topic("here")
        assert (await ids(client))["here"] != first["here"]


@in_loop
async def test_a_topic_of_an_older_server_has_the_first_id(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await server.broker.create_topic("old", principal=SERVER)
    (settings,) = (tmp_path / "topics" / "old").glob("settings*")
    kept = msgspec.json.decode(settings.read_bytes().partition(b"\n")[2])  # behind the line of its CRC
    del kept["id"]
    settings.write_bytes(msgspec.json.encode(kept))
    async with serving(tmp_path) as server, client_of(server, tmp_path) as client:
        assert [one.id for one in await client.positions(["old"])] == ["0"]
        await client.remove_topic("old")
        await client.create_topic("old")
        assert [one.id for one in await client.positions(["old"])] != ["0"]


@in_loop
async def test_one_partition_is_fetched_from_an_offset_or_a_time_up_to_an_end(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, client_of(server, tmp_path) as client:
        await server.broker.create_topic("t", 3, principal=SERVER)
        await client.publish_many("t", numbered(5), partition=0)
        await client.publish_many("t", numbered(50, 100), partition=2)

        async def payloads(**options: int) -> list[bytes | None]:
            found = await client.fetch_partition("t", 2, **options)
            assert (found.first_offset, found.high_watermark) == (0, 50)
            return [record.payload for record in found.batch.records()] if found.batch else []

        assert await payloads() == [b"%d" % number for number in range(100, 150)]
        assert await payloads(offset=48) == [b"148", b"149"]
        assert await payloads(offset=10, end_offset=12) == [b"110", b"111"]
        assert await payloads(timestamp=NOW + 147) == [b"147", b"148", b"149"]
        assert await payloads(timestamp=NOW + 147, end_offset=48) == [b"147"]
        assert (
            await payloads(timestamp=NOW + 150)
            == await payloads(offset=50)
            == await payloads(offset=9, end_offset=9)
            == []
        )
        assert (await client.fetch_partition("t", 1, offset=0)).batch is None
        part = await client.fetch_partition("t", 2, offset=10, bytes_max=100)
        assert part.batch is not None
        assert (part.batch.base_offset, part.next_offset) == (10, 10 + len(part.batch))
        assert 0 < len(part.batch.data) <= 100


@in_loop
async def test_a_fetch_from_a_time_goes_on_when_retention_removes_the_record_that_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_time = Partition.find_time

    async def find_and_clean(partition: Partition, timestamp: int) -> int | None:
        found = await find_time(partition, timestamp)
        await partition.clean(NOW)
        return found

    async with serving(tmp_path) as server, client_of(server, tmp_path) as client:
        for name in ("one", "two"):
            settings = {"segment_bytes": 65_536, "retention_records": 1}
            topic = await server.broker.create_topic(name, 1, settings, principal=SERVER)
            for number in range(4):
                await client.publish(name, b"%d" % number + b"x" * 40_000)
            assert topic.partitions[0].log.first_offset == 0
        monkeypatch.setattr(Partition, "find_time", find_and_clean)
        one = await client.fetch_partition("one", 0, timestamp=0)
        assert one.batch is not None
        assert [record.offset for record in one.batch.records()][-1] == 3
        two = await client.fetch("two", timestamp=0)
        assert [record.offset for record in two.batches[0].records()][-1] == 3


@in_loop
async def test_what_cannot_be_fetched_has_its_own_errors(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, client_of(server, tmp_path) as client:
        await server.broker.create_topic("t", 2, principal=SERVER)
        await client.publish_many("t", numbered(5), partition=1)
        with pytest.raises(OffsetOutOfRangeError, match=r"offset 6 does not exist: there are 0 to 5") as caught:
            await client.fetch_partition("t", 1, offset=6)
        assert (caught.value.first, caught.value.end) == (0, 5)
        with pytest.raises(UnknownPartitionError, match="has partitions 0 to 1, not 2"):
            await client.fetch_partition("t", 2)
        with pytest.raises(UnknownTopicError, match="no topic 'nope'"):
            await client.fetch_partition("nope", 0)
        with pytest.raises(RecordTooLargeError):
            await client.fetch_partition("t", 1, bytes_max=3)
        with pytest.raises(LocalProtocolError):
            await client.fetch_partition("t", -1)
        (log_file,) = (tmp_path / "topics" / "t" / "1").glob("*.log")
        damaged = bytearray(log_file.read_bytes())
        damaged[-10] ^= 1
        log_file.write_bytes(damaged)
        server.broker.topic("t").partitions[1].forget_tail()
        where = rf"damaged, offset 4, byte \d+ of topics/t/1/{log_file.name}: "
        with pytest.raises(RequestError, match=where) as refused:
            await client.fetch_partition("t", 1, offset=4)
        assert not refused.value.repeat
        assert str(tmp_path) not in str(refused.value)  # where the server keeps its data concerns no client


@in_loop
async def test_a_reader_tells_how_far_it_is_and_its_lag_is_that_of_a_group(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, client_of(server, tmp_path) as client:
        await server.broker.create_topic("news", 2, principal=SERVER)
        groups = server.broker.groups
        assert groups is not None
        await client.publish_many("news", numbered(10), partition=0)
        await client.publish_many("news", numbered(4), partition=1)
        await client.move_group("news", "me", {0: 3, 1: 4})
        assert [(cursor.position, cursor.lag) for cursor in groups.get("news", "me").info().cursors] == [(3, 7), (4, 0)]
        await client.move_group("news", "me", {0: 10})
        assert groups.get("news", "me").info().lag == 0
        groups.create("news", "workers", start=BEGINNING, principal=SERVER)
        with pytest.raises(RequestError, match="'workers' is one for members to share"):
            await client.move_group("news", "workers", {0: 10})
        assert groups.get("news", "workers").info().lag == 14
        with pytest.raises(UnknownTopicError):
            await client.move_group("nope", "me", {0: 1})
        with pytest.raises(UnknownPartitionError):
            await client.move_group("news", "me", {0: 1, 2: 1})
        with pytest.raises(RequestError):
            await client.move_group("news", "a\x00b", {0: 1})


def sessions_of(server: Server) -> list[Session]:
    sessions = [connection._session for connection in connections_of(server)]
    assert all(isinstance(session, Session) for session in sessions)
    return sessions  # type: ignore[return-value]  # the line above looked at each


@in_loop
async def test_who_may_not_read_a_topic_is_not_told_of_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await server.broker.create_topic("t", principal=SERVER)
        guest = Identity.generate()
        server._lists.put(ClientEntry(guest.fingerprint, "guest", admin=False))
        async with Client(server.addresses["jebp"], identity=guest) as client:
            assert [one.topic for one in await client.positions()] == ["$state", "t"]
            (session,) = sessions_of(server)
            session._client = msgspec.structs.replace(session._client, rights=Rights(""))  # type: ignore[type-var]
            assert await client.positions() == []
            with pytest.raises(UnknownTopicError):
                await client.positions(["t"])
            with pytest.raises(UnknownTopicError):
                await client.fetch_partition("t", 0, wait_seconds=5)
            with pytest.raises(UnknownTopicError):
                await client.move_group("t", "me", {0: 0})


@in_loop
async def test_a_fetch_waits_for_a_record_its_time_or_the_end_of_the_topic(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, client_of(server, tmp_path) as client, client_of(server, tmp_path) as other:
        await server.broker.create_topic("t", 2, principal=SERVER)

        async def waiting(seconds: float = 30.0) -> "asyncio.Task[object]":
            task = asyncio.create_task(client.fetch_partition("t", 1, offset=0, wait_seconds=seconds))
            await until(lambda: any(session._waits for session in sessions_of(server)))
            return task

        assert (await (await waiting(0.01))).batch is None  # type: ignore[attr-defined]
        task = await waiting()
        await other.publish("t", b"elsewhere", partition=0)
        assert not task.done()
        await other.publish("t", b"here", partition=1)
        found = await task
        assert [one.payload for one in found.batch.records()] == [b"here"]  # type: ignore[attr-defined]
        assert not any(session._waits for session in sessions_of(server))
        await other.remove_topic("t")
        await other.create_topic("t")
        await server.broker.alter_topic("t", {"partitions": 2}, principal=SERVER)
        task = await waiting()
        await other.remove_topic("t")
        with pytest.raises(UnknownTopicError):
            await task


@pytest.mark.parametrize("bytes_max", [2**16, 2**24])
@in_loop
async def test_nothing_waits_for_a_client_that_is_gone(tmp_path: Path, bytes_max: int) -> None:
    async with serving(tmp_path) as server:
        topic = await server.broker.create_topic("t", principal=SERVER)
        async with client_of(server, tmp_path) as client:
            task = asyncio.create_task(client.fetch_partition("t", 0, bytes_max=bytes_max, wait_seconds=60))
            await until(lambda: topic.partitions[0]._watchers)
            assert not any(connection._paused for connection in connections_of(server))  # it sees the end
            task.cancel()
        await until(lambda: not sessions_of(server))
        assert not topic.partitions[0]._watchers


@in_loop
async def test_following_a_partition_stops_at_its_own_end_and_crosses_what_compaction_removed(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, client_of(server, tmp_path) as client:
        topic = await server.broker.create_topic("t", 3, {"cleanup": "compact"}, principal=SERVER)
        await client.publish_many("t", [Record(b"x" * 100_000, timestamp=NOW)] * 200, partition=0)  # 20 MB in front
        await client.publish_many("t", [Record(b"%d" % n, b"key", (), NOW + n) for n in range(500)], partition=2)
        log = topic.partitions[2].log
        assert isinstance(log, Log)
        log.roll()
        await client.publish_many("t", numbered(3, 500), partition=2)
        await topic.partitions[2].clean(NOW)

        async def payloads(**options: int) -> list[bytes | None]:
            return [one.payload async for one in client.follow("t", partition=2, until_end=True, **options)]

        assert await payloads() == [b"499", b"500", b"501", b"502"]
        assert await payloads(offset=7) == [b"499", b"500", b"501", b"502"]
        assert await payloads(timestamp=NOW + 501) == [b"501", b"502"]
        assert await payloads(offset=503) == []
        with pytest.raises(OffsetOutOfRangeError):
            await payloads(offset=504)
        with pytest.raises(UnknownPartitionError, match="not 3"):
            [one async for one in client.follow("t", partition=3, offset=0, until_end=True)]


def test_the_blocking_client_has_both(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    server = Server(configure(tmp_path, jebp=JebpSettings(port=0)))
    try:
        loop.run_until_complete(server.start())
        loop.run_until_complete(server.broker.create_topic("t", 2, principal=SERVER).wait())
        identity = Identity.load(tmp_path / "conf" / "admin_key")

        def use() -> None:
            with BlockingClient(server.addresses["jebp"], identity=identity) as client:
                client.publish_many("t", numbered(3), partition=1)
                (told,) = client.positions(["t"])
                assert [one.high_watermark for one in told.partitions] == [0, 3]
                assert client.fetch_partition("t", 1, offset=1, end_offset=2).next_offset == 2

        loop.run_until_complete(asyncio.to_thread(use))
    finally:
        loop.run_until_complete(server.stop())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


@in_loop
async def test_live_events_say_who_published_them_and_the_records_stay_as_they_came(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, client_of(server, tmp_path) as admin:
        guest = Identity.generate()
        server._lists.put(ClientEntry(guest.fingerprint, "guest", admin=False))
        for name, partitions in (("one", 1), ("two", 2)):
            await server.broker.create_topic(name, partitions, principal=SERVER)
        heard: list[Event] = []
        for name in ("one", "two"):
            server.broker.subscribe(exactly(name), heard.extend, principal=SERVER)
        async with Client(server.addresses["jebp"], identity=guest) as client:
            await asyncio.gather(create_singly(admin, "one", [b"a"]), create_singly(client, "one", [b"g1", b"g2"]))
            await create_singly(admin, "one", [b"a"] * 100)
            await create_singly(client, "two", [b"g3", b"g4"])
            await client.publish("one", b"g5", headers=((b"ce_source", b"forged"), (b"h", b"v")))
        sources = {(event.payload, dict(event.headers)[b"ce_source"]) for event in heard}
        assert sources == {(b"a", b"jebp:admin")} | {(b"g%d" % n, b"jebp:guest") for n in range(1, 6)}
        assert len(heard) == 106
        assert [event.headers for event in heard if event.payload == b"g5"] == [
            ((b"h", b"v"), (b"ce_source", b"jebp:guest"))
        ]
        last = [record async for record in admin.follow("one", until_end=True)][-1]
        assert last.headers == ((b"ce_source", b"forged"), (b"h", b"v"))
