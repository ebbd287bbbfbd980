"""Frames both ways: those of the specification, what clients send otherwise, and every way to be malformed."""

import base64
import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.protocols.zbus.codec import (
    decode_message,
    delivery_head,
    delivery_tail,
    encode_deliveries,
    encode_message,
    taken,
)
from babelbus.protocols.zbus.errors import MalformedMessageError
from babelbus.protocols.zbus.messages import HEADERS_MAX, Message
from tests.protocols.zbus.strategies import headers, json_bodies, messages, texts, values

GOLDEN: list[tuple[bytes, Message]] = [
    (
        b'{"headers": {"cmd": "create", "mq": "MyMQ", "channel": "MyChannel", "id": "699a"}}',
        Message({"cmd": "create", "mq": "MyMQ", "channel": "MyChannel", "id": "699a"}),
    ),
    (
        b'{"headers": {"cmd": "sub", "mq": "MyMQ", "channel": "MyChannel", "window": 1, "id": "cfce"}}',
        Message({"cmd": "sub", "mq": "MyMQ", "channel": "MyChannel", "window": "1", "id": "cfce"}),
    ),
    (
        b'{"headers":{"cmd":"pub","mq":"MyMQ","id":"7"},"body":"hello from js"}',
        Message({"cmd": "pub", "mq": "MyMQ", "id": "7"}, body=b"hello from js", body_kind="text"),
    ),
    (
        b'{"url":"/MyRpc/example/plus","body":[1,2],"headers":{"id":"8"}}',
        Message({"id": "8"}, url="/MyRpc/example/plus", body=b"[1,2]"),
    ),
    (
        b'{"body":"OK, SUB (mq=MyMQ,channel=MyChannel)","headers":{"content-type":"text/plain; charset=utf8",'
        b'"id":"cfce45a4"},"status":200}',
        Message(
            {"content-type": "text/plain; charset=utf8", "id": "cfce45a4"},
            status=200,
            body=b"OK, SUB (mq=MyMQ,channel=MyChannel)",
            body_kind="text",
        ),
    ),
    (
        b'{"body":"hello","headers":{"mq":"MyMQ","channel":"MyChannel","id":"p0","offset":"0","source":"4010",'
        b'"window":"0"}}',
        Message(
            {"mq": "MyMQ", "channel": "MyChannel", "id": "p0", "offset": "0", "source": "4010", "window": "0"},
            body=b"hello",
            body_kind="text",
        ),
    ),
]


@pytest.mark.parametrize(("frame", "message"), GOLDEN)
def test_the_frames_of_the_specification_both_ways(frame: bytes, message: Message) -> None:
    assert decode_message(frame) == message
    assert decode_message(encode_message(message)) == message


def test_what_we_send_has_no_absent_field_and_no_space() -> None:
    message = Message({"id": "1"}, status=200, body=b"OK", body_kind="text")
    assert encode_message(message) == b'{"headers":{"id":"1"},"body":"OK","status":200}'
    assert encode_message(Message({})) == b'{"headers":{}}'
    assert encode_message(Message({}, body=b"", body_kind="text")) == b'{"headers":{},"body":""}'


@given(messages(headers))
def test_what_is_said_is_what_is_understood(message: Message) -> None:
    understood = decode_message(encode_message(message))
    if message.body is not None and message.body_kind == "bytes":
        assert understood.body_kind == "text"
        assert base64.b64decode(understood.body or b"") == message.body
        assert understood.headers["content-encoding"].endswith("base64")
    else:
        assert understood == message


@given(values)
def test_any_json_value_survives_as_a_body_without_being_changed(value: Any) -> None:
    frame = json.dumps({"headers": {"cmd": "pub"}, "body": value}).encode()
    message = decode_message(frame)
    assert json.loads(encode_message(message)).get("body") == value
    if message.body is not None and message.body_kind == "json":
        assert message.body == json.dumps(value).encode()  # the sender's own spaces and escapes


@given(st.binary(max_size=60) | st.binary(max_size=20).map(lambda junk: b'{"headers":{"cmd":' + junk + b"}}"))
def test_garbage_is_a_message_or_our_error(junk: bytes) -> None:
    with contextlib.suppress(MalformedMessageError):
        encode_message(decode_message(junk))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1", "1"),
        ("-7", "-7"),
        ("1.50", "1.50"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("true", "true"),
        ("false", "false"),
        ('"x"', "x"),
        (' "\\u4e2d" ', "中"),
        ('["a", 1, null]', "a, 1"),
    ],
)
def test_header_values_become_texts_as_their_sender_wrote_them(value: str, text: str) -> None:
    assert decode_message(f'{{"headers":{{"ack":{value}}}}}'.encode()).headers == {"ack": text}


def test_a_header_that_is_null_is_absent() -> None:
    frame = b'{"headers":{"cmd":"create","mq":"M","mqType":null,"mqMask":null,"MQ":null},"url":null,"status":null}'
    assert decode_message(frame) == Message({"cmd": "create", "mq": "M"})


def test_protocol_headers_are_known_in_any_case_and_others_stay_as_sent() -> None:
    message = decode_message(b'{"headers":{"CMD":"pub","mqtype":"disk","Content-Type":"a","X-Mine":"b"}}')
    assert message.headers == {"cmd": "pub", "mqType": "disk", "content-type": "a", "X-Mine": "b"}


def test_unknown_fields_are_ignored_and_null_fields_are_absent() -> None:
    message = decode_message(b'{"headers":{"id":"1"},"topic":"x","body":null,"method":null}')
    assert message == Message({"id": "1"})


def test_a_flat_sample_is_taken_when_there_are_no_headers() -> None:
    message = decode_message(b'{"cmd":"pub","mq":"M","window":5,"body":"b"}')
    assert message == Message({"cmd": "pub", "mq": "M", "window": "5"}, body=b"b", body_kind="text")
    assert decode_message(b'{"headers":{"id":"1"},"cmd":"pub"}') == Message({"id": "1"})
    assert decode_message(b'{"mq":"M","body":[1]}') == Message({}, body=b"[1]")
    assert decode_message(b'{"body":"\\"cmd\\""}') == Message({}, body=b'"cmd"', body_kind="text")


MALFORMED = [
    *(b"", b"[]", b"1", b"null", b'"x"', b"{", b'{"headers":[]}', b'{"headers":"x"}', b"\xef\xbb\xbf{}", b"{} {}"),
    *(b'{"headers":{"id":{"a":1}}}', b'{"headers":{"id":[{}]}}', b'{"url":{}}', b'{"method":{}}', b"{'a':1}"),
    *(b'{"status":"x"}', b'{"status":99}', b'{"status":1000}', b'{"status":2e2}', b'{"status":-200}', b'{"body":NaN}'),
    *(b'{"body":"\\ud800"}', b'{"body":"\xff"}', b'{"body":["\xff"]}', b'{"headers":{"\xff":"a"}}', b'{"body":01}'),
    *(b'{"url":"\xed\xa0\x80"}', b'{"headers":{"id":"\xff"}}', b'{"body":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    *(b'{"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, b'{"headers":{"id":' + b"[" * 5000 + b"]" * 5000 + b"}}"),
]


@pytest.mark.parametrize("frame", MALFORMED, ids=lambda frame: repr(frame[:30]))
def test_what_is_no_message_is_refused_with_400(frame: bytes) -> None:
    with pytest.raises(MalformedMessageError) as caught:
        decode_message(frame)
    assert caught.value.status == 400
    assert len(caught.value.text) < 300


def test_a_message_may_have_as_many_headers_as_a_record_can_keep_and_no_more() -> None:
    def frame(count: int) -> bytes:
        return msgspec.json.encode({"headers": {f"h{number}": "x" for number in range(count)}})

    assert len(decode_message(frame(HEADERS_MAX)).headers) == HEADERS_MAX
    with pytest.raises(MalformedMessageError):
        decode_message(frame(HEADERS_MAX + 1))


numbers = st.sampled_from(
    [b"0", b"-0", b"1", b"-1", b"100", b"9" * 25, b"1.0", b"1e2", b"true", b"null", b'"x"', b"9" * 5000]
)


@given(st.dictionaries(st.sampled_from(["cmd", "id", "window", "x"]), numbers), st.sampled_from([b"", b"[1]"]))
def test_a_number_among_the_headers_is_what_was_written(sent: dict[str, bytes], body: bytes) -> None:
    pairs = b",".join(b'"%b":%b' % (name.encode(), number) for name, number in sent.items())
    message = decode_message(b'{"headers":{%b}%b}' % (pairs, b',"body":' + body if body else b""))
    assert message.body == (body or None)
    assert message.headers == {name: number.strip(b'"').decode() for name, number in sent.items() if number != b"null"}


def test_a_body_of_a_mebibyte_and_an_empty_one_pass() -> None:
    for text in ("x" * 2**20, "中" * 2**18, ""):
        message = Message({"id": "1"}, body=text.encode(), body_kind="text")
        assert decode_message(encode_message(message)) == message


def test_a_delivery_has_where_it_was_read_and_no_status_and_texts_only() -> None:
    message = Message({"id": "p0", "source": "s", "tag": "a"}, "/u", "GET", 200, b"[1]")
    head = delivery_head(message, "MyMQ", 7)
    assert json.loads(encode_deliveries([head], delivery_tail("c"), 0)[0]) == {
        "headers": {
            "id": "p0",
            "source": "s",
            "tag": "a",
            "mq": "MyMQ",
            "offset": "7",
            "channel": "c",
            "window": "0",
        },
        "url": "/u",
        "method": "GET",
        "body": [1],
    }
    assert "window" not in json.loads(encode_deliveries([head], delivery_tail("c"), None)[0])["headers"]


@given(messages(headers), texts, texts, st.integers(0, 2**63 - 1), st.none() | st.integers(-5, 2**31))
def test_deliveries_that_share_a_head_are_independent(
    message: Message, mq: str, channel: str, offset: int, window: int | None
) -> None:
    head = delivery_head(message, mq, offset)
    encode_deliveries([head], delivery_tail("another"), 99)
    understood = decode_message(encode_deliveries([head], delivery_tail(channel), window)[0])
    place = {"mq": mq, "offset": str(offset), "channel": channel}
    if window is not None:
        place["window"] = str(window)
    assert understood.headers.items() >= place.items()
    assert ("window" in understood.headers) == (window is not None)
    assert understood.status is None
    assert understood.url == message.url


@given(st.integers(0, 40), st.integers(-5, 1100))
def test_each_delivery_says_what_was_left_of_the_window_behind_it(count: int, window: int) -> None:
    heads = [delivery_head(Message({"id": "i"}), "M", offset) for offset in range(count)]
    said = [json.loads(one)["headers"] for one in encode_deliveries(heads, delivery_tail("c"), window)]
    assert [int(one["offset"]) for one in said] == list(range(count))
    assert [int(one["window"]) for one in said] == [window + count - 1 - at for at in range(count)]


def test_what_was_taken_is_a_list_of_messages_without_channel_and_window() -> None:
    message = Message({"id": "1", "channel": "forged", "window": "9"}, body=b"x", body_kind="text")
    heads = [delivery_head(message, "M", 4), delivery_head(Message({"id": "2"}), "M", 5)]
    assert json.loads(taken(heads)) == [
        {"headers": {"id": "1", "mq": "M", "offset": "4"}, "body": "x"},
        {"headers": {"id": "2", "mq": "M", "offset": "5"}},
    ]
    assert taken([]) == b"[]"


@given(json_bodies)
def test_a_body_is_stored_and_delivered_as_its_sender_wrote_it(body: bytes) -> None:
    message = decode_message(b'{"headers":{"cmd":"pub"},"body": ' + body + b" }")
    assert message.body == body
    assert body in delivery_head(message, "M", 0)
