"""Heads of a chunk at once: the same as the long way gives, for whatever records stand in it."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.groups.delivery_rows import Rows, Run
from babelbus.core.groups.in_flight import Delivery
from babelbus.protocols.zbus.filters import without
from babelbus.protocols.zbus.heads import LEARNED_ONCE_MAX, SHAPE_BYTES_MAX, SHAPES_MAX, Heads
from babelbus.protocols.zbus.messages import Message
from babelbus.records.columns import decode_columns, find_positions
from babelbus.records.format import encode_batch, public_headers
from babelbus.records.record import Headers, Record
from tests.protocols.zbus.strategies import messages, to_record

SHAPE: Headers = ((b"ce_source", b"zbus:#s"), (b"zbus_ack", b"false"))
TEXT = (b"zbus.body", b"text")
JSON = (b"zbus.body", b"json")


def run_of(records: Sequence[Record]) -> Run:
    data = bytes(encode_batch(records, 7).data)
    rows = Rows(decode_columns(data, find_positions(data, 0, len(data))[0]), 7 + len(records))
    return Run(rows, range(len(records)), 0, None)


def parsed(heads: Sequence[bytes]) -> list[Any]:
    return [json.loads(head + b"}}") for head in heads]


def stored(message: Message, *, id_first: bool) -> Record:
    payload, key, headers = to_record(message)
    if not id_first:
        headers = headers[::-1]
    return Record(payload, key, public_headers(headers), 5)


def text(body: bytes, request_id: bytes = b"i", *, kind: tuple[bytes, bytes] = TEXT) -> Record:
    return Record(body, None, ((b"ce_id", request_id), *SHAPE, kind), 5)


odd_bodies = [
    *(b"", b"plain", b'"', b"\\", b"\x00", b"\x7f", "\u00e9".encode(), b"\xc3", b"\xa9", b"%b%d%%"),
    *(b"[1]", b" [1]", b"[1] ", b"{}", b"{}{}", b"[1,", b"2]", b'["a', b'b"]', b"null", b'"text"', b"true", b"-1.5"),
    *(b"nul", b"[" * 2000),
]
raw_bodies = st.binary(max_size=20) | st.sampled_from(odd_bodies)
alike = st.builds(text, raw_bodies, raw_bodies, kind=st.sampled_from([TEXT, JSON, (b"zbus.body", b"bytes")]))
pairs = st.tuples(st.sampled_from([b"ce_id", b"ce_source", b"x", b"$y", b"zbus.body", b""]), st.none() | raw_bodies)
any_records = st.builds(
    Record, st.none() | raw_bodies, st.none() | raw_bodies, st.lists(pairs, max_size=4).map(tuple), st.just(5)
)
any_messages = st.builds(stored, messages(), id_first=st.booleans())


@given(st.lists(alike | any_messages | any_records, min_size=1, max_size=30), st.data())
def test_a_chunk_gives_the_heads_that_its_records_give_one_by_one(records: list[Record], data: st.DataObject) -> None:
    heads, run = Heads("Q%d"), run_of(records)
    wanted = parsed(Heads("Q%d").of(list(run)))
    some = data.draw(st.lists(st.sampled_from(range(len(records))), unique=True).map(sorted))
    assert parsed(heads.of(run.only(some))) == [wanted[number] for number in some]
    assert parsed(heads.of(run)) == wanted
    assert parsed(heads.of(run_of(records))) == wanted  # what was learned is used


@given(st.lists(raw_bodies, min_size=1, max_size=20), st.booleans())
def test_bodies_cannot_say_anything_together_that_none_of_them_says(bodies: list[bytes], is_json: bool) -> None:
    run = run_of([text(body, b"i%d" % at, kind=JSON if is_json else TEXT) for at, body in enumerate(bodies)])
    found = parsed(Heads("Q").of(run))
    assert found == parsed(Heads("Q").of(list(run)))
    assert [one["headers"]["id"] for one in found] == [f"i{at}" for at in range(len(bodies))]
    assert [one["headers"]["offset"] for one in found] == [str(7 + at) for at in range(len(bodies))]


@pytest.mark.parametrize("odd", [b'say "hi"', b"\xff", "\u20ac".encode(), b"line\nline"])
def test_one_odd_body_does_not_change_its_neighbours(odd: bytes) -> None:
    run = run_of([text(b"before"), text(odd), text(b"behind")])
    first, middle, last = parsed(Heads("Q").of(run))
    assert (first["body"], last["body"]) == ("before", "behind")
    assert middle == parsed(Heads("Q").of(list(run)))[1]


def test_headers_of_clients_that_never_repeat_themselves_are_not_remembered() -> None:
    heads = Heads("Q")
    for begin in range(0, 3000, 100):
        records = [text(b"t", kind=(b"x%d" % at, b"y")) for at in range(begin, begin + 100)]
        assert [one["headers"][f"x{begin}"] for one in parsed(heads.of(run_of(records))[:1])] == ["y"]
    assert len(heads._shapes) == 0
    long = text(b"t", kind=(b"x", b"y" * SHAPE_BYTES_MAX))
    assert len(parsed(heads.of(run_of([long, long])))) == 2
    assert len(heads._shapes) == 0


def test_no_more_shapes_are_remembered_than_there_is_room_for() -> None:
    heads = Heads("Q")
    for begin in range(0, 2 * SHAPES_MAX, LEARNED_ONCE_MAX):
        heads.of(run_of([text(b"t", kind=(b"x%d" % at, b"y")) for at in range(begin, begin + LEARNED_ONCE_MAX)]))
        assert len(heads._shapes) <= SHAPES_MAX
    heads.of(run_of([text(b"t", kind=(b"z%d" % (at % 1100), b"y")) for at in range(2200)]))
    assert 0 < len(heads._shapes) <= SHAPES_MAX


callers = st.tuples(st.sampled_from(["", "a", "b"]), st.sampled_from(["", "1", "2"]))
calls = st.builds(
    lambda caller, turned, more: Record(
        b"x",
        None,
        (*more, *((b"ce_id", caller[1].encode()), (b"ce_source", b"zbus:me#" + caller[0].encode()))[::turned]),
    ),
    callers,
    st.sampled_from([1, -1]),
    st.lists(st.tuples(st.sampled_from([b"ce_id", b"z"]), st.none() | st.just(b"1")), max_size=2),
)


@given(st.lists(calls.map(lambda one: Record(one.payload, None, one.headers, 5)), min_size=1), st.sets(callers))
def test_calls_that_were_given_up_are_left_out_of_a_run_as_of_a_list(
    records: list[Record], given_up: set[tuple[str, str]]
) -> None:
    run = run_of(records)
    one_by_one: list[Delivery] = list(run)
    assert list(without(run, given_up)) == list(without(one_by_one, given_up))
    assert without(run, set()) is run
