"""The fields that requests and answers are made of: names of topics, texts and numbers.

name_field := L: u8 (0..8), name_bytes: big-endian number of L bytes, name (UTF-8)      (DECISION 15 and 19)

A name has 1 to 249 bytes of UTF-8 without a comma (it separates names in a list) and without control characters.
That is wider than the set of DECISION 15: the store escapes what no folder may be called.
"""

import re
import struct
from functools import lru_cache
from typing import Final, TypeVar

import msgspec

from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.protocols.jebp.frames import encode_length
from babelbus.protocols.jebp.messages import (
    BatchCommitted,
    Data,
    OffsetBounds,
    PartsDropped,
    RecordsCreated,
    RecordsStaged,
)

T = TypeVar("T", bound=msgspec.Struct)

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


class MalformedError(Exception):
    """A request does not have its form."""


class Fields:
    """Reads the fields of a request one behind the other; each method raises `MalformedError`."""

    def __init__(self, content: Data) -> None:
        self._content = content
        self.position = 1

    @property
    def more(self) -> bool:
        """Whether bytes follow."""
        return self.position < len(self._content)

    def name(self) -> str:
        """Read a topic's name."""
        field = read_name_field(self._content, self.position)
        if field is None:
            raise MalformedError
        name, self.position = field
        return name

    def text(self, bytes_min: int, bytes_max: int) -> str:
        """Read a text whose length is in front, as that of a name is."""
        field = find_field(self._content, self.position)
        if field is None:
            raise MalformedError
        self.position = field[1]
        return _text(self._content[field[0] : field[1]], bytes_min, bytes_max)

    def short_text(self, bytes_min: int, bytes_max: int) -> str:
        """Read a text with one byte of length."""
        (size,) = self.numbers(_BYTE)
        start, self.position = self.position, self.position + size
        if self.position > len(self._content):
            raise MalformedError
        return _text(self._content[start : self.position], bytes_min, bytes_max)

    def numbers(self, fields: struct.Struct) -> tuple[int, ...]:
        """Read numbers."""
        start, self.position = self.position, self.position + fields.size
        if self.position > len(self._content):
            raise MalformedError
        return fields.unpack_from(self._content, start)

    def end(self) -> None:
        """Check that nothing follows."""
        if self.more:
            raise MalformedError

    def rest(self) -> memoryview:
        """Return the bytes that follow, at least one."""
        if not self.more:
            raise MalformedError
        return memoryview(self._content)[self.position :]


def _text(data: Data, bytes_min: int, bytes_max: int) -> str:
    if not bytes_min <= len(data) <= bytes_max:
        raise MalformedError
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise MalformedError from None


_BYTE: Final = struct.Struct(">B")

# -- answers that are numbers alone ----------------------------------------------------------------------------------

_NUMBERS: Final[dict[type[msgspec.Struct], tuple[struct.Struct, int]]] = {
    RecordsCreated: (struct.Struct(">iq"), 0),
    RecordsStaged: (struct.Struct(">iq"), -1),
    BatchCommitted: (struct.Struct(">q?"), -1),
    PartsDropped: (struct.Struct(">i"), 0),
    OffsetBounds: (struct.Struct(">qq"), 0),
}
"""The form of each answer, and the least that its numbers can be."""


def encode_numbers(answer: msgspec.Struct) -> bytes:
    """Return the content of an answer, after the two status bytes."""
    return _NUMBERS[type(answer)][0].pack(*msgspec.structs.astuple(answer))


def decode_numbers(kind: type[T], content: Data) -> T:
    """Read the content of an answer of this kind.

    Raises:
        RemoteProtocolError: the length is wrong, or a number is impossible.
    """
    form, least = _NUMBERS[kind]
    if len(content) != form.size:
        raise RemoteProtocolError(f"an answer {kind.__name__} of {len(content)} bytes, not {form.size}")
    numbers = form.unpack(content)
    if min(numbers) < least:
        raise RemoteProtocolError(f"impossible numbers of an answer {kind.__name__}: {numbers}")
    return kind(*numbers)
