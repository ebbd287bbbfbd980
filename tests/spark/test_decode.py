from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import StructField, StructType

from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import encode_batch, mark_producer, rebase
from babelbus.records.record import Record
from babelbus.spark import decode
from babelbus.spark.decode import Decoder
from babelbus.spark.schema import COLUMNS, arrow_schema
from tests.spark.support import NOW
from tests.storage.helpers import records

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def schema(*names: str) -> Any:
    return arrow_schema(StructType([StructField(name, COLUMNS[name]) for name in names or COLUMNS]))


def rows(data: bytes, *names: str, topic: str = "news") -> list[dict[str, Any]]:
    decoder = Decoder(schema(*names), topic, 3)
    batches = list(decoder.batches(decode_chunk(data), 0, 2**62))
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema == schema(*names)
    return [row for batch in batches for row in batch.to_pylist()]


def expected(record: Record, topic: str = "news") -> dict[str, Any]:
    """What a row says, made from the record the slow way."""
    subject, headers = topic, list(record.headers)
    said = [value for key, value in headers if key == b"ce_subject"]
    if said and said[-1] is not None and said[-1].startswith(f"{topic}/".encode()):
        subject = said[-1].decode("utf-8", "replace")
        headers = [pair for pair in headers if pair[0] != b"ce_subject"]
    micros = min(record.timestamp, (2**63 - 1) // 1000) * 1000
    return {
        "key": record.key,
        "value": record.payload,
        "topic": topic,
        "partition": 3,
        "offset": record.offset,
        "timestamp": micros,
        "timestampType": 0,
        "subject": subject,
        "headers": [{"key": key.decode("utf-8", "replace"), "value": value} for key, value in headers] or None,
    }


def plain(data: bytes, topic: str = "news") -> list[dict[str, Any]]:
    decoder = Decoder(schema(), topic, 3)
    found = []
    for batch in decoder.batches(decode_chunk(data), 0, 2**62):
        at = batch.schema.get_field_index("timestamp")
        found += batch.set_column(at, "timestamp", batch.column(at).cast(pa.int64())).to_pylist()
    return found


def with_subjects() -> st.SearchStrategy[Record]:
    subjects = st.sampled_from([b"news/a", b"news/\xc3\xb6", b"news", b"other/a", b"news/\xff", None])
    extra = st.lists(st.tuples(st.just(b"ce_subject"), subjects), max_size=2)
    return st.builds(
        lambda record, more: Record(
            record.payload, record.key, (*record.headers, *more), record.timestamp, record.attributes
        ),
        records(),
        extra,
    )


@given(st.lists(with_subjects(), min_size=1, max_size=40))
def test_rows_say_what_the_records_say(sent: list[Record]) -> None:
    data = bytes(encode_batch(sent, 17).data)
    assert plain(data) == [expected(record) for record in iterate(decode_chunk(data))]


@given(st.sets(st.sampled_from(sorted(COLUMNS)), min_size=1), st.lists(with_subjects(), min_size=1, max_size=5))
def test_any_columns_can_be_asked_for_in_any_order(names: set[str], sent: list[Record]) -> None:
    sent = [Record(one.payload, one.key, one.headers, NOW) for one in sent]
    data = bytes(encode_batch(sent).data)
    every = rows(data)
    assert rows(data, *names) == [{name: row[name] for name in names} for row in every]


def test_times_are_those_of_the_records() -> None:
    data = bytes(encode_batch([Record(b"a", timestamp=1), Record(b"b", timestamp=NOW + 7)]).data)
    assert [row["timestamp"] for row in rows(data)] == [
        EPOCH + timedelta(milliseconds=1),
        EPOCH + timedelta(milliseconds=NOW + 7),
    ]


def test_the_headers_of_the_bus_itself_are_not_shown() -> None:
    batch = mark_producer(encode_batch([Record(b"a", None, ((b"k", b"v"),), NOW), Record(b"b", timestamp=NOW)]), 7, 0)
    found = rows(bytes(rebase(batch, 0).data))
    assert [row["headers"] for row in found] == [[{"key": "k", "value": b"v"}], None]
    alone = mark_producer(encode_batch([Record(b"a", timestamp=NOW)] * 2), 7, 0)
    assert [row["headers"] for row in rows(bytes(alone.data))] == [None, None]


def test_a_chunk_gives_only_the_wanted_offsets_in_batches_that_are_not_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "BATCH_RECORDS", 10)
    monkeypatch.setattr(decode, "BATCH_BYTES", 1000)
    sent = [Record(b"x" * (5000 if n == 33 else 20), timestamp=NOW) for n in range(100)]
    decoder = Decoder(schema("offset", "value"), "news", 0)
    batches = list(decoder.batches(decode_chunk(bytes(encode_batch(sent, 100).data)), 105, 190))
    assert [n for batch in batches for n in batch.column(0).to_pylist()] == list(range(105, 190))
    assert max(batch.num_rows for batch in batches) == 10
    assert all(batch.nbytes < 2000 or batch.num_rows == 1 for batch in batches)
