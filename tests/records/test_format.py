import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import (
    FEW,
    HEADERS_MAX,
    PRODUCER,
    PRODUCER_HEADER,
    TOMBSTONE,
    InvalidRecordError,
    decode_headers,
    encode_batch,
    encode_headers,
    encode_keyed,
    encode_payloads,
    headers_position,
    mark_producer,
    public_headers,
    rebase,
    record_error,
    uniform_run,
    walk,
)
from babelbus.records.record import Headers, Record, RecordBatch

# docs/specifications/jebp.md, section 5.1: both worked records, byte for byte.
KEYED = bytes.fromhex(
    "000000000000000700000038bf31e1ef000000018bcfe5687b00000006757365722d3100000002686902"
    "0000000263740000000474657874000000026964000000023432"
)
KEYED_RECORD = Record(b"hi", b"user-1", ((b"ct", b"text"), (b"id", b"42")), 1_700_000_000_123, 0, 7)
PLAIN = bytes.fromhex("00000000000000000000001ba97cdd57000000018bcfe56800ffffffff0000000568656c6c6f00")
PLAIN_RECORD = Record(b"hello", None, (), 1_700_000_000_000, 0, 0)

headers = st.lists(
    st.tuples(st.binary(max_size=5).filter(lambda key: not key.startswith(b"$")), st.none() | st.binary(max_size=8)),
    max_size=4,
).map(tuple)
records = st.builds(
    Record,
    payload=st.none() | st.binary(max_size=60),
    key=st.none() | st.binary(max_size=10),
    headers=headers,
    timestamp=st.integers(1, 2**63 - 1),
    attributes=st.integers(0, 7),
)


def stored(batch: RecordBatch) -> list[Record]:
    return list(iterate(decode_chunk(bytes(batch.data))))


def with_offsets(sent: list[Record], base: int) -> list[Record]:
    return [
        Record(one.payload, one.key, one.headers, one.timestamp, one.attributes, base + number)
        for number, one in enumerate(sent)
    ]


@pytest.mark.parametrize(("record", "data"), [(KEYED_RECORD, KEYED), (PLAIN_RECORD, PLAIN)])
def test_the_records_of_the_specification_are_encoded_and_decoded_to_the_byte(record: Record, data: bytes) -> None:
    assert bytes(encode_batch([record], record.offset).data) == data
    assert list(iterate(decode_chunk(data))) == [record]
    assert record_error(data, 0, len(data)) is None


def test_a_payload_alone_is_encoded_like_a_record_without_key_and_headers() -> None:
    assert bytes(encode_payloads([b"hello"], [1_700_000_000_000]).data) == PLAIN


@given(st.lists(records, min_size=1, max_size=40), st.integers(0, 2**40))
def test_any_records_come_back_as_they_were(sent: list[Record], base: int) -> None:
    batch = encode_batch(sent, base)
    assert stored(batch) == with_offsets(sent, base)
    assert walk(batch.data) == [*map(int, batch.positions), len(batch.data)]


@given(
    st.lists(st.tuples(st.binary(max_size=40), st.integers(1, 2**63 - 1)), min_size=1, max_size=60),
    st.booleans(),
    st.booleans(),
)
def test_payloads_encoded_by_arrays_and_one_by_one_are_the_same_bytes(
    rows: list[tuple[bytes, int]], one_size: bool, one_time: bool
) -> None:
    payloads = [rows[0][0] if one_size else payload for payload, _ in rows]
    times = [rows[0][1] if one_time else time for _, time in rows]
    together = encode_payloads(payloads, times, 5)
    singly = [
        encode_payloads([payload], [time], 5 + at)
        for at, (payload, time) in enumerate(zip(payloads, times, strict=True))
    ]
    assert bytes(together.data) == b"".join(bytes(one.data) for one in singly)
    assert list(together.positions) == walk(together.data)[:-1]


@given(
    st.lists(st.tuples(st.binary(max_size=30), st.binary(max_size=60)), min_size=1, max_size=40),
    st.lists(st.tuples(st.binary(max_size=9), st.none() | st.binary(max_size=9)), max_size=3).map(tuple),
    st.integers(1, 2**63 - 1),
    st.integers(0, 2**40),
    st.sampled_from([1, FEW + 1]),
)
def test_keyed_records_encoded_together_are_the_bytes_of_each_alone(
    pairs: list[tuple[bytes, bytes]], headers: Headers, timestamp: int, base: int, times: int
) -> None:
    pairs = pairs * times
    keys, payloads = [key for key, _ in pairs], [payload for _, payload in pairs]
    together = encode_keyed(keys, payloads, encode_headers(headers), timestamp, base)
    alone = encode_batch([Record(payload, key, headers, timestamp) for key, payload in pairs], base)
    assert bytes(together.data) == bytes(alone.data)
    assert list(together.positions) == list(alone.positions)
    assert list(together.timestamps) == list(alone.timestamps)
    assert (together.count, together.base_offset) == (alone.count, alone.base_offset)


@pytest.mark.parametrize("count", [0, 1, FEW, FEW + 1, 1000])
@pytest.mark.parametrize("size", [0, 7, 65_535, 65_536])
def test_keyed_records_of_any_number_and_size_are_stored_and_read_alike(count: int, size: int) -> None:
    keys, payload = [b"k/%d" % number for number in range(count)], b"1" * (size if count < 100 else size % 100)
    batch = encode_keyed(keys, [payload] * count, encode_headers(()), 5, 7)
    assert stored(batch) == [Record(payload, key, (), 5, 0, offset) for offset, key in enumerate(keys, 7)]


@pytest.mark.parametrize("timestamp", [0, -1, 2**63])
def test_keyed_records_have_a_time_that_the_form_has(timestamp: int) -> None:
    with pytest.raises(InvalidRecordError):
        encode_keyed([b"k"], [b"1"], encode_headers(()), timestamp, 0)


@given(st.lists(records, min_size=1, max_size=40), st.integers(0, 2**40), st.sampled_from([1, FEW + 1]))
def test_rebasing_changes_the_offsets_and_nothing_else(sent: list[Record], base: int, times: int) -> None:
    sent = sent * times
    assert bytes(rebase(encode_batch(sent, 3), base).data) == bytes(encode_batch(sent, base).data)


def test_a_null_payload_is_a_tombstone_of_no_bytes_that_others_read_as_empty() -> None:
    data = bytes(encode_batch([Record(None, b"k", timestamp=1)]).data)
    assert data[16] == TOMBSTONE
    assert struct.unpack_from(">i", data, 16 + 13 + 1)[0] == 0
    (back,) = iterate(decode_chunk(data))
    assert (back.payload, back.attributes) == (None, 0)


def test_an_empty_payload_an_empty_key_and_no_key_stay_apart() -> None:
    sent = [Record(b"", b"", timestamp=1), Record(b"", None, timestamp=1), Record(None, b"", timestamp=1)]
    assert stored(encode_batch(sent)) == with_offsets(sent, 0)


def test_127_headers_are_stored_and_one_more_is_refused() -> None:
    most = Record(b"", headers=((b"h", None),) * HEADERS_MAX, timestamp=1)
    assert stored(encode_batch([most])) == with_offsets([most], 0)
    with pytest.raises(InvalidRecordError, match="128 headers"):
        encode_batch([Record(b"", headers=((b"h", None),) * (HEADERS_MAX + 1), timestamp=1)])


@pytest.mark.parametrize("timestamp", [0, -1, 2**63])
@pytest.mark.parametrize("count", [1, 20])
def test_a_time_that_the_form_does_not_have_is_refused(timestamp: int, count: int) -> None:
    with pytest.raises(InvalidRecordError, match="time"):
        encode_payloads([b""] * count, [1] * (count - 1) + [timestamp])
    with pytest.raises(InvalidRecordError, match="time"):
        encode_batch([Record(b"", b"k", timestamp=1)] * (count - 1) + [Record(b"", b"k", timestamp=timestamp)])


@pytest.mark.parametrize("attributes", [-1, 16, 128])
def test_attributes_without_a_meaning_are_refused(attributes: int) -> None:
    with pytest.raises(InvalidRecordError, match="attributes"):
        encode_batch([Record(b"", timestamp=1, attributes=attributes)])


def test_no_records_are_no_bytes() -> None:
    assert bytes(encode_batch([]).data) == b""
    assert bytes(encode_payloads([], []).data) == b""


@given(st.lists(records, min_size=1, max_size=40), st.integers(0, 2**62), st.integers(0, 2**62))
def test_a_producer_is_marked_by_a_header_of_the_first_record_that_readers_do_not_see(
    sent: list[Record], producer: int, sequence: int
) -> None:
    marked = mark_producer(encode_batch(sent, 9), producer, sequence)
    assert stored(marked) == with_offsets(sent, 9)
    at = headers_position(marked.data, 0)
    *own, (key, value) = decode_headers(marked.data, at + 1, marked.data[at])
    assert tuple(own) == sent[0].headers
    assert (key, value) == (PRODUCER_HEADER, PRODUCER.pack(producer, sequence, len(sent)))
    assert public_headers([*own, (key, value)]) == sent[0].headers
    assert list(marked.positions) == walk(marked.data)[:-1]


def test_a_first_record_without_room_for_the_producer_is_refused() -> None:
    full = Record(b"", headers=((b"h", None),) * HEADERS_MAX, timestamp=1)
    with pytest.raises(InvalidRecordError, match="126 headers"):
        mark_producer(encode_batch([full]), 1, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda body: body[:-1], "are there"),
        (lambda body: body[:1] + struct.pack(">q", 0) + body[9:], "time"),
        (lambda body: body[:9] + struct.pack(">i", -2) + body[13:], "key"),
        (lambda body: body[:9] + struct.pack(">i", 99) + body[13:], "key"),
        (lambda body: body[:13] + struct.pack(">i", -1) + body[17:], "payload"),
        (lambda body: body[:13] + struct.pack(">i", 99) + body[17:], "payload"),
        (lambda body: body[:-1] + b"\x01", "headers"),
        (lambda body: body[:-1] + b"\xff", "headers"),
        (lambda body: body + b"\x00", "add up"),
        (lambda body: body[:-1] + b"\x01" + struct.pack(">ii", -1, 0), "negative"),
    ],
)
def test_each_way_in_which_a_record_with_a_right_crc_can_be_wrong_is_told(change, reason: str) -> None:  # type: ignore[no-untyped-def]
    body = change(PLAIN[16:])
    length = len(body) + 4 if len(body) >= len(PLAIN) - 16 else len(PLAIN) - 12
    data = struct.pack(">qiI", 0, length, zlib.crc32(body)) + body
    found = record_error(data, 0, len(data))
    assert found is not None
    assert reason in found


@given(st.binary(max_size=200))
def test_garbage_is_walked_and_judged_without_an_accident(data: bytes) -> None:
    *starts, end = walk(data)
    assert 0 <= end <= len(data)
    assert record_error(data, 0, len(data)) is not None or starts
    uniform_run(data, 0, len(data))
