"""Whole connections: the sealed frames of section 4.7 and of the extension, any cut, limits, and broken peers."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.errors import RemoteProtocolError
from babelbus.protocols.jebp.box import Opener, Sealer
from babelbus.protocols.jebp.codec import decode_request, decode_response, encode_request, request_parts
from babelbus.protocols.jebp.decoder import ClientDecoder, ServerDecoder
from babelbus.protocols.jebp.messages import (
    CallItems,
    CreateRecord,
    CreateRecords,
    CreateTopic,
    Fetch,
    Malformed,
    RemoveTopic,
    Request,
    Response,
    Subscribe,
)
from babelbus.protocols.jebp.proved import ProvedOpener, encode_opened
from babelbus.protocols.jebp.status import Outcome

KEY = bytes.fromhex("ec88f6e13b22bf9f04d480e0d8525c08ac7e2f48e212742bcbcafa104a74b08d")
CLIENT_NONCE, SERVER_NONCE = bytes(range(0x40, 0x58)), bytes(range(0x80, 0x98))
HERE = Path(__file__).parent
DOCS = HERE.parents[2] / "docs" / "protocols" / "jebp.md"

requests: st.SearchStrategy[Request] = st.one_of(
    st.sampled_from([CreateTopic("a/b"), RemoveTopic("ä"), Subscribe(("a", "b")), Fetch(0xC1, 7, 9)]),
    st.builds(CreateRecord, st.sampled_from(["news", "new", "x" * 200]), st.just(5), st.just(b"p" * 100)),
    st.builds(CreateRecord, st.just("news"), st.just(5), st.binary(max_size=300), st.booleans()),
    st.builds(lambda size: CreateRecord("news", 5, b"l" * size), st.integers(min_value=1900, max_value=5000)),
    st.builds(lambda size: CreateRecords("news", 0, 1, 2, b"r" * size), st.sampled_from([1, 30, 2100, 9000])),
)


def client_sealer(messages: int = 2) -> Sealer:
    return Sealer(KEY, CLIENT_NONCE, messages=messages)


def server_decoder(frame_bytes_max: int = 16 * 2**20, messages: int = 2) -> ServerDecoder:
    return ServerDecoder(Opener(KEY, CLIENT_NONCE, messages=messages), frame_bytes_max=frame_bytes_max)


def client_decoder() -> ClientDecoder:
    return ClientDecoder(Opener(KEY, SERVER_NONCE, messages=1))


def golden(name: str) -> list[list[bytes]]:
    """Give (request plain, request frame, response plain, response frame) of each exchange."""
    lines = (HERE / name).read_text().splitlines()
    values = [bytes.fromhex(line.split()[-1]) for line in lines if line.startswith(" ")]
    return [values[at : at + 4] for at in range(0, len(values), 4)]


GOLDEN = ["golden_requests.txt", "golden_create_records.txt"]


@pytest.mark.parametrize("name", GOLDEN)
def test_the_exchanges_of_the_specification_are_sealed_byte_for_byte(name: str) -> None:
    exchanges = golden(name)
    client, server = client_sealer(), Sealer(KEY, SERVER_NONCE, messages=1)
    assert client.seal_many([plain for plain, _, _, _ in exchanges]) == b"".join(frame for _, frame, _, _ in exchanges)
    for _, _, plain, frame in exchanges:
        assert server.seal_parts((plain[:2], plain[2:])) == frame


@pytest.mark.parametrize("name", GOLDEN)
def test_the_exchanges_of_the_specification_are_read_at_once_and_one_by_one(name: str) -> None:
    exchanges = golden(name)
    asked = [decode_request(plain) for plain, _, _, _ in exchanges]
    answered = [decode_response(plain) for _, _, plain, _ in exchanges]
    assert not any(isinstance(request, Malformed) for request in asked)
    for whole in (True, False):
        server, client = server_decoder(), client_decoder()
        requests_, responses = [], []
        for _, request_frame, _, response_frame in exchanges:
            server.receive_data(request_frame)
            client.receive_data(response_frame)
            if not whole:
                requests_ += server.events()
                responses += client.events()
        assert requests_ + server.events() == asked
        assert responses + client.events() == answered


def test_the_worked_example_of_the_extension_is_the_one_in_the_docs() -> None:
    assert (HERE / "golden_create_records.txt").read_text() in DOCS.read_text()


@given(st.lists(requests, max_size=30), st.lists(st.integers(min_value=1, max_value=4000), min_size=1))
def test_messages_do_not_depend_on_how_the_bytes_were_cut(sent: list[Request], sizes: list[int]) -> None:
    data = bytes(client_sealer().seal_many([encode_request(request) for request in sent]))
    decoder, received, at = server_decoder(), [], 0
    while at < len(data):
        for size in sizes:
            decoder.receive_data(data[at : at + size])
            received += decoder.events()
            at += size
    assert received == sent
    assert not decoder._chunks
    assert not decoder._parts_bytes


def test_single_bytes_and_one_piece_give_the_same_messages() -> None:
    sent: list[Request] = [CreateRecord("news", 1, b"x"), CreateRecords("news", 0, -1, -1, b"r" * 2500), Subscribe(())]
    data = client_sealer().seal_many([encode_request(request) for request in sent])
    decoder, received = server_decoder(), []
    for byte in data:
        decoder.receive_data(bytes((byte,)))
        received += decoder.events()
    assert received == sent


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_data_may_be_any_kind_of_bytes_and_may_be_reused_at_once(kind: type) -> None:
    buffer = bytearray(client_sealer().seal_many([encode_request(CreateRecord("news", 1, b"x" * 100))] * 3))
    decoder = server_decoder()
    decoder.receive_data(kind(buffer))
    if kind is not bytes:
        buffer[:] = bytes(len(buffer))
    assert decoder.events() == [CreateRecord("news", 1, b"x" * 100)] * 3


def test_long_runs_of_equal_frames_are_read_whatever_interrupts_them() -> None:
    sent = [
        CreateRecord("news" if i % 700 < 650 else "other", i, i.to_bytes(4, "big") * (26 if i % 97 == 0 else 25))
        for i in range(1500)
    ]
    data = bytes(client_sealer().seal_many([encode_request(request) for request in sent]))
    decoder = server_decoder()
    decoder.receive_data(data)
    assert decoder.events() == sent


def test_a_record_that_ends_early_is_not_read_on_into_the_message_before_it() -> None:
    record = encode_request(CreateRecord("news", 1, b"secret of an earlier message"))
    decoder = server_decoder()
    decoder.receive_data(client_sealer().seal_many([record, record[:12], record[:4], record[:2], record]))
    full, short = CreateRecord("news", 1, record[-28:]), Malformed(0x12, Outcome.CREATE_RECORD_REFUSED)
    assert decoder.events() == [full, short, short, short, full]


@pytest.mark.parametrize("end", range(20))
def test_a_record_cut_at_any_byte_that_arrives_alone_is_answered(end: int) -> None:
    record = encode_request(CreateRecord("news", 1, b"x"))
    sealer, decoder = client_sealer(), server_decoder()
    for content in (record[:end], record, record[:end]):
        decoder.receive_data(sealer.seal_parts((content,)))
        assert decoder.events() == [decode_request(content)]


def test_a_negative_timestamp_in_the_common_form_is_refused() -> None:
    record = encode_request(CreateRecord("news", 1, b"x"))
    bad = record[:11] + b"\xff" * 8 + record[19:]
    decoder = server_decoder()
    decoder.receive_data(client_sealer().seal_many([record, bad]))
    assert decoder.events()[1] == Malformed(0x12, Outcome.CREATE_RECORD_REFUSED)


def test_more_topics_than_are_remembered_are_read() -> None:
    sent = [CreateRecord(f"topic-{i % 400}", i, b"x") for i in range(900)]
    decoder = server_decoder()
    decoder.receive_data(client_sealer().seal_many([encode_request(request) for request in sent]))
    assert decoder.events() == sent


def test_a_frame_of_16_mib_arrives_in_pieces_and_its_records_are_writable() -> None:
    records = bytes(range(256)) * (2**16 - 1)
    frame = client_sealer().seal_parts(request_parts(CreateRecords("news", 0, -1, -1, records)))
    decoder = server_decoder()
    for at in range(0, len(frame) - 65536, 65536):
        decoder.receive_data(frame[at : at + 65536])
        assert decoder.events() == []
    decoder.receive_data(frame[at + 65536 :])
    [request] = decoder.events()
    assert isinstance(request, CreateRecords)
    assert isinstance(request.records, memoryview)
    assert request.records == records
    assert not request.records.readonly
    assert not decoder._chunks
    assert not decoder._parts_bytes


@pytest.mark.parametrize("limit", [1024, 4096])
def test_a_frame_of_the_limit_is_read_and_one_byte_more_is_refused_by_its_head(limit: int) -> None:
    head = len(encode_request(CreateRecord("news", 1, b"")))
    record = CreateRecord("news", 1, b"x" * (limit - 16 - head))
    decoder = server_decoder(limit)
    decoder.receive_data(client_sealer().seal_many([encode_request(record)]))
    assert decoder.events() == [record]
    decoder.receive_data(b"\x01\x02" + (limit + 1).to_bytes(2, "big"))
    with pytest.raises(RemoteProtocolError, match=f"limit {limit}"):
        decoder.events()


def test_a_limit_below_the_one_of_the_handshake_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="1023"):
        server_decoder(1023)


BROKEN = {
    "first byte": b"\x02",
    "length of length": b"\x01\x09",
    "2^63 bytes": b"\x01\x08\x80" + bytes(7),
    "empty frame": b"\x01\x00",
    "not sealed": b"\x01\x01\x15" + bytes(21),
    "not sealed, large": b"\x01\x02\x20\x00" + bytes(0x2000),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_what_was_whole_before_the_peer_broke_the_protocol_is_given_first(broken: bytes) -> None:
    sealer, decoder = client_sealer(), server_decoder()
    sent = [encode_request(RemoveTopic("news"))] * 5
    decoder.receive_data(bytes(sealer.seal_many(sent)) + broken + bytes(sealer.seal_many(sent)))
    assert decoder.events() == [RemoveTopic("news")] * 5
    assert isinstance(decoder.error, RemoteProtocolError)
    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            decoder.events()
        decoder.receive_data(b"more")


def test_requests_before_a_broken_one_and_a_large_one_are_given_once() -> None:
    contents = [encode_request(RemoveTopic("news"))] * 3
    contents += [encode_request(CallItems([(1, 0x7F, b"")])), encode_request(CreateRecord("news", 5, bytes(5000)))]
    fronted = ServerDecoder(ProvedOpener(KEY, CLIENT_NONCE))
    for decoder, data in ((server_decoder(), client_sealer().seal_many(contents)), (fronted, encode_opened(contents))):
        decoder.receive_data(data)
        assert decoder.events() == [RemoveTopic("news")] * 3
        with pytest.raises(RemoteProtocolError, match="item of call 1 is of the unknown kind 127"):
            decoder.events()


@pytest.mark.parametrize("count", [1, 2, 10])
def test_a_replayed_request_ends_the_connection(count: int) -> None:
    frames = client_sealer().seal_many([encode_request(RemoveTopic("news"))] * count)
    decoder = server_decoder()
    decoder.receive_data(frames + frames)
    assert decoder.events() == [RemoveTopic("news")] * count
    with pytest.raises(RemoteProtocolError, match="decrypt"):
        decoder.events()


def test_a_request_sent_back_by_a_mirror_does_not_decrypt() -> None:
    decoder = client_decoder()
    decoder.receive_data(client_sealer().seal_parts((b"\xa1\x30",)))
    with pytest.raises(RemoteProtocolError, match="decrypt"):
        decoder.events()


def test_a_half_message_waits_and_is_dropped_with_the_connection() -> None:
    decoder = server_decoder()
    decoder.receive_data(client_sealer().seal_parts((b"\x31news",))[:-1])
    assert decoder.events() == []
    assert decoder.events() == []
    assert decoder.error is None


@given(st.binary(max_size=400))
def test_garbage_raises_nothing_but_a_protocol_error(garbage: bytes) -> None:
    for decoder in (server_decoder(), client_decoder()):
        decoder.receive_data(garbage)
        try:
            assert decoder.events() == []
        except RemoteProtocolError:
            assert decoder.error is not None


# Items of calls that are malformed end the connection (test_items): no answer could name their call.
@given(st.lists(st.binary(max_size=100).filter(lambda content: content[:1] != b"\x40"), max_size=5))
def test_sealed_garbage_is_answered_by_a_server_and_refused_by_a_client(contents: list[bytes]) -> None:
    server, client = server_decoder(), client_decoder()
    server.receive_data(client_sealer().seal_many(contents))
    assert len(server.events()) == len(contents)
    client.receive_data(Sealer(KEY, SERVER_NONCE, messages=1).seal_many([b"\x00" + content for content in contents]))
    if contents:
        with pytest.raises(RemoteProtocolError, match="response"):
            client.events()


def test_responses_of_every_size_are_read_in_order() -> None:
    contents = [b"\xa1\x30", b"\xa1\x30", b"\xb3\x31", b"\xa0\x30" + b"r" * 5000, b"\xa1\x30", b"\xa0\x30" + b"s" * 300]
    decoder = client_decoder()
    decoder.receive_data(Sealer(KEY, SERVER_NONCE, messages=1).seal_many(contents))
    assert decoder.events() == [Response(c[0], c[1] == 0x31, c[2:]) for c in contents]
