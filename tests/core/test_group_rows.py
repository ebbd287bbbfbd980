"""A chunk decoded for a group: the same records as the storage gives, one by one and all at once."""

from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.group_rows import Rows
from babelbus.storage.columns import decode_columns, find_positions, iterate
from babelbus.storage.format import encode_batch
from babelbus.storage.record import Record
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


def test_headers_of_the_bus_itself_are_left_out() -> None:
    data = bytes(encode_batch([Record(b"x", None, ((b"$batch", b"1"), (b"a", None), (b"", b"")), NOW)]).data)
    rows = Rows(decode_columns(data, find_positions(data, 0, len(data))[0]), 1)
    assert rows.record(0).headers == ((b"a", None), (b"", b""))
