"""The box against the bytes of the specification, against PyNaCl's public functions, and at its limits."""

import nacl
import nacl.bindings
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.protocols.jebp.box import (
    MESSAGES_MAX,
    SMALL_BYTES_MAX,
    TAG_BYTES,
    Opener,
    Sealer,
    check_nonces,
    load_sodium,
    shared_key,
)
from babelbus.protocols.jebp.frames import encode_frame

KEY = bytes.fromhex("ec88f6e13b22bf9f04d480e0d8525c08ac7e2f48e212742bcbcafa104a74b08d")
CLIENT_NONCE = bytes(range(0x40, 0x58))
SERVER_NONCE = bytes(range(0x80, 0x98))
MODULUS = 2**192


def number(nonce: int) -> bytes:
    return (nonce % MODULUS).to_bytes(24, "little")


def public_seal(content: bytes, nonce: int) -> bytes:
    return nacl.bindings.crypto_box_easy_afternm(content, number(nonce), KEY)


def open_all(opener: Opener, sealed: list[bytes]) -> list[bytes]:
    return [
        plain[i * stride : i * stride + len(item) - 16]
        for plain, stride, part in opener.open_many(sealed)
        for i, item in enumerate(part)
    ]


def test_the_private_functions_of_pynacl_are_those_that_the_box_calls() -> None:
    ffi, seal, open_ = load_sodium()
    text, size = "unsigned char *", "unsigned long long"
    assert ffi.typeof(seal) is ffi.typeof(open_) is ffi.typeof(f"int(*)({text}, {text}, {size}, {text}, {text})")


@pytest.mark.parametrize("other", [None, object()])
def test_another_pynacl_is_refused_with_what_to_do(other: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nacl, "_sodium", other)
    with pytest.raises(ImportError, match="install the version"):
        load_sodium()


def test_the_shared_key_is_the_one_of_the_specification_on_both_sides() -> None:
    client, server = bytes(range(1, 0x21)), bytes(range(0x21, 0x41))
    public = nacl.bindings.crypto_scalarmult_base
    assert shared_key(client, public(server)) == shared_key(server, public(client)) == KEY


def test_message_6_is_sealed_to_the_bytes_of_the_specification() -> None:
    frame = Sealer(KEY, CLIENT_NONCE).seal_parts((bytes(range(0xA0, 0xC0)),))
    assert frame.hex() == (
        "0101309ed3d68a9d014d06bceef5b03b24ef006b5e2fe7162d59826d0ad6b4a34481676ee7d4fdce2cc37f620a50b892255967"
    )


def test_acks_are_sealed_to_the_bytes_of_the_specification_by_every_way() -> None:
    expected = "010112750e8e4c9ef9428dd632252d363744a9900f"
    assert Sealer(KEY, SERVER_NONCE, messages=1).seal_parts((b"\xa1\x30",)).hex() == expected
    assert Sealer(KEY, SERVER_NONCE, messages=1).seal_many([b"\xa1\x30"]).hex() == expected
    assert Opener(KEY, SERVER_NONCE, messages=1).open(bytes.fromhex(expected)[3:]) == b"\xa1\x30"


@given(st.lists(st.binary(max_size=3000), max_size=12), st.integers(min_value=0, max_value=MODULUS - 1))
def test_many_messages_are_sealed_as_pynacl_does_one_by_one_and_opened_again(contents: list[bytes], nonce: int) -> None:
    sealed = [public_seal(content, nonce + i) for i, content in enumerate(contents)]
    assert Sealer(KEY, number(nonce)).seal_many(contents) == b"".join(map(encode_frame, sealed))
    one_by_one = Opener(KEY, number(nonce))
    assert [one_by_one.open(item) for item in sealed] == contents
    in_place = Opener(KEY, number(nonce))
    assert [bytes(in_place.open_in_place(bytearray(item))) for item in sealed] == contents
    small = [content for content in contents if len(content) <= 2032]
    assert open_all(Opener(KEY, number(nonce)), [public_seal(c, nonce + i) for i, c in enumerate(small)]) == small


@pytest.mark.parametrize("size", [0, 1, 239, 240, 2031, 2032, 2048, 2049, 70_000])
def test_a_message_by_itself_is_sealed_as_pynacl_does_and_a_small_message_is_opened_again(size: int) -> None:
    contents = [bytes([at]) * size for at in range(3)]
    sealed = [public_seal(content, 7 + at) for at, content in enumerate(contents)]
    sealer, opener = Sealer(KEY, number(7)), Opener(KEY, number(7))
    assert [sealer.seal(content) for content in contents] == list(map(encode_frame, sealed))
    assert sealer.messages == 3
    if size <= SMALL_BYTES_MAX - TAG_BYTES:
        assert [opener.open_alone(item) for item in sealed] == contents
        assert opener.messages == 3


@pytest.mark.parametrize("sealed", [b"", bytes(15), bytes(16), bytes(40), public_seal(b"x", 8)])
def test_what_the_peer_did_not_seal_for_this_place_is_not_opened_by_itself(sealed: bytes) -> None:
    opener = Opener(KEY, number(7))
    with pytest.raises(RemoteProtocolError, match="message 0 does not decrypt"):
        opener.open_alone(sealed)
    assert opener.messages == 0


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 500, 1024, 1025, 2500])
def test_a_batch_of_any_length_is_sealed_as_its_messages_alone(count: int) -> None:
    alone, many = Sealer(KEY, CLIENT_NONCE), Sealer(KEY, CLIENT_NONCE)
    assert many.seal_many([b"\xa1\x30"] * count) == b"".join([alone.seal_parts((b"\xa1\x30",)) for _ in range(count)])
    assert many.messages == alone.messages == count


@pytest.mark.parametrize("size", [0, 1, 48, 49, 112, 2032])
def test_batches_larger_than_the_scratch_memory_open_in_order(size: int) -> None:
    contents = [i.to_bytes(2, "big").rjust(size, b"x")[:size] for i in range(2500)]
    sealed = [public_seal(content, 7 + i) for i, content in enumerate(contents)]
    assert open_all(Opener(KEY, number(7)), sealed) == contents


def test_the_nonce_carries_as_in_the_specification() -> None:
    before = bytes.fromhex("ffff00000000000000000000000000000000000000000001")
    after = bytes.fromhex("000001000000000000000000000000000000000000000001")
    second = nacl.bindings.crypto_box_easy_afternm(b"b", after, KEY)
    assert Sealer(KEY, before).seal_many([b"a", b"b"]).endswith(second)


@pytest.mark.parametrize("start", [2**64 - 3, 2**128 - 3, MODULUS - 3])
def test_a_batch_may_cross_a_carry_of_the_nonce(start: int) -> None:
    sealed = [public_seal(b"ack", start + i) for i in range(9)]
    assert Sealer(KEY, number(start)).seal_many([b"ack"] * 9) == b"".join(map(encode_frame, sealed))
    assert open_all(Opener(KEY, number(start)), sealed) == [b"ack"] * 9


def test_a_change_of_the_connection_changes_the_high_part_of_batch_nonces() -> None:
    for nonce in (2**100, 2**180 + 5, 2**100):
        expected = b"".join(encode_frame(public_seal(b"ack", nonce + i)) for i in range(8))
        assert Sealer(KEY, number(nonce)).seal_many([b"ack"] * 8) == expected


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_parts_may_be_any_kind_of_bytes(kind: type) -> None:
    large = bytes(range(256)) * 8192
    frame = Sealer(KEY, CLIENT_NONCE).seal_parts((b"\xa0\x30", kind(large)))
    assert frame[5:] == public_seal(b"\xa0\x30" + large, int.from_bytes(CLIENT_NONCE, "little"))
    assert Sealer(KEY, CLIENT_NONCE).seal_many([kind(b"\xa0\x30" + large)]) == frame


def test_an_opened_large_message_is_writable_and_is_the_memory_it_came_in() -> None:
    sealed = bytearray(public_seal(b"x" * 5000, 1))
    message = Opener(KEY, number(1)).open_in_place(sealed)
    message[0] = ord("y")
    assert sealed[16:] == b"y" + b"x" * 4999


@pytest.mark.parametrize("sealed", [b"", b"x", bytes(15), bytes(16), bytes(17)])
def test_what_the_peer_did_not_seal_is_refused(sealed: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Opener(KEY, CLIENT_NONCE).open(sealed)
    with pytest.raises(RemoteProtocolError):
        open_all(Opener(KEY, CLIENT_NONCE), [sealed])


def test_one_message_alone_and_the_same_one_in_a_batch_open_alike() -> None:
    sealed = [public_seal(bytes(size), 1 + i) for i, size in enumerate([0, 1, 2032])]
    alone = Opener(KEY, number(1))
    assert [open_all(alone, [item]) for item in sealed] == [[bytes(0)], [bytes(1)], [bytes(2032)]]
    assert open_all(Opener(KEY, number(1)), sealed) == [bytes(0), bytes(1), bytes(2032)]
    assert alone.messages == 3


@pytest.mark.parametrize("change", ["flipped", "replayed", "dropped", "swapped"])
def test_the_messages_before_a_bad_one_are_given_and_nothing_behind_it(change: str) -> None:
    sealed = [public_seal(bytes([i]) * 5, 1 + i) for i in range(6)]
    match change:
        case "flipped":
            sealed[3] = bytes([sealed[3][0] ^ 1]) + sealed[3][1:]
        case "replayed":
            sealed.insert(3, sealed[2])
        case "dropped":
            del sealed[3]
        case "swapped":
            sealed[3], sealed[4] = sealed[4], sealed[3]
    batches = Opener(KEY, number(1)).open_many(sealed)
    plain, stride, part = next(batches)
    assert [plain[i * stride : i * stride + 5] for i in range(len(part))] == [bytes([i]) * 5 for i in range(3)]
    with pytest.raises(RemoteProtocolError, match="message 3"):
        next(batches)


def test_message_2_to_the_63_is_the_last_one() -> None:
    sealer = Sealer(KEY, CLIENT_NONCE, messages=MESSAGES_MAX - 2)
    frames = bytes(sealer.seal_many([b"\xa1\x30"] * 2))
    with pytest.raises(LocalProtocolError, match=r"2\^63"):
        sealer.seal_parts((b"x",))
    with pytest.raises(LocalProtocolError, match=r"2\^63"):
        sealer.seal_many([b"x"])
    opener = Opener(KEY, CLIENT_NONCE, messages=MESSAGES_MAX - 2)
    batches = opener.open_many([frames[3:21], frames[24:42], frames[3:21]])
    assert len(next(batches)[2]) == 2
    with pytest.raises(RemoteProtocolError, match=r"2\^63"):
        next(batches)
    with pytest.raises(RemoteProtocolError, match=r"2\^63"):
        opener.open(b"")


def test_content_is_sealed_up_to_the_frame_limit_and_not_one_byte_over() -> None:
    sealer = Sealer(KEY, CLIENT_NONCE, frame_bytes_max=1024)
    assert len(sealer.seal_parts((bytes(1000), bytes(8)))) == 4 + 1024
    with pytest.raises(LocalProtocolError, match="1009 bytes, limit 1008"):
        sealer.seal_parts((bytes(1009),))
    with pytest.raises(LocalProtocolError, match="1009 bytes, limit 1008"):
        sealer.seal_many([b"", bytes(1009)])
    assert sealer.messages == 1


@pytest.mark.parametrize("distance", [0, 1, 2**64 - 1, -(2**64 - 1), MODULUS - 1])
def test_start_nonces_that_are_too_close_are_refused(distance: int) -> None:
    for start in (0, 5, MODULUS - 1):
        with pytest.raises(RemoteProtocolError, match="apart"):
            check_nonces(number(start), number(start + distance))


@pytest.mark.parametrize("distance", [2**64, -(2**64), 2**191])
def test_start_nonces_that_are_far_enough_apart_pass(distance: int) -> None:
    for start in (0, 5, MODULUS - 1):
        check_nonces(number(start), number(start + distance))


@pytest.mark.parametrize("public_key", [bytes(32), bytes([1]) + bytes(31), bytes(31), bytes(33), b""])
def test_a_public_key_that_gives_zeros_or_has_another_size_is_refused(public_key: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        shared_key(bytes(range(1, 33)), public_key)
