"""Both sides of the handshake: the nine frames of the specification, and each way to break one of them."""

import hashlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import nacl.bindings
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.errors import RemoteProtocolError
from babelbus.protocols.jebp.box import Opener, Sealer, shared_key
from babelbus.protocols.jebp.decoder import ServerDecoder
from babelbus.protocols.jebp.frames import encode_frame
from babelbus.protocols.jebp.handshake import ClientHandshake, Established, ServerHandshake, UntrustedPeerError
from babelbus.protocols.jebp.identity import Identity
from babelbus.protocols.jebp.messages import RemoveTopic

SERVER, CLIENT = Identity(b"\x53" * 32), Identity(b"\x43" * 32)
SERVER_SECRET, CLIENT_SECRET = bytes(range(0x21, 0x41)), bytes(range(1, 0x21))
SERVER_NONCE, CLIENT_NONCE = bytes(range(0x80, 0x98)), bytes(range(0x40, 0x58))
RANDOM = bytes(range(0xA0, 0xC0))
FRAMES = """
0101086a6562702f312e30
01012007a37cbc142093c8b755dc1b10e86cb426374ad16aa853ed0bdfc0b2b86d1c7c
0101205869aff450549732cbaaed5e5df9b30a6da31cb0e5742bad5ad4a1a768f1a67b
010118404142434445464748494a4b4c4d4e4f5051525354555657
010118808182838485868788898a8b8c8d8e8f9091929394959697
0101309ed3d68a9d014d06bceef5b03b24ef006b5e2fe7162d59826d0ad6b4a34481676ee7d4fdce2cc37f620a50b892255967
010120a0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebf
010170af91f7fedd88f65800532e4f77d1a19c107443197bf4367a19032cb3a2d4ba997b3212696a3d2f0a2caea11f371232a646ad68813e92dfefd1f3c377cabae5d6596c29d296448dc23e6cd2c8ff28a124b1667dab0d9d7752fc842980324551792ec854f9c0dd4f85902e860c7365aced
0101708b13ab4cd7379e2d880c2ffa2a56da37682b404211d27a53daa2438478eaa155b54a9f9ff4eeaf1c08d020bfe350e760df08ea46ad43496948f9108eb2580e85f8a494a4c6dbacb3afb82796ab459fdcd71e1c67072b2061facbb185ab05ee59518bed55357db2f985994033350ebbb8
"""
GOLDEN = [bytes.fromhex(frame) for frame in FRAMES.split()]
PLAIN_8 = bytes.fromhex(
    "f80cccdce4ae1c07ae208a2adf99a310ae4207e0306fa0236110b06827bbb8d0ad1182df330599fc4ecefb708620b0074eaa76a2a6f1e0"
    "53acb5f0cc7bde9e560d9755f601d516d0f9e7e9d5b65f898eff37fa7830f3de36f68f718e80e03d04"
)
PLAIN_9 = bytes.fromhex(
    "22fc297792f0b6ffc0bfcfdb7edb0c0aa14e025a365ec0e342e86e3829cb74b6ab0e90315db7ac3f6accb6fe0ccf519d1fecaad3af6d11"
    "381b4085b6e313b1629c11c70b6ff3ca244be2b9969e05aeb8121443811d4169a31214b014b1157807"
)
SERVER_FINGERPRINT = "f993bf2661c8a80d1ec098a49f6fb01d39439a1d5d6295a9ae435950026536da"
KEY = bytes.fromhex("ec88f6e13b22bf9f04d480e0d8525c08ac7e2f48e212742bcbcafa104a74b08d")
EVERYONE: Callable[[str], bool] = bool  # a fingerprint is never empty


def server(version: bytes = b"jebp/1.0", *, bare: bool = False) -> ServerHandshake:
    return ServerHandshake(
        SERVER, version=version, bare_certificates=bare, secret_key=SERVER_SECRET, nonce=SERVER_NONCE
    )


def client(trust: Callable[[str], bool] = EVERYONE, *, bare: bool = False) -> ClientHandshake:
    return ClientHandshake(
        CLIENT, trust, bare_certificates=bare, secret_key=CLIENT_SECRET, nonce=CLIENT_NONCE, random_bytes=RANDOM
    )


def finish(server: ServerHandshake, client: ClientHandshake) -> tuple[Established, Established]:
    to_client = server.begin()
    while server.established is None:
        to_client = server.receive_data(client.receive_data(to_client))
    assert to_client == b""
    assert server.established is not None
    assert client.established is not None
    return server.established, client.established


def to_message(handshake: ServerHandshake | ClientHandshake, *frames: bytes) -> None:
    for frame in frames:
        handshake.receive_data(frame)


def test_the_server_says_its_five_frames_byte_for_byte() -> None:
    handshake = server()
    assert handshake.begin() == GOLDEN[0]
    assert handshake.receive_data(GOLDEN[1]) == GOLDEN[2]
    assert handshake.receive_data(GOLDEN[3]) == GOLDEN[4]
    assert handshake.receive_data(GOLDEN[5]) == GOLDEN[6] + GOLDEN[7]
    before = handshake.established
    assert handshake.receive_data(GOLDEN[8]) == b""
    assert before is None
    assert handshake.established is not None
    assert handshake.established.fingerprint == CLIENT.fingerprint


def test_the_client_says_its_four_frames_byte_for_byte() -> None:
    handshake = client()
    assert handshake.begin() == b""
    assert handshake.receive_data(GOLDEN[0]) == GOLDEN[1]
    assert handshake.receive_data(GOLDEN[2]) == GOLDEN[3]
    assert handshake.receive_data(GOLDEN[4]) == GOLDEN[5]
    assert handshake.receive_data(GOLDEN[6]) == b""
    assert handshake.receive_data(GOLDEN[7]) == GOLDEN[8]
    assert handshake.established is not None
    assert handshake.established.fingerprint == SERVER_FINGERPRINT
    assert handshake.established.fingerprint == SERVER.fingerprint


def test_the_certificates_hold_the_plain_bytes_of_the_specification() -> None:
    assert Opener(KEY, SERVER_NONCE).open(GOLDEN[7][3:]) == PLAIN_8
    assert Opener(KEY, CLIENT_NONCE, messages=1).open(GOLDEN[8][3:]) == PLAIN_9
    digest = hashlib.sha256(b"".join(frame[3:] for frame in GOLDEN[:5])).digest()
    assert digest.hex() == "e4e95f4613f2e32c6ed017b47f10aa34b8bd49da31c197a1eb0cb4bb035298d6"
    assert SERVER.certificate + SERVER.sign(b"jebp server" + digest) == PLAIN_8
    assert CLIENT.certificate + CLIENT.sign(b"jebp client" + digest) == PLAIN_9


@pytest.mark.parametrize("version", [b"jebp/1.0", b"jebp/1.1", b"jebp/1.27"])
@pytest.mark.parametrize("bare", [False, True])
def test_both_sides_finish_with_boxes_that_fit(version: bytes, bare: bool) -> None:
    ours, theirs = finish(server(version, bare=bare), client(bare=bare))
    assert ours.fingerprint == CLIENT.fingerprint
    assert theirs.fingerprint == SERVER_FINGERPRINT
    assert ours.opener.messages == theirs.sealer.messages == 2
    assert ours.sealer.messages == theirs.opener.messages == 1
    assert ours.opener.open(theirs.sealer.seal_parts((b"request",))[3:]) == b"request"
    assert theirs.opener.open(ours.sealer.seal_parts((b"response",))[3:]) == b"response"


def test_every_connection_has_fresh_keys_nonces_and_random_bytes() -> None:
    finish(ServerHandshake(SERVER), ClientHandshake(CLIENT, EVERYONE))
    said = [ServerHandshake(SERVER).receive_data(GOLDEN[1]) for _ in range(2)]
    assert said[0] != said[1]
    said = [ClientHandshake(CLIENT, EVERYONE).receive_data(GOLDEN[0]) for _ in range(2)]
    assert said[0] != said[1]


@given(st.lists(st.integers(min_value=0, max_value=400), max_size=20))
def test_the_handshake_does_not_depend_on_how_the_bytes_were_cut(cuts: list[int]) -> None:
    data = b"".join(GOLDEN[i] for i in (1, 3, 5, 8)) + b"surplus"
    edges = [0, *sorted(cuts), len(data)]
    handshake, said, surplus = server(), b"", b""
    for start, end in pairwise(edges):
        if handshake.established is not None:
            surplus += data[start:end]
        else:
            said += handshake.receive_data(data[start:end])
    assert said == b"".join(GOLDEN[i] for i in (0, 2, 4, 6, 7))
    assert handshake.established is not None
    assert handshake.established.surplus + surplus == b"surplus"


def test_requests_that_arrive_with_the_last_message_are_the_surplus() -> None:
    handshake, request = server(), Sealer(KEY, CLIENT_NONCE, messages=2).seal_parts((b"\x31news",))
    to_message(handshake, GOLDEN[1], GOLDEN[3], GOLDEN[5], GOLDEN[8] + request)
    assert handshake.established is not None
    decoder = ServerDecoder(handshake.established.opener)
    decoder.receive_data(handshake.established.surplus)
    assert decoder.events() == [RemoveTopic("news")]


@pytest.mark.parametrize(
    "version",
    [
        b"",
        b"jebp",
        b"jebp/2.0",
        b"jebp/0.9",
        b"jebp/1",
        b"jebp/1.",
        b"JEBP/1.0",
        b"http/1.1",
        b"jebp/1.0\n",
        b"x" * 900,
    ],
)
def test_a_client_leaves_a_server_of_another_name_or_major_number(version: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="speaks"):
        client().receive_data(encode_frame(version))


@pytest.mark.parametrize("content", [b"", bytes(31), bytes(33), bytes(32), bytes([1]) + bytes(31)])
def test_a_bad_public_key_ends_the_handshake_of_either_side(content: bytes) -> None:
    for handshake in (server(), client()):
        if isinstance(handshake, ClientHandshake):
            handshake.receive_data(GOLDEN[0])
        with pytest.raises(RemoteProtocolError):
            handshake.receive_data(encode_frame(content))


@pytest.mark.parametrize("size", [0, 23, 25])
def test_a_nonce_of_another_size_ends_the_handshake(size: int) -> None:
    ours, theirs = server(), client()
    to_message(ours, GOLDEN[1])
    to_message(theirs, GOLDEN[0], GOLDEN[2])
    for handshake in (ours, theirs):
        with pytest.raises(RemoteProtocolError, match="nonce"):
            handshake.receive_data(encode_frame(bytes(size)))


def test_a_nonce_too_close_to_our_own_ends_the_handshake_before_anything_is_sent() -> None:
    ours, theirs = server(), client()
    to_message(ours, GOLDEN[1])
    to_message(theirs, GOLDEN[0], GOLDEN[2])
    with pytest.raises(RemoteProtocolError, match="apart"):
        ours.receive_data(encode_frame(SERVER_NONCE))
    with pytest.raises(RemoteProtocolError, match="apart"):
        theirs.receive_data(encode_frame(CLIENT_NONCE))


@pytest.mark.parametrize(("size", "accepted"), [(0, False), (1, True), (512, True), (513, False)])
def test_the_server_gives_1_to_512_random_bytes_back(size: int, accepted: bool) -> None:
    handshake = server()
    to_message(handshake, GOLDEN[1], GOLDEN[3])
    challenge = bytes(Sealer(KEY, CLIENT_NONCE).seal_parts((b"r" * size,)))
    if accepted:
        assert handshake.receive_data(challenge).startswith(encode_frame(b"r" * size))
    else:
        with pytest.raises(RemoteProtocolError, match="random"):
            handshake.receive_data(challenge)


@pytest.mark.parametrize("answer", [b"", RANDOM[:-1], RANDOM + b"x", bytes(32)])
def test_a_client_leaves_a_server_that_gives_other_bytes_back(answer: bytes) -> None:
    handshake = client()
    to_message(handshake, GOLDEN[0], GOLDEN[2], GOLDEN[4])
    with pytest.raises(RemoteProtocolError, match="random"):
        handshake.receive_data(encode_frame(answer))


def bad_certificates(signer: bytes, good: bytes) -> list[bytes]:
    other = Identity(b"\x66" * 32)
    digest = hashlib.sha256(b"".join(frame[3:] for frame in GOLDEN[:5])).digest()
    return [
        b"",
        good[:-1],
        good + b"x",
        good[:32],
        good[:95] + bytes([good[95] ^ 1]),
        other.certificate + good[32:],  # somebody else's name on our proof
        other.certificate + other.sign(signer + bytes(32)),  # another handshake
        other.certificate + other.sign((b"jebp server" if signer == b"jebp client" else b"jebp client") + digest),
        bytes(96),
    ]


@pytest.mark.parametrize("number", range(9))
def test_a_certificate_without_the_right_proof_ends_the_handshake(number: int) -> None:
    ours, theirs = server(), client()
    to_message(ours, GOLDEN[1], GOLDEN[3], GOLDEN[5])
    to_message(theirs, GOLDEN[0], GOLDEN[2], GOLDEN[4], GOLDEN[6])
    message_9 = Sealer(KEY, CLIENT_NONCE, messages=1).seal_parts((bad_certificates(b"jebp client", PLAIN_9)[number],))
    message_8 = Sealer(KEY, SERVER_NONCE).seal_parts((bad_certificates(b"jebp server", PLAIN_8)[number],))
    with pytest.raises(RemoteProtocolError, match="certificate"):
        ours.receive_data(message_9)
    with pytest.raises(RemoteProtocolError, match="certificate"):
        theirs.receive_data(message_8)


@pytest.mark.parametrize(("size", "accepted"), [(0, False), (1, True), (96, True), (8192, True), (8193, False)])
def test_bare_certificates_have_1_to_8192_bytes(size: int, accepted: bool) -> None:
    handshake = server(bare=True)
    to_message(handshake, GOLDEN[1], GOLDEN[3], GOLDEN[5])
    frame = Sealer(KEY, CLIENT_NONCE, messages=1).seal_parts((b"c" * size,))
    if not accepted:
        with pytest.raises(RemoteProtocolError, match="certificate"):
            handshake.receive_data(frame)
        return
    handshake.receive_data(frame)
    assert handshake.established is not None
    assert handshake.established.fingerprint == hashlib.sha256(b"c" * size).hexdigest()


def test_a_client_that_does_not_trust_the_server_sends_no_certificate() -> None:
    handshake = client(lambda fingerprint: fingerprint != SERVER_FINGERPRINT)
    to_message(handshake, GOLDEN[0], GOLDEN[2], GOLDEN[4], GOLDEN[6])
    with pytest.raises(UntrustedPeerError) as caught:
        handshake.receive_data(GOLDEN[7])
    assert caught.value.fingerprint == SERVER_FINGERPRINT


@pytest.mark.parametrize("number", [5, 8])
def test_a_sealed_message_that_does_not_decrypt_ends_the_handshake_for_good(number: int) -> None:
    handshake = server()
    to_message(handshake, *(GOLDEN[i] for i in (1, 3, 5) if i < number))
    bad = GOLDEN[number][:-1] + bytes([GOLDEN[number][-1] ^ 1])
    with pytest.raises(RemoteProtocolError, match="decrypt"):
        handshake.receive_data(bad)
    with pytest.raises(RemoteProtocolError, match="decrypt"):
        handshake.receive_data(GOLDEN[number])


@pytest.mark.parametrize(("bare", "limit"), [(False, 1024), (True, 16384)])
def test_a_handshake_frame_over_the_limit_is_refused_before_its_content_arrives(bare: bool, limit: int) -> None:
    handshake = server(bare=bare)
    assert handshake.receive_data(b"\x01\x02" + limit.to_bytes(2, "big")) == server().begin()
    with pytest.raises(RemoteProtocolError, match=f"limit {limit}"):
        server(bare=bare).receive_data(b"\x01\x02" + (limit + 1).to_bytes(2, "big"))


@given(st.binary(max_size=200), st.integers(min_value=0, max_value=4))
def test_garbage_raises_a_protocol_error_or_waits_for_more(garbage: bytes, frames: int) -> None:
    ours, theirs = server(), client()
    to_message(ours, *[GOLDEN[i] for i in (1, 3, 5)][:frames])
    to_message(theirs, *[GOLDEN[i] for i in (0, 2, 4, 6)][:frames])
    for handshake in (ours, theirs):
        try:
            handshake.receive_data(garbage)
            handshake.receive_data(encode_frame(garbage))
        except RemoteProtocolError:
            continue


def test_the_keys_of_the_specification_are_those_of_the_frames() -> None:
    assert nacl.bindings.crypto_scalarmult_base(CLIENT_SECRET) == GOLDEN[1][3:]
    assert shared_key(CLIENT_SECRET, GOLDEN[2][3:]) == KEY


def test_the_frames_of_the_handshake_in_the_docs_are_those_of_version_1_1() -> None:
    page = (Path(__file__).parents[3] / "docs" / "protocols" / "jebp.md").read_text()
    ours, theirs = server(b"jebp/1.1"), client()
    hello = ours.begin()
    to_message(theirs, hello, GOLDEN[2], GOLDEN[4], GOLDEN[6])
    to_message(ours, GOLDEN[1], GOLDEN[3])
    certificate = ours.receive_data(GOLDEN[5])[len(GOLDEN[6]) :]
    assert f"1 S  {hello.hex()}\n8 S  {certificate.hex()}\n9 C  {theirs.receive_data(certificate).hex()}\n" in page
