"""Requests and responses: the bytes of section 4 and of the extension both ways, and each way to be malformed."""

import struct
import zlib
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.protocols.jebp import codec
from babelbus.protocols.jebp.fields import decode_numbers, encode_numbers, read_name
from babelbus.protocols.jebp.messages import (
    FROM_OFFSET,
    FROM_TIMESTAMP,
    Batch,
    CreateRecord,
    CreateRecords,
    CreateTopic,
    Fetch,
    Malformed,
    RecordsCreated,
    RemoveTopic,
    Request,
    Response,
    Subscribe,
)
from babelbus.protocols.jebp.status import Outcome

NEWS = CreateRecord("news", 1_700_000_000_000, b"hello")
STORED = bytes.fromhex("00000000000000000000001ba97cdd57000000018bcfe56800ffffffff0000000568656c6c6f00")
REQUESTS: list[tuple[Request, str]] = [
    (CreateTopic("news"), "116e657773"),
    (NEWS, "1201046e6577733610a6860000018bcfe5680068656c6c6f"),
    (CreateRecord("news", 1_700_000_000_000, b"hello", False), "1201046e6577733610a6870000018bcfe5680068656c6c6f"),
    (Subscribe(("news", "nope")), "216e6577732c6e6f7065"),
    (Subscribe(("news",)), "216e657773"),
    (Subscribe(()), "21"),
    (Fetch(FROM_OFFSET, 0, 65_536), "22c1000000000000000000010000"),
    (Fetch(FROM_TIMESTAMP, 1_700_000_000_000, 65_536), "22c00000018bcfe5680000010000"),
    (Fetch(FROM_OFFSET, 99, 65_536), "22c1000000000000006300010000"),
    (RemoveTopic("news"), "316e657773"),
    (
        CreateRecords("news", -1, 42, 3, STORED),
        "1301046e657773ffffffff000000000000002a0000000000000003" + STORED.hex(),
    ),
    (
        CreateRecords("news", 0, -1, -1, STORED),
        "1301046e65777300000000ffffffffffffffffffffffffffffffff" + STORED.hex(),
    ),
]
RESPONSES = [
    (Response(0xA1, False), "a130"),
    (Response(0xB6, False), "b630"),
    (Response(0xB3, True), "b331"),
    (Response(0xB1, False, b"nope"), "b1306e6f7065"),
    (Response(0xB1, False, bytes([0] * 7 + [99])), "b1300000000000000063"),
    (Response(0xA2, False), "a230"),
]


def is_name(text: str) -> bool:
    return read_name(text.encode("utf-8", "replace")) == text


names = st.text(min_size=1, max_size=60).filter(is_name)
int64 = st.integers(min_value=0, max_value=2**63 - 1)
producers = st.tuples(int64, int64) | st.just((-1, -1))
requests: st.SearchStrategy[Request] = st.one_of(
    st.builds(CreateTopic, names),
    st.builds(RemoveTopic, names),
    st.builds(CreateRecord, names, int64, st.binary(max_size=300), st.booleans()),
    st.builds(
        lambda topic, partition, producer, records: CreateRecords(topic, partition, producer[0], producer[1], records),
        names,
        st.integers(min_value=-1, max_value=2**31 - 1),
        producers,
        st.binary(min_size=1, max_size=300),
    ),
    st.builds(lambda topics: Subscribe(tuple(topics)), st.lists(names, unique=True, max_size=5)),
    st.builds(Fetch, st.sampled_from([0xC0, 0xC1]), int64, st.integers(min_value=0, max_value=2**31 - 1)),
)


@pytest.mark.parametrize(("request_", "plain"), REQUESTS)
def test_a_request_has_the_bytes_of_the_specification(request_: Request, plain: str) -> None:
    assert codec.encode_request(request_).hex() == plain
    for kind in (bytes, bytearray, lambda content: memoryview(bytearray(content))):
        assert codec.decode_request(kind(bytes.fromhex(plain))) == request_


@pytest.mark.parametrize(("response", "plain"), RESPONSES)
def test_a_response_has_the_bytes_of_the_specification(response: Response, plain: str) -> None:
    assert codec.decode_response(bytes.fromhex(plain)) == response
    assert codec.decode_response(memoryview(bytes.fromhex(plain))) == response


def test_a_fetch_response_carries_batches_as_the_specification_says() -> None:
    content = bytes.fromhex("01046e6577730000000000000027") + STORED
    assert codec.decode_batches(content) == [Batch("news", 0, STORED)]
    assert codec.decode_batches(content + content) == [Batch("news", 0, STORED)] * 2
    assert codec.decode_batches(b"") == []


def test_other_contents_of_responses_go_both_ways() -> None:
    assert encode_numbers(RecordsCreated(0, 2)).hex() == "000000000000000000000002"
    assert decode_numbers(RecordsCreated, bytes.fromhex("000000000000000000000002")) == RecordsCreated(0, 2)
    assert codec.encode_missing_topics(["nope", "no"]) == b"nope,no"
    assert codec.decode_missing_topics(b"nope,no") == ("nope", "no")
    assert codec.encode_missing_offset(99).hex() == "0000000000000063"


@given(requests)
def test_every_request_goes_both_ways(request_: Request) -> None:
    assert codec.decode_request(codec.encode_request(request_)) == request_


def test_the_checksum_is_the_one_of_zlib() -> None:
    assert zlib.crc32(b"123456789") == 0xCBF43926
    plain = codec.encode_request(CreateRecord("t", 0, b"123456789"))
    assert plain == bytes.fromhex("12010174cbf439260000000000000000") + b"123456789"


@pytest.mark.parametrize("length", ["0104", "020004", "080000000000000004"])
def test_a_name_may_have_a_length_with_leading_zeros(length: str) -> None:
    plain = bytes.fromhex("12" + length + "6e6577733610a6860000018bcfe5680068656c6c6f")
    assert codec.decode_request(plain) == NEWS


@pytest.mark.parametrize("name", ["a/b", "ä", "A-Z.0_9", "with blank", ".", "..", "%2f", "x" * 249, "ä" * 124 + "x"])
def test_every_name_without_comma_and_control_characters_is_carried(name: str) -> None:
    for request_ in (CreateTopic(name), RemoveTopic(name), Subscribe((name,)), CreateRecord(name, 0, b"")):
        assert codec.decode_request(codec.encode_request(request_)) == request_


BAD_NAMES = [b"", b"x" * 250, b"a,b", b"a\x00", b"\x1f", b"\x7f", "\x85".encode(), b"\xff", b"\xc3", b"\xed\xa0\x80"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_an_answer(name: bytes) -> None:
    field = bytes((1, len(name)))
    rest = bytes(12) + b"x" * 20
    expected = {
        b"\x11" + name: Outcome.CREATE_TOPIC_BAD_NAME,
        b"\x31" + name: Outcome.REMOVE_TOPIC_REFUSED,
        b"\x12" + field + name + rest: Outcome.CREATE_RECORD_REFUSED,
        b"\x13" + field + name + bytes(20) + STORED: Outcome.CREATE_RECORDS_REFUSED,
    }
    if name not in (b"", b"a,b"):  # the one is the empty list, the other are two names
        expected[b"\x21" + name] = Outcome.SUBSCRIBE_REFUSED
    for content, outcome in expected.items():
        assert codec.decode_request(content) == Malformed(content[0], outcome)


@pytest.mark.parametrize("topic", ["", "a,b", "a\n", "x" * 250, "\ud800"])
def test_our_own_side_cannot_say_a_bad_name(topic: str) -> None:
    for request_ in (CreateTopic(topic), Subscribe((topic,)), CreateRecord(topic, 0, b"")):
        with pytest.raises(LocalProtocolError, match="topic name"):
            codec.encode_request(request_)


@pytest.mark.parametrize(
    "request_",
    [
        CreateRecord("t", -1, b""),
        CreateRecords("t", 0, -1, -1, b""),
        CreateRecords("t", 0, 1, -1, STORED),
        CreateRecords("t", 0, -1, 1, STORED),
        Malformed(0x11, Outcome.CREATE_TOPIC_BAD_NAME),
    ],
)
def test_our_own_side_cannot_say_what_would_be_malformed(request_: Request) -> None:
    with pytest.raises(LocalProtocolError):
        codec.encode_request(request_)


def test_a_topic_named_twice_in_a_subscribe_counts_once() -> None:
    assert codec.decode_request(b"\x21a,b,a") == Subscribe(("a", "b"))


@pytest.mark.parametrize("content", [b"\x21,", b"\x21a,", b"\x21,a", b"\x21a,,b"])
def test_an_empty_name_in_a_subscribe_is_refused(content: bytes) -> None:
    assert codec.decode_request(content) == Malformed(0x21, Outcome.SUBSCRIBE_REFUSED)


@pytest.mark.parametrize("command", [0x00, 0x10, 0x18, 0x27, 0x32, 0xA0, 0xFF])
def test_an_unknown_command_is_an_answer(command: int) -> None:
    assert codec.decode_request(bytes((command,)) + b"abc") == Malformed(command, Outcome.UNKNOWN_COMMAND)


def test_an_empty_request_is_an_answer() -> None:
    assert codec.decode_request(b"") == Malformed(None, Outcome.UNKNOWN_COMMAND)


@pytest.mark.parametrize(
    "content",
    [
        "22",
        "22c10000000000000000000100",
        "22c100000000000000000001000000",
        "22c2000000000000000000010000",
        "2200000000000000000000010000",
        "22c1ffffffffffffffff00010000",
        "22c10000000000000000ffffffff",
    ],
)
def test_a_malformed_fetch_is_an_answer(content: str) -> None:
    assert codec.decode_request(bytes.fromhex(content)) == Malformed(0x22, Outcome.FETCH_REFUSED)


@pytest.mark.parametrize("end", range(1, 19))
def test_a_record_request_that_ends_before_its_content_is_refused(end: int) -> None:
    content = codec.encode_request(NEWS)[:end]
    assert codec.decode_request(content) == Malformed(0x12, Outcome.CREATE_RECORD_REFUSED)


def test_a_record_without_content_is_carried() -> None:
    assert codec.decode_request(codec.encode_request(CreateRecord("news", 0, b""))) == CreateRecord("news", 0, b"")


@pytest.mark.parametrize("content", ["1209", "12ff6e657773", "1201046e6577733610a686ffffffffffffffff68656c6c6f"])
def test_a_bad_length_or_a_negative_timestamp_is_refused(content: str) -> None:
    assert codec.decode_request(bytes.fromhex(content)) == Malformed(0x12, Outcome.CREATE_RECORD_REFUSED)


@pytest.mark.parametrize("end", range(1, 28))
def test_a_batch_request_that_ends_before_its_records_is_refused(end: int) -> None:
    content = codec.encode_request(CreateRecords("news", 0, 1, 0, STORED))[:end]
    assert codec.decode_request(content) == Malformed(0x13, Outcome.CREATE_RECORDS_REFUSED)


@pytest.mark.parametrize("numbers", [(-2, 1, 1), (0, -2, 0), (0, 1, -1), (0, 1, -2), (0, -1, 0), (0, -1, -2)])
def test_impossible_numbers_of_a_batch_are_refused(numbers: tuple[int, int, int]) -> None:
    content = b"\x13\x01\x04news" + struct.pack(">iqq", *numbers) + STORED
    assert codec.decode_request(content) == Malformed(0x13, Outcome.CREATE_RECORDS_REFUSED)


def test_the_records_of_a_batch_in_writable_memory_can_be_patched_in_place() -> None:
    request_ = codec.decode_request(bytearray(codec.encode_request(CreateRecords("news", 0, 1, 0, STORED))))
    assert isinstance(request_, CreateRecords)
    assert isinstance(request_.records, memoryview)
    request_.records[:8] = (7).to_bytes(8, "big")
    assert request_.records[8:] == STORED[8:]


class TestBareRecords:
    """The reading of the option `jebp_bare_records`: no length in front of the name."""

    PLAIN = bytes.fromhex("126e6577733610a6860000018bcfe5680068656c6c6f")

    def test_the_bare_form_has_the_bytes_of_the_specification(self) -> None:
        assert codec.encode_request(NEWS, bare_records=True) == self.PLAIN
        assert codec.decode_request(self.PLAIN, {"news", "new"}.__contains__) == NEWS

    def test_the_bare_form_is_refused_without_the_option(self) -> None:
        assert codec.decode_request(self.PLAIN) == Malformed(0x12, Outcome.CREATE_RECORD_REFUSED)

    def test_the_form_with_the_length_is_read_with_the_option_too(self) -> None:
        assert codec.decode_request(codec.encode_request(NEWS), {"news"}.__contains__) == NEWS

    @pytest.mark.parametrize("topics", [set(), {"new"}, {"n"}, {"news6"}])
    def test_no_topic_that_fits_the_checksum_is_a_wrong_checksum(self, topics: set[str]) -> None:
        expected = Malformed(0x12, Outcome.CREATE_RECORD_CHECKSUM)
        assert codec.decode_request(self.PLAIN, topics.__contains__) == expected

    def test_the_longest_topic_that_fits_wins(self) -> None:
        plain = codec.encode_request(CreateRecord("ab", 5, b"x"), bare_records=True)
        assert codec.decode_request(plain, {"a", "ab"}.__contains__) == CreateRecord("ab", 5, b"x")
        assert codec.decode_request(plain, {"a"}.__contains__) == Malformed(0x12, Outcome.CREATE_RECORD_CHECKSUM)

    def test_a_name_that_the_checksum_seems_to_continue_is_found(self) -> None:
        payload = next(p for i in range(9999) if (p := str(i).encode()) and zlib.crc32(p) >> 24 == ord("s"))
        request_ = CreateRecord("new", 5, payload)
        plain = codec.encode_request(request_, bare_records=True)
        assert plain.startswith(b"\x12news")
        assert codec.decode_request(plain, {"new", "news"}.__contains__) == request_

    @pytest.mark.parametrize("size", range(1, 14))
    def test_what_is_too_short_for_a_name_and_its_fields_is_refused(self, size: int) -> None:
        content = (b"\x12" + b"n" * 20)[:size]
        assert codec.decode_request(content, {"n"}.__contains__) == Malformed(0x12, Outcome.CREATE_RECORD_REFUSED)

    def test_a_negative_timestamp_is_refused(self) -> None:
        content = b"\x12news" + struct.pack(">Iq", zlib.crc32(b"x"), -1) + b"x"
        assert codec.decode_request(content, {"news"}.__contains__) == Malformed(0x12, Outcome.CREATE_RECORD_REFUSED)

    @given(st.text(min_size=1, max_size=83).filter(is_name), int64, st.binary())
    def test_every_bare_record_of_a_known_topic_is_read(self, topic: str, timestamp: int, payload: bytes) -> None:
        request_ = CreateRecord(topic, timestamp, payload)
        plain = codec.encode_request(request_, bare_records=True)
        assert codec.decode_request(plain, {topic}.__contains__) == request_


@given(st.binary(max_size=60))
def test_garbage_is_always_some_request(content: bytes) -> None:
    for command in (b"", b"\x11", b"\x12", b"\x13", b"\x21", b"\x22", b"\x31"):
        if (command + content)[:1] == b"\x40":  # items of calls, which are whole or end the connection
            continue
        codec.decode_request(command + content)
        codec.decode_request(bytearray(command + content), lambda topic: True)


@given(st.binary(max_size=60))
def test_garbage_from_a_server_raises_nothing_but_a_protocol_error(content: bytes) -> None:
    for decode in (
        codec.decode_response,
        codec.decode_batches,
        partial(decode_numbers, RecordsCreated),
        codec.decode_missing_topics,
    ):
        try:
            decode(content)
        except RemoteProtocolError:
            continue


@pytest.mark.parametrize("content", ["", "a1", "c130", "0030", "a132", "a100"])
def test_a_malformed_response_is_refused(content: str) -> None:
    with pytest.raises(RemoteProtocolError, match="response"):
        codec.decode_response(bytes.fromhex(content))


@pytest.mark.parametrize(
    "content",
    [
        "01",
        "01046e6577",
        "01046e657773",
        "01046e65777300000000000000",
        "01046e6577730000000000000001",
        "01046e657773ffffffff00000000",
        "01046e65777300000000ffffffff",
        "00" + "00" * 8,
        "0101ff" + "00" * 8,
    ],
)
def test_a_malformed_batch_is_refused(content: str) -> None:
    with pytest.raises(RemoteProtocolError, match="batch"):
        codec.decode_batches(bytes.fromhex(content))
