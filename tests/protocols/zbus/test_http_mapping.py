"""HTTP both ways: each row of the tables of section 2.4, and what HTTP cannot carry."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.protocols.zbus.codec import encode_message
from babelbus.protocols.zbus.errors import MalformedMessageError, RequestError, UnsendableMessageError
from babelbus.protocols.zbus.http_mapping import decode_request, encode_response, target_of
from babelbus.protocols.zbus.messages import HEADERS_MAX, BodyKind, Message, json_reply, published, text_reply
from babelbus.wire.http import Request, RequestDecoder
from babelbus.wire.http import encode_response as encode_http
from tests.protocols.zbus.strategies import headers, messages, values

PUB = (
    b"POST / HTTP/1.1\r\nHost: localhost:15555\r\ncmd: pub\r\nmq: MyMQ\r\nid: 42\r\n"
    b"Content-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello"
)


def cut(data: bytes) -> Request:
    decoder = RequestDecoder()
    decoder.receive_data(data)
    (request,) = decoder.requests()
    return request


def posted(body: bytes, content_type: str | None) -> Message:
    return decode_request(Request("POST", "/", {} if content_type is None else {"content-type": content_type}, body))


def test_the_request_of_the_specification() -> None:
    given_headers = {"cmd": "pub", "mq": "MyMQ", "id": "42", "content-type": "text/plain"}
    delivered = {"host": "localhost:15555", **given_headers, "content-length": "5"}
    assert decode_request(cut(PUB)) == Message(delivered, "/", "POST", None, b"hello", "text")


def test_the_response_of_the_specification() -> None:
    response = encode_response(text_reply("42", 200, published("MyMQ")))
    assert encode_http(response.status, response.headers, response.body) == (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; charset=utf8\r\nid: 42\r\ncontent-length: 17\r\n\r\n"
        b"OK, PUB (mq=MyMQ)"
    )


def test_header_names_are_the_protocols_and_those_of_the_connection_are_dropped() -> None:
    request = cut(
        b"GET / HTTP/1.1\r\nHost: h\r\nMQTYPE: disk\r\nmqmask: 1\r\nApiKey: k\r\nX-Own: v\r\nConnection: keep-alive\r\n"
        b"Keep-Alive: 5\r\nTE: trailers\r\n\r\n"
    )
    assert decode_request(request).headers == {
        "host": "h",
        "mqType": "disk",
        "mqMask": "1",
        "apiKey": "k",
        "x-own": "v",
    }


@pytest.mark.parametrize(
    ("target", "url"),
    [
        ("/", "/"),
        ("/a%20b/c?k=v+w", "/a b/c?k=v w"),
        ("/%D0%9E?x=%26", "/О?x=&"),
        ("/\xd0\x9e", "/О"),
        ("http://host:1/a?b", "/a?b"),
        ("http://host", "/"),
    ],
)
def test_the_url_is_the_target_decoded_as_a_whole(target: str, url: str) -> None:
    assert decode_request(Request("GET", target, {})).url == url


@pytest.mark.parametrize("target", ["/%zz", "/%ff", "/%", "/\xff"])
def test_a_target_that_is_no_text_is_refused(target: str) -> None:
    with pytest.raises(MalformedMessageError):
        decode_request(Request("GET", target, {}))


def test_the_target_for_routing_keeps_its_escapes() -> None:
    assert target_of(Request("GET", "/?cmd=pub&body=a%26b", {})) == "/?cmd=pub&body=a%26b"
    assert target_of(Request("GET", "http://h/?cmd=pub", {})) == "/?cmd=pub"
    assert target_of(Request("GET", "/?mq=\xd0\x9e", {})) == "/?mq=О"


def test_header_values_are_utf8_or_latin() -> None:
    request = Request("GET", "/", {"mq": "Очередь".encode().decode("latin-1"), "tag": "caf\xe9", "id": "1"})
    assert decode_request(request).headers == {"mq": "Очередь", "tag": "café", "id": "1"}


@pytest.mark.parametrize(
    ("content_type", "body", "wanted", "kind"),
    [
        ("text/plain", b"hello", b"hello", "text"),
        ("text/html; charset=GBK", "中".encode("gbk"), "中".encode(), "text"),
        ('text/plain; charset="iso-8859-1"', b"caf\xe9", "café".encode(), "text"),
        ("TEXT/PLAIN;charset=UTF-8", "中".encode(), "中".encode(), "text"),
        ("application/json", b'{"a": 1}', b'{"a": 1}', "text"),
        ("application/json-rpc", b"no json", b"no json", "text"),
        ("application/octet-stream", b"\xff\x00", b"\xff\x00", "bytes"),
        ("image/png", b"text", b"text", "bytes"),
        ("", b"x", b"x", "bytes"),
        (None, b"hello", b"hello", "bytes"),
    ],
)
def test_what_a_request_body_becomes(content_type: str | None, body: bytes, wanted: bytes, kind: str) -> None:
    message = posted(body, content_type)
    assert (message.body, message.body_kind) == (wanted, kind)


@pytest.mark.parametrize("content_type", ["text/plain", "application/json", "multipart/form-data", "image/png", None])
def test_an_empty_body_is_none(content_type: str | None) -> None:
    assert posted(b"", content_type).body is None


def test_an_urlencoded_form_becomes_attributes() -> None:
    message = posted(b"a=1&b=x+y%26&a=2&c=", "application/x-www-form-urlencoded")
    assert message.body_kind == "json"
    assert json.loads(message.body or b"") == {"attributes": {"a": "2", "b": "x y&", "c": ""}, "files": {}}


def test_a_form_in_parts_becomes_attributes_and_files() -> None:
    body = (
        b'--XX\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
        b'--XX\r\nContent-Disposition: form-data; name="f"; filename="n \xd0\x9e.bin"\r\n'
        b"Content-Type: image/png\r\n\r\n"
        b"\x00\xff\r\n--X\r\n--XX--\r\n"
    )
    message = posted(body, 'multipart/form-data; boundary="XX"')
    data = base64.b64encode(b"\x00\xff\r\n--X").decode()
    assert json.loads(message.body or b"") == {
        "attributes": {"a": "1"},
        "files": {"f": [{"fileName": "n О.bin", "contentType": "image/png", "data": data}]},
    }


REFUSED = [
    ("text/plain", b"\xff"),
    ("text/plain; charset=ascii", b"\xff"),
    ("text/plain; charset=utf-16", b"\x00\xd8"),
    ("text/plain; charset=zlib", b"x"),
    ("text/plain; charset=punycode", b"x"),
    ("text/plain; charset=no-such", b"x"),
    ("application/x-www-form-urlencoded", b"\xff"),
    ("application/x-www-form-urlencoded", b"a=b&" * 1001),
    ("multipart/form-data", b"--XX--"),
]


@pytest.mark.parametrize(("content_type", "body"), REFUSED, ids=lambda value: repr(value[:40]))
def test_a_body_that_is_not_what_its_type_says_is_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(MalformedMessageError) as caught:
        posted(body, content_type)
    assert caught.value.status == 400


def test_a_request_may_have_as_many_headers_as_a_message_and_no_more() -> None:
    decode_request(Request("GET", "/", {f"h{number}": "" for number in range(HEADERS_MAX)}))
    with pytest.raises(MalformedMessageError):
        decode_request(Request("GET", "/", {f"h{number}": "" for number in range(HEADERS_MAX + 1)}))


@pytest.mark.parametrize(
    ("content_type", "body", "kind", "sent"),
    [
        (None, b"[1, 2]", "json", b"[1, 2]"),
        (None, b"x", "text", b'"x"'),
        (None, b"\xff", "bytes", b'"/w=="'),
        ("application/json; charset=utf8", b"x", "text", b'"x"'),
        ("Application/JSON", b"1", "json", b"1"),
        ("text/html", "<p>中".encode(), "text", "<p>中".encode()),
        ("image/png", b"\xff", "bytes", b"\xff"),
        ("text/plain", b'{"a": 1}', "json", b'{"a": 1}'),
        ("text/plain", None, "json", b""),
    ],
)
def test_what_a_response_body_is(content_type: str | None, body: bytes | None, kind: BodyKind, sent: bytes) -> None:
    message = Message({} if content_type is None else {"content-type": content_type}, None, None, 200, body, kind)
    response = encode_response(message)
    assert response.body == sent
    assert dict(response.headers)["content-type"] == (content_type or "application/json; charset=utf8")


def test_nothing_to_take_is_604_with_an_empty_list() -> None:
    response = encode_response(json_reply("1", 604, b"[]", mq="M", channel="c"))
    assert (response.status, response.body) == (604, b"[]")
    assert encode_response(Message({}, status=604)).body == b"[]"
    assert encode_http(response.status, response.headers, response.body).startswith(b"HTTP/1.1 604 ")


def test_an_answer_without_status_is_200_and_some_have_no_body() -> None:
    assert encode_response(Message({})).status == 200
    for status in (204, 304):
        assert encode_response(Message({}, status=status, body=b"x", body_kind="text")).body == b""
    with pytest.raises(UnsendableMessageError):
        encode_response(Message({}, status=101))


def test_headers_of_another_connection_are_not_answered_and_secrets_never() -> None:
    given_headers = {
        "Content-Length": "999",
        "transfer-encoding": "chunked",
        "Connection": "close",
        "host": "h",
        "Upgrade": "x",
        "apiKey": "k",
        "signature": "s",
        "set-cookie": "a=b",
        "location": "/x",
        "id": "1",
    }
    response = encode_response(Message({**given_headers, "content-type": "text/plain"}))
    assert dict(response.headers) == {"set-cookie": "a=b", "location": "/x", "id": "1", "content-type": "text/plain"}


BAD_HEADERS = [
    ("id", "a\r\nx: y"),
    ("id", "a\n"),
    ("id", "a\r"),
    ("id", "a\0"),
    ("x: y\r\nz", "1"),
    ("a b", "1"),
    ("", "1"),
]


@pytest.mark.parametrize(("name", "value"), BAD_HEADERS)
def test_a_header_that_would_split_the_response_is_refused(name: str, value: str) -> None:
    with pytest.raises(UnsendableMessageError) as caught:
        encode_response(Message({name: value}))
    assert caught.value.status == 500


def test_an_answer_with_a_name_that_is_not_ascii_is_utf8() -> None:
    response = encode_response(text_reply("идентификатор", 200, "OK"))
    assert "id: идентификатор\r\n".encode() in encode_http(response.status, response.headers, response.body)


@given(messages(headers))
def test_every_message_can_be_answered_or_is_refused(message: Message) -> None:
    try:
        response = encode_response(message)
    except UnsendableMessageError:
        return
    raw = encode_http(response.status, response.headers, response.body)
    assert raw.count(b"\r\n\r\n") >= 1
    assert raw.endswith(response.body)


@given(
    st.text(st.characters(max_codepoint=255), max_size=30),
    st.dictionaries(st.sampled_from(["content-type", "mq"]), st.text(st.characters(max_codepoint=255), max_size=20)),
    st.binary(max_size=50),
)
def test_any_request_is_a_message_that_websocket_can_carry_or_is_refused(
    target: str, given_headers: dict[str, str], body: bytes
) -> None:
    try:
        message = decode_request(Request("POST", "/" + target, given_headers, body))
    except RequestError:
        return
    encode_message(message)


@given(values)
def test_json_in_a_request_reaches_websocket_as_its_text(value: object) -> None:
    text = json.dumps(value)
    message = posted(text.encode(), "application/json")
    assert json.loads(encode_message(message))["body"] == text
