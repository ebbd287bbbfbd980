import shutil
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows

from babelbus.records.record import Record
from babelbus.spark.errors import DataLossError, NoRecordError, OptionError
from babelbus.spark.reader import Task
from babelbus.spark.schema import full_schema
from babelbus.spark.stream import StreamReader
from tests.spark.support import NOW, Folder, numbered
from tests.support.clock import ManualClock

ALL = ReadAllAvailable()


def stream(folder: Folder, clock: ManualClock | None = None, **given: Any) -> StreamReader:
    options = folder.options("stream", **given)
    return StreamReader(options, full_schema(include_headers=False), clock=clock)


def offsets(*ends: int, topic: str = "news") -> dict[str, Any]:
    return {topic: {str(number): end for number, end in enumerate(ends)}}


def values(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[bytes]:
    tasks = reader.partitions(start, end)
    batches = [batch for task in tasks for batch in reader.read(task)]
    return [value for batch in batches for value in batch.column("value").to_pylist()]


def test_a_new_query_hears_the_same_beginning_twice(folder: Folder) -> None:
    folder.add(numbered(10))
    reader = stream(folder)
    assert reader.initialOffset() == offsets(10)
    folder.add(numbered(5, first=10))
    assert reader.latestOffset(offsets(10), ALL) == offsets(15)
    assert reader.initialOffset() == offsets(10)
    assert values(reader, offsets(10), offsets(15)) == [b"%d" % n for n in range(10, 15)]


def test_a_query_begins_where_the_options_say(folder: Folder) -> None:
    folder.add(numbered(10))
    folder.add(numbered(4), partition=1)
    assert stream(folder, startingOffsets="earliest").initialOffset() == offsets(0, 0)
    assert stream(folder, startingOffsets='{"news": {"0": 3, "1": -1}}').initialOffset() == offsets(3, 4)
    assert stream(folder, startingTimestamp=NOW + 2).initialOffset() == offsets(2, 2)
    each = f'{{"news": {{"0": {NOW + 5}, "1": {NOW + 50}}}}}'
    late = stream(folder, startingOffsetsByTimestamp=each, startingOffsetsByTimestampStrategy="latest")
    assert late.initialOffset() == offsets(5, 4)
    with pytest.raises(NoRecordError, match="partition 1 has no record at or after"):
        stream(folder, startingOffsetsByTimestamp=each).initialOffset()
    with pytest.raises(OptionError, match="partition 1 of topic 'news' is not named"):
        stream(folder, startingOffsets='{"news": {"0": 3}}').initialOffset()
    with pytest.raises(OptionError, match="partition 2 of topic 'news' does not exist"):
        stream(folder, startingOffsets='{"news": {"0": 3, "1": 0, "2": 0}}').initialOffset()


def test_a_batch_reads_no_more_than_its_limit(folder: Folder) -> None:
    folder.add(numbered(900))
    folder.add(numbered(100), partition=1)
    reader = stream(folder, maxOffsetsPerTrigger=100)
    assert reader.getDefaultReadLimit() == ReadMaxRows(100)
    assert reader.latestOffset(offsets(0, 0), ReadMaxRows(100)) == offsets(90, 10)
    assert reader.latestOffset(offsets(90, 10), ReadMaxRows(10**6)) == offsets(900, 100)
    assert reader.latestOffset(offsets(90, 10), ALL) == offsets(900, 100)
    by_size = stream(folder, maxBytesPerTrigger="1KiB")
    assert by_size.getDefaultReadLimit() == ReadMaxBytes(1024)
    end = by_size.latestOffset(offsets(0, 0), ReadMaxBytes(1024))
    assert 20 <= sum(end["news"].values()) <= 30


def test_a_batch_waits_for_enough_records_but_not_too_long(folder: Folder) -> None:
    clock = ManualClock(NOW)
    folder.add(numbered(5))
    reader = stream(folder, clock, startingOffsets="earliest", minOffsetsPerTrigger=10, maxTriggerDelay="1m")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMinRows(10)
    start = reader.initialOffset()
    assert reader.latestOffset(start, limit) == start
    clock.advance(59)
    assert reader.latestOffset(start, limit) == start
    clock.advance(1)
    assert reader.latestOffset(start, limit) == offsets(5)
    folder.add(numbered(9, first=5))
    assert reader.latestOffset(offsets(5), limit) == offsets(5)
    folder.add(numbered(1, first=14))
    assert reader.latestOffset(offsets(5), limit) == offsets(15)
    assert reader.latestOffset(start, ALL) == offsets(15)


def test_available_now_stops_where_the_topics_ended(folder: Folder) -> None:
    folder.add(numbered(10))
    reader = stream(folder, maxOffsetsPerTrigger=6, minOffsetsPerTrigger=5)
    reader.prepareForTriggerAvailableNow()
    folder.add(numbered(10, first=10))
    assert reader.latestOffset(offsets(0), ReadMaxRows(6)) == offsets(6)
    assert reader.latestOffset(offsets(6), ReadMaxRows(6)) == offsets(10)
    assert reader.latestOffset(offsets(10), ReadMaxRows(6)) == offsets(10)


def test_a_new_partition_is_read_from_its_first_record(folder: Folder) -> None:
    folder.add(numbered(10))
    reader = stream(folder)
    start = reader.initialOffset()
    folder.add(numbered(7), partition=1)
    joined = reader.latestOffset(start, ALL)
    assert joined == offsets(10, 0)  # first it joins, so that a batch run again knows where it began
    assert reader.partitions(start, joined) == []
    end = reader.latestOffset(joined, ALL)
    assert end == offsets(10, 7)
    assert values(reader, joined, end) == [b"%d" % n for n in range(7)]


def test_a_new_topic_that_fits_the_pattern_joins(folder: Folder) -> None:
    folder.add(numbered(2))
    folder.add(numbered(2), "other")
    folder.add(numbered(2), "$state")
    reader = stream(folder, subscribePattern="ne.*|.*state", startingOffsets="earliest")
    assert reader.initialOffset() == offsets(0)
    folder.add(numbered(3), "newer")
    end = reader.latestOffset(reader.latestOffset(offsets(0), ALL), ALL)
    assert end == offsets(2) | offsets(3, topic="newer")


def retain(folder: Folder) -> None:
    """Leave the offsets from 10 on."""
    for first in range(0, 20, 10):
        folder.add(numbered(10, first=first), retention_bytes=1)
        folder.log().roll()
    folder.log().clean(NOW)


def test_records_that_retention_removed_are_an_error_that_says_which(folder: Folder) -> None:
    retain(folder)
    reader = stream(folder)
    end = reader.latestOffset(offsets(4), ALL)
    with pytest.raises(DataLossError) as caught:
        reader.partitions(offsets(4), end)
    error = caught.value
    assert (error.topic, error.partition, error.wanted, error.available) == ("news", 0, 4, (10, 20))
    assert "topic 'news', partition 0: offset 4 was wanted, available: offsets 10 to 20 (excluded)" in str(error)


def test_without_failing_the_lost_records_are_counted_and_the_others_read(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    retain(folder)
    reader = stream(folder, failOnDataLoss="false")
    end = reader.latestOffset(offsets(4), ALL)
    assert end == offsets(20) | {",lost": 6}
    assert values(reader, offsets(4), end) == [b"%d" % n for n in range(10, 20)]
    assert "6 offsets are lost, 6 in all" in caplog.text
    assert reader.latestOffset(end, ALL) == end
    again = stream(folder).latestOffset(offsets(8) | {",lost": 6}, ReadMaxRows(3))
    assert again == offsets(13) | {",lost": 8}


def test_records_that_go_while_a_task_runs_are_an_error_too(folder: Folder) -> None:
    folder.add(numbered(10), retention_bytes=1)
    for fail in ("true", "false"):
        reader = stream(folder, failOnDataLoss=fail)
        [task] = reader.partitions(offsets(0), offsets(10))
        assert isinstance(task, Task)
        task.spans[0] = type(task.spans[0])("news", 0, 0, 25, 1)
        if fail == "true":
            with pytest.raises(DataLossError, match="removed while the query ran"):
                list(reader.read(task))
        else:
            assert sum(batch.num_rows for batch in reader.read(task)) == 10


@pytest.mark.parametrize("more", [3, 30])
def test_a_topic_that_was_made_again_is_noticed(folder: Folder, more: int) -> None:
    folder.add(numbered(10))
    strict, lenient = stream(folder), stream(folder, failOnDataLoss="false")
    for reader in (strict, lenient):
        assert reader.latestOffset(offsets(10), ALL) == offsets(10)
    folder.close()
    os_keeps_the_number = folder.path / "topics" / "kept"
    shutil.move(
        folder.path / "topics" / "news", os_keeps_the_number
    )  # else the new folder may get the old one's number
    folder.add(numbered(more))
    with pytest.raises(DataLossError, match="made again"):
        strict.latestOffset(offsets(10), ALL)
    begun = lenient.latestOffset(offsets(10), ALL)
    assert begun == offsets(0)  # all of the old one was read: nothing is lost
    assert lenient.partitions(offsets(10), begun) == []
    assert lenient.latestOffset(begun, ALL) == offsets(more)


def test_a_topic_that_was_made_again_is_noticed_by_a_query_that_was_started_again(folder: Folder) -> None:
    folder.add(numbered(10))
    folder.store.save_settings("news", b'{"id": "one"}')
    first = stream(folder, startingOffsets="earliest")
    start = first.initialOffset()
    end = first.latestOffset(start, ALL)
    assert end == offsets(10) | {",ids": {"news": "one"}}
    assert first.latestOffset(end, ALL) == end
    folder.close()
    shutil.rmtree(folder.path / "topics" / "news")
    folder.add(numbered(30))
    folder.store.save_settings("news", b'{"id": "two"}')
    with pytest.raises(DataLossError, match="made again"):
        stream(folder).latestOffset(end, ALL)
    with pytest.raises(DataLossError, match="made again"):
        stream(folder).partitions(start, end)  # a batch that was under way when the driver was killed
    lenient = stream(folder, failOnDataLoss="false")
    assert lenient.partitions(start, end) == []
    begun = lenient.latestOffset(end, ALL)
    assert begun == offsets(0) | {",ids": {"news": "two"}}
    assert lenient.latestOffset(begun, ALL) == offsets(30) | {",ids": {"news": "two"}}
    assert stream(folder).latestOffset(offsets(10), ALL)["news"] == {"0": 30}  # a checkpoint of before there were ids


def test_a_topic_that_was_removed_is_noticed(folder: Folder) -> None:
    folder.add(numbered(10))
    strict, lenient = stream(folder), stream(folder, failOnDataLoss="false")
    folder.close()
    shutil.rmtree(folder.path / "topics" / "news")
    with pytest.raises(DataLossError, match="available: none; the topic or the partition was removed"):
        strict.latestOffset(offsets(10), ALL)
    assert lenient.latestOffset(offsets(10), ALL) == {}


def test_what_was_seen_and_not_read_of_a_topic_that_was_removed_is_lost(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.add(numbered(10))
    folder.add(numbered(6), partition=1)
    folder.add(numbered(1), "other")
    reader = stream(folder, subscribe="news,other", failOnDataLoss="false")
    read = reader.latestOffset(offsets(2, 0) | offsets(0, topic="other"), ReadMaxRows(9))
    assert read == offsets(6, 3) | offsets(1, topic="other")
    folder.close()
    shutil.rmtree(folder.path / "topics" / "news")
    left = reader.latestOffset(read, ALL)
    assert left == offsets(1, topic="other") | {",lost": 4 + 3}
    assert "3 offsets are lost, 7 in all" in caplog.text
    assert reader.latestOffset(left, ALL) == left
    fresh = stream(folder, subscribe="news,other", failOnDataLoss="false")
    assert fresh.latestOffset(read, ALL) == offsets(1, topic="other")  # it has never seen what was there


@pytest.mark.parametrize("ids", [True, False])
def test_what_was_seen_and_not_read_of_a_topic_that_was_made_again_is_lost(
    folder: Folder, caplog: pytest.LogCaptureFixture, ids: bool
) -> None:
    caplog.set_level("INFO", "babelbus.spark.stream")

    def save(topic_id: str) -> dict[str, Any]:
        folder.store.save_settings("news", b'{"id": "%s"}' % topic_id.encode() if ids else b"{}")
        return {",ids": {"news": topic_id}} if ids else {}

    folder.add(numbered(10))
    one = save("one")
    reader = stream(folder, failOnDataLoss="false")
    read = reader.latestOffset(offsets(0) | one, ReadMaxRows(4))
    assert read == offsets(4) | one
    folder.close()
    shutil.move(folder.path / "topics" / "news", folder.path / "topics" / "kept")
    folder.add(numbered(30))
    two = save("two")
    if ids:  # a query that was started again has seen only what is there now, however often
        fresh = stream(folder, failOnDataLoss="false")
        fresh.prepareForTriggerAvailableNow()
        assert fresh.latestOffset(read, ALL) == offsets(0) | two
    caplog.clear()
    begun = reader.latestOffset(read, ALL)
    assert begun == offsets(0) | two | {",lost": 6}
    assert "0 partitions are new, 1 were made again" in caplog.text
    assert "is new and read from" not in caplog.text
    assert reader.latestOffset(begun, ALL) == offsets(30) | two | {",lost": 6}


CHOSEN = [{"subscribe": "other"}, {"subscribePattern": "oth.*"}, {"assign": '{"other": [0]}'}]


@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda chosen: next(iter(chosen)))
def test_a_checkpoint_of_other_topics_is_not_taken_for_their_removal(
    folder: Folder, caplog: pytest.LogCaptureFixture, chosen: dict[str, Any]
) -> None:
    folder.add(numbered(10))
    folder.add(numbered(3), "other")
    why = (
        r"offset 4 was wanted, available: offsets 0 to 10 \(excluded\); it is not among the topics and partitions that"
        r" are read now \(the checkpoint is of 'news'\): use another checkpoint, or read the old ones too"
    )
    strict = stream(folder, **chosen)
    with pytest.raises(DataLossError, match=why):
        strict.latestOffset(offsets(4), ALL)
    with pytest.raises(DataLossError, match=why):
        strict.partitions(offsets(4), offsets(9))  # a batch that was under way
    lenient = stream(folder, failOnDataLoss="false", **chosen)
    assert lenient.partitions(offsets(4), offsets(9)) == []
    assert lenient.latestOffset(offsets(4), ALL) == offsets(0, topic="other")
    assert "it is not among the topics" in caplog.text
    folder.close()
    shutil.rmtree(folder.path / "topics" / "news")
    with pytest.raises(DataLossError, match="the topic or the partition was removed"):
        strict.latestOffset(offsets(4), ALL)


def test_a_partition_that_is_not_assigned_any_more_was_not_removed(folder: Folder) -> None:
    folder.add(numbered(10))
    folder.add(numbered(10), partition=1)
    reader = stream(folder, assign='{"news": [1]}')
    with pytest.raises(DataLossError, match=r"partition 0: .*not among the topics and partitions that are read now"):
        reader.latestOffset(offsets(4, 5), ALL)


def test_an_option_that_the_checkpoint_beats_is_told(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    folder.add(numbered(10))
    for _ in range(2):  # as a query that is started again, which Spark does not ask for its beginning
        reader = stream(folder, startingOffsets="earliest")
        reader.latestOffset(offsets(4), ALL)
        reader.latestOffset(offsets(4), ALL)
    assert caplog.text.count("option startingOffsets has no effect") == 2
    fresh = stream(folder, startingOffsets="earliest")
    fresh.latestOffset(fresh.initialOffset(), ALL)
    assert caplog.text.count("has no effect") == 2


def test_the_lag_can_be_told(folder: Folder) -> None:
    folder.add(numbered(10))
    reader = stream(folder, maxOffsetsPerTrigger=1)
    reader.latestOffset(offsets(0), ReadMaxRows(1))
    assert reader.reportLatestOffset() == offsets(10)


def test_a_partition_is_cut_into_as_many_tasks_as_asked_for(folder: Folder) -> None:
    folder.add([Record(b"%d" % n, timestamp=NOW) for n in range(1000)])
    reader = stream(folder, maxRecordsPerPartition=300)
    assert len(reader.partitions(offsets(0), offsets(1000))) == 4
    assert values(reader, offsets(0), offsets(1000)) == [b"%d" % n for n in range(1000)]
    assert len(stream(folder, minPartitions=8).partitions(offsets(0), offsets(1000))) >= 8
