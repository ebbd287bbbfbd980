"""gRPC on the side of a server: messages however they are cut, encodings, deadlines, and how each call is refused."""

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.wire.http2 import Asked, Began, CallLimit, Calls, Came, Cancelled, Event, Finished, Http2Error
from babelbus.wire.http2.calls import MESSAGE_BYTES, TURN_BYTES_MAX
from babelbus.wire.http2.requests import encode_message
from tests.support.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    WINDOW_UPDATE,
    Frame,
    block,
    body_of,
    call,
    fields_of,
    frame,
    frames,
    message,
    number,
    settings,
)

LIMIT = 100_000
METHODS = {b"/s/unary": False, b"/s/stream": True}
STREAM = frame(HEADERS, END_HEADERS, 1, block(path="/s/stream"))


def begun(count_max: int = 10, room_bytes: int = 2**30, **values: int) -> Calls:
    made = Calls(
        METHODS, CallLimit(count_max), streams_max=20, message_bytes_max=LIMIT, inflated_bytes_max=lambda: room_bytes
    )
    made.receive_data(PREFACE + settings(**values), 0.0)
    made.answers.take_output()
    return made


def output(calls: Calls) -> list[Frame]:
    return list(frames(calls.answers.take_output()))


def refused(calls: Calls, data: bytes) -> dict[str, str]:
    """The fields of the answer to a call on stream 1, which has no other event than its end."""
    events = calls.receive_data(data, 0.0)
    assert all(isinstance(event, Began | Cancelled) for event in events)
    assert calls.open == []
    return fields_of(output(calls), 1)


def refusal(data: bytes) -> int:
    return int(refused(begun(), data)["grpc-status"])


# -- golden bytes ------------------------------------------------------------------------------------------------------


def test_a_unary_call_both_ways() -> None:
    calls = begun()
    assert calls.receive_data(call(1, b"hello"), 0.0) == [Asked(1, b"/s/unary", None, b"hello")]
    calls.answer(1, b"you")
    assert calls.answers.take_output() == (
        bytes.fromhex("000020 01 04 00000001 88 00 0c") + b"content-type" + b"\x10application/grpc"
        + bytes.fromhex("000008 00 00 00000001 00 00000003") + b"you"
        + bytes.fromhex("00000f 01 05 00000001 00 0b") + b"grpc-status" + b"\x010"
    )  # fmt: skip
    assert calls.open == []
    assert calls.unfinished_bytes == 0


def test_a_refused_call_has_its_status_in_its_only_block() -> None:
    calls = begun()
    calls.receive_data(call(1, b""), 0.0)
    calls.fail(1, 9, "50 % é\n")
    (only,) = output(calls)
    assert (only.kind, only.flags) == (HEADERS, END_HEADERS | END_STREAM)
    assert fields_of([only], 1) == {
        ":status": "200", "content-type": "application/grpc", "grpc-status": "9", "grpc-message": "50 %25 %C3%A9%0A",
    }  # fmt: skip


def test_a_streaming_call_both_ways() -> None:
    calls = begun()
    assert calls.receive_data(STREAM, 5.0) == [Began(1, b"/s/stream", None)]
    events = calls.receive_data(frame(DATA, 0, 1, message(b"a") + message(b"")) + frame(DATA, END_STREAM, 1), 5.0)
    assert events == [Came(1, b"a", 6), Came(1, b"", 5), Finished(1)]
    calls.begin(1)
    calls.begin(1)
    calls.send(1, [b"x", b"yz"])
    calls.end(1)
    found = output(calls)
    assert [one.kind for one in found] == [HEADERS, DATA, HEADERS]
    assert body_of(found, 1) == message(b"x") + message(b"yz")
    assert fields_of(found, 1)["grpc-status"] == "0"


def test_a_streaming_call_fails_with_trailers_after_its_messages() -> None:
    calls = begun()
    calls.receive_data(STREAM, 0.0)
    calls.begin(1)
    calls.send(1, [b"x"])
    calls.fail(1, 4, "late")
    found = output(calls)
    assert [one.kind for one in found] == [HEADERS, DATA, HEADERS, RST_STREAM]
    assert fields_of(found, 1)["grpc-status"] == "4"


# -- any cut -----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.binary(max_size=30), max_size=8),
    st.lists(st.integers(1, 40), max_size=20),
    st.booleans(),
)
def test_messages_do_not_depend_on_frames_and_reads(sent: list[bytes], sizes: list[int], compress: bool) -> None:
    calls = begun()
    fields = block(path="/s/stream", grpc_encoding="gzip")
    packed = [message(gzip.compress(one), 1) if compress else message(one) for one in sent]
    data, body = frame(HEADERS, END_HEADERS, 1, fields), b"".join(packed)
    start = 0
    for size in [*sizes, len(body)]:
        data += frame(DATA, 0, 1, body[start : start + size])
        start += size
    data += frame(DATA, END_STREAM, 1)
    events: list[Event] = []
    for start in range(0, len(data), 7):
        events += calls.receive_data(data[start : start + 7], 0.0)
    assert [event.message for event in events if isinstance(event, Came)] == sent
    assert events[-1] == Finished(1)
    assert calls.unfinished_bytes == 0


@given(st.lists(st.integers(1, 5000), max_size=60))
def test_every_byte_of_a_stream_goes_back_to_its_window_once(sizes: list[int]) -> None:
    calls = begun()
    calls.receive_data(STREAM, 0.0)
    body, taken = b"".join(message(bytes(size)) for size in sizes), 0
    for start in range(0, len(body), 3001):
        part = body[start : start + 3001]
        events = calls.receive_data(frame(DATA, 0, 1, part), 0.0)
        taken += sum(event.size_bytes for event in events if isinstance(event, Came))
    stream = calls.answers.streams[1]
    updates = sum(one.number for one in output(calls) if (one.kind, one.stream) == (WINDOW_UPDATE, 1))
    assert updates + stream.taken + taken == len(body)


garbage = st.builds(
    frame,
    st.sampled_from([DATA, HEADERS, RST_STREAM]),
    st.sampled_from([0, END_STREAM, END_HEADERS, END_HEADERS | END_STREAM]),
    st.sampled_from([1, 3, 5]),
    st.one_of(
        st.binary(max_size=20),
        st.sampled_from([block(), block(path="/s/stream"), block(path="/s/stream", grpc_encoding="gzip"), bytes(4)]),
        st.builds(message, st.binary(max_size=5), st.sampled_from([0, 0, 0, 1, 2])),
    ),
)


@given(st.lists(garbage, max_size=40))
def test_calls_of_any_frames_are_counted_and_forgotten(sent: list[bytes]) -> None:
    calls = begun(count_max=2)
    open_ = set()
    try:
        for data in sent:
            for event in calls.receive_data(data, 0.0):
                if isinstance(event, Asked | Began):
                    open_.add(event.stream)
                elif isinstance(event, Cancelled):
                    open_.discard(event.stream)
                else:
                    assert event.stream in open_
            assert len(calls.open) == calls._limit.count <= 2
    except Http2Error:
        assert calls.answers.take_output()
    calls.close()
    assert calls._limit.count == calls.unfinished_bytes == 0


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "status", "code"),
    [
        ({"path": "/s/other"}, "200", 12),
        ({"path": "no/slash"}, "200", 12),
        ({"method": "GET"}, "405", 13),
        ({"content_type": "text/plain"}, "415", 2),
        ({"content_type": "application/grpc-web"}, "415", 2),
        ({"content_type": None}, "415", 2),
        ({"grpc_encoding": "deflate"}, "200", 12),
        ({"grpc_timeout": "5"}, "200", 13),
        ({"grpc_timeout": "S"}, "200", 13),
        ({"grpc_timeout": "123456789S"}, "200", 13),
        ({"grpc_timeout": "-1S"}, "200", 13),
        ({"grpc_timeout": "²S"}, "200", 13),
        ({"grpc_timeout": ""}, "200", 13),
    ],
)
def test_a_call_that_cannot_be_is_refused(changed: dict[str, str | None], status: str, code: int) -> None:
    fields = refused(begun(), call(1, b"x", block(**changed)))
    assert (fields[":status"], fields["grpc-status"]) == (status, str(code))
    assert fields["content-type"] == "application/grpc"
    assert fields["grpc-message"]


def test_an_unknown_encoding_is_answered_with_the_ones_that_are_known() -> None:
    fields = refused(begun(), call(1, b"x", block(grpc_encoding="zstd")))
    assert fields["grpc-accept-encoding"] == "identity,gzip"


@pytest.mark.parametrize(
    "changed",
    [{"method": None}, {"scheme": None}, {"path": None}, {"te": "gzip"}, {"connection": "close"},
     {"transfer_encoding": "chunked"}, {"Upper": "x"}],
)  # fmt: skip
def test_a_malformed_request_is_reset(changed: dict[str, str | None]) -> None:
    calls = begun()
    assert calls.receive_data(call(1, b"x", block(**changed)), 0.0) == []
    assert Frame(RST_STREAM, 0, 1, b"\0\0\0\1") in output(calls)
    assert len(calls.receive_data(call(3, b"x"), 0.0)) == 1


def test_pseudo_fields_come_first_and_once() -> None:
    for fields in (b"\x83\x83\x86\x84", b"\x86\x84\x0f\x01\x01x\x83", b"\x83\x86\x84\x00\x04:new\x01x"):
        calls = begun()
        calls.receive_data(frame(HEADERS, END_HEADERS, 1, fields), 0.0)
        assert [one.kind for one in output(calls)] == [RST_STREAM]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 13),
        (message(b"x")[:-1], 13),
        (b"\0\0", 13),
        (message(b"x") + b"\0", 13),
        (message(b"x") + message(b"y"), 13),
        (message(b"x", flag=1), 13),
        (message(b"x", flag=2), 13),
        (message(bytes(LIMIT + 1)), 8),
    ],
)
def test_a_unary_call_has_one_message_that_is_whole_and_not_too_long(body: bytes, status: int) -> None:
    data = frame(HEADERS, END_HEADERS, 1, block())
    for start in range(0, len(body), 10_000):
        data += frame(DATA, 0, 1, body[start : start + 10_000])
    assert refusal(data + frame(DATA, END_STREAM, 1)) == status


def test_a_call_that_ends_with_its_header_has_no_message() -> None:
    assert refusal(frame(HEADERS, END_HEADERS | END_STREAM, 1, block())) == 13


def test_a_message_at_the_limit_passes_and_a_longer_one_is_refused_by_its_head() -> None:
    calls = begun()
    head = frame(HEADERS, END_HEADERS, 1, block())
    body = message(bytes(LIMIT))
    data = b"".join(frame(DATA, 0, 1, body[start : start + 16_384]) for start in range(0, len(body), 16_384))
    (asked,) = calls.receive_data(head + data + frame(DATA, END_STREAM, 1), 0.0)
    assert isinstance(asked, Asked)
    assert len(asked.message) == LIMIT
    calls = begun()
    assert refused(calls, head + frame(DATA, 0, 1, b"\0" + (LIMIT + 1).to_bytes(4, "big")))["grpc-status"] == "8"
    assert calls.unfinished_bytes == 0


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (gzip.compress(b"x")[:-1], 13),
        (gzip.compress(b"x") + b"y", 13),
        (gzip.compress(b"x") * 2, 13),
        (b"no gzip", 13),
        (zlib.compress(b"x"), 13),
        (b"", 13),
        (gzip.compress(bytes(LIMIT + 1)), 8),
    ],
)
def test_a_compressed_message_is_whole_and_has_a_bound(data: bytes, status: int) -> None:
    fields = block(grpc_encoding="gzip")
    body = message(data, flag=1)
    assert refusal(frame(HEADERS, END_HEADERS, 1, fields) + frame(DATA, END_STREAM, 1, body)) == status


def test_a_bomb_takes_no_more_memory_than_its_bound() -> None:
    bomb = message(gzip.compress(bytes(50_000_000), 9), flag=1)
    assert len(bomb) < LIMIT
    for room_bytes, limit in ((2**30, LIMIT), (1000, 1000)):
        calls = begun(room_bytes=room_bytes)
        data = frame(HEADERS, END_HEADERS, 1, block(grpc_encoding="gzip"))
        calls.receive_data(data, 0.0)
        tracemalloc.start()
        try:
            for start in range(0, len(bomb), 16_384):
                calls.receive_data(frame(DATA, 0, 1, bomb[start : start + 16_384]), 0.0)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 5 * LIMIT
        fields = fields_of(output(calls), 1)
        assert (fields["grpc-status"], fields["grpc-message"]) == ("8", f"a message is longer than {limit} bytes")


@pytest.mark.parametrize("path", ["/s/unary", "/s/stream"])
def test_a_chunk_of_bombs_is_read_in_several_turns(path: str) -> None:
    bomb, fields = message(gzip.compress(bytes(LIMIT)), flag=1), block(path=path, grpc_encoding="gzip")
    streams = [1] if METHODS[path.encode()] else list(range(1, 41, 2))
    data = b"".join(
        frame(HEADERS, END_HEADERS, stream, fields) + frame(DATA, END_STREAM, stream, bomb * (20 // len(streams)))
        for stream in streams
    )
    calls, sizes = begun(count_max=20), []
    while data or calls.busy:
        events, data = calls.receive_data(data, 0.0), b""
        sizes.append([len(event.message) for event in events if isinstance(event, Asked | Came)])
    turn = TURN_BYTES_MAX // LIMIT + 1
    assert sizes == [[LIMIT] * turn, [LIMIT] * (20 - turn)]
    assert calls.unfinished_bytes == 0
    assert isinstance(events[-1], Finished if METHODS[path.encode()] else Asked)


def test_a_chunk_of_empty_messages_is_read_in_several_turns() -> None:
    calls, data, counts = begun(), STREAM + frame(DATA, END_STREAM, 1, message(b"") * 3000), []
    while data or calls.busy:
        events, data = calls.receive_data(data, 0.0), b""
        counts.append(sum(isinstance(event, Came) for event in events))
    turn = TURN_BYTES_MAX // MESSAGE_BYTES
    assert counts == [turn, 3000 - turn]


def test_bombs_that_are_refused_are_read_in_several_turns() -> None:
    fields = block(grpc_encoding="gzip")
    whole = gzip.compress(bytes(LIMIT))
    for bomb in (gzip.compress(bytes(LIMIT + 1)), whole[:-8] + bytes(8)):
        data = b"".join(
            frame(HEADERS, END_HEADERS, stream, fields) + frame(DATA, END_STREAM, stream, message(bomb, flag=1))
            for stream in range(1, 41, 2)
        )
        calls, turns = begun(), 0
        while data or calls.busy:
            assert calls.receive_data(data, 0.0) == []
            data, turns = b"", turns + 1
        assert turns == 2
        assert len({one.stream for one in output(calls) if one.kind == HEADERS}) == 20


def test_a_compressed_message_counts_as_long_as_it_is() -> None:
    calls = begun()
    bomb = message(gzip.compress(bytes(LIMIT)), flag=1)
    calls.receive_data(frame(HEADERS, END_HEADERS, 1, block(grpc_encoding="gzip")) + frame(DATA, 0, 1, bomb), 0.0)
    assert calls.unfinished_bytes >= LIMIT
    assert len(calls.receive_data(frame(DATA, END_STREAM, 1), 0.0)) == 1
    assert calls.unfinished_bytes == 0


def test_all_connections_together_have_a_bound_of_open_calls() -> None:
    calls = begun(count_max=1)
    calls.receive_data(STREAM, 0.0)
    calls.receive_data(call(3, b"x"), 0.0)
    assert fields_of(output(calls), 3)["grpc-status"] == "8"
    calls.receive_data(number(RST_STREAM, 1, 8), 0.0)
    assert len(calls.receive_data(call(5, b"x"), 0.0)) == 1
    calls.close()
    assert calls._limit.count == 0


# -- deadlines, the end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2H", 7200), ("2M", 120), ("2S", 2), ("2m", 0.002), ("2u", 2e-6), ("2n", 2e-9), ("0S", 0),
     ("99999999H", 99_999_999 * 3600)],
)  # fmt: skip
def test_the_deadline_of_a_call_counts_from_its_header(text: str, seconds: float) -> None:
    calls = begun()
    head, data = block(grpc_timeout=text), message(b"x")
    calls.receive_data(frame(HEADERS, END_HEADERS, 1, head), 10.0)
    (asked,) = calls.receive_data(frame(DATA, END_STREAM, 1, data), 11.0)
    assert isinstance(asked, Asked)
    assert asked.deadline == pytest.approx(10 + seconds)


def test_a_call_that_the_client_cancels_is_over() -> None:
    calls = begun()
    calls.receive_data(call(1, b"x") + STREAM.replace(b"\0\0\0\1", b"\0\0\0\3", 1), 0.0)
    assert calls.receive_data(number(RST_STREAM, 1, 8) + number(RST_STREAM, 3, 8), 0.0) == [Cancelled(1), Cancelled(3)]
    calls.answer(1, b"late")
    calls.fail(1, 4, "late")
    calls.begin(3)
    calls.send(3, [b"late"])
    calls.end(3)
    assert output(calls) == []


def test_trailers_end_a_call() -> None:
    calls = begun()
    head = frame(HEADERS, END_HEADERS, 1, block()) + frame(DATA, 0, 1, message(b"x"))
    (asked,) = calls.receive_data(head + frame(HEADERS, END_HEADERS | END_STREAM, 1, block(trailer="x")), 0.0)
    assert asked == Asked(1, b"/s/unary", None, b"x")


def test_a_connection_that_is_gone_holds_nothing() -> None:
    calls = begun()
    calls.receive_data(
        frame(HEADERS, END_HEADERS, 1, block()) + frame(DATA, 0, 1, message(bytes(50_000))[:16_000]), 0.0
    )
    calls.receive_data(frame(HEADERS, END_HEADERS, 3, block()) + frame(DATA, 0, 3, message(bytes(9000))), 0.0)
    calls.receive_data(frame(DATA, 0, 5, bytes(9000))[:5000], 0.0)
    assert 30_000 < calls.unfinished_bytes < 31_000
    calls.close()
    assert calls.unfinished_bytes == 0


@given(st.text(max_size=2000))
def test_the_text_of_a_status_is_printable_and_bounded(text: str) -> None:
    try:
        encoded = encode_message(text)
    except UnicodeEncodeError:
        assert any("\ud800" <= letter <= "\udfff" for letter in text)
        return
    assert len(encoded) <= 12_000
    assert all(32 <= byte < 127 for byte in encoded)
