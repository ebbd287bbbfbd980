"""The stored form without numpy: the same records, bytes and refusals as with numpy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import encode_batch
from babelbus.records.plain import (
    HEADERS_MAX,
    CorruptRecordError,
    decode_each,
    decode_records,
    encode_records,
    join_bodies,
    verify_records,
    walk,
)
from babelbus.records.record import Record
from tests.records.test_format import KEYED, KEYED_RECORD, PLAIN, PLAIN_RECORD, records

PLACES = st.integers(0, 2**31 - 1)


def read_by_columns(data: bytes) -> list[Record] | None:
    try:
        return list(iterate(decode_chunk(data)))
    except CorruptRecordError:
        return None


def read(data: bytes) -> list[Record] | None:
    try:
        return decode_records(data)
    except CorruptRecordError:
        return None


def test_the_worked_records_of_the_specification_are_read() -> None:
    assert decode_records(KEYED + PLAIN) == [KEYED_RECORD, PLAIN_RECORD]
    assert decode_records(b"") == []


@given(st.lists(records, min_size=1, max_size=40))
def test_it_writes_and_reads_what_the_arrays_write_and_read(sent: list[Record]) -> None:
    data = bytes(encode_records(sent).data)
    assert data == bytes(encode_batch(sent).data)
    assert decode_records(data) == list(iterate(decode_chunk(data)))
    verify_records(data, walk(data))


@given(st.lists(records, min_size=1, max_size=5), PLACES, st.integers(1, 255))
def test_a_flipped_byte_is_refused_as_by_the_arrays(sent: list[Record], place: int, flip: int) -> None:
    data = bytearray(encode_records(sent).data)
    data[place % len(data)] ^= flip
    assert read(bytes(data)) == read_by_columns(bytes(data))


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=3))
def test_bodies_that_are_no_records_are_refused_although_their_sums_hold(bodies: list[bytes]) -> None:
    data = bytes(join_bodies([body.ljust(18, b"\0") for body in bodies], [1] * len(bodies), 0).data)
    assert read(data) == read_by_columns(data)


@given(st.lists(records, min_size=1, max_size=3), PLACES)
def test_a_chunk_that_ends_inside_a_record_is_refused(sent: list[Record], place: int) -> None:
    data = bytes(encode_records(sent).data)
    cut = place % len(data)
    if cut in walk(data):
        assert len(decode_records(data[:cut])) == walk(data).index(cut)
    else:
        with pytest.raises(CorruptRecordError):
            decode_records(data[:cut])


@pytest.mark.parametrize("count", [HEADERS_MAX, HEADERS_MAX + 1])
def test_the_most_headers_are_read_and_one_more_is_refused(count: int) -> None:
    body = bytearray(encode_records([Record(b"", timestamp=1)]).data)[16:-1]
    body += count.to_bytes(1, "big") + bytes(8) * count
    data = bytes(join_bodies([bytes(body)], [1], 0).data)
    expected = [Record(b"", None, ((b"", b""),) * count, 1, 0, 0)] if count == HEADERS_MAX else None
    assert read(data) == read_by_columns(data) == expected


def test_verify_names_the_record_that_is_damaged() -> None:
    data = bytearray(encode_records([Record(b"one", timestamp=1), Record(b"two", timestamp=1)]).data)
    data[-2] ^= 1
    with pytest.raises(CorruptRecordError) as raised:
        verify_records(data, walk(data))
    assert raised.value.position == len(data) // 2


def test_an_owner_is_told_the_number_of_each_record() -> None:
    data = bytes(encode_records([KEYED_RECORD, PLAIN_RECORD]).data)
    made = decode_each(data, lambda *fields: fields, "owner")
    assert [(fields[0], *fields[5:]) for fields in made] == [
        (KEYED_RECORD.payload, 0, "owner", 0),
        (PLAIN_RECORD.payload, 1, "owner", 1),
    ]
