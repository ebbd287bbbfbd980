"""A chunk decoded for a group: the same records as the storage gives, one by one and all at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.groups.delivery_rows import Rows, Run, even
from babelbus.records.columns import decode_columns, find_positions, iterate
from babelbus.records.equal_headers import cut
from babelbus.records.format import FEW, encode_batch
from babelbus.records.headers import decode_all_headers, read_headers
from babelbus.records.record import Record
from tests.storage.helpers import NOW, records


@given(st.lists(records() | st.just(Record(b"plain", timestamp=NOW)), min_size=1, max_size=12))
def test_rows_are_the_records_that_the_storage_decodes(some: list[Record]) -> None:
    data = bytes(encode_batch(some, 5).data)
    columns = decode_columns(data, find_positions(data, 0, len(data))[0])
    expected = list(iterate(columns))
    rows = Rows(columns, 5 + len(some))
    assert [rows.record(number) for number in range(rows.count)] == expected
    assert [rows.find(one.offset) for one in expected] == expected
    assert rows.find(4) is rows.find(5 + len(some)) is None
    given = rows.deliveries(range(rows.count), 3, None)
    fields = Record.__struct_fields__
    assert [[getattr(one, name) for name in fields] for one in given] == [
        [getattr(one, name) for name in fields] for one in expected
    ]
    assert {(one.partition, one.attempt) for one in given} == {(3, 1)}


first_headers = st.tuples(st.sampled_from([b"id", b"idx", b"i", b""]), st.none() | st.binary(max_size=3))
more_headers = st.lists(st.tuples(st.sampled_from([b"x", b"$y"]), st.none() | st.just(b"z")), max_size=2)
led = st.builds(
    Record,
    st.none() | st.binary(max_size=3),
    st.none() | st.just(b"key"),
    st.builds(lambda first, more: (first, *more), first_headers, more_headers),
    st.just(NOW),
)


@given(st.lists(led, min_size=1, max_size=40) | st.integers(1, 40).flatmap(lambda n: led.map(lambda one: [one] * n)))
def test_leading_columns_are_those_of_the_records_with_that_first_header(some: list[Record]) -> None:
    data = bytes(encode_batch(some).data)
    rows = Rows(decode_columns(data, find_positions(data, 0, len(data))[0]), len(some))
    leading = rows.leading(b"id")
    wanted = [
        (number, one.payload, one.headers[0][1], one.headers[1:])
        for number, one in enumerate(some)
        if one.headers[0][0] == b"id" and one.headers[0][1] is not None and one.payload is not None
    ]
    rests = [read_headers(rest) for rest in leading.rests()]
    assert list(zip(leading.numbers, leading.payloads(), leading.values(), rests, strict=True)) == [
        (number, payload, value, tuple(pair for pair in rest if not pair[0].startswith(b"$")))
        for number, payload, value, rest in wanted
    ]


plain = st.just(Record(b"", timestamp=NOW))


@given(st.lists(led | plain, min_size=FEW, max_size=6 * FEW) | led.map(lambda one: [one] * 2 * FEW))
def test_headers_that_are_decoded_together_are_those_of_each_record(some: list[Record]) -> None:
    data = bytes(encode_batch(some).data)
    columns = decode_columns(data, find_positions(data, 0, len(data))[0])
    assert decode_all_headers(columns, data) == [record.headers for record in iterate(columns)]


def test_a_run_is_a_sequence_of_deliveries() -> None:
    data = bytes(encode_batch([Record(b"%d" % number, timestamp=NOW) for number in range(9)], 3).data)
    run = Run(Rows(decode_columns(data, find_positions(data, 0, len(data))[0]), 12), range(1, 9, 2), 4, None)
    assert [one.payload for one in run] == [b"1", b"3", b"5", b"7"]
    assert [(one.offset, one.partition, one.attempt) for one in run[1:3]] == [(6, 4, 1), (8, 4, 1)]
    assert run[-1].payload == b"7"
    assert len(run) == 4
    assert [one.payload for one in run.only([2, 6])] == [b"2", b"6"]
    assert run[0] in run


@given(st.lists(st.sampled_from([b"", b"a", b"b\0", b"\0\0", b"same"]), max_size=3 * FEW))
def test_parts_are_cut_as_slices_would_be(parts: list[bytes]) -> None:
    ends = np.cumsum(np.array([len(part) for part in parts], np.int64))
    sizes = np.array([len(part) for part in parts], np.int64)
    assert cut(b"".join(parts), ends - sizes, sizes) == parts


def test_what_is_made_of_a_chunk_is_made_once() -> None:
    data = bytes(encode_batch([Record(b"x", timestamp=NOW)]).data)
    rows = Rows(decode_columns(data, find_positions(data, 0, len(data))[0]), 1)
    calls: list[Rows] = []
    for _ in range(3):
        rows.made(calls.append)
    assert calls == [rows]


def test_headers_of_the_bus_itself_are_left_out() -> None:
    data = bytes(encode_batch([Record(b"x", None, ((b"$batch", b"1"), (b"a", None), (b"", b"")), NOW)]).data)
    rows = Rows(decode_columns(data, find_positions(data, 0, len(data))[0]), 1)
    assert rows.record(0).headers == ((b"a", None), (b"", b""))


@pytest.mark.parametrize(
    ("numbers", "share"),
    [
        ([], []),
        ([4], [4]),
        ([4, 5], range(4, 6)),
        ([0, 4, 8, 12], range(0, 13, 4)),
        ([0, 4, 8, 13], [0, 4, 8, 13]),
        ([0, 4, 5, 12], [0, 4, 5, 12]),
        ([0, 1, 9], [0, 1, 9]),
    ],
)
def test_numbers_with_even_steps_are_a_range(numbers: list[int], share: object) -> None:
    assert even(numbers) == share
