"""Messages through the log: zbus ones exactly, foreign events as zbus can say them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.protocols.zbus.codec import decode_message, encode_message
from babelbus.protocols.zbus.errors import MalformedMessageError
from babelbus.protocols.zbus.http_mapping import encode_response
from babelbus.protocols.zbus.messages import HEADERS_MAX, Message
from babelbus.protocols.zbus.records import from_record
from tests.protocols.zbus.strategies import as_stored, messages, stored_headers, to_record

RECORD_HEADERS_MAX = 127


@given(messages(stored_headers))
def test_every_part_of_a_message_survives_the_log(message: Message) -> None:
    assert from_record(*to_record(message)) == as_stored(message)


CONTENT_TYPES = [
    *("text/plain", "text/html; charset=gbk", "application/json", "application/json; charset=utf-16", "image/png"),
    *("application/cloudevents+json", "multipart/form-data; boundary=x", "", ";", "text/plain; charset=", "TEXT/x"),
]


@pytest.mark.parametrize("content_type", CONTENT_TYPES)
@given(messages(stored_headers))
def test_a_body_keeps_its_kind_under_every_content_type(content_type: str, message: Message) -> None:
    typed = Message({**message.headers, "content-type": content_type}, body=message.body, body_kind=message.body_kind)
    assert from_record(*to_record(typed)) == as_stored(typed)


def test_the_payload_is_natural_and_the_headers_are_those_of_cloudevents() -> None:
    frame = b'{"headers":{"cmd":"pub","mq":"M","id":"7","source":"u-1","tag":"a.b","x":"y"},"body":"hello"}'
    payload, key, headers = to_record(decode_message(frame))
    assert (payload, key) == (b"hello", b"a.b")
    assert dict(headers) == {
        b"ce_id": b"7",
        b"ce_source": b"zbus:#u-1",
        b"zbus_tag": b"a.b",
        b"x": b"y",
        b"content-type": b"text/plain; charset=utf-8",
        b"zbus.body": b"text+",
    }


@pytest.mark.parametrize(
    ("body", "kind", "sent", "stored"),
    [
        (b'{"a": 1}', "json", None, b"application/json"),
        (b'{"a": 1}', "json", "text/html", b"application/json"),
        (b'{"a": 1}', "json", "application/x+json", b"application/x+json"),
        (b'{"a": 1}', "text", "application/json", b"application/json"),
        (b"x", "text", None, b"text/plain; charset=utf-8"),
        (b"x", "text", "text/html; charset=GBK", b"text/html; charset=utf-8"),
        (b"x", "bytes", None, None),
        (b"x", "bytes", "image/png", b"image/png"),
    ],
)
def test_the_records_content_type_describes_its_payload(
    body: bytes, kind: str, sent: str | None, stored: bytes
) -> None:
    headers = {} if sent is None else {"content-type": sent}
    message = Message(headers, body=body, body_kind=kind)  # type: ignore[arg-type]  # from the table
    payload, _, record_headers = to_record(message)
    assert payload == body
    assert dict(record_headers).get(b"content-type") == stored
    assert from_record(payload, None, record_headers) == as_stored(message)


def test_command_and_secrets_are_not_stored() -> None:
    secrets = {"apiKey": "k", "signature": "s", "signFields": "body"}
    _, _, headers = to_record(Message({"cmd": "pub", "mq": "M", "id": "1", **secrets}))
    assert headers == ((b"ce_id", b"1"), (b"ce_source", b"zbus:#S"))
    assert from_record(b"", None, headers, "M") == Message({"mq": "M", "id": "1", "source": "S"})


def test_the_header_key_is_the_records_key_before_the_tag() -> None:
    assert to_record(Message({"tag": "t"}))[1] == b"t"
    assert to_record(Message({"tag": "t", "key": "k"}))[1] == b"k"
    assert to_record(Message({}))[1] is None
    assert to_record(Message({"key": ""}))[1] == b""


def test_a_message_with_as_many_headers_as_may_be_fits_a_record() -> None:
    headers = {f"h{number}": "x" for number in range(HEADERS_MAX - 1)} | {"content-type": "text/x; charset=gbk"}
    _, _, stored = to_record(Message(headers, "/", "GET", 200, b"x", "text"))
    assert len(stored) <= RECORD_HEADERS_MAX


@pytest.mark.parametrize("size", [0, 1, 2**20])
def test_payloads_of_any_size_pass(size: int) -> None:
    names = {"ключ": "значение"}
    text = Message(names, body=b"x" * size, body_kind="text")
    data = Message(names, body=b"\xff" * size, body_kind="bytes")
    assert [from_record(*to_record(message)) for message in (text, data)] == [as_stored(text), as_stored(data)]


def test_a_header_that_is_no_utf8_is_refused() -> None:
    for headers in ({"id": "\ud800"}, {"x": "\ud800"}, {"tag": "\ud800"}, {"\ud800": "x"}):
        with pytest.raises(MalformedMessageError):
            to_record(Message(headers))


FOREIGN = [
    (b'{"a":1}', b"application/json", b'{"a":1}', "json"),
    (b' {"a":1}\n', b"application/json; charset=utf-8", b'{"a":1}', "json"),
    (b'"x"', b"application/cloudevents+json", b"x", "text"),
    (b'{"a":', b"application/json", b'{"a":', "text"),
    (b'{"a":"\xff"}', b"application/json", b'{"a":"\xff"}', "bytes"),
    (b'{"a":1}', b"text/plain", b'{"a":1}', "text"),
    (b'{"a":1}', None, b'{"a":1}', "text"),
    ("中".encode(), b"image/png", "中".encode(), "text"),
    (b"\xff\x00", None, b"\xff\x00", "bytes"),
    (b"", None, b"", "text"),
    (b"null", b"application/json", None, "json"),
    (None, b"application/json", None, "json"),
]


@pytest.mark.parametrize(("payload", "content_type", "body", "kind"), FOREIGN)
def test_a_foreign_payload_becomes_json_text_or_bytes(
    payload: bytes | None, content_type: bytes | None, body: bytes | None, kind: str
) -> None:
    headers = () if content_type is None else ((b"content-type", content_type),)
    message = from_record(payload, None, headers, "M")
    assert (message.body, message.body_kind) == (body, kind)
    encode_message(message)


def test_a_foreign_payload_that_is_no_text_is_base64_that_says_so() -> None:
    message = from_record(b"\xff\x00", b"k", ((b"ce_id", b"1"), (b"ce_source", b"sbus:uid=1"), (b"t", None)), "M")
    assert encode_message(message) == (
        b'{"headers":{"mq":"M","id":"1","source":"sbus:uid=1","key":"k","content-encoding":"base64"},"body":"/wA="}'
    )


def test_a_foreign_event_keeps_its_headers_but_those_that_say_where_it_was_read() -> None:
    headers = ((b"ce_type", b"t"), (b"type", b"order"), (b"TAG", b"a"), (b"offset", b"9"), (b"Signature", b"s"))
    assert from_record(b"x", None, headers, "M").headers == {"mq": "M", "ce_type": "t", "type": "order", "tag": "a"}


record_headers = st.lists(
    st.tuples(
        st.sampled_from([b"ce_source", b"ce_id", b"content-type", b"zbus.body", b"zbus.status", b"zbus_content-type"])
        | st.binary(max_size=8),
        st.none()
        | st.sampled_from([b"zbus:", b"zbus:a#b", b"json", b"text", b"json+", b"bytes", b"application/json", b"200"])
        | st.binary(max_size=8),
    ),
    max_size=6,
).map(tuple)


@given(st.none() | st.binary(max_size=20), st.none() | st.binary(max_size=5), record_headers)
def test_whatever_stands_in_the_log_is_a_message_that_can_be_sent(
    payload: bytes | None, key: bytes | None, headers: tuple[tuple[bytes, bytes | None], ...]
) -> None:
    message = from_record(payload, key, headers, "M")
    assert decode_message(encode_message(message)).headers.keys() >= message.headers.keys()


def test_a_forged_record_cannot_say_more_than_its_own_message() -> None:
    headers = ((b"ce_source", b"zbus:x"), (b"content-type", b"application/json"))
    message = from_record(b'1,"headers":{"status":"200"}', None, headers)
    assert message.body_kind == "text"


def test_a_message_goes_from_websocket_through_the_log_to_http() -> None:
    frame = b'{"headers":{"id":"1","content-type":"text/html"},"status":200,"body":"<p>\\u4e2d</p>"}'
    response = encode_response(from_record(*to_record(decode_message(frame))))
    assert response.body == "<p>中</p>".encode()
    assert ("content-type", "text/html") in response.headers
