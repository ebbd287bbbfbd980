import logging
from pathlib import Path
from typing import Any

import pytest

from babelbus.spark import option_values
from babelbus.spark.errors import OptionError
from babelbus.spark.options import EARLIEST, LATEST, SourceOptions, parse
from babelbus.spark.sink_options import parse_sink

URL = {"url": "jebp://10.0.0.1:5320", "identity": "key", "assign": '{"t": [0]}'}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name in ("BABELBUS_SERVER", "BABELBUS_IDENTITY", "BABELBUS_SERVER_FINGERPRINT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "topics").mkdir()
    return {"path": str(tmp_path), "subscribe": "t"}


def refusal(given: dict[str, str], query: Any = "any") -> str:
    with pytest.raises(OptionError) as caught:
        parse(given, query)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_without_any_a_batch_reads_everything_and_a_stream_what_comes(place: dict[str, str]) -> None:
    batch, stream = parse(place, "batch"), parse(place, "stream")
    assert (batch.start.offset, batch.end.offset) == (EARLIEST, LATEST)
    assert stream.start.offset == LATEST
    assert batch.fail_on_data_loss
    assert not batch.include_headers


def test_names_are_read_in_any_case_and_as_kafka_has_them(place: dict[str, str]) -> None:
    options = parse(place | {"MAXRECORDSPERTRIGGER": "5", "includeheaders": "TRUE"})
    assert (options.records_per_trigger_max, options.include_headers) == (5, True)
    kafka = {"kafka.bootstrap.servers": "h:1", "identity": "key", "assign": '{"t": [0]}'}
    assert parse(kafka).place.address == "h:1"


def test_an_unknown_option_is_refused_with_all_that_there_are(place: dict[str, str]) -> None:
    text = refusal(place | {"startingOffset": "earliest"})
    assert text.startswith("option startingOffset is unknown")
    assert "startingOffsets" in text


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("startingOffset", "startingOffsets"),
        ("startingoffset", "startingOffsets"),  # as Spark tells it
        ("maxRecordPerTrigger", "maxOffsetsPerTrigger"),
        ("kafka.bootstrap.server", "url"),
    ],
)
def test_an_unknown_option_is_refused_with_the_one_that_was_meant(
    place: dict[str, str], given: str, meant: str
) -> None:
    assert refusal(place | {given: "1"}).startswith(f"option {given} is unknown: did you mean {meant}? the source has ")


def test_an_unknown_option_that_is_like_none_is_only_unknown(place: dict[str, str]) -> None:
    assert refusal(place | {"qqq": "1"}).startswith("option qqq is unknown; the source has path, ")


def test_an_unknown_option_of_the_sink_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(
        OptionError, match=r"^option deadletter is unknown: did you mean deadLetterTopic\? the sink has"
    ):
        parse_sink({"url": "bus:1", "identity": "key", "deadletter": "t"}, "batch")


@pytest.mark.parametrize(
    ("name", "value", "twice"),
    [
        ("startingOffsets", '{"t": {"0": 5, "0": 6}}', "the key '0'"),
        ("startingOffsets", '{"t": {"0": 5}, "t": {"0": 5}}', "the key 't'"),
        ("startingOffsets", '{"t": {"0": 5, "00": 6}}', "partition 0 of topic 't'"),
        ("endingOffsets", '{"t": {"1": 5, "0": 1, "1": 5}}', "the key '1'"),
        ("startingOffsetsByTimestamp", '{"t": {"0": 5, "0": 6}}', "the key '0'"),
    ],
)
def test_what_stands_twice_in_json_is_refused(place: dict[str, str], name: str, value: str, twice: str) -> None:
    assert refusal(place | {name: value}) == f"option {name}: {twice} stands there twice, in {value!r}; name it once"


def test_a_topic_that_is_assigned_twice_is_refused() -> None:
    text = refusal(URL | {"assign": '{"t": [0], "t": [1]}'})
    assert text.startswith("option assign: the key 't' stands there twice, in ")


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("startingOffsets", "first", "latest, earliest or JSON"),
        ("startingOffsets", '{"t": {"0": -3}}', "-2 is earliest"),
        ("startingOffsets", '{"t": {"zero": 1}}', "JSON"),
        ("startingOffsets", '{"t": {"0": 1.5}}', "whole number"),
        ("startingOffsets", '{"t": {"0": true}}', "whole number"),
        ("startingOffsets", '{"t": [1]}', "JSON"),
        ("startingOffsets", '{"t": {"0": 1}', "JSON"),
        ("startingOffsets", "{}", "JSON"),
        ("endingOffsets", "earliest", "latest or JSON"),
        ("endingOffsets", '{"t": {"0": -2}}', "-1 is latest"),
        ("startingTimestamp", "yesterday", "milliseconds since the epoch"),
        ("endingTimestamp", "-1", "milliseconds since the epoch"),
        ("startingOffsetsByTimestamp", '{"t": {"0": -1}}', "milliseconds"),
        ("startingOffsetsByTimestampStrategy", "earliest", "error or latest"),
        ("maxOffsetsPerTrigger", "0", "from 1 on"),
        ("maxBytesPerTrigger", "many", "64MiB"),
        ("maxBytesPerTrigger", "0", "64MiB"),
        ("minOffsetsPerTrigger", "1e3", "from 1 on"),
        ("minPartitions", "-2", "from 1 on"),
        ("maxRecordsPerPartition", "", "from 1 on"),
        ("targetPartitionBytes", "0MiB", "64MiB"),
        ("failOnDataLoss", "no", "true or false"),
        ("includeHeaders", "1", "true or false"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_the_value_and_what_is_accepted(
    place: dict[str, str], name: str, value: str, accepted: str
) -> None:
    text = refusal(place | {name: value})
    assert text.startswith(f"option {name}: {value!r} is not possible; write ")
    assert accepted in text


def test_a_wait_without_a_number_to_wait_for_is_refused(place: dict[str, str]) -> None:
    assert "needs minOffsetsPerTrigger" in refusal(place | {"maxTriggerDelay": "1m"})
    text = refusal(place | {"maxTriggerDelay": "soon", "minOffsetsPerTrigger": "5"})
    assert text.startswith("option maxTriggerDelay: 'soon'")
    assert parse(place | {"maxTriggerDelay": "2m", "minOffsetsPerTrigger": "5"}).trigger_delay_seconds == 120


def test_options_that_contradict_each_other_are_refused(place: dict[str, str]) -> None:
    assert "maxBytesPerTrigger" in refusal(place | {"maxOffsetsPerTrigger": "1", "maxBytesPerTrigger": "1"})
    assert "more than" in refusal(place | {"maxOffsetsPerTrigger": "1", "minOffsetsPerTrigger": "2"})
    assert "given twice" in refusal(place | {"maxOffsetsPerTrigger": "1", "maxRecordsPerTrigger": "2"})
    assert "path and url" in refusal(place | {"url": "h:1"})


def test_what_a_batch_or_a_stream_has_no_use_for_is_refused(place: dict[str, str]) -> None:
    assert "for streams" in refusal(place | {"maxOffsetsPerTrigger": "1"}, "batch")
    assert "for batches" in refusal(place | {"endingOffsets": "latest"}, "stream")
    assert "for streams" in refusal(URL | {"groupId": "g"}, "batch")
    assert "goes with url" in refusal(place | {"groupId": "g"}, "stream")
    assert "a name of 1 to 249 bytes" in refusal(URL | {"groupId": ""}, "stream")
    assert parse(URL | {"kafka.group.id": "g"}, "stream").group == "g"


def test_exactly_one_option_says_what_is_read(place: dict[str, str]) -> None:
    assert "none was given" in refusal({"path": place["path"]})
    assert "subscribe and assign" in refusal(place | {"assign": '{"t": [0]}'})
    for name, value in [("subscribe", " , "), ("subscribePattern", "("), ("assign", '{"t": []}'), ("assign", "t")]:
        assert refusal({"path": place["path"], name: value}).startswith(f"option {name}: {value!r}")


def test_offsets_for_a_topic_that_is_not_read_are_refused(place: dict[str, str]) -> None:
    assert "topic 'u' is not among" in refusal(place | {"startingOffsets": '{"u": {"0": 1}}'})


def test_a_time_for_all_beats_times_for_each_which_beat_offsets(place: dict[str, str]) -> None:
    def start(*names: str) -> SourceOptions:
        values = {
            "startingTimestamp": "5",
            "startingOffsetsByTimestamp": '{"t": {"0": 6}}',
            "startingOffsets": '{"t": {"0": 7}}',
        }
        return parse(place | {name: values[name] for name in names})

    everything = start("startingTimestamp", "startingOffsetsByTimestamp", "startingOffsets")
    assert everything.start.timestamp == 5
    assert start("startingOffsetsByTimestamp", "startingOffsets").start.timestamps == {"t": {0: 6}}
    assert start("startingOffsets").start.offsets == {"t": {0: 7}}


def test_a_place_that_cannot_be_is_refused(place: dict[str, str], tmp_path: Path) -> None:
    assert "path (a data folder) or url" in refusal({"subscribe": "t"})
    assert "is no folder here" in refusal({"path": str(tmp_path / "gone"), "subscribe": "t"})
    assert "no data folder" in refusal({"path": str(tmp_path / "topics"), "subscribe": "t"})
    assert "goes with url" in refusal(place | {"identity": "key"})
    for url in ("http://h:1", "jebp://h", "h:0", "h:99999", "a:1,b:2"):
        assert refusal(URL | {"url": url}).startswith(f"option url: {url!r}")
    assert "key file" in refusal({"url": "h:1", "subscribe": "t"})
    assert "64 hex digits" in refusal(URL | {"serverFingerprint": "abc"})


def test_the_server_and_the_key_may_come_from_the_environment(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BABELBUS_SERVER", "bus:5320")
    monkeypatch.setenv("BABELBUS_IDENTITY", "key")
    found = parse({"subscribe": "t"}).place
    assert (found.address, found.identity, found.path) == ("bus:5320", "key", "")
    assert parse(place).place.path == place["path"]


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("groupIdPrefix", "groupId"),
        ("fetchOffset.numRetries", "requestTimeoutMs"),
        ("kafkaConsumer.pollTimeoutMs", "requestTimeoutMs"),
        ("kafka.security.protocol", "identity"),
    ],
)
def test_an_option_of_kafka_without_a_meaning_here_is_a_warning_that_names_ours(
    place: dict[str, str], caplog: pytest.LogCaptureFixture, name: str, ours: str
) -> None:
    option_values._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert parse(place | {name: "1"}) == parse(place | {name.lower(): "1"}) == parse(place)
        parse_sink({"url": "bus:1", "identity": "key", name: "1"}, "batch")
    messages = [record.getMessage() for record in caplog.records if f"option {name} " in record.getMessage()]
    assert len(messages) == 1  # not with each of the many times that Spark has the options read
    assert ours in messages[0]


def test_a_batch_that_can_have_no_records_is_refused(place: dict[str, str]) -> None:
    for start in ("latest", '{"t": {"0": -1, "1": -1}}'):
        assert "begins at the latest offset has no records" in refusal(place | {"startingOffsets": start}, "batch")
    parse(place | {"startingOffsets": '{"t": {"0": -1, "1": 5}}'}, "batch")
    times = {"startingTimestamp": "9", "endingTimestamp": "5"}
    assert refusal(place | times, "batch") == "option startingTimestamp: 9 is after endingTimestamp, 5"


def test_a_table_and_an_insert_are_refused_with_the_way_that_works(place: dict[str, str]) -> None:
    assert "write CREATE TEMPORARY VIEW" in refusal(place | {"provider": "babelbus"})
    with pytest.raises(OptionError, match=r"^option subscribe is for reading: .* df.write.format"):
        parse_sink({"url": "bus:1", "identity": "key", "subscribe": "t", "topic": "t"}, "batch")
