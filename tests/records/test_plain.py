"""The plain reader and writer of records agree with those for whole chunks, and refuse what is damaged."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.errors import CorruptRecordError, InvalidRecordError
from babelbus.records.format import encode_batch
from babelbus.records.plain import decode_each, encode_each, public_headers
from babelbus.records.record import Record

headers = st.lists(st.tuples(st.binary(max_size=8), st.none() | st.binary(max_size=8)), max_size=3).map(tuple)
records = st.lists(
    st.builds(
        Record,
        st.none() | st.binary(max_size=50),
        st.none() | st.binary(max_size=20),
        headers,
        st.integers(1, 2**62),
        st.integers(0, 7),
    ),
    max_size=40,
)


def make(*fields: Any) -> tuple[Any, ...]:
    return fields


@given(records)
def test_both_writers_say_the_same_but_for_the_offsets(given_records: list[Record]) -> None:
    written = list(iterate(decode_chunk(encode_each(given_records))))
    assert [msgspec.structs.replace(record, offset=-1) for record in written] == [
        msgspec.structs.replace(record, headers=public_headers(record.headers)) for record in given_records
    ]
    if len(given_records) == 1:
        assert encode_each(given_records) == bytes(encode_batch(given_records).data)


@given(records)
def test_both_readers_read_the_same(given_records: list[Record]) -> None:
    data = bytes(encode_batch(given_records, 7).data) if given_records else b""
    plain = decode_each(data, make, "more")
    assert [fields[6:] for fields in plain] == [("more", number) for number in range(len(given_records))]
    assert [Record(*fields[:6]) for fields in plain] == list(iterate(decode_chunk(data)))


@given(records.filter(len), st.data())
def test_a_damaged_byte_is_never_a_record(given_records: list[Record], data: st.DataObject) -> None:
    stored = bytearray(encode_each(given_records))
    at = data.draw(st.integers(8, len(stored) - 1))
    stored[at] ^= 0x10
    try:
        made = decode_each(bytes(stored), make)
    except CorruptRecordError:
        return
    assert len(made) == len(given_records), "only the offset of a record, which no CRC covers, may differ"


@pytest.mark.parametrize("size", [1, 20, 33])
def test_a_record_that_is_cut_off_is_corrupt(size: int) -> None:
    with pytest.raises(CorruptRecordError):
        decode_each(encode_each([Record(b"payload", timestamp=5)])[:size], make)


@pytest.mark.parametrize("record", [Record(b"x"), Record(b"x", timestamp=5, attributes=32)])
def test_what_cannot_be_stored_is_refused(record: Record) -> None:
    with pytest.raises(InvalidRecordError):
        encode_each([record])
