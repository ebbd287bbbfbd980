"""Rows into the stored form, without Spark and without a server."""

import zlib
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.record import Record
from babelbus.spark import encode
from babelbus.spark.encode import Encoder, NoPlaceError, Piece
from babelbus.spark.errors import RowRefusedError
from babelbus.spark.options import Place
from babelbus.spark.sink_options import RECORD_BYTES_MAX, SinkOptions
from tests.spark.support import NOW

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TYPES = {
    "value": pa.binary(),
    "key": pa.string(),
    "headers": HEADERS,
    "topic": pa.string(),
    "partition": pa.int32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "subject": pa.string(),
}


def options(topic: str = "t", **given: Any) -> SinkOptions:
    return SinkOptions(
        place=Place(),
        topic=topic,
        to_state=given.get("to_state", False),
        dead_letter_topic=given.get("dead", ""),
        record_bytes_max=given.get("most", RECORD_BYTES_MAX),
        transaction="",
        batch_id=-1,
        partitioner=given.get("partitioner", "key"),
    )


def chunk(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    names = list(dict.fromkeys(name for row in rows for name in row))
    arrays = [pa.array([row.get(name) for row in rows], TYPES[name]) for name in names]
    return pa.RecordBatch.from_arrays(arrays, names=names)


def partitions(counts: dict[str, int]) -> encode.CountPartitions:
    def count(topic: str, least: int) -> int:
        if topic not in counts:
            raise NoPlaceError(f"there is no topic {topic!r}")
        return counts[topic]

    return count


def records(pieces: list[Piece]) -> dict[tuple[str, int], list[Record]]:
    found: dict[tuple[str, int], list[Record]] = {}
    for piece in pieces:
        for batch in piece.batches:
            stored = iterate(decode_chunk(bytes(batch.data)))
            found.setdefault((piece.topic, piece.partition), []).extend(stored)
    return found


texts = st.text(max_size=4)
rows = st.fixed_dictionaries(
    {"value": st.binary(max_size=5)},
    optional={
        "key": st.none() | texts,
        "headers": st.none()
        | st.lists(
            st.fixed_dictionaries({"key": st.text("ab$", max_size=2).filter(lambda text: text[:1] != "$"),
                                   "value": st.none() | st.binary(max_size=2)}),
            max_size=2,
        ),
        "timestamp": st.none() | st.integers(1000, 10**15),
    },
)  # fmt: skip


@given(st.lists(rows, min_size=1, max_size=40), st.integers(0, 3))
def test_what_is_decoded_is_what_was_in_the_rows(given_rows: list[dict[str, Any]], first: int) -> None:
    batch = chunk(given_rows)[first:]
    found = records(list(Encoder(options(), partitions({"t": 1})).encode(batch, NOW)))
    assert [(one.payload, one.key, one.headers, one.timestamp) for one in found.get(("t", 0), [])] == [
        (
            row["value"],
            None if row.get("key") is None else row["key"].encode(),
            tuple((one["key"].encode(), one["value"]) for one in row.get("headers") or ()),
            NOW if row.get("timestamp") is None else row["timestamp"] // 1000,
        )
        for row in given_rows[first:]
    ]


@given(
    st.lists(
        st.fixed_dictionaries(
            {"value": st.none() | st.binary(max_size=5), "key": st.none() | texts},
            optional={
                "partition": st.none() | st.integers(0, 2),
                "timestamp": st.none() | st.integers(1000, 10**15),
                "subject": st.none() | st.just("t"),
            },
        ).filter(lambda row: row["value"] is not None or row["key"] is not None),
        min_size=1,
        max_size=40,
    ),
    st.integers(-1, 3).filter(bool),
    st.integers(0, 3),
    st.sampled_from(["key", "spread"]),
)
def test_plain_rows_that_are_encoded_at_once_become_the_records_that_they_become_one_by_one(
    given_rows: list[dict[str, Any]], count: int, first: int, how: str
) -> None:
    given_rows = [row | {"partition": None if count < 3 else row.get("partition")} for row in given_rows]
    batch = chunk(given_rows)[first:]
    at_once = list(Encoder(options(partitioner=how), partitions({"t": count})).encode(batch, NOW))
    # A header that one row has, in a chunk of its own making, makes records of all of them.
    marked = chunk([row | {"headers": [{"key": "h", "value": b""}]} for row in given_rows])[first:]
    one_by_one = list(Encoder(options(partitioner=how), partitions({"t": count})).encode(marked, NOW))
    assert records(at_once) == {
        at: [msgspec.structs.replace(one, headers=()) for one in found] for at, found in records(one_by_one).items()
    }
    assert all(batch.count == len(batch.positions) == len(batch.timestamps) for one in at_once for batch in one.batches)


def test_rows_go_to_the_topics_of_a_column() -> None:
    many = chunk([{"topic": name, "value": b"%d" % at} for at, name in enumerate("tut")])
    found = records(list(Encoder(options(""), partitions({"t": 1, "u": 1})).encode(many, NOW)))
    assert {at: [one.payload for one in part] for at, part in found.items()} == {
        ("t", 0): [b"0", b"2"],
        ("u", 0): [b"1"],
    }


def test_a_key_goes_where_the_server_would_put_it_and_rows_without_one_go_round() -> None:
    encoder = Encoder(options(), partitions({"t": 3}))
    keyed = [{"key": f"k{number}", "value": b"1"} for number in range(50)]
    found = records(list(encoder.encode(chunk(keyed), NOW)))
    assert len(found) == 3
    assert all(zlib.crc32(one.key or b"") % 3 == at[1] for at, part in found.items() for one in part)
    plain = chunk([{"value": b"1"}])
    assert {piece.partition for _ in range(3) for piece in encoder.encode(plain, NOW)} == {0, 1, 2}


@pytest.mark.parametrize("column", [{}, {"headers": [{"key": "h", "value": b""}]}])
def test_rows_that_are_spread_go_round_one_by_one_whatever_their_keys_unless_they_name_a_partition(
    column: dict[str, Any],
) -> None:
    def spread(turn: int) -> dict[tuple[str, int], list[bytes | None]]:
        encoder = Encoder(options(partitioner="spread"), partitions({"t": 4}), turn=turn)
        chunks = [
            chunk([{"key": "same", "value": b"%d" % (n + at), "partition": None} | column for n in range(size)])
            for at, size in ((0, 3), (3, 1), (4, 6))
        ]
        chunks.append(chunk([{"key": "same", "value": b"named", "partition": 2} | column]))
        chunks.append(chunk([{"key": "same", "value": b"10", "partition": None} | column]))
        pieces = [piece for one in chunks for piece in encoder.encode(one, NOW)]
        return {at: [one.payload for one in found] for at, found in records(pieces).items()}

    assert spread(1) == {
        ("t", 1): [b"0", b"4", b"8"],
        ("t", 2): [b"1", b"5", b"9", b"named"],
        ("t", 3): [b"2", b"6", b"10"],
        ("t", 0): [b"3", b"7"],
    }
    assert spread(1) == spread(1) != spread(2)


def test_batches_are_cut_by_size_and_a_large_record_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "BATCH_BYTES", 1000)
    values = [b"x" * 100] * 20 + [b"y" * 5000] + [b"z"] * 3
    (piece,) = Encoder(options(), partitions({"t": 1})).encode(chunk([{"value": value} for value in values]), NOW)
    assert [batch.count for batch in piece.batches] == [7, 7, 6, 1, 3]
    assert [one.payload for one in records([piece])["t", 0]] == values


def test_one_bad_row_refuses_all_without_a_topic_for_dead_letters() -> None:
    batch = chunk([{"topic": "t", "value": b"1"}, {"topic": "u", "value": b"2"}])
    with pytest.raises(RowRefusedError, match="there is no topic 'u'; with the option deadLetterTopic"):
        list(Encoder(options(""), partitions({"t": 1})).encode(batch, NOW))
    with pytest.raises(RowRefusedError, match=r"no topic 'u'; option deadLetterTopic: there is no topic 'dead'$"):
        list(Encoder(options("", dead="dead"), partitions({"t": 1})).encode(batch, NOW))


def test_dead_letters_say_why_and_keep_what_they_can() -> None:
    many = [{"key": f"h{number}", "value": b""} for number in range(200)]
    bad: list[tuple[dict[str, Any], bytes]] = [
        ({"value": b"1", "headers": many}, b"it has 200 headers, the most are 126"),
        ({"value": b"2", "headers": [{"key": "$batch", "value": b""}]}, b"header '$batch': keys that begin with '$'"),
        ({"value": b"3", "headers": [{"key": None, "value": b""}]}, b"a header has no key"),
        ({"value": b"4", "timestamp": -5}, b"its timestamp is not after 1970-01-01"),
        (
            {"value": b"5", "subject": "elsewhere"},
            b"its subject 'elsewhere' is not below its topic 't': drop the column subject, as with .drop('subject')",
        ),
        ({"value": b"6" * 5000}, b"it has 5034 bytes, the most are 4096"),
        ({"value": b"7", "key": "k" * 5000}, b"it has 5035 bytes"),
        ({"value": None}, b"its value is null"),
    ]
    encoder = Encoder(options(dead="dead", most=4096), partitions({"t": 1, "dead": 1}))
    batch = chunk([{"value": b"good"}, *(row for row, _ in bad)])
    found = records(list(encoder.encode(batch, NOW)))
    assert [one.payload for one in found["t", 0]] == [b"good"]
    assert encoder.dead == len(found["dead", 0]) == len(bad)
    for one, (row, reason) in zip(found["dead", 0], bad, strict=True):
        headers = dict(one.headers)
        assert (headers[b"dead-reason"] or b"").startswith(reason)
        assert headers[b"dead-topic"] == b"t"
        assert one.payload == (row["value"] or b"")[:1024]
        assert len(one.headers) < 126
    assert dict(found["dead", 0][5].headers)[b"dead-bytes"] == b"5000"


def not_utf8(column: pa.Array) -> pa.Array:
    """Spark's strings can be any bytes, which Arrow takes over."""
    raw = pa.array([text.encode().replace(b"!", b"\xff") for text in column.to_pylist()], pa.binary())
    return pa.StringArray.from_buffers(len(raw), *raw.buffers()[1:])


def test_rows_whose_texts_are_not_utf8_become_dead_letters() -> None:
    topics, subjects, names = (not_utf8(pa.array(texts)) for texts in (["t!", "t", "t"], ["t", "t/!", "t"], "kk!"))
    headers = pa.ListArray.from_arrays([0, 1, 2, 3], pa.StructArray.from_arrays([names, names], ["key", "value"]))
    values = pa.array([b"1", b"2", b"3"])
    batch = pa.RecordBatch.from_arrays([values, topics, subjects, headers], ["value", "topic", "subject", "headers"])
    encoder = Encoder(options("", dead="dead"), partitions({"t": 1, "dead": 1}))
    assert records(list(encoder.encode(batch, NOW))).keys() == {("dead", 0)}
    found = records(list(encoder.encode(batch, NOW)))["dead", 0]
    assert [dict(one.headers)[b"dead-reason"] for one in found] == [
        b"its topic is not UTF-8",
        b"its subject is not UTF-8",
        b"the key of a header is not UTF-8",
    ]
    keys = pa.RecordBatch.from_arrays([not_utf8(pa.array(["t/!"])), pa.array([b"1"])], ["key", "value"])
    with pytest.raises(RowRefusedError, match="its key is not UTF-8"):
        list(Encoder(options(to_state=True), partitions({"t": 1})).encode(keys, NOW))


def test_the_state_is_set_by_events_that_its_topic_retains() -> None:
    batch = chunk(
        [
            {"key": "t/a", "value": b'{"x": 1}'},
            {"key": "t", "value": b"1"},
            {"key": "t/b", "value": None},
            {"key": "tt", "value": b"1"},
            {"key": "t/c", "value": b"{"},
            {"key": None, "value": b"1"},
        ]
    )
    encoder = Encoder(options(to_state=True, dead="dead"), partitions({"t": 1, "dead": 1}))
    found = records(list(encoder.encode(batch, NOW)))
    json = (b"content-type", b"application/json")
    assert [(one.key, one.payload, one.headers) for one in found["t", 0]] == [
        (b"t/a", b'{"x": 1}', ((b"ce_subject", b"t/a"), json)),
        (b"t", b"1", (json,)),
        (b"t/b", None, ((b"ce_subject", b"t/b"), json)),
    ]
    reasons = [dict(one.headers)[b"dead-reason"] or b"" for one in found["dead", 0]]
    assert reasons[0] == b"its key 'tt' is neither 't' nor below it"
    assert reasons[1].startswith(b"its value is no JSON")
    assert reasons[2] == b"its key None is neither 't' nor below it"
