"""The items of calls <-> the content of a frame (docs/protocols/jebp.md, jebp/1.2): command 40 and frames of status c0.

client content := 40, item*      server content := c0 00, item*
item := id: u32, kind: u8, body_bytes: u32, body; big-endian
"""

import struct
from typing import Final

import msgspec

from babelbus.errors import RemoteProtocolError
from babelbus.protocols.jebp.messages import CALL, CallItems, Data

OPEN: Final = 0
MORE: Final = 1
CANCEL: Final = 2
"""Kinds of a client's items."""
ITEM: Final = 0
END: Final = 1
ERROR: Final = 2
"""Kinds of a server's items; after an end or an error the id is free again."""

CLIENT_HEAD: Final = bytes((CALL,))
SERVER_HEAD: Final = b"\xc0\x00"
ITEM_HEAD: Final = struct.Struct(">IBI")
CALLS_MAX: Final = 1_024
"""Most calls that are open on one connection."""
GATHERED_BYTES_MAX: Final = 65_536
"""Items are gathered into one frame up to about this size; a larger item has a frame of its own."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The body of an error: a short code, a sentence for people, and what the method's page says."""

    code: str
    message: str
    details: msgspec.Raw = msgspec.Raw(b"\xc0")


def decode_client_items(content: Data) -> CallItems:
    """Read the items of a client; bodies are parts of `content`.

    Raises:
        RemoteProtocolError: an item is not whole, or of no known kind.
    """
    return _decode(content, len(CLIENT_HEAD))


def decode_server_items(content: Data) -> CallItems:
    """Read the items of a server, as `decode_client_items`."""
    return _decode(content, len(SERVER_HEAD))


def _decode(content: Data, position: int) -> CallItems:
    items: list[tuple[int, int, Data]] = []
    size, head_bytes = len(content), ITEM_HEAD.size
    while position < size:
        start = position + head_bytes
        if start > size:
            raise RemoteProtocolError(f"item at byte {position} of a frame has no whole head")
        number, kind, body_bytes = ITEM_HEAD.unpack_from(content, position)
        position = start + body_bytes
        if position > size:
            raise RemoteProtocolError(f"item of call {number}: {body_bytes} bytes, {size - start} are there")
        if kind > 2:
            raise RemoteProtocolError(f"item of call {number} is of the unknown kind {kind}")
        items.append((number, kind, content[start:position]))
    return CallItems(items)


def encode_items(head: bytes, items: list[tuple[int, int, Data]]) -> bytes:
    """Return the content of a frame with these items behind `CLIENT_HEAD` or `SERVER_HEAD`."""
    parts: list[Data] = [head]
    for number, kind, body in items:
        parts += (ITEM_HEAD.pack(number, kind, len(body)), body)
    return b"".join(parts)
