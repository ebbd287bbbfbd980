"""The short ways give what the long ways give: records at once, and heads by what they have in common."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.record import Record
from babelbus.protocols.zbus.codec import delivery_head
from babelbus.protocols.zbus.heads import Heads
from babelbus.protocols.zbus.messages import Message
from babelbus.protocols.zbus.records import from_record
from babelbus.protocols.zbus.stored import Recorder
from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import encode_bodies
from tests.protocols.zbus.strategies import messages, to_record

STAMP = {"source": "S", "remote-addr": "/10.0.0.1:5"}


def with_id(message: Message) -> Message:
    message.headers.setdefault("id", "an id")
    return message


sent = messages().map(with_id)


def stored(sent: Sequence[Message]) -> list[Record]:
    recorder = Recorder(STAMP)
    bodies = [
        body for message in sent for body in recorder.encode(message, [message.headers["id"]], [message.body or b""], 5)
    ]
    return list(iterate(decode_chunk(bytes(encode_bodies(bodies, [5] * len(bodies), 0).data))))


@given(st.lists(sent, min_size=1, max_size=5))
def test_a_record_begins_with_the_id_and_is_the_same_whatever_was_encoded_before(sent: list[Message]) -> None:
    for offset, (record, message) in enumerate(zip(stored(sent), sent, strict=True)):
        assert (record.payload, record.key, record.headers) == to_record(message, **STAMP)
        assert record.headers[0] == (b"ce_id", message.headers["id"].encode())
        assert (record.offset, record.timestamp) == (offset, 5)


@given(sent, st.lists(st.tuples(st.text("ab"), st.binary(max_size=9)), min_size=1, max_size=5))
def test_messages_that_are_encoded_together_become_the_records_of_each(
    message: Message, pairs: list[tuple[str, bytes]]
) -> None:
    ids, payloads = [one for one, _ in pairs], [payload for _, payload in pairs]
    recorder = Recorder(STAMP)
    alone = [recorder.encode(message, [one], [payload], 5)[0] for one, payload in pairs]
    assert recorder.encode(message, ids, payloads, 5) == alone


def parsed(head: bytes) -> Any:
    return json.loads(head + b"}}")


@given(st.lists(sent, min_size=1, max_size=5))
def test_a_head_says_the_same_either_way(sent: list[Message]) -> None:
    heads = Heads("Q")
    records = stored(sent)
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


def test_a_connection_that_never_says_the_same_twice_makes_nobody_remember_it_all() -> None:
    recorder, heads = Recorder(STAMP), Heads("Q")
    for number in range(3000):
        bodies = recorder.encode(Message({f"x{number}": "y"}, body=b"", body_kind="text"), ["i"], [b"t"], 1)
        batch = encode_bodies(bodies, [1], 0)
        assert parsed(heads.of(list(iterate(decode_chunk(bytes(batch.data)))))[0])["headers"][f"x{number}"] == "y"
    assert len(recorder._names) <= 256
    assert len(heads._shapes) <= 1024
