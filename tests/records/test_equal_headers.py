"""Headers that many records share are read once, with the same columns and the same records refused."""

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.records.columns import Columns, decode_columns, find_positions
from babelbus.records.format import FEW, HEAD_BYTES, CorruptRecordError, encode_batch, record_error
from babelbus.records.record import Record
from tests.storage.helpers import records

kinds = st.lists(
    st.lists(st.tuples(st.binary(max_size=4), st.none() | st.binary(max_size=4)), max_size=3).map(tuple),
    min_size=1,
    max_size=6,
)
bodies = st.tuples(st.none() | st.binary(max_size=9), st.none() | st.binary(max_size=3), st.binary(max_size=9))


def columns_of(columns: Columns) -> list[list[int]]:
    names = set(Columns.__struct_fields__) - {"data", "headed"}
    return [getattr(columns, name).tolist() for name in sorted(names)]


@given(kinds, st.lists(bodies, min_size=1, max_size=8), st.randoms(use_true_random=False), st.lists(records()))
def test_equal_headers_change_nothing_of_the_columns(
    kinds: list[tuple[tuple[bytes, bytes | None], ...]],
    bodies: list[tuple[bytes | None, bytes | None, bytes]],
    order: random.Random,
    others: list[Record],
) -> None:
    some = []
    for _ in range(2 * FEW):
        (payload, key, first), headers = order.choice(bodies), order.choice(kinds)
        some.append(Record(payload, key, ((b"id", first), *headers) if first else headers, 1))
    order.shuffle(mixed := [*some, *others])
    data = bytes(encode_batch(mixed, 3).data)
    positions, _ = find_positions(data, 0, len(data))
    # Bytes that are no `bytes` are walked header by header.
    assert columns_of(decode_columns(data, positions)) == columns_of(decode_columns(bytearray(data), positions))


@given(st.data())
def test_a_record_whose_lengths_do_not_add_up_is_refused_among_any_others(data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([1, FEW, 3 * FEW]))
    rest = ((b"x", b"y"),) * data.draw(st.integers(0, 2))
    several = [Record(b"p" * (at % 3), None, ((b"id", b"%d" % at), *rest), 1) for at in range(count)]
    stored = bytearray(encode_batch(several).data)
    positions, _ = find_positions(bytes(stored), 0, len(stored))
    number = data.draw(st.sampled_from(range(len(several))))
    start = int(positions[number])
    end = int(positions[number + 1]) if number + 1 < len(several) else len(stored)
    at = data.draw(st.integers(start + HEAD_BYTES + 9, end - 1))
    stored[at] ^= data.draw(st.integers(1, 3) | st.integers(4, 255))
    stored[start + 12 : start + 16] = zlib.crc32(stored[start + HEAD_BYTES : end]).to_bytes(4, "big")
    if record_error(stored, start, end) is None:
        decode_columns(bytes(stored), positions)
    else:
        with pytest.raises(CorruptRecordError) as caught:
            decode_columns(bytes(stored), positions)
        assert caught.value.position == start
