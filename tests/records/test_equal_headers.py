"""Columns by kinds of headers: the same as the storage gives, and the same records refused."""

import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from babelbus.records.columns import I64, Columns, decode_columns, find_positions
from babelbus.records.equal_headers import FEW, decode
from babelbus.records.format import HEAD_BYTES, CorruptRecordError, encode_batch
from babelbus.records.record import Record
from tests.storage.helpers import records

kinds = st.lists(
    st.lists(st.tuples(st.binary(max_size=4), st.none() | st.binary(max_size=4)), max_size=3).map(tuple),
    min_size=1,
    max_size=6,
)
bodies = st.tuples(st.none() | st.binary(max_size=9), st.none() | st.binary(max_size=3), st.binary(max_size=9))


def columns_of(columns: Columns) -> list[list[int]]:
    return [getattr(columns, name).tolist() for name in Columns.__struct_fields__ if name != "data"]


@given(kinds, st.lists(bodies, min_size=1, max_size=8), st.randoms(use_true_random=False), st.lists(records()))
def test_columns_are_those_of_the_storage(
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
    assert columns_of(decode(data, positions)[0]) == columns_of(decode_columns(data, positions))


def outcome(decode: Callable[[bytes, I64], Columns], data: bytes, positions: I64) -> list[list[int]] | str:
    try:
        return columns_of(decode(data, positions))
    except CorruptRecordError as error:
        return str(error)


@given(st.data())
def test_a_record_that_the_storage_refuses_is_refused_among_any_others(data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([1, FEW, 3 * FEW]))
    rest = ((b"x", b"y"),) * data.draw(st.integers(0, 2))
    several = [Record(b"p" * (at % 3), None, ((b"id", b"%d" % at), *rest), 1) for at in range(count)]
    stored = bytearray(encode_batch(several).data)
    positions, _ = find_positions(bytes(stored), 0, len(stored))
    number = data.draw(st.sampled_from(range(len(several))))
    end = int(positions[number + 1]) if number + 1 < len(several) else len(stored)
    at = data.draw(st.integers(int(positions[number]) + HEAD_BYTES + 9, end - 1))
    stored[at] ^= data.draw(st.integers(1, 3) | st.integers(4, 255))
    changed = bytes(stored)
    assert outcome(lambda *chunk: decode(*chunk)[0], changed, positions) == outcome(decode_columns, changed, positions)
