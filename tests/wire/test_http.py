"""HTTP/1.1 both ways: the examples of RFC 9112, any cut, each limit at and one past it, each way to be malformed."""

import tracemalloc
from collections.abc import Sequence
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.errors import LocalProtocolError
from babelbus.wire.http import (
    CONTINUE,
    HttpError,
    Request,
    RequestDecoder,
    ResponseDecoder,
    encode_error,
    encode_response,
    encode_stream_head,
    parse_form,
    parse_query,
    percent_decode,
    split_target,
)
from tests.support.http import encode_request

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /p HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
WEBSOCKET = b"GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: WebSocket\r\n\r\n"


def read(data: bytes, decoder: RequestDecoder | None = None) -> list[Request]:
    decoder = decoder or RequestDecoder()
    decoder.receive_data(data)
    return decoder.requests()


def refusal(data: bytes, decoder: RequestDecoder | None = None) -> HttpError:
    with pytest.raises(HttpError) as caught:
        read(data, decoder)
    return caught.value


def cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    chunks, position, number = [], 0, 0
    while position < len(data):
        size = sizes[number % len(sizes)] if sizes else len(data)
        chunks.append(data[position : position + size])
        position += size
        number += 1
    return chunks


def head(*lines: str, first: str = "GET / HTTP/1.1") -> bytes:
    return "".join(f"{line}\r\n" for line in (first, "Host: a", *lines, "")).encode("latin-1")


def test_the_example_of_rfc_9112_section_2_1_is_read() -> None:
    data = b"GET /hello.txt HTTP/1.1\r\nUser-Agent: curl/7.64.1\r\nHost: www.example.com\r\nAccept-Language: en, mi"
    data += b"\r\n\r\n"
    headers = {"user-agent": "curl/7.64.1", "host": "www.example.com", "accept-language": "en, mi"}
    assert read(data) == [Request("GET", "/hello.txt", headers)]


def test_pipelined_requests_come_in_order_with_their_bodies() -> None:
    assert [(one.method, one.body) for one in read(GET + POST + GET)] == [
        ("GET", b""),
        ("POST", b"hello"),
        ("GET", b""),
    ]


def test_the_headers_of_a_request_belong_to_it_alone() -> None:
    first, second = read(GET + GET)
    first.headers["host"] = "changed"
    assert second.headers == {"host": "a"}
    assert read(GET)[0].headers == {"host": "a"}


def test_names_are_lower_case_and_repeated_ones_are_joined() -> None:
    request = read(head("X-A: 1", "x-a:2 ", "X-B:\t y z \t", "X-Empty:", "X-C: caf\xe9"))[0]
    assert request.headers == {"host": "a", "x-a": "1, 2", "x-b": "y z", "x-empty": "", "x-c": "caf\xe9"}
    assert read(head("Cookie: a=1", "cookie: b=2; c=3"))[0].headers["cookie"] == "a=1; b=2; c=3"


def test_a_body_in_chunks_is_put_together_without_extensions_and_trailers() -> None:
    body = b'4\r\nWiki\r\n6;name="v"\r\npedia \r\nE \r\nin \r\n\r\nchunks.\r\n0\r\nExpires: never\r\n\r\n'
    assert [one.body for one in read(CHUNKED + body + POST)] == [b"Wikipedia in \r\n\r\nchunks.", b"hello"]


@pytest.mark.parametrize(
    ("first", "connection", "keep_alive"),
    [
        ("GET / HTTP/1.1", None, True),
        ("GET / HTTP/1.1", "Close", False),
        ("GET / HTTP/1.1", "x, close", False),
        ("GET / HTTP/1.1", "keep-alive", True),
        ("GET / HTTP/1.0", None, False),
        ("GET / HTTP/1.0", "Keep-Alive", True),
        ("GET / HTTP/1.0", "keep-alive, close", False),
        ("GET / HTTP/1.7", None, True),
    ],
)
def test_a_connection_stays_open_as_section_9_3_says(first: str, connection: str | None, keep_alive: bool) -> None:
    lines = [] if connection is None else [f"Connection: {connection}"]
    assert read(head(*lines, first=first))[0].keep_alive is keep_alive


def test_nothing_behind_a_request_that_closes_is_read() -> None:
    decoder = RequestDecoder()
    assert len(read(head("Connection: close") + GET, decoder)) == 1
    assert read(b"garbage\r\n\r\n", decoder) == []
    assert not decoder.unfinished_bytes


def test_behind_a_request_for_a_websocket_the_bytes_are_left_to_whom_they_belong() -> None:
    decoder = RequestDecoder()
    assert [one.target for one in read(GET + WEBSOCKET + b"\x81\x00", decoder)] == ["/", "/ws"]
    assert read(b"\x82\x00", decoder) == []
    assert decoder.unread() == b"\x81\x00\x82\x00"
    assert decoder.unread() == b""


def test_a_websocket_that_is_not_had_goes_on_as_http() -> None:
    decoder = RequestDecoder()
    assert len(read(WEBSOCKET + POST, decoder)) == 1
    decoder.go_on()
    assert [one.body for one in decoder.requests()] == [b"hello"]


def test_a_websocket_that_is_not_had_on_a_connection_that_closes_is_the_last_request() -> None:
    decoder = RequestDecoder()
    read(WEBSOCKET.replace(b"Upgrade\r\n", b"Upgrade, close\r\n", 1) + POST, decoder)
    decoder.go_on()
    assert decoder.requests() == []
    assert read(POST, decoder) == []


def test_a_client_that_waits_to_continue_is_told_once_and_behind_the_requests_before() -> None:
    decoder = RequestDecoder()
    waiting = POST.replace(b"Content", b"Expect: 100-Continue\r\nContent")
    assert len(read(GET + waiting[:-5], decoder)) == 1
    assert decoder.take_continue()
    assert not decoder.take_continue()
    assert [one.body for one in read(b"hello", decoder)] == [b"hello"]
    assert not decoder.take_continue()
    read(CHUNKED.replace(b"Host", b"Expect: 100-continue\r\nHost"), decoder)
    assert decoder.take_continue()


def test_nobody_is_told_to_continue_who_does_not_wait() -> None:
    decoder = RequestDecoder()
    read(POST[:-5], decoder)
    assert not decoder.take_continue()
    older = RequestDecoder()
    read(POST.replace(b"1.1", b"1.0").replace(b"Host", b"Expect: 100-continue\r\nHost")[:-5], older)
    assert not older.take_continue()
    assert CONTINUE == b"HTTP/1.1 100 Continue\r\n\r\n"


REFUSED = [
    (400, b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n"),
    (400, b"GET /\r\n\r\n"),
    (400, b" GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
    (400, b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n"),
    (400, b"GET / http/1.1\r\nHost: a\r\n\r\n"),
    (400, b"G(T / HTTP/1.1\r\nHost: a\r\n\r\n"),
    (400, b"GET index HTTP/1.1\r\nHost: a\r\n\r\n"),
    (400, b"GET * HTTP/1.1\r\nHost: a\r\n\r\n"),
    (400, b"GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n"),
    (400, b"\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n"),
    (400, b"GET / HTTP/1.1\nHost: a\n\n"),
    (400, b"GET / HTTP/1.1\r\nHost: a\n"),
    (400, b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n"),
    (400, b"GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n"),
    (400, b"GET / HTTP/1.1\r\n\r\n"),
    (400, head("Host: b")),
    (400, head("Host: a")),
    (400, head("X : b")),
    (400, head(" X: b")),
    (400, head("X: a", " folded")),
    (400, head("X: a", "\tfolded")),
    (400, head("X")),
    (400, head(": a")),
    (400, head("X: a\0b")),
    (400, head("X\xe9: a")),
    (400, head("Content-Length: 1", "Content-Length: 2")),
    (400, head("Content-Length: 1, 1")),
    (400, head("Content-Length: -1")),
    (400, head("Content-Length: +1")),
    (400, head("Content-Length: 0x1")),
    (400, head("Content-Length: 1 1")),
    (400, head("Content-Length:")),
    (400, head("Content-Length: \xb2")),
    (400, head("Content-Length: 1", "Transfer-Encoding: chunked")),
    (400, head("Transfer-Encoding: chunked", first="POST / HTTP/1.0")),
    (400, head("Transfer-Encoding: chunked, chunked")),
    (400, head("Transfer-Encoding: chunked", "Transfer-Encoding: gzip")),
    (400, head("Transfer-Encoding:")),
    (413, head("Content-Length: 99999999999999999999999999")),
    (413, head("Content-Length: 9223372036854775807")),
    (417, head("Expect: 200-ok")),
    (501, head("Transfer-Encoding: gzip, chunked")),
    (501, head("Transfer-Encoding: xchunked")),
    (501, head("Transfer-Encoding: identity")),
    (505, b"PRI * HTTP/2.0\r\n\r\n"),
    (505, b"GET / HTTP/0.9\r\nHost: a\r\n\r\n"),
    (400, CHUNKED + b"\r\n"),
    (400, CHUNKED + b"-1\r\n"),
    (400, CHUNKED + b"0x5\r\nhello\r\n"),
    (400, CHUNKED + b"5 5\r\n"),
    (400, CHUNKED + b" 5\r\n"),
    (400, CHUNKED + b"g\r\n"),
    (400, CHUNKED + b"5\nhello\r\n"),
    (400, CHUNKED + b"5;a\rb\r\nhello\r\n"),
    (400, CHUNKED + b"5\r\nhello0\r\n\r\n"),
    (400, CHUNKED + b"5\r\nhello\n\n"),
    (400, CHUNKED + b"00000000000000001\r\n"),
    (400, CHUNKED + b"5" + b";" * 300),
    (400, CHUNKED + b"0\r\nbad trailer\r\n\r\n"),
    (400, CHUNKED + b"0\r\nX: a\n\r\n"),
    (413, CHUNKED + b"ffffffffffffffff\r\n"),
]


@pytest.mark.parametrize(("status", "data"), REFUSED)
def test_what_could_be_understood_in_two_ways_is_refused(status: int, data: bytes) -> None:
    assert refusal(data).status == status


@pytest.mark.parametrize(("status", "data"), REFUSED)
def test_what_stood_before_a_bad_request_is_given_first_and_nothing_after_it(status: int, data: bytes) -> None:
    decoder = RequestDecoder()
    assert len(read(GET + POST + data + b"0", decoder)) == 2
    assert decoder.error is not None
    assert decoder.error.status == status
    assert refusal(GET, decoder).status == status
    assert not decoder.unfinished_bytes


def test_the_same_length_said_twice_is_that_length() -> None:
    assert read(head("Content-Length: 1", "Content-Length: 1") + b"x")[0].body == b"x"


def test_one_empty_line_before_a_request_is_forgiven() -> None:
    assert len(read(POST + b"\r\n" + GET + b"\r\n")) == 2


def test_a_host_is_not_needed_in_http_1_0() -> None:
    assert len(read(b"GET / HTTP/1.0\r\n\r\n")) == 1


def test_a_head_may_have_as_many_bytes_as_the_limit_says_and_no_more() -> None:
    assert len(read(GET + GET, RequestDecoder(head_bytes_max=len(GET)))) == 2
    assert refusal(GET, RequestDecoder(head_bytes_max=len(GET) - 1)).status == 431
    assert refusal(GET[:-3], RequestDecoder(head_bytes_max=len(GET) - 3)).status == 431
    assert read(GET[:-3], RequestDecoder(head_bytes_max=len(GET) - 2)) == []
    assert refusal(b"GET /" + b"x" * 100, RequestDecoder(head_bytes_max=100)).status == 414


def test_a_head_may_have_as_many_headers_as_the_limit_says_and_no_more() -> None:
    data = head("X: 1", "X: 2")
    assert len(read(data, RequestDecoder(headers_max=3))) == 1
    assert refusal(data, RequestDecoder(headers_max=2)).status == 431


def test_a_body_may_have_as_many_bytes_as_the_limit_says_and_no_more() -> None:
    assert len(read(POST, RequestDecoder(body_bytes_max=5))) == 1
    assert refusal(POST[:-5], RequestDecoder(body_bytes_max=4)).status == 413
    chunks = CHUNKED + b"2\r\nhe\r\n3\r\n"
    assert len(read(chunks + b"llo\r\n0\r\n\r\n", RequestDecoder(body_bytes_max=5))) == 1
    assert refusal(chunks, RequestDecoder(body_bytes_max=4)).status == 413


def test_trailers_are_bounded_like_headers() -> None:
    trailers = b"0\r\nX: 1\r\nX: 2\r\n\r\n"
    assert len(read(CHUNKED + trailers, RequestDecoder(headers_max=2))) == 1
    assert refusal(CHUNKED + trailers.replace(b"X: 2", b"X: 2\r\nX: 3"), RequestDecoder(headers_max=2)).status == 431
    endless = CHUNKED + b"0\r\nX: " + b"x" * 100
    assert refusal(endless, RequestDecoder(head_bytes_max=len(CHUNKED))).status == 431


def test_a_peer_that_says_something_else_each_time_does_not_fill_the_memory() -> None:
    decoder = RequestDecoder()
    tracemalloc.start()
    try:
        for number in range(5000):
            name = f"x-{number:01000}"
            assert read(head(f"{name}: {number}"), decoder)[0].headers[name] == str(number)
        assert tracemalloc.get_traced_memory()[0] < 3_000_000
    finally:
        tracemalloc.stop()


requests = st.sampled_from(
    [
        GET,
        POST,
        CHUNKED + b"3\r\nabc\r\n1;x\r\nd\r\n0\r\n\r\n",
        CHUNKED + b"0\r\nA: b\r\n\r\n",
        b"\r\n" + head("X: y", "Expect: 100-continue", "Content-Length: 3") + b"\r\n\n",
        head("Connection: keep-alive", first="GET / HTTP/1.0"),
    ]
)


@given(st.lists(requests), st.lists(st.integers(min_value=1, max_value=40)))
def test_requests_do_not_depend_on_how_the_bytes_were_cut(sent: list[bytes], sizes: list[int]) -> None:
    decoder, received = RequestDecoder(), []
    for chunk in cut(b"".join(sent), sizes):
        decoder.receive_data(chunk)
        received += decoder.requests()
    assert received == [one for data in sent for one in read(data)]
    assert not decoder.unfinished_bytes


@given(st.lists(requests | st.binary(max_size=30) | st.sampled_from([b"\r\n", b"\n", b":", b" ", b"0"]), max_size=8))
def test_garbage_raises_nothing_but_our_errors_and_the_same_however_it_is_cut(parts: list[bytes]) -> None:
    data = b"".join(parts)
    outcomes = []
    for chunks in ([data], cut(data, [1])):
        decoder, received = RequestDecoder(), []
        for chunk in chunks:
            decoder.receive_data(chunk)
            try:
                received += decoder.requests()
            except HttpError:
                pass
        outcomes.append((received, decoder.error and decoder.error.status))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/a/b?c=d?e", "/a/b", "c=d?e"),
        ("/", "/", ""),
        ("HTTP://host:80/a?b", "/a", "b"),
        ("http://host", "/", ""),
        ("http://host?q", "/", "q"),
        ("//a", "//a", ""),
        ("*", "*", ""),
    ],
)
def test_a_target_is_a_path_and_a_query(target: str, path: str, query: str) -> None:
    assert split_target(target) == (path, query)
    assert (Request("GET", target, {}).path, Request("GET", target, {}).query) == (path, query)


def test_escapes_are_bytes_of_utf_8() -> None:
    assert percent_decode("/a%2Fb/%c3%a4+%00") == "/a/b/ä+\0"
    assert percent_decode("a+b", plus=True) == "a b"
    assert percent_decode("\xc3\xa4") == "ä"
    assert parse_query("a=1&b&=c&&a=%26+x=y") == [("a", "1"), ("b", ""), ("", "c"), ("a", "& x=y")]


@pytest.mark.parametrize("text", ["%", "%4", "%zz", "%ff", "\xff", "%ed%a0%80"])
def test_an_escape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(HttpError) as caught:
        percent_decode(text)
    assert caught.value.status == 400


def test_a_response_says_its_length() -> None:
    assert encode_response(200, [("content-type", "text/plain")], b"hi") == (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nhi"
    )
    assert encode_response(604, [], b"[]", keep_alive=False) == (
        b"HTTP/1.1 604 Unknown Status (604)\r\nconnection: close\r\ncontent-length: 2\r\n\r\n[]"
    )
    assert encode_response(200, [], b"hi", head_only=True) == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
    assert encode_response(204) == b"HTTP/1.1 204 No Content\r\n\r\n"
    assert encode_error(HttpError(405, "no", [("allow", "GET")])) == (
        b"HTTP/1.1 405 Method Not Allowed\r\nallow: GET\r\ncontent-type: text/plain; charset=utf-8\r\n"
        b"connection: close\r\ncontent-length: 3\r\n\r\nno\n"
    )


@pytest.mark.parametrize(
    "header",
    [
        ("x", "a\r\nb: c"),
        ("x", "a\nb"),
        ("x", "a\0"),
        ("x", "€"),
        ("x\r\ny", "a"),
        ("x y", "a"),
        ("", "a"),
        ("x:", "a"),
        ("Content-Length", "1"),
        ("transfer-encoding", "chunked"),
    ],
)
def test_a_header_that_would_be_something_else_on_the_wire_is_refused(header: tuple[str, str]) -> None:
    for encode in (encode_response, encode_stream_head):
        with pytest.raises(LocalProtocolError):
            encode(200, [header])
    with pytest.raises(LocalProtocolError):
        encode_request("GET", "/", [header], host="a")


def test_a_response_that_has_no_body_or_no_status_is_not_made_with_one() -> None:
    for status in (101, 204, 304):
        with pytest.raises(LocalProtocolError):
            encode_response(status, [], b"x")
    for status in (0, 99, 1000):
        with pytest.raises(LocalProtocolError):
            encode_response(status)


@pytest.mark.parametrize(("method", "target"), [("G T", "/"), ("", "/"), ("GET", "/a b"), ("GET", ""), ("GET", "/ä")])
def test_a_request_that_would_be_something_else_on_the_wire_is_refused(method: str, target: str) -> None:
    with pytest.raises(LocalProtocolError):
        encode_request(method, target, host="a")


def test_what_a_client_asks_is_what_a_server_reads() -> None:
    data = encode_request("POST", "/x?y", [("X-A", "b")], b"body", host="h:1", keep_alive=False)
    headers = {"host": "h:1", "x-a": "b", "content-length": "4", "connection": "close"}
    assert read(data) == [Request("POST", "/x?y", headers, b"body", keep_alive=False)]


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\nab", b"ab"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab", None),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n", None),
        (b"HTTP/1.1 200 OK\r\n", None),
        (b"", None),
    ],
)
def test_the_end_of_a_connection_completes_a_response_without_a_length(data: bytes, body: bytes | None) -> None:
    decoder = ResponseDecoder()
    decoder.receive_data(data)
    assert decoder.responses() == []
    response = decoder.receive_end()
    assert (None if response is None else (response.status, response.body, response.keep_alive)) == (
        None if body is None else (200, body, False)
    )
    assert decoder.receive_end() is None


@given(st.text(alphabet="ab=&+%0aFf \u00e4\u20ac\n") | st.text())
def test_forms_are_read_as_browsers_and_urllib_read_them(text: str) -> None:
    assert parse_form(text, 10**6) == parse_qsl(text, keep_blank_values=True)


@pytest.mark.parametrize("text", ["a=%FF", "%ED%A0%80=b", "a=\u00e4%C3", "a=%zz%FF"])
def test_a_strict_form_has_no_bytes_that_are_not_utf_8(text: str) -> None:
    assert "\ufffd" in str(parse_form(text, 1))
    with pytest.raises(UnicodeDecodeError):
        parse_form(text, 1, "strict")
    assert parse_form("a=%\u00e4+%%41%4", 1, "strict") == [("a", "%\u00e4 %A%4")]
    assert parse_form("a=%C3%A4%zz", 1, "strict") == [("a", "\u00e4%zz")]


def test_a_form_has_a_limit_of_fields() -> None:
    assert len(parse_form("&".join(["a=1"] * 5), 5)) == 5
    with pytest.raises(ValueError, match="6 fields, limit 5"):
        parse_form("&".join(["a=1"] * 6), 5)
