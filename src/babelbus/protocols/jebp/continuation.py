"""The form in which a session goes from one server to the next (docs/cluster.md, "Sessions that go on")."""

import msgspec

from babelbus.protocols.jebp.box import Opener, Sealer
from babelbus.protocols.jebp.handshake import Established
from babelbus.protocols.jebp.proved import ProvedOpener, ProvedSealer


class KeptSession(msgspec.Struct, frozen=True, array_like=True):
    """The proved client, both directions of its box (key, nonce, messages), and the topics that it reads."""

    fingerprint: str
    sealer: tuple[bytes, bytes, int]
    opener: tuple[bytes, bytes, int]
    topics: list[str]
    fronted: bool = False
    """Whether the box is that of a front: the session has the part of it for large messages alone."""


encode_session = msgspec.msgpack.Encoder().encode
decode_session = msgspec.msgpack.Decoder(KeptSession).decode


def restore(kept: KeptSession, frame_bytes_max: int) -> Established:
    """Return the result of the handshake of a client with another server, as far as its messages have come."""
    make_sealer, make_opener = (ProvedSealer, ProvedOpener) if kept.fronted else (Sealer, Opener)
    key, nonce, messages = kept.sealer
    sealer = make_sealer(key, nonce, frame_bytes_max=frame_bytes_max)
    sealer.messages = messages
    key, nonce, messages = kept.opener
    opener = make_opener(key, nonce)
    opener.messages = messages
    return Established(kept.fingerprint, sealer, opener, b"")
