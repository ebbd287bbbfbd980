"""The short ways give what the long ways give: records at once, and heads by what they have in common."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.record import Record
from babelbus.protocols.zbus.codec import delivery_head
from babelbus.protocols.zbus.errors import MalformedMessageError
from babelbus.protocols.zbus.heads import Heads
from babelbus.protocols.zbus.messages import Message
from babelbus.protocols.zbus.records import ORIGIN_PREFIX, from_record, to_record
from babelbus.protocols.zbus.stored import Recorder, encode_id
from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import encode_bodies, public_headers
from tests.protocols.zbus.strategies import messages

STAMP = {"source": "S", "remote-addr": "/10.0.0.1:5"}


def with_id(message: Message) -> Message:
    message.headers.setdefault("id", "an id")
    return message


sent = messages().map(with_id)


def long_way(message: Message) -> Record:
    stamped = Message(
        {**message.headers, **STAMP}, message.url, message.method, message.status, message.body, message.body_kind
    )
    payload, key, headers = to_record(stamped, ORIGIN_PREFIX)
    return Record(payload, key, public_headers(headers), 5)


def short_way(sent: Sequence[Message]) -> list[Record]:
    recorder = Recorder(STAMP)
    batch = encode_bodies(
        [recorder.encode(message, encode_id(message.headers["id"]), 5) for message in sent], [5] * len(sent), 0
    )
    return list(iterate(decode_chunk(bytes(batch.data))))


@given(st.lists(sent, min_size=1, max_size=5))
def test_a_message_is_stored_as_the_same_record_either_way_but_for_the_order_of_headers(sent: list[Message]) -> None:
    for offset, (found, message) in enumerate(zip(short_way(sent), sent, strict=True)):
        wanted = long_way(message)
        assert (found.payload, found.key, found.timestamp) == (wanted.payload, wanted.key, 5)
        assert sorted(found.headers) == sorted(wanted.headers)
        assert found.headers[0] == (b"ce_id", message.headers["id"].encode())
        assert found.offset == offset


def parsed(head: bytes) -> Any:
    return json.loads(head + b"}}")


@given(st.lists(sent, min_size=1, max_size=5))
def test_a_head_says_the_same_either_way(sent: list[Message]) -> None:
    heads = Heads("Q")
    records = short_way(sent)
    for _ in range(2):  # the second time what is known is used
        for record, head in zip(records, heads.of(records), strict=True):
            wanted = delivery_head(from_record(record.payload, record.key, record.headers, "Q"), "Q", record.offset)
            assert parsed(head) == parsed(wanted)
            assert head.endswith(b'"')


@given(st.lists(st.tuples(st.binary(max_size=12), st.none() | st.binary(max_size=12)), max_size=4), st.binary())
def test_the_head_of_any_record_is_json_whoever_wrote_it(pairs: list[tuple[bytes, bytes | None]], body: bytes) -> None:
    headers = ((b"ce_id", b"7355608"), (b"ce_source", b"zbus:#x"), *pairs)
    for one in (Record(body, b"k", headers, offset=3), Record(body, b"k", tuple(pairs), offset=3)):
        assert Heads("Q").of([one]) == Heads("Q").of([one, one])[:1]
        assert parsed(Heads("Q").of([one])[0])["headers"]["offset"] == "3"


@pytest.mark.parametrize("kind", [b"json", b"text"])
@pytest.mark.parametrize(
    "payload", [b'"x", "headers": {"mq": "other"}', b"[1] ", b"\xff", b"nul", b"[" * 2000, b"{}{}"]
)
def test_a_body_that_is_not_what_its_record_says_cannot_say_anything_else(kind: bytes, payload: bytes) -> None:
    headers = ((b"ce_id", b"i"), (b"ce_source", b"zbus:#s"), (b"zbus.body", kind))
    [head] = Heads("Q").of([Record(payload, None, headers, offset=0)])
    found = parsed(head)
    assert found["headers"]["mq"] == "Q"
    wanted = parsed(delivery_head(from_record(payload, None, headers, "Q"), "Q", 0))
    assert found == wanted


def test_a_header_that_is_no_utf_8_is_refused_also_where_it_is_remembered() -> None:
    recorder = Recorder(STAMP)
    for headers in ({"id": "\ud800"}, {"id": "i", "x": "\ud800"}, {"id": "i", "tag": "\ud800"}):
        with pytest.raises(MalformedMessageError):
            recorder.encode(Message(headers), encode_id(headers["id"]), 1)


def test_a_connection_that_never_says_the_same_twice_makes_nobody_remember_it_all() -> None:
    recorder, heads = Recorder(STAMP), Heads("Q")
    for number in range(3000):
        body = recorder.encode(Message({f"x{number}": "y"}, body=b"t", body_kind="text"), b"i", 1)
        batch = encode_bodies([body], [1], 0)
        assert parsed(heads.of(list(iterate(decode_chunk(bytes(batch.data)))))[0])["headers"][f"x{number}"] == "y"
    assert len(recorder._names) <= 256
    assert len(heads._shapes) <= 1024
