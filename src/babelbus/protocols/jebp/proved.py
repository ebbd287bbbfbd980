"""A jebp connection whose handshake and box end at a front (docs/cluster.md, "Fronts"): the session's side of both.

The front sends one frame, a `Proof` or the text of an error. Frames behind it have the form and size of sealed ones,
so that everything counts the same bytes: the room of the tag is zeros and the content plain, or the room is `ff` and
the content the text of an error. Frames above `OPENED_BYTES_MAX` come sealed, as they came from the client: the budget
for unfinished messages is the core's, and an edge never holds them.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from babelbus.errors import RemoteProtocolError
from babelbus.protocols.jebp.box import KEY_BYTES, NONCE_BYTES, TAG_BYTES, Opener, Sealer
from babelbus.protocols.jebp.frames import FrameReader, encode_frame, encode_length
from babelbus.protocols.jebp.handshake import VERSION, Established
from babelbus.protocols.jebp.messages import Data
from babelbus.units import KIB

OPENED_BYTES_MAX: Final = 8 * KIB + 512
"""Largest sealed content that a front opens."""
ROOM: Final = bytes(TAG_BYTES)
_BROKEN: Final = b"\xff" * TAG_BYTES
_FAILED: Final = b"\x00"
_PROVED: Final = b"\x01"
_TEXT_BYTES_MAX: Final = 512


class JebpPlan(msgspec.Struct, frozen=True):
    """The content of jebp's `FrontPlan`, as JSON."""

    seed: bytes
    """The key of the server."""
    frame_bytes_max: int
    bare_certificates: bool


class Proof(msgspec.Struct, frozen=True, array_like=True):
    """The result of a handshake: who the client is, and how the core opens its large messages."""

    fingerprint: str
    key: bytes
    nonce: bytes
    """Nonce of the client's next message."""
    messages: int
    """Messages that the client has sealed."""


def encode_proof(fingerprint: str, opener: Opener) -> bytes:
    """Return the frame for a client that has proved who it is."""
    return encode_frame(_PROVED + msgspec.msgpack.encode(Proof(fingerprint, *opener.place)))


def encode_failure(error: Exception) -> bytes:
    """Return the frame for a handshake that has failed."""
    return encode_frame(_FAILED + str(error).encode("utf-8", "replace")[:_TEXT_BYTES_MAX])


def encode_broken(error: Exception) -> bytes:
    """Return the frame for a client that has broken the protocol after its handshake."""
    return encode_frame(_BROKEN + str(error).encode("utf-8", "replace")[:_TEXT_BYTES_MAX])


def encode_opened(contents: Sequence[Data]) -> bytes:
    """Return the frames of contents that are not sealed."""
    parts: list[Data] = []
    for content in contents:
        parts += (b"\x01", encode_length(len(content) + TAG_BYTES), ROOM, content)
    return b"".join(parts)


class ProvedHandshake:
    """A handshake that a front has done, in place of a `ServerHandshake`."""

    def __init__(self, frame_bytes_max: int) -> None:
        self.established: Established | None = None
        self._frame_bytes_max = frame_bytes_max
        self._reader = FrameReader()

    def begin(self) -> bytes:
        """Return the sign for the front that the client may come in."""
        return encode_frame(VERSION)

    def receive_data(self, data: bytes | bytearray | memoryview) -> bytes:
        """Receive bytes of the front; nothing is sent back.

        Raises:
            RemoteProtocolError: the client broke the protocol.
        """
        self._reader.receive_data(data)
        content = self._reader.next_frame()
        if content is None:
            return b""
        if not content.startswith(_PROVED):
            raise RemoteProtocolError(content[1:].decode("utf-8", "replace"))
        proof = msgspec.msgpack.decode(content[1:], type=Proof)
        sealer = ProvedSealer(bytes(KEY_BYTES), bytes(NONCE_BYTES), frame_bytes_max=self._frame_bytes_max)
        opener = ProvedOpener(proof.key, proof.nonce)
        opener.messages = proof.messages
        self.established = Established(proof.fingerprint, sealer, opener, self._reader.take_rest())
        return b""


class ProvedSealer(Sealer):
    """Encodes the messages of the session; the front seals them."""

    def seal_parts(self, parts: Sequence[Data]) -> bytes:
        """Return the frame of one message that is given in parts.

        Raises:
            LocalProtocolError: the message is over the frame limit.
        """
        size = sum(map(len, parts))
        self._check(size, 1)
        return b"".join((b"\x01", encode_length(size + TAG_BYTES), ROOM, *parts))

    def seal(self, content: bytes) -> bytes:
        """Return the frame of one message; errors are those of `seal_parts`."""
        return self.seal_parts((content,))

    def seal_many(self, contents: Sequence[Data]) -> bytes:
        """Return the frames of messages; errors are those of `seal_parts`."""
        self._check(max(map(len, contents), default=0), len(contents))
        return encode_opened(contents)


class ProvedOpener(Opener):
    """Reads what the front has opened, and opens what was too large for the front."""

    def open_alone(self, sealed: bytes) -> bytes:
        """Return one small message.

        Raises:
            RemoteProtocolError: the client broke the protocol.
        """
        self._read_room(sealed)
        return sealed[TAG_BYTES:]

    def open_in_place(self, sealed: bytearray) -> memoryview:
        """Return one message as a part of its memory; errors are those of `open_alone`."""
        if len(sealed) > OPENED_BYTES_MAX:
            return super().open_in_place(sealed)
        self._read_room(sealed)
        return memoryview(sealed)[TAG_BYTES:]

    def open_many(self, sealed: list[bytes]) -> Iterator[tuple[bytes, int, list[bytes]]]:
        """Yield small messages as `Opener.open_many` does; errors are those of `open_alone`."""
        for one in sealed:
            yield self.open_alone(one), 0, [one]

    def _read_room(self, sealed: bytes | bytearray) -> None:
        if not sealed.startswith(ROOM):
            raise RemoteProtocolError(sealed[TAG_BYTES:].decode("utf-8", "replace"))
        self.skip(1)
