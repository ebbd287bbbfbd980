"""Frames that no part of the house sends, and peers may."""

from collections.abc import Sequence

from babelbus.wire.websocket.frames import BINARY, FIN, PING, encode_frames


def encode_binaries(payloads: Sequence[bytes], *, mask: bool = False) -> bytes:
    return encode_frames(FIN | BINARY, payloads, mask=mask)


def encode_ping(data: bytes = b"", *, mask: bool = False) -> bytes:
    return encode_frames(FIN | PING, [data], mask=mask)
