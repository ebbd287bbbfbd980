import random
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.records.columns import Columns, decode_chunk, decode_columns, find_positions, iterate, verify
from babelbus.records.fields import crcs_hold
from babelbus.records.format import (
    CorruptRecordError,
    InvalidRecordError,
    encode_batch,
    encode_payloads,
    record_crcs,
    record_error,
    walk,
)
from babelbus.records.ingest import ChecksumError, parse_records
from babelbus.records.record import Record

records = st.builds(
    Record,
    payload=st.none() | st.binary(max_size=30),
    key=st.none() | st.binary(max_size=5),
    headers=st.just(()) | st.just(((b"a", None), (b"bc", b"d"))),
    timestamp=st.integers(1, 2**62),
)


def uniform(count: int, size: int = 100) -> bytes:
    return bytes(encode_payloads([b"x" * size] * count, [5] * count, 7).data)


def mixed(count: int, seed: int = 1) -> bytes:
    """Runs of one size with others between them, as batches of a producer are."""
    chance = random.Random(seed)
    made = [
        Record(chance.randbytes(100), None, ((b"h", b"v"),) if number % 97 == 0 else (), 5 + number)
        for number in range(count)
    ]
    return bytes(encode_batch(made, 7).data)


def rows(columns: Columns) -> list[tuple[object, ...]]:
    fields = (
        "offsets",
        "timestamps",
        "attributes",
        "key_lengths",
        "payload_lengths",
        "headers_counts",
        "positions",
        "ends",
    )
    return list(zip(*(getattr(columns, name).tolist() for name in fields), strict=True))


@given(st.lists(records, min_size=1, max_size=200))
def test_columns_say_what_the_records_say(sent: list[Record]) -> None:
    columns = decode_chunk(bytes(encode_batch(sent, 3).data))
    assert columns.offsets.tolist() == list(range(3, 3 + len(sent)))
    assert columns.timestamps.tolist() == [record.timestamp for record in sent]
    assert columns.key_lengths.tolist() == [-1 if record.key is None else len(record.key) for record in sent]
    assert columns.payload_lengths.tolist() == [len(record.payload or b"") for record in sent]
    assert columns.headers_counts.tolist() == [len(record.headers) for record in sent]
    data = bytes(columns.data)
    for at, size, record in zip(columns.key_positions, columns.key_lengths, sent, strict=True):
        assert data[at : at + max(size, 0)] == (record.key or b"")


def test_records_of_one_size_and_of_many_give_the_same_columns() -> None:
    data = uniform(100)
    odd = bytes(encode_batch([Record(b"y", timestamp=5)], 107).data)
    fast, general = decode_chunk(data), decode_chunk(data + odd)
    assert rows(fast) == rows(general)[:-1]


def test_no_bytes_are_no_records() -> None:
    assert len(decode_chunk(b"")) == 0
    assert list(iterate(decode_chunk(b""))) == []


@pytest.mark.parametrize("data", [uniform(500), mixed(500), mixed(500)[:-3], uniform(40, 0), mixed(3)])
def test_positions_found_by_runs_are_those_of_a_plain_walk(data: bytes) -> None:
    positions, last = find_positions(data, 0, len(data))
    assert [*positions.tolist(), last] == walk(data)


@given(st.binary(max_size=400))
def test_garbage_is_refused_and_never_an_accident(data: bytes) -> None:
    if data:
        with pytest.raises(CorruptRecordError):
            decode_chunk(data)
        with pytest.raises(InvalidRecordError):
            parse_records(data)


@given(st.lists(records, min_size=1, max_size=30), st.data())
def test_a_flipped_bit_outside_the_offsets_is_found(sent: list[Record], data: st.DataObject) -> None:
    damaged = bytearray(encode_batch(sent, 3).data)
    starts = walk(damaged)[:-1]
    at = data.draw(st.integers(0, len(damaged) - 1))
    start = max(start for start in starts if start <= at)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    if at - start < 8:  # no CRC covers an offset: the log knows which one it expects
        decode_chunk(bytes(damaged))
    else:
        with pytest.raises(CorruptRecordError):
            decode_chunk(bytes(damaged))


@pytest.mark.parametrize("make", [uniform, mixed])
def test_the_quick_check_of_many_crcs_agrees_with_a_call_for_each(make) -> None:  # type: ignore[no-untyped-def]
    good = make(700)
    positions = np.array(walk(good)[:-1], np.int64)
    assert crcs_hold(good, positions, len(good))
    chance = random.Random(2)
    for _ in range(300):
        damaged = bytearray(good)
        at = chance.randrange(len(damaged))
        damaged[at] ^= 1 << chance.randrange(8)
        start = int(positions[np.searchsorted(positions, at, side="right") - 1])
        expected = at - start < 8 or record_error(damaged, start, len(damaged)) is None
        if 8 <= at - start < 12:
            continue  # a length: the walk would not have given these positions
        assert crcs_hold(damaged, positions, len(damaged)) == expected, at


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(0, 3), st.booleans())
def test_the_crcs_of_many_records_are_those_of_a_call_for_each(sizes: list[int], skipped: int, alike: bool) -> None:
    data = encode_batch([Record(bytes(sizes[0] if alike else size), timestamp=1) for size in sizes * 20]).data
    positions = np.array(walk(data)[skipped:-1], np.int64)
    stops = [*positions[1:].tolist(), len(data)]
    wanted = [zlib.crc32(data[at + 16 : stop]) for at, stop in zip(positions.tolist(), stops, strict=True)]
    assert record_crcs(data, positions, len(data)).tolist() == wanted
    assert len(record_crcs(data, positions[:0], 0)) == 0


def test_the_record_that_is_wrong_is_named() -> None:
    damaged = bytearray(uniform(300))
    third = walk(damaged)[3]
    damaged[third + 60] ^= 1
    with pytest.raises(CorruptRecordError, match="CRC") as caught:
        verify(bytes(damaged), np.array(walk(damaged)[:-1], np.int64), len(damaged))
    assert caught.value.position == third


def test_inner_lengths_that_do_not_add_up_are_refused_although_the_crc_is_right() -> None:
    data = bytearray(mixed(100))
    at = walk(data)[5]
    data[at + 25 : at + 29] = (50_000).to_bytes(4, "big")
    with pytest.raises(CorruptRecordError, match="key"):
        decode_columns(bytes(data), np.array(walk(data)[:-1], np.int64))


# -- what a client sends --------------------------------------------------------------------------------------------


@given(st.lists(records, min_size=1, max_size=120))
def test_a_batch_of_a_client_is_taken_as_it_is(sent: list[Record]) -> None:
    data = bytes(encode_batch(sent).data)
    batch = parse_records(data)
    assert (batch.count, bytes(batch.data)) == (len(sent), data)
    assert list(map(int, batch.timestamps)) == [record.timestamp for record in sent]


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize(
    ("last", "error", "reason"),
    [
        (Record(b"x", headers=((b"$batch", b""),), timestamp=1), InvalidRecordError, "'\\$'"),
        (Record(b"x", headers=((b"a", None), (b"$", None)), timestamp=1), InvalidRecordError, "'\\$'"),
    ],
)
def test_headers_of_the_bus_itself_are_refused(count: int, last: Record, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        parse_records(bytes(encode_batch([Record(b"y", timestamp=1)] * (count - 1) + [last]).data))


def _patched(count: int, at: int, value: bytes) -> bytes:
    """Give a batch whose last record has other bytes and the CRC that fits them."""
    data = bytearray(uniform(count))
    start = walk(data)[-2]
    data[start + at : start + at + len(value)] = value
    data[start + 12 : start + 16] = zlib.crc32(data[start + 16 :]).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize(
    ("at", "value"),
    [
        (17, bytes(8)),
        (17, b"\xff" * 8),
        (16, b"\x10"),
        (16, b"\x80"),
        (25, b"\x00\x00\x10\x00"),
        (29, b"\x00\x00\x10\x00"),
    ],
)
def test_a_batch_with_a_wrong_field_is_refused(count: int, at: int, value: bytes) -> None:
    with pytest.raises(InvalidRecordError):
        parse_records(_patched(count, at, value))


@pytest.mark.parametrize("count", [1, 100])
def test_a_wrong_crc_is_told_from_other_faults_because_sending_again_may_help(count: int) -> None:
    data = bytearray(uniform(count))
    data[-10] ^= 1
    with pytest.raises(ChecksumError):
        parse_records(bytes(data))
