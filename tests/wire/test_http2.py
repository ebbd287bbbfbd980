"""HTTP/2 on the side of a server: golden bytes both ways, any cut, every window, each limit and each malformed form."""

from collections.abc import Callable

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.wire.http2.connection import BLOCKS_MAX, GOODBYE, Aborted, Connection, Data, Event, Opened
from babelbus.wire.http2.frames import Http2Error
from babelbus.wire.http2.headers import LIST_BYTES_MAX, HeaderDecoder
from tests.support.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Frame,
    block,
    body_of,
    frame,
    frames,
    number,
    settings,
)

NO_ERROR, PROTOCOL, INTERNAL, FLOW, TIMEOUT, CLOSED, SIZE, REFUSED, CANCEL, COMPRESSION, CONNECT, CALM = range(12)
OPEN = frame(HEADERS, END_HEADERS, 1, block())
PING_FRAME = frame(PING, payload=b"12345678")
ASKED = frame(HEADERS, END_HEADERS | END_STREAM, 1, block())
HEAD, TRAILERS = b"\x88", b"\x00\x0bgrpc-status\x010"


def begun(*, streams_max: int = 100, **values: int) -> Connection:
    """A connection whose client has begun, without the frames of the server's beginning."""
    made = Connection(streams_max=streams_max)
    made.receive_data(PREFACE + settings(**values), 0.0)
    made.answers.take_output()
    return made


def output(connection: Connection) -> list[Frame]:
    return list(frames(connection.answers.take_output()))


def code_of(send: Callable[[], object]) -> int:
    with pytest.raises(Http2Error) as caught:
        send()
    return caught.value.code


def refusal(connection: Connection, data: bytes) -> int:
    """The code with which a connection ends."""
    code = code_of(lambda: connection.receive_data(data, 0.0))
    goaway = output(connection)[-1]
    assert goaway.kind == GOAWAY
    assert int.from_bytes(goaway.payload[4:8], "big") == code
    return code


# -- golden bytes ------------------------------------------------------------------------------------------------------


def test_the_server_begins_with_its_settings_and_the_window_of_the_connection() -> None:
    connection = Connection(streams_max=1000)
    assert connection.answers.take_output() == bytes.fromhex(
        "000012 04 00 00000000 0003 000003e8 0004 00040000 0006 00004000"
        "000004 08 00 00000000 000f0001"
    )  # fmt: skip
    assert connection.receive_data(PREFACE + bytes.fromhex("000000 04 00 00000000"), 0.0) == []
    assert connection.established
    assert connection.answers.take_output() == bytes.fromhex("000000 04 01 00000000")


def test_the_examples_of_rfc_7541_are_requests() -> None:
    # C.4.1, with the method POST (0x83) and the fields of gRPC as literals without a name in the table
    connection = begun()
    data = (
        bytes.fromhex("83 86 84 41 8c f1e3 c2e5 f23a 6ba0 ab90 f4ff") + bytes.fromhex("0f10 10") + b"application/grpc"
    )
    (opened,) = connection.receive_data(frame(HEADERS, END_HEADERS | END_STREAM, 1, data), 0.0)
    assert isinstance(opened, Opened)
    assert (opened.stream, opened.head.path, opened.ended) == (1, b"/", True)


def test_a_ping_is_answered_and_a_goodbye_lets_streams_go_on() -> None:
    connection = begun()
    assert connection.receive_data(bytes.fromhex("000008 06 00 00000000 0102030405060708"), 0.0) == []
    assert connection.answers.take_output() == bytes.fromhex("000008 06 01 00000000 0102030405060708")
    connection.receive_data(frame(PING, ACK, 0, b"babelbus") + frame(GOAWAY, payload=bytes(8)), 0.0)
    assert output(connection) == []
    assert len(connection.receive_data(OPEN, 0.0)) == 1


def test_an_answer_is_a_header_block_a_body_and_trailers() -> None:
    connection = begun()
    connection.receive_data(ASKED, 0.0)
    connection.answers.answer(1, HEAD, b"body", TRAILERS)
    assert connection.answers.take_output() == (
        bytes.fromhex("000001 01 04 00000001 88") + bytes.fromhex("000004 00 00 00000001") + b"body"
        + bytes.fromhex("00000f 01 05 00000001") + TRAILERS[:1] + TRAILERS[1:]
    )  # fmt: skip
    assert connection.answers.idle


def test_an_answer_before_the_end_of_the_request_tells_the_client_to_stop() -> None:
    connection = begun()
    connection.receive_data(OPEN, 0.0)
    connection.answers.answer(1, HEAD, b"body", TRAILERS)
    assert [one.kind for one in output(connection)] == [HEADERS, DATA, HEADERS, RST_STREAM]
    assert connection.receive_data(frame(DATA, 0, 1, b"late") + frame(HEADERS, 5, 1, block()), 0.0) == []
    assert connection.receive_data(number(WINDOW_UPDATE, 1, 5) + number(RST_STREAM, 1, CANCEL), 0.0) == []


# -- any cut, any garbage ----------------------------------------------------------------------------------------------

TALK = PREFACE + settings() + b"".join(
    frame(HEADERS, END_HEADERS, stream, block()) + frame(DATA, 0, stream, b"x" * 300) + frame(PING, 0, 0, b"12345678")
    + frame(99, 3, 5, b"unknown") + frame(DATA, END_STREAM | PADDED, stream, b"\x02yz\0\0")
    for stream in (1, 3, 5)
)  # fmt: skip


@given(st.lists(st.integers(min_value=1, max_value=400)))
def test_events_do_not_depend_on_how_the_bytes_were_cut(sizes: list[int]) -> None:
    whole = Connection(streams_max=10)
    expected = whole.receive_data(TALK, 0.0)
    connection, events, start = Connection(streams_max=10), [], 0
    for size in [*sizes, len(TALK)]:
        events += connection.receive_data(TALK[start : start + size], 0.0)
        start += size
    assert events == expected
    assert len(events) == 9
    assert connection.answers.take_output() == whole.answers.take_output()
    assert connection.unfinished_bytes == 0


some_frames = st.builds(
    frame,
    st.integers(0, 11),
    st.sampled_from([0, 1, 4, 5, 8, 13, 32, 37, 255]),
    st.sampled_from([0, 1, 2, 3, 5, 7, 2**31 - 1]),
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([block(), block()[:9], bytes(4), bytes(5), bytes(8), b"\x7f\xff\xff\xff", b"\0\4\0\0\0\0"]),
    ),
)


@given(st.lists(some_frames, max_size=30), st.integers(1, 50))
def test_garbage_ends_the_connection_with_a_goaway_or_is_handled(sent: list[bytes], size: int) -> None:
    connection = begun(streams_max=2)
    data = b"".join(sent)
    try:
        for start in range(0, len(data), size):
            for event in connection.receive_data(data[start : start + size], 0.0):
                if isinstance(event, Opened):
                    connection.answers.send(event.stream, b"x" * 70_000)
    except Http2Error:
        assert output(connection)[-1].kind == GOAWAY
    else:
        assert all(one.kind != GOAWAY for one in output(connection))
        assert connection.unfinished_bytes < 20_000
    assert len(connection.answers.streams) <= 2
    connection.close()
    assert connection.answers.unsent_bytes == 0


# -- malformed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(SETTINGS, payload=bytes(5)), SIZE),
        (frame(SETTINGS, ACK, payload=bytes(6)), SIZE),
        (frame(SETTINGS, stream=1), PROTOCOL),
        (settings(push=2), PROTOCOL),
        (settings(window=2**31), FLOW),
        (settings(frame=16_383), PROTOCOL),
        (settings(frame=2**24), PROTOCOL),
        (frame(PING, payload=bytes(7)), SIZE),
        (frame(PING, stream=1, payload=bytes(8)), PROTOCOL),
        (frame(GOAWAY, payload=bytes(7)), SIZE),
        (frame(GOAWAY, stream=1, payload=bytes(8)), PROTOCOL),
        (frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4)), PROTOCOL),
        (frame(PRIORITY, stream=1, payload=bytes(4)), SIZE),
        (frame(PRIORITY, payload=bytes(5)), PROTOCOL),
        (frame(RST_STREAM, stream=1, payload=bytes(4)), PROTOCOL),
        (frame(RST_STREAM, stream=0, payload=bytes(4)), PROTOCOL),
        (frame(RST_STREAM, stream=1, payload=bytes(3)), SIZE),
        (frame(WINDOW_UPDATE, payload=bytes(3)), SIZE),
        (frame(WINDOW_UPDATE, payload=bytes(4)), PROTOCOL),
        (number(WINDOW_UPDATE, 0, 2**31 - 1), FLOW),
        (number(WINDOW_UPDATE, 1, 1), PROTOCOL),
        (frame(DATA, 0, 1, b"x"), PROTOCOL),
        (frame(DATA, 0, 0, b"x"), PROTOCOL),
        (frame(HEADERS, END_HEADERS, 0, block()), PROTOCOL),
        (frame(HEADERS, END_HEADERS, 2, block()), PROTOCOL),
        (frame(HEADERS, END_HEADERS | 32, 1, bytes(4)), SIZE),
        (frame(HEADERS, END_HEADERS | PADDED, 1, b"\x06abcde"), PROTOCOL),
        (frame(HEADERS, END_HEADERS | PADDED, 1), PROTOCOL),
        (OPEN + frame(DATA, PADDED, 1, b"\x01"), PROTOCOL),
        (frame(CONTINUATION, END_HEADERS, 1), PROTOCOL),
        (frame(HEADERS, 0, 1, block()) + frame(PING, payload=bytes(8)), PROTOCOL),
        (frame(HEADERS, 0, 1, block()) + frame(CONTINUATION, END_HEADERS, 3), PROTOCOL),
        (frame(HEADERS, END_HEADERS, 1, b"\x80"), COMPRESSION),
        (frame(HEADERS, END_HEADERS, 1, b"\xbe"), COMPRESSION),
        (frame(HEADERS, END_HEADERS, 1, b"\xff" * 40), COMPRESSION),
        (frame(HEADERS, END_HEADERS, 1, b"\x40\x7f"), COMPRESSION),
        (frame(HEADERS, END_HEADERS, 1, b"\x3f\xe2\x1f"), COMPRESSION),
        (b"\x00\x40\x01\x00\x00\x00\x00\x00\x01", SIZE),
    ],
)
def test_a_client_that_breaks_the_protocol_is_told_why(data: bytes, code: int) -> None:
    assert refusal(begun(), data) == code


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", PREFACE[:-1] + b"x", PREFACE + frame(PING, payload=bytes(8)),
                                  PREFACE + frame(SETTINGS, ACK)])  # fmt: skip
def test_a_connection_begins_with_the_preface_and_settings(data: bytes) -> None:
    assert refusal(Connection(streams_max=1), data) == PROTOCOL


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (ASKED + frame(DATA, 0, 1, b"x"), CLOSED),
        (ASKED + frame(HEADERS, END_HEADERS | END_STREAM, 1, block()), CLOSED),
        (OPEN + frame(HEADERS, END_HEADERS, 1, block()), PROTOCOL),
        (OPEN + number(WINDOW_UPDATE, 1, 0), PROTOCOL),
        (OPEN + number(WINDOW_UPDATE, 1, 2**31 - 1), FLOW),
        (OPEN + 17 * frame(DATA, 0, 1, bytes(16_384)), FLOW),
    ],
)
def test_a_fault_of_one_stream_ends_the_stream_alone(data: bytes, code: int) -> None:
    connection = begun()
    assert connection.receive_data(data, 0.0)[-1] == Aborted(1)
    reset = next(one for one in output(connection) if one.kind == RST_STREAM)
    assert (reset.stream, reset.number) == (1, code)
    assert len(connection.receive_data(frame(HEADERS, END_HEADERS, 3, block()), 0.0)) == 1


def test_headers_of_a_closed_stream_end_the_connection() -> None:
    connection = begun()
    connection.receive_data(ASKED, 0.0)
    connection.answers.answer(1, HEAD, b"", TRAILERS)
    assert refusal(connection, OPEN) == CLOSED


def test_more_bytes_than_the_window_of_the_connection_end_it() -> None:
    connection = begun()
    data = b"".join(
        frame(HEADERS, END_HEADERS, stream, block()) + 16 * frame(DATA, 0, stream, bytes(16_384))
        for stream in range(1, 11, 2)
    )
    assert refusal(connection, data) == FLOW


# -- limits ------------------------------------------------------------------------------------------------------------


def test_more_streams_than_allowed_are_refused_and_the_others_go_on() -> None:
    connection = begun(streams_max=2)
    data = b"".join(frame(HEADERS, END_HEADERS, stream, block()) for stream in (1, 3, 5))
    assert [event.stream for event in connection.receive_data(data, 0.0)] == [1, 3]
    assert output(connection) == [Frame(RST_STREAM, 0, 5, REFUSED.to_bytes(4, "big"))]
    assert connection.receive_data(frame(DATA, END_STREAM, 1), 0.0) == [Data(1, b"", ended=True)]


def test_ten_thousand_streams_end_the_connection() -> None:
    connection = begun(streams_max=100)
    encoder = hpack.Encoder()
    data = b"".join(frame(HEADERS, END_HEADERS, 2 * n + 1, block(encoder)) for n in range(10_000))

    def flood() -> None:
        connection.receive_data(data, 0.0)
        while connection.busy:
            connection.receive_data(b"", 0.0)

    assert code_of(flood) == CALM


def test_a_turn_reads_so_many_header_blocks_and_the_next_turns_read_the_others() -> None:
    connection, encoder = begun(streams_max=10 * BLOCKS_MAX), hpack.Encoder()
    count = 2 * BLOCKS_MAX + 1
    data = b"".join(frame(HEADERS, END_HEADERS, 2 * n + 1, block(encoder, other=str(n))) for n in range(count))
    opened = []
    for chunk, expected in ((data + PING_FRAME[:5], BLOCKS_MAX), (b"", BLOCKS_MAX), (b"", 1)):
        events = connection.receive_data(chunk, 0.0)
        assert len(events) == expected
        assert connection.busy == (expected == BLOCKS_MAX)
        opened += [event.stream for event in events]
    assert opened == list(range(1, 2 * count, 2))
    assert connection.unfinished_bytes < 100
    assert output(connection) == []
    connection.receive_data(PING_FRAME[5:], 0.0)
    assert [one.kind for one in output(connection)] == [PING]


@pytest.mark.parametrize(
    ("length", "parts", "is_whole"),
    [
        ("3", [b"abc"], True),
        ("3", [b"a", b"bc"], True),
        ("03", [b"abc"], True),
        ("0", [b""], True),
        ("3", [b"ab"], False),
        ("3", [b"ab", b"cd"], False),
        ("0", [b"a"], False),
        ("3", [], False),
        ("0", [], True),
        ("-1", [b"a"], False),
        ("", [b"a"], False),
        ("1" * 19, [b"a"], False),
        ("\u00b3", [b"abc"], False),
    ],
)
def test_a_body_of_another_length_than_its_head_names_is_malformed(
    length: str, parts: list[bytes], is_whole: bool
) -> None:
    connection = begun()
    flags = END_HEADERS if parts else END_HEADERS | END_STREAM
    data = frame(HEADERS, flags, 1, block(content_length=length))
    for number_, part in enumerate(parts, 1):
        data += frame(DATA, END_STREAM if number_ == len(parts) else 0, 1, part)
    events = connection.receive_data(data, 0.0)
    opened, last = events[0], events[-1]
    assert isinstance(opened, Opened)
    is_read = not opened.head.malformed and not isinstance(last, Aborted)
    assert is_read is is_whole
    if isinstance(last, Aborted):
        assert Frame(RST_STREAM, 0, 1, PROTOCOL.to_bytes(4, "big")) in output(connection)
    assert not connection.receive_data(PING_FRAME, 0.0)  # the fault is that of the stream alone


def test_a_padded_body_has_the_length_of_its_data_and_trailers_end_it() -> None:
    for body, is_whole in ((b"abc", True), (b"ab", False)):
        connection, encoder = begun(), hpack.Encoder()
        head = frame(HEADERS, END_HEADERS, 1, block(encoder, content_length="3"))
        trailers = frame(HEADERS, END_HEADERS | END_STREAM, 1, bytes(encoder.encode([("x", "y")])))
        padded = frame(DATA, PADDED, 1, b"\x05" + body + bytes(5))
        *_, last = connection.receive_data(head + padded + trailers, 0.0)
        assert isinstance(last, Data) is is_whole


def test_a_header_list_has_a_bound() -> None:
    fits, over = LIST_BYTES_MAX - 1000, LIST_BYTES_MAX
    for size, code in ((fits, None), (over, CALM)):
        connection = begun()
        data = block(name="x" * size)
        sent = frame(HEADERS, 0, 1, data[:10_000]) + frame(CONTINUATION, END_HEADERS, 1, data[10_000:])
        if code is None:
            assert len(connection.receive_data(sent, 0.0)) == 1
        else:
            assert refusal(connection, sent) == code


@pytest.mark.parametrize("size", [0, 1, 10_000])
def test_a_flood_of_continuations_has_a_bound(size: int) -> None:
    connection = begun()
    flood = frame(HEADERS, 0, 1) + 10_000 * frame(CONTINUATION, 0, 1, bytes(size))

    def send() -> None:
        for start in range(0, len(flood), 10_000):
            connection.receive_data(flood[start : start + 10_000], 0.0)
            assert connection.unfinished_bytes < 64_000

    assert code_of(send) == CALM


def rapid_resets() -> Callable[[int], bytes]:
    encoder = hpack.Encoder()
    return lambda n: frame(HEADERS, END_HEADERS, 2 * n + 3, block(encoder)) + number(RST_STREAM, 2 * n + 3, CANCEL)


FLOODS: dict[str, Callable[[], Callable[[int], bytes]]] = {
    "ping": lambda: lambda _: frame(PING, payload=bytes(8)),
    "ping answers": lambda: lambda _: frame(PING, ACK, payload=bytes(8)),
    "settings": lambda: lambda _: settings(window=1),
    "priority": lambda: lambda _: frame(PRIORITY, stream=1, payload=bytes(5)),
    "empty data": lambda: lambda _: frame(DATA, 0, 1),
    "padding alone": lambda: lambda _: frame(DATA, PADDED, 1, b"\0"),
    "unknown": lambda: lambda _: frame(77),
    "goodbyes": lambda: lambda _: frame(GOAWAY, payload=bytes(8)),
    "rapid resets": rapid_resets,
    "provoked resets": lambda: (
        lambda n: frame(HEADERS, END_HEADERS, 2 * n + 3, block()) + number(WINDOW_UPDATE, 2 * n + 3, 0)
    ),
}


@pytest.mark.parametrize("name", FLOODS)
def test_frames_that_bring_nothing_have_a_bound(name: str) -> None:
    make, connection = FLOODS[name](), begun()
    connection.receive_data(OPEN, 0.0)

    def send() -> None:
        for n in range(3000):
            connection.receive_data(make(n), 1.0)

    assert code_of(send) == CALM
    slow, make = begun(), FLOODS[name]()
    slow.receive_data(OPEN, 0.0)
    for n in range(3000):  # so many in 30 s are no flood
        slow.receive_data(make(n), n / 100)


# -- header blocks -----------------------------------------------------------------------------------------------------


def test_a_block_that_came_before_means_what_the_table_says_now() -> None:
    encoder, decoder = hpack.Encoder(), HeaderDecoder()
    first = block(encoder, path="/a")
    assert decoder.decode(first).path == b"/a"
    again = block(encoder, path="/a")
    assert len(again) < len(first)
    assert decoder.decode(again) is decoder.decode(again)
    indexed = bytes.fromhex("83 86 be 0f10 10") + b"application/grpc"  # :path is the newest entry of the table
    for path in (b"/one", b"/two"):
        decoder.decode(b"\x44" + bytes((len(path),)) + path)
        assert [decoder.decode(indexed).path for _ in range(2)] == [path, path]
    decoder.decode(b"\x20\x3f\xe1\x1f" + b"\x44\x04/new")  # the table is emptied, and large again
    assert decoder.decode(indexed).path == b"/new"
    decoder.decode(b"\x20\x3f\xe1\x1f\x83")
    with pytest.raises(Http2Error):
        decoder.decode(indexed)


@given(st.lists(st.tuples(st.sampled_from(["/a", "/b", "/c"]), st.integers(0, 3)), max_size=40))
def test_cached_blocks_are_what_a_decoder_without_a_cache_reads(calls: list[tuple[str, int]]) -> None:
    encoder, decoder = hpack.Encoder(), HeaderDecoder()
    for number_, (path, change) in enumerate(calls):
        if change == 3:
            encoder.header_table_size = 300 if number_ % 2 else 4096
        text = f"{number_ if change == 2 else change}S"
        head = decoder.decode(block(encoder, path=path, grpc_timeout=text))
        assert (head.path.decode(), head.timeout_seconds) == (path, float(text[:-1]))


def test_a_client_that_makes_its_table_smaller_is_told_that_we_use_none() -> None:
    connection = begun(table=0)
    connection.receive_data(ASKED, 0.0)
    connection.answers.answer(1, HEAD, b"", TRAILERS)
    assert [one.payload for one in output(connection) if one.kind == HEADERS] == [b"\x20\x88", TRAILERS]


# -- windows of the client ---------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=4),
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 90)), max_size=200),
)
def test_answers_go_as_far_as_the_windows_and_in_order(
    sizes: list[int], window: int, grants: list[tuple[int, int]]
) -> None:
    connection = begun(window=window)
    connection.answers._window = 70  # a connection begins with 65,535 bytes
    rooms = {-1: 70}
    bodies = {}
    for index, size in enumerate(sizes):
        stream = 2 * index + 1
        connection.receive_data(frame(HEADERS, END_HEADERS | END_STREAM, stream, block()), 0.0)
        bodies[stream] = bytes(index + n % 7 for n in range(size))
        rooms[index] = window
        connection.answers.answer(stream, HEAD, bodies[stream], TRAILERS)
    came = output(connection)
    for index, size in [*grants, *((index, 300) for index in range(len(sizes))), (-1, 1000)]:
        if index >= len(sizes):
            continue
        rooms[index] += size
        connection.receive_data(number(WINDOW_UPDATE, 2 * index + 1 if index >= 0 else 0, size), 0.0)
        came += output(connection)
        spent = {stream: len(body_of(came, stream)) for stream in bodies}
        assert sum(spent.values()) <= rooms[-1]
        assert all(spent[2 * number_ + 1] <= rooms[number_] for number_ in range(len(sizes)))
        assert connection.answers.unsent_bytes == sum(map(len, bodies.values())) - sum(spent.values())
    assert {stream: body_of(came, stream) for stream in bodies} == bodies
    for stream in bodies:
        mine = [one for one in came if one.stream == stream]
        assert (mine[-1].kind, mine[-1].flags) == (HEADERS, END_HEADERS | END_STREAM)
    assert connection.answers.idle


def test_settings_change_the_windows_of_open_streams_also_below_zero() -> None:
    connection = begun(window=10)
    connection.receive_data(ASKED, 0.0)
    connection.answers.send(1, b"x" * 30)
    assert body_of(output(connection), 1) == b"x" * 10
    connection.receive_data(settings(window=4), 0.0)
    connection.receive_data(number(WINDOW_UPDATE, 1, 8), 0.0)
    assert body_of(output(connection), 1) == b"xx"
    connection.receive_data(settings(window=100), 0.0)
    assert body_of(output(connection), 1) == b"x" * 18
    assert refusal(connection, number(WINDOW_UPDATE, 1, 2**31 - 101) + settings(window=200)) == FLOW


def test_frames_are_as_long_as_the_client_takes() -> None:
    for values, longest in (({}, 16_384), ({"frame": 20_000}, 20_000), ({"frame": 2**20}, 65_535)):
        connection = begun(window=2**20, **values)
        connection.receive_data(ASKED, 0.0)
        connection.answers.send(1, bytes(100_000))
        assert max(len(one.payload) for one in output(connection)) == longest


def test_streams_that_wait_have_their_turn() -> None:
    connection = begun(window=2**20)
    for stream in (1, 3):
        connection.receive_data(frame(HEADERS, END_HEADERS | END_STREAM, stream, block()), 0.0)
        connection.answers.answer(stream, HEAD, bytes(100_000), TRAILERS)
    output(connection)
    connection.receive_data(number(WINDOW_UPDATE, 0, 2 * 16_384), 0.0)
    assert [one.stream for one in output(connection) if one.kind == DATA] == [1, 3]


# -- windows of the server ---------------------------------------------------------------------------------------------


def test_room_is_given_back_as_bytes_are_taken() -> None:
    connection = begun()
    connection.receive_data(OPEN, 0.0)
    untaken = 0
    for _ in range(8):
        events: list[Event] = connection.receive_data(frame(DATA, 0, 1, bytes(16_384)), 0.0)
        untaken += sum(len(event.data) for event in events if isinstance(event, Data))
    assert output(connection) == []
    connection.take(1, untaken)
    assert output(connection) == [Frame(WINDOW_UPDATE, 0, 1, (2**17).to_bytes(4, "big"))]
    for stream in range(3, 103, 2):
        connection.receive_data(frame(HEADERS, END_HEADERS, stream, block()), 0.0)
        connection.receive_data(frame(DATA, 0, stream, bytes(16_000)), 0.0)
    given = sum(one.number for one in output(connection) if (one.kind, one.stream) == (WINDOW_UPDATE, 0))
    assert 2**19 < given < 2**20


def test_padding_is_given_back_at_once() -> None:
    connection = begun()
    connection.receive_data(OPEN, 0.0)
    for _ in range(2000):
        (event,) = connection.receive_data(frame(DATA, PADDED, 1, b"\xff" + b"x" + bytes(255)), 0.0)
        assert isinstance(event, Data)
        assert event.data == b"x"


# -- a goodbye ---------------------------------------------------------------------------------------------------------


def test_streams_on_their_way_to_a_server_that_says_goodbye_are_carried_out() -> None:
    connection, encoder = begun(), hpack.Encoder()
    connection.leave()
    connection.answers.take_output()
    late = frame(HEADERS, END_HEADERS | END_STREAM, 1, block(encoder)) + frame(PING, ACK, 0, GOODBYE)
    (event,) = connection.receive_data(late, 0.0)
    assert isinstance(event, Opened)
    assert output(connection) == [Frame(GOAWAY, 0, 0, (1).to_bytes(4, "big") + bytes(4))]


def test_after_a_goodbye_open_streams_go_on_and_new_ones_are_not_carried_out() -> None:
    connection, encoder = begun(), hpack.Encoder()
    connection.receive_data(frame(HEADERS, END_HEADERS, 1, block(encoder)), 0.0)
    connection.leave()
    connection.leave()
    ping = Frame(PING, 0, 0, GOODBYE)
    assert output(connection) == [Frame(GOAWAY, 0, 0, (2**31 - 1).to_bytes(4, "big") + bytes(4)), ping]
    connection.receive_data(frame(PING, ACK, 0, b"babelbus"), 0.0)  # the answer to an earlier ping
    assert output(connection) == []
    connection.receive_data(frame(PING, ACK, 0, GOODBYE), 0.0)
    connection.end_goodbye()
    assert connection.has_left
    assert output(connection) == [Frame(GOAWAY, 0, 0, (1).to_bytes(4, "big") + bytes(4))]
    assert connection.receive_data(frame(HEADERS, END_HEADERS, 3, block(encoder, other="x")), 0.0) == []
    late = frame(DATA, 0, 3, b"x") + number(WINDOW_UPDATE, 3, 1) + number(RST_STREAM, 3, CANCEL)
    assert connection.receive_data(late, 0.0) == []
    assert connection.receive_data(frame(DATA, END_STREAM, 1, b"x"), 0.0) == [Data(1, b"x", ended=True)]
    connection.answers.answer(1, HEAD, b"y", TRAILERS)
    assert body_of(output(connection), 1) == b"y"
