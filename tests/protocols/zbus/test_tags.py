"""Tags as filters see them: the same for a chunk as for each of its records."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.groups.delivery_rows import Rows
from babelbus.core.settings import InvalidSettingError
from babelbus.protocols.zbus.filters import FILTER_LENGTH_MAX, TagFilter, compile_filter, record_filter
from babelbus.records.columns import decode_columns, find_positions
from babelbus.records.format import encode_batch
from babelbus.records.record import Record

names = st.sampled_from([b"ce_id", b"zbus_tag", b"tag", b"x", b"$z"])
values = st.none() | st.sampled_from([b"a", b"a.b", b"b", b"\xff", b""])
records = st.builds(
    Record,
    st.none() | st.just(b"body"),
    st.none() | st.just(b"key"),
    st.lists(st.tuples(names, values), max_size=4).map(tuple),
    st.just(5),
)


@given(st.lists(records, min_size=1, max_size=30), st.sampled_from(["a", "a.#;b", "*", "\\xff", ""]))
def test_a_filter_wants_the_same_of_a_chunk_as_of_each_record(some: list[Record], text: str) -> None:
    data = bytes(encode_batch(some).data)
    rows = Rows(decode_columns(data, find_positions(data, 0, len(data))[0]), len(some))
    wants = TagFilter(compile_filter(text))
    assert wants.choose(rows) == [wants(rows.record(number)) for number in range(rows.count)]


@pytest.mark.parametrize(
    ("headers", "wanted"), [(((b"zbus_tag", b"a"),), True), (((b"tag", b"a"),), True), ((), False)]
)
def test_the_tag_may_be_of_zbus_or_of_another_protocol(headers: tuple[tuple[bytes, bytes]], wanted: bool) -> None:
    assert record_filter("a")(Record(b"", None, headers)) is wanted


def test_a_filter_that_is_none_is_no_setting() -> None:
    with pytest.raises(InvalidSettingError):
        record_filter("a" * (FILTER_LENGTH_MAX + 1))
