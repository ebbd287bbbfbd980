"""Topic names on the wire: which are allowed, and the form with the length in front (DECISION 15 and 19).

name_field := L: u8 (0..8), name_bytes: big-endian number of L bytes, name (UTF-8)

A name has 1 to 249 bytes of UTF-8 without a comma (it separates names in a list) and without control characters.
That is wider than the set of DECISION 15: the store escapes what no folder may be called.
"""

import re
from functools import lru_cache
from typing import Final

from babelbus.errors import LocalProtocolError
from babelbus.protocols.jebp.frames import encode_length
from babelbus.protocols.jebp.messages import Data

NAME_BYTES_MAX: Final = 249

# Unicode's control characters (category Cc): C0, DEL and C1.
_FORBIDDEN: Final = re.compile("[,\x00-\x1f\x7f-\x9f]")


def read_name(encoded: Data) -> str | None:
    """Read a topic name; None if it is not an allowed one, which is an answer and no reason to close."""
    if not 1 <= len(encoded) <= NAME_BYTES_MAX:
        return None
    try:
        name = str(encoded, "utf-8")
    except UnicodeDecodeError:
        return None
    return None if _FORBIDDEN.search(name) else name


def encode_name(topic: str) -> bytes:
    """Return the bytes of a topic name.

    Raises:
        LocalProtocolError: the name is not one that jebp can carry.
    """
    try:
        encoded = topic.encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"topic name {topic!r} is not valid Unicode") from error
    if read_name(encoded) is None:
        raise LocalProtocolError(
            f"topic name {topic!r}: it must have 1 to {NAME_BYTES_MAX} bytes of UTF-8, no comma, no control character"
        )
    return encoded


@lru_cache(maxsize=1024)
def encode_name_field(topic: str) -> bytes:
    """Return a topic name with its length in front.

    Raises:
        LocalProtocolError: as `encode_name`.
    """
    encoded = encode_name(topic)
    return encode_length(len(encoded)) + encoded


def find_field(data: Data, position: int) -> tuple[int, int] | None:
    """Find the text whose length is at `position`: where it starts and where it ends; None if it is not whole."""
    if position >= len(data) or data[position] > 8:
        return None
    start = position + 1 + data[position]
    if start > len(data):
        return None
    end = start + int.from_bytes(data[position + 1 : start], "big")
    return (start, end) if end <= len(data) else None


def read_name_field(data: Data, position: int) -> tuple[str, int] | None:
    """Read the topic name whose length is at `position`: the name and where it ends; None as `read_name`."""
    field = find_field(data, position)
    if field is None or field[1] - field[0] > NAME_BYTES_MAX:
        return None
    name = known_name(bytes(data[field[0] : field[1]]))
    return None if name is None else (name, field[1])


known_name = lru_cache(maxsize=1024)(read_name)
"""`read_name` that remembers: most clients write many records to few topics."""
