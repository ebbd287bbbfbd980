"""Values of the state: entries, changes and revisions, which are JSON that is read when a program asks for it."""

import binascii
from typing import Any, TypeVar

import msgspec

from babelbus.errors import LocalProtocolError

T = TypeVar("T")
_BASE64 = "base64"
_json = msgspec.json.encode
_decode_json = msgspec.json.decode


class _Valued:
    """The forms in which a JSON text is read."""

    __slots__ = ()
    raw: bytes | None

    @property
    def value(self) -> Any:
        """The value as Python has it; `None` without one. Each access reads the text again."""
        return None if self.raw is None else _decode_json(self.raw)

    def decode(self, type: type[T]) -> T:  # noqa: A002  # the word of msgspec
        """Return the value as a type, a Struct for example.

        Raises:
            msgspec.ValidationError: it has another shape.
        """
        value: T = _decode_json(b"null" if self.raw is None else self.raw, type=type)
        return value

    @property
    def data(self) -> bytes:
        """The bytes of a value that was set as bytes, or the text of a string in UTF-8.

        Raises:
            ValueError: the value is neither.
        """
        value = self.value
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, dict) and len(value) == 1 and isinstance(value.get(_BASE64), str):
            return binascii.a2b_base64(value[_BASE64], strict_mode=True)
        raise ValueError("the value is no bytes and no text")


class Entry(msgspec.Struct, _Valued, frozen=True, gc=False):
    """A key with its value: `raw` is the JSON text, `version` is 0 for a plain value."""

    key: str
    raw: bytes
    version: int = 0


class Change(msgspec.Struct, _Valued, frozen=True, gc=False):
    """A change of a watch; `raw` is `None` when the key was deleted.

    `timestamp` (ms since 1970) and `source` (protocol and name of who it was) are 0 and empty for a value that was
    there before. `present` says so for the values that begin a watch, `resync` for what has changed while the watch was
    interrupted: only the last change of each key is known then.
    """

    key: str
    raw: bytes | None
    version: int = 0
    timestamp: int = 0
    source: str = ""
    present: bool = False
    resync: bool = False

    @property
    def deleted(self) -> bool:
        """Whether the key has no value any more."""
        return self.raw is None


class Revision(msgspec.Struct, _Valued, frozen=True, gc=False):
    """A stored change of a key: when (ms since 1970), by whom, and its value; `raw` is `None` for a deletion."""

    offset: int
    timestamp: int
    raw: bytes | None
    version: int
    source: str

    @property
    def deleted(self) -> bool:
        """Whether it was a deletion."""
        return self.raw is None


class Revisions(msgspec.Struct, frozen=True):
    """The stored changes of a key, oldest first. From the offset `complete_from` on, none is missing."""

    revisions: list[Revision]
    complete_from: int


def encode_value(value: Any) -> bytes:
    """Return a value as JSON text: bytes become `{"base64": ...}`, `msgspec.Raw` is JSON already.

    Raises:
        LocalProtocolError: JSON cannot carry it.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        value = {_BASE64: binascii.b2a_base64(value, newline=False).decode()}
    try:
        return _json(value)
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise LocalProtocolError(f"the value cannot be written as JSON: {error}") from error
