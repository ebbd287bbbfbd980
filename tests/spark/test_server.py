"""Reading over the bus, without Spark: a real server, and what it can tell of its topics."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from babelbus.client import BlockingClient, ConnectionLostError
from babelbus.core.access import SERVER
from babelbus.records.columns import iterate
from babelbus.records.record import Record
from babelbus.spark.errors import OptionError, RecordsRefusedError, UnknownTopicError
from babelbus.spark.options import Place, parse
from babelbus.spark.reader import BatchReader
from babelbus.spark.schema import full_schema
from babelbus.spark.server import ServerReach
from babelbus.spark.stream import StreamReader
from babelbus.storage.disk.log import Log
from babelbus.storage.errors import OffsetOutOfRangeError
from tests.spark.support import NOW, numbered, on_disk
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.server import LiveServer, configure, configure_to_return


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(on_disk(tmp_path / "data")) as server:
        yield server


@pytest.fixture
def reach(live: LiveServer) -> Iterator[ServerReach]:
    made = reach_of(live)
    yield made
    made.close()


def reach_of(live: LiveServer) -> ServerReach:
    return ServerReach(
        Place(address=live.address, identity=str(live.conf / "admin_key"), timeout_seconds=SAFETY_NET_SECONDS)
    )


def make(live: LiveServer, topic: str = "news", partitions: int = 1, **settings: object) -> None:
    live.call(lambda: live.server.broker.create_topic(topic, partitions, dict(settings), SERVER))


def publish(live: LiveServer, records: list[Record], topic: str = "news", partition: int = 0) -> None:
    with BlockingClient(live.address, identity=live.admin) as client:
        client.publish_many(topic, records, partition=partition)


def edges(reach: ServerReach, topic: str = "news") -> tuple[int, int]:
    bounds = reach.bounds(topic, (0,))[0]
    return bounds.first, bounds.end


def payloads(reach: ServerReach, start: int, end: int, partition: int = 0) -> list[bytes | None]:
    found = [record for columns in reach.read("news", partition, start, end) for record in iterate(columns)]
    return [record.payload for record in found if start <= record.offset < end]


def test_the_end_is_found_wherever_it_is(live: LiveServer, reach: ServerReach) -> None:
    make(live)
    assert edges(reach) == (0, 0)
    end = 0
    for count in (1, 1, 1022, 1, 5000, 3):
        publish(live, numbered(count, first=end))
        end += count
        assert edges(reach) == (0, end)
        assert edges(reach) == (0, end)


def test_all_records_of_a_range_come_and_no_more_is_asked_for_than_needed(live: LiveServer, reach: ServerReach) -> None:
    make(live)
    publish(live, [Record(b"%06d" % n * 200, timestamp=NOW) for n in range(9000)])  # over 10 MiB
    assert payloads(reach, 0, 9000) == [b"%06d" % n * 200 for n in range(9000)]
    assert payloads(reach, 4321, 4325) == [b"%06d" % n * 200 for n in range(4321, 4325)]
    assert 1200 < reach.bounds("news", (0,))[0].record_bytes < 1300


def test_a_record_larger_than_a_chunk_is_read(live: LiveServer, reach: ServerReach) -> None:
    make(live)
    publish(live, [Record(b"x" * (6 * 2**20), timestamp=NOW), Record(b"y", timestamp=NOW + 1)])
    assert edges(reach) == (0, 2)
    assert [len(one or b"") for one in payloads(reach, 0, 2)] == [6 * 2**20, 1]
    assert reach.find_time("news", 0, NOW + 1) == 1


def test_a_time_leads_to_an_offset(live: LiveServer, reach: ServerReach) -> None:
    make(live)
    publish(live, numbered(100))
    assert [reach.find_time("news", 0, at) for at in (0, NOW, NOW + 99, NOW + 100)] == [0, 0, 99, None]


def test_the_first_partition_is_read_beside_longer_and_shorter_ones(live: LiveServer, reach: ServerReach) -> None:
    make(live, partitions=3)
    publish(live, numbered(50))
    publish(live, numbered(7000), partition=1)
    publish(live, numbered(5), partition=2)
    assert edges(reach) == (0, 50)
    assert payloads(reach, 0, 50) == [b"%d" % n for n in range(50)]


def test_every_partition_of_every_topic_is_reached(live: LiveServer) -> None:
    make(live, partitions=3)
    make(live, "olds", engine="memory")
    publish(live, numbered(50))
    publish(live, numbered(7000), partition=2)
    reach = reach_of(live)
    assert reach.topics() == ["$state", "news", "olds"]
    bounds = reach.bounds("news", None)
    assert {number: (one.first, one.end) for number, one in bounds.items()} == {0: (0, 50), 1: (0, 0), 2: (0, 7000)}
    assert bounds[2].size_bytes > 100 * bounds[0].size_bytes
    assert list(reach.bounds("news", (2, 9))) == [2]
    assert payloads(reach, 6000, 6003, partition=2) == [b"6000", b"6001", b"6002"]
    assert reach.find_time("news", 2, NOW + 6999) == 6999
    assert reach.find_time("news", 1, NOW) is None
    with pytest.raises(UnknownTopicError, match="'news' with a partition 3 on the server at"):
        payloads(reach, 0, 1, partition=3)
    reach.close()


def test_a_range_that_compaction_emptied_is_read_without_a_loss(live: LiveServer) -> None:
    make(live, cleanup="compact")
    publish(live, [Record(b"%d" % n, b"key", (), NOW + n) for n in range(1000)])

    def compact() -> None:
        log = live.server.broker.topic("news").partitions[0].log
        assert isinstance(log, Log)
        log.roll()
        log.clean(NOW)

    live.call(compact)
    publish(live, numbered(2, first=1000))
    reach = reach_of(live)
    assert edges(reach) == (0, 1002)
    assert payloads(reach, 0, 500) == []
    assert payloads(reach, 0, 1002) == [b"999", b"1000", b"1001"]
    reach.close()


ASKED = [
    {"subscribe": "news"},
    {"subscribe": "olds,news", "minPartitions": "7"},
    {"subscribePattern": "new.*"},
    {"assign": '{"news": [0]}'},
    {"assign": '{"news": [1, 2], "olds": [0]}'},
    {
        "subscribe": "news",
        "startingOffsets": '{"news": {"0": 10, "1": -2, "2": -1}}',
        "endingOffsets": '{"news": {"0": 20, "1": 300, "2": -1}}',
    },
    {"subscribe": "news,olds", "startingTimestamp": str(NOW + 3), "startingOffsetsByTimestampStrategy": "latest"},
    {"assign": '{"news": [1]}', "startingTimestamp": str(NOW + 3), "endingTimestamp": str(NOW + 9)},
]


def test_a_server_and_its_folder_give_the_same_rows_whatever_is_asked(live: LiveServer) -> None:
    make(live, partitions=3)
    make(live, "olds", 2)
    publish(live, [Record(b"%d" % n, b"key", ((b"h", b"%d" % n),), NOW + n) for n in range(50)])
    publish(live, numbered(4000), partition=1)
    publish(live, numbered(5), "olds")
    schema = full_schema(include_headers=True)

    def rows(options: dict[str, str]) -> list[dict[str, object]]:
        reader = BatchReader(parse(options, "batch"), schema)
        found = [row for task in reader.partitions() for batch in reader.read(task) for row in batch.to_pylist()]
        return sorted(found, key=lambda row: (row["topic"], row["partition"], row["offset"]))

    counts = []
    for asked in ASKED:
        by_url = rows(asked | {"url": live.address, "identity": str(live.conf / "admin_key")})
        assert by_url == rows(asked | {"path": live.server.config.data.folder}), asked
        counts.append(len(by_url))
    assert counts == [4050, 4055, 4050, 50, 4005, 310, 47 + 3997 + 2, 6]


def test_a_topic_that_was_made_again_is_seen_to_be_another_one(live: LiveServer) -> None:
    reach = reach_of(live)
    identities = []
    for _ in range(2):
        make(live)
        identities.append(reach.bounds("news", None)[0].identity)
        live.call(lambda: live.server.broker.remove_topic("news", principal=SERVER))
    assert identities[0] != identities[1]
    reach.close()


def test_a_damaged_record_is_named_by_topic_offset_file_and_byte(live: LiveServer) -> None:
    make(live, partitions=2)
    publish(live, numbered(2000), partition=1)
    file = Path(live.server.config.data.folder) / "topics" / "news" / "1" / f"{0:020d}.log"
    content = bytearray(file.read_bytes())
    content[content.index(b"\x041500") + 2] ^= 0x40
    file.write_bytes(content)
    reach = reach_of(live)
    chunks = reach.read("news", 1, 0, 2000)
    assert [record.offset for record in iterate(next(chunks))] == list(range(1500))
    with pytest.raises(RecordsRefusedError) as caught:
        next(chunks)
    error = caught.value
    assert (error.topic, error.partition, error.offset) == ("news", 1, 1500)
    assert str(error).startswith("topic 'news', partition 1, offset 1500 cannot be read: ")
    found = re.search(rf"byte (\d+) of topics/news/1/{file.name}: ", str(error))
    assert found is not None
    at = int(found[1])
    assert content[at : at + 8] == (1500).to_bytes(8, "big")
    assert payloads(reach, 1501, 1503, partition=1) == [b"1501", b"1502"]
    reach.close()


def test_what_retention_removed_is_out_of_range(live: LiveServer, reach: ServerReach) -> None:
    make(live, retention_bytes=1, segment_bytes=1024)
    for first in range(0, 300, 100):
        publish(live, numbered(100, first=first))
    assert edges(reach) == (0, 300)
    live.call(lambda: live.server.broker.topic("news").partitions[0].log.clean(NOW))
    first, end = edges(reach)
    assert (first > 0, end) == (True, 300)
    with pytest.raises(OffsetOutOfRangeError) as caught:
        payloads(reach, 0, 300)
    assert (caught.value.offset, caught.value.first, caught.value.end) == (0, first, 300)
    with pytest.raises(OffsetOutOfRangeError):
        payloads(reach, 299, 310)


def test_a_topic_that_was_made_again_has_its_own_end(live: LiveServer, reach: ServerReach) -> None:
    make(live)
    publish(live, numbered(2000))
    assert edges(reach) == (0, 2000)
    live.call(lambda: live.server.broker.remove_topic("news", principal=SERVER))
    with pytest.raises(UnknownTopicError, match="no topic 'news' on the server at"):
        edges(reach)
    make(live)
    publish(live, numbered(10))
    assert edges(reach) == (0, 10)


def test_a_stream_tells_the_server_how_far_it_is(live: LiveServer) -> None:
    make(live, partitions=2)
    publish(live, numbered(10))
    publish(live, numbered(4), partition=1)
    place = {"url": live.address, "identity": str(live.conf / "admin_key"), "subscribe": "news"}

    reach = reach_of(live)

    def reader(group: str) -> StreamReader:
        options = parse(place | {"groupId": group, "startingOffsets": "earliest"}, "stream")
        return StreamReader(options, full_schema(include_headers=False), reach=reach)

    def lag() -> int:
        groups = live.server.broker.groups
        assert groups is not None
        return live.call(lambda: groups.get("news", "spark").info().lag)

    stream = reader("spark")
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadMaxRows(7))
    assert lag() == 14  # nothing of it is done before the next batch is asked for
    last = stream.latestOffset(end, ReadAllAvailable())
    assert lag() == 7
    stream.latestOffset(last, ReadAllAvailable())
    assert lag() == 0
    live.call(lambda: live.server.broker.groups.create("news", "workers", principal=SERVER))
    with pytest.raises(OptionError, match="'workers' is one for members to share"):
        reader("workers").latestOffset(start, ReadAllAvailable())
    reach.close()


def test_reading_goes_on_when_the_server_comes_back(tmp_path: Path) -> None:
    config = configure_to_return(tmp_path / "data")
    with LiveServer(config) as live:
        make(live)
        publish(live, numbered(10))
        address, key = live.address, str(live.conf / "admin_key")
        reach = ServerReach(Place(address=address, identity=key, timeout_seconds=SAFETY_NET_SECONDS))
        assert edges(reach) == (0, 10)
    with LiveServer(config) as live:
        publish(live, numbered(1, first=10))
        assert edges(reach) == (0, 11)
        assert payloads(reach, 0, 11) == [b"%d" % n for n in range(11)]
    reach.close()


def test_a_server_that_stays_away_is_an_error(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path / "data")) as live:
        make(live)
        reach = ServerReach(Place(address=live.address, identity=str(live.conf / "admin_key"), timeout_seconds=0.2))
        assert edges(reach) == (0, 0)
    with pytest.raises(ConnectionLostError, match="no connection to"):
        edges(reach)
    reach.close()
