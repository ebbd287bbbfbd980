"""The NaCl box of one connection: seal and open, many messages at a time (specification, DECISION 6 to 9).

Each direction has its own start nonce and counts up, so one `Sealer` and one `Opener` belong to a connection.
A box with a precomputed key *is* a secretbox (XSalsa20-Poly1305, tag first), which is what is called here.

`load_sodium` is the only place that uses `nacl._sodium`, PyNaCl's private face of libsodium, and it does so for speed:
the public functions allocate and copy the message three times. On the machine where they took 4.4 us to seal and 6.6 us
to open a small message, a message of a batch took 0.9 and 1.5 us here. Tests hold the types of the functions and the
bytes of the specification against it, so that a PyNaCl that changes there is seen.
"""

import operator
import sys
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, chain, repeat
from typing import Any, Final

import nacl
import nacl.bindings
import nacl.exceptions

from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.protocols.jebp.frames import FRAME_BYTES_MAX, encode_length
from babelbus.protocols.jebp.messages import Data

TAG_BYTES: Final = 16
NONCE_BYTES: Final = 24
KEY_BYTES: Final = 32
MESSAGES_MAX: Final = 2**63

SMALL_BYTES_MAX: Final = 2_048  # sealed content up to here goes through the batch ways; above, copies cost more
_BATCH_MAX: Final = 1_024
_SLOT_BYTES: Final = 64
_SCRATCH_BYTES: Final = 2**18
_NONCES: Final = 2 ** (8 * NONCE_BYTES)
_LOW: Final = 2**64
_NONCE_DISTANCE_MIN: Final = 2**64


def load_sodium() -> tuple[Any, Any, Any]:
    """Return the cffi of PyNaCl's libsodium and two of its functions: seal and open of a secretbox.

    Raises:
        ImportError: this PyNaCl keeps them elsewhere.
    """
    try:
        from nacl import _sodium

        return _sodium.ffi, _sodium.lib.crypto_secretbox_easy, _sodium.lib.crypto_secretbox_open_easy
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"PyNaCl {nacl.__version__} does not have libsodium where jebp looks for it (nacl._sodium): "
            "install the version that constraints.txt names"
        ) from error


_ffi, _seal, _open = load_sodium()

_GAP: Final = bytes(TAG_BYTES)


@cache
def _heads() -> list[bytes]:
    """Return the head of a frame by the size of its small content."""
    return [b"\x01" + encode_length(size + TAG_BYTES) for size in range(SMALL_BYTES_MAX + 1)]


@cache
def _heads_with_room() -> list[bytes]:
    """Return the head of a frame and the room for its tag by the size of its small content."""
    return [head + _GAP for head in _heads()]


@cache
def _frame_bytes() -> list[int]:
    """Return the size of a frame by the size of its small content."""
    return [len(head) + size for size, head in enumerate(_heads_with_room())]


def shared_key(secret_key: bytes, peer_public_key: bytes) -> bytes:
    """Return the box key of a connection: HSalsa20 of the X25519 result (DECISION 6).

    Raises:
        RemoteProtocolError: the peer's key is not 32 bytes or makes the X25519 result all zeros, which anyone knows.
    """
    if len(peer_public_key) != KEY_BYTES:
        raise RemoteProtocolError(f"public key of {len(peer_public_key)} bytes, not {KEY_BYTES}")
    try:
        return nacl.bindings.crypto_box_beforenm(peer_public_key, secret_key)
    except nacl.exceptions.CryptoError as error:
        raise RemoteProtocolError("the peer's public key gives an X25519 result of zeros") from error


def check_nonces(first: bytes, second: bytes) -> None:
    """Refuse start nonces whose runs could meet (DECISION 9).

    Raises:
        RemoteProtocolError: a nonce is not 24 bytes, or they are less than 2^64 apart modulo 2^192. Both directions
            share one key: without this a forged nonce would let messages be reflected to their sender.
    """
    if len(first) != NONCE_BYTES or len(second) != NONCE_BYTES:
        raise RemoteProtocolError(f"nonces of {len(first)} and {len(second)} bytes, not {NONCE_BYTES}")
    distance = (int.from_bytes(first, "little") - int.from_bytes(second, "little")) % _NONCES
    if min(distance, _NONCES - distance) < _NONCE_DISTANCE_MIN:
        raise RemoteProtocolError("the start nonces are less than 2^64 apart")


def _little(words: Iterable[int]) -> "array[int]":
    """Return 64-bit words whose bytes are in the order of nonces."""
    packed = array("Q", words)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


class _Scratch(threading.local):
    """Memory and ready-made pointers into it, one set per thread.

    Making a pointer object costs as much as a third of sealing an ack, so they are made once. Per thread and not per
    connection, since a thousand idle connections must cost nothing; and not global, since libsodium is called
    without the interpreter's lock and two threads would write each other's nonces.
    """

    def __init__(self) -> None:
        self.memory = _ffi.new("unsigned char[]", _SCRATCH_BYTES)
        self.slots = [self.memory + at for at in range(0, _SCRATCH_BYTES, _SLOT_BYTES)]
        self._nonce_memory = _ffi.new("unsigned char[]", NONCE_BYTES * _BATCH_MAX)
        self.nonces = [self._nonce_memory + NONCE_BYTES * i for i in range(_BATCH_MAX)]
        self._words = memoryview(_ffi.buffer(self._nonce_memory)).cast("Q")
        self._high = 0
        """The words behind the first one of each nonce, as they are now."""

    def count(self, nonce: int, count: int) -> Any:
        """Return `count` nonces from `nonce` on, as an iterable of things to pass to libsodium."""
        low, high = nonce % _LOW, nonce // _LOW
        if count < 4 or low + count > _LOW:  # few, or a carry into the high part
            return [((nonce + i) % _NONCES).to_bytes(NONCE_BYTES, "little") for i in range(count)]
        words = self._words
        words[: 3 * count : 3] = _little(range(low, low + count))
        if high != self._high:
            words[1::3] = _little(repeat(high % _LOW, _BATCH_MAX))
            words[2::3] = _little(repeat(high // _LOW, _BATCH_MAX))
            self._high = high
        return self.nonces


_scratch = _Scratch()


class _Direction:
    """Key and next nonce of one direction."""

    def __init__(self, key: bytes, nonce: bytes, *, messages: int = 0) -> None:
        assert len(key) == KEY_BYTES
        assert len(nonce) == NONCE_BYTES
        self._key = key
        self._nonce = (int.from_bytes(nonce, "little") + messages) % _NONCES
        self.messages = messages

    @property
    def place(self) -> tuple[bytes, bytes, int]:
        """Key, nonce of the next message, and messages so far, for another process."""
        return self._key, self._nonce.to_bytes(NONCE_BYTES, "little"), self.messages

    def _advance(self, count: int) -> None:
        self._nonce = (self._nonce + count) % _NONCES
        self.messages += count


class Sealer(_Direction):
    """Seals the messages of this side into frames, in the order in which they must be sent.

    `messages` counts the sealed messages, those of the handshake included.
    """

    def __init__(self, key: bytes, nonce: bytes, *, messages: int = 0, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        super().__init__(key, nonce, messages=messages)
        self.content_bytes_max = frame_bytes_max - TAG_BYTES

    def seal_parts(self, parts: Sequence[Data]) -> bytes | bytearray:
        """Return the frame of one message that is given in parts, which are copied once and sealed in the frame.

        Raises:
            LocalProtocolError: the message is over the frame limit, or it would be number 2^63.
        """
        size = sum(map(len, parts))
        if size <= SMALL_BYTES_MAX:
            return self.seal(b"".join(parts))
        self._check(size, 1)
        head = b"\x01" + encode_length(size + TAG_BYTES)
        frame = bytearray().join((head, _GAP, *parts))
        with _ffi.from_buffer("unsigned char[]", frame) as memory:
            sealed = memory + len(head)
            _seal(sealed, sealed + TAG_BYTES, size, self._nonce.to_bytes(NONCE_BYTES, "little"), self._key)
        self._advance(1)
        return frame

    def seal(self, content: bytes) -> bytes | bytearray:
        """Return the frame of one message; a small message is not copied before it is sealed.

        Raises:
            LocalProtocolError: as `seal_parts`.
        """
        size = len(content)
        if size > SMALL_BYTES_MAX:
            return self.seal_parts((content,))
        self._check(size, 1)
        memory = _scratch.memory
        _seal(memory, content, size, self._nonce.to_bytes(NONCE_BYTES, "little"), self._key)
        self._advance(1)
        sealed: bytes = _ffi.buffer(memory, size + TAG_BYTES)[:]
        return _heads()[size] + sealed

    def seal_many(self, contents: Sequence[Data]) -> bytes | bytearray:
        """Return the frames of messages, one after the other.

        Raises:
            LocalProtocolError: as `seal_parts`; nothing is sealed then.
        """
        sizes = list(map(len, contents))
        largest = max(sizes, default=0)
        self._check(largest, len(sizes))
        if len(sizes) > 1 and largest <= SMALL_BYTES_MAX and set(map(type, contents)) == {bytes}:
            frames: list[bytes | bytearray] = [
                self._seal_batch(contents[at : at + _BATCH_MAX], sizes[at : at + _BATCH_MAX])
                for at in range(0, len(sizes), _BATCH_MAX)
            ]
        else:
            frames = [self.seal_parts((content,)) for content in contents]
        return frames[0] if len(frames) == 1 else bytearray().join(frames)

    def _seal_batch(self, contents: Sequence[Data], sizes: list[int]) -> bytearray:
        # No step of Python per message: every loop below runs inside C.
        heads = map(_heads_with_room().__getitem__, sizes)
        frames = bytearray().join(chain.from_iterable(zip(heads, contents, strict=True)))
        ends = accumulate(map(_frame_bytes().__getitem__, sizes))
        starts = map(operator.sub, ends, map(TAG_BYTES.__add__, sizes))
        with _ffi.from_buffer("unsigned char[]", frames) as memory:
            outputs = map(operator.add, repeat(memory), starts)
            nonces = _scratch.count(self._nonce, len(sizes))
            deque(map(_seal, outputs, contents, sizes, nonces, repeat(self._key)), maxlen=0)
        self._advance(len(sizes))
        return frames

    def _check(self, largest: int, count: int) -> None:
        if largest > self.content_bytes_max:
            raise LocalProtocolError(f"message of {largest} bytes, limit {self.content_bytes_max}")
        if self.messages + count > MESSAGES_MAX:
            raise LocalProtocolError("2^63 messages were sealed with this key; connect again")


class Opener(_Direction):
    """Opens the messages of the peer, in the order in which they arrived. Spent once it has raised."""

    def skip(self, count: int) -> None:
        """Count messages that are opened elsewhere.

        Raises:
            RemoteProtocolError: one of them is number 2^63.
        """
        self._check(count)
        self._advance(count)

    def open(self, sealed: Data) -> bytes:
        """Return the message of one sealed content of the handshake.

        Raises:
            RemoteProtocolError: it was not sealed by the peer, not for this place in the order, or is number 2^63.
        """
        content = bytearray(sealed)
        return bytes(self.open_in_place(content))

    def open_alone(self, sealed: bytes) -> bytes:
        """Return the message of one small sealed content, at most 256 KiB; above `SMALL_BYTES_MAX` copies cost more.

        Raises:
            RemoteProtocolError: as `open`.
        """
        self._check(1)
        memory, size = _scratch.memory, len(sealed)
        if _open(memory, sealed, size, self._nonce.to_bytes(NONCE_BYTES, "little"), self._key):
            raise RemoteProtocolError(f"message {self.messages} does not decrypt")
        self._advance(1)
        content: bytes = _ffi.buffer(memory, size - TAG_BYTES)[:]
        return content

    def open_in_place(self, sealed: bytearray) -> memoryview:
        """Open one sealed content in its own memory and return the part that is the message, writable.

        Raises:
            RemoteProtocolError: as `open`.
        """
        self._check(1)
        with _ffi.from_buffer("unsigned char[]", sealed) as memory:
            nonce = self._nonce.to_bytes(NONCE_BYTES, "little")
            # Below the size of a tag libsodium refuses before it touches the output.
            failed = _open(memory + min(TAG_BYTES, len(sealed)), memory, len(sealed), nonce, self._key)
        if failed:
            raise RemoteProtocolError(f"message {self.messages} does not decrypt")
        self._advance(1)
        return memoryview(sealed)[TAG_BYTES:]

    def open_many(self, sealed: list[bytes]) -> Iterator[tuple[bytes, int, list[bytes]]]:
        """Open small sealed contents (at most `SMALL_BYTES_MAX` bytes each), as few calls and copies as possible.

        Yields, for as many of them as fit into the scratch memory, `(plain, stride, part)`: message i of `part` is
        `plain[i * stride : i * stride + len(part[i]) - 16]`. The bytes between the messages are left over from earlier
        ones, perhaps of other connections: never take anything from beyond a message's end.

        Raises:
            RemoteProtocolError: as `open`, after those before the bad one were yielded.
        """
        first = 0
        while first < len(sealed):
            self._check(1)
            part = sealed[first : first + min(_BATCH_MAX, MESSAGES_MAX - self.messages)]
            stride = max(_SLOT_BYTES, 1 << (max(map(len, part)) - TAG_BYTES - 1).bit_length())
            if len(part) * stride > _SCRATCH_BYTES:
                part = part[: _SCRATCH_BYTES // stride]
            count = len(part)
            nonces = _scratch.count(self._nonce, count)
            outputs = _scratch.slots[: count * stride // _SLOT_BYTES : stride // _SLOT_BYTES]
            failures = list(map(_open, outputs, part, map(len, part), nonces, repeat(self._key)))
            good = count
            if any(failures):
                good = next(i for i, failed in enumerate(failures) if failed)
            self._advance(good)
            if good:
                yield _ffi.buffer(_scratch.memory, good * stride)[:], stride, part[:good] if good < count else part
            if good < count:
                raise RemoteProtocolError(f"message {self.messages} does not decrypt")
            first += count

    def _check(self, count: int) -> None:
        if self.messages + count > MESSAGES_MAX:
            raise RemoteProtocolError("2^63 messages were opened with this key")
