"""JSON texts <-> messages of Wörterbuch as a client of 0.10 to 1.1 needs them: requests go out, replies come in.

Values are those of JSON. Section numbers are those of docs/specifications/worterbuch.md.
"""

from functools import cache
from typing import Any

import msgspec

from babelbus.errors import RemoteProtocolError
from babelbus.protocols.worterbuch import messages as m
from babelbus.protocols.worterbuch.codec import KEEPALIVE

_UNSET = msgspec.UNSET
_encode = msgspec.json.Encoder().encode
_decode_metadata = msgspec.json.Decoder(str).decode


# -- requests --------------------------------------------------------------------------------------------------------


def encode_message(message: m.ClientMessage) -> bytes:
    """Return the JSON text of a message, without a line end; members that may be absent are, if there is nothing.

    Raises:
        UnicodeEncodeError: a text has a lone surrogate.
    """
    if isinstance(message, m.Keepalive):
        return KEEPALIVE
    members = {}
    for attribute, member in _members(type(message)):
        value = getattr(message, attribute)
        if value is not None:
            members[member] = msgspec.Raw(value) if type(value) is bytes else value
    return _encode({m.name_of(type(message)): members})


@cache
def _members(kind: type[m.ClientMessage]) -> list[tuple[str, str]]:
    """Return the fields of a message with the names of their members."""
    return [(field.name, field.encode_name) for field in msgspec.structs.fields(kind)]


# -- replies ---------------------------------------------------------------------------------------------------------


class Authorized(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The JWT was accepted."""

    transaction_id: int


class Ack(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The request is done."""

    transaction_id: int


class Err(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The request is refused; `metadata` is JSON text of most servers, see `decode_metadata`."""

    transaction_id: int
    error_code: int
    metadata: str


class State(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A value, or the one that a key had."""

    transaction_id: int
    value: Any = _UNSET
    deleted: Any = _UNSET

    def __post_init__(self) -> None:
        if (self.value is _UNSET) == (self.deleted is _UNSET):
            raise ValueError("a state without a value")

    @property
    def content(self) -> Any:
        """The value, of a deletion the last one."""
        return self.value if self.deleted is _UNSET else self.deleted


class CState(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A value and its version, 0 if it is plain."""

    transaction_id: int
    value: Any
    version: int


class Pair(msgspec.Struct, frozen=True, gc=False):
    """A key and its value."""

    key: str
    value: Any


class PState(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Keys with their values, or with those that they had."""

    transaction_id: int
    key_value_pairs: tuple[Pair, ...] | msgspec.UnsetType = _UNSET
    deleted: tuple[Pair, ...] | msgspec.UnsetType = _UNSET

    def __post_init__(self) -> None:
        if (self.key_value_pairs is _UNSET) == (self.deleted is _UNSET):
            raise ValueError("a pState without keys")

    @property
    def content(self) -> dict[str, Any]:
        """The values by their keys, of a deletion the last ones."""
        return {pair.key: pair.value for pair in (self.key_value_pairs or self.deleted or ())}


class LsState(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The names below a key."""

    transaction_id: int
    children: tuple[str, ...]


class Welcome(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The first message of the server."""

    info: m.ServerInfo
    client_id: str


Answer = Authorized | Ack | Err | State | CState | PState | LsState
Reply = Answer | Welcome


class _Text(msgspec.Struct, gc=False, rename="camel"):
    """All that may stand in a message of a server; one of it does."""

    welcome: Welcome | msgspec.UnsetType = _UNSET
    authorized: Authorized | msgspec.UnsetType = _UNSET
    ack: Ack | msgspec.UnsetType = _UNSET
    err: Err | msgspec.UnsetType = _UNSET
    state: State | msgspec.UnsetType = _UNSET
    c_state: CState | msgspec.UnsetType = _UNSET
    p_state: PState | msgspec.UnsetType = _UNSET
    ls_state: LsState | msgspec.UnsetType = _UNSET


_decode = msgspec.json.Decoder(_Text).decode


def decode_reply(text: bytes) -> Reply | None:
    """Read the one message of a WebSocket text or of a line; `None` is a keepalive.

    Raises:
        RemoteProtocolError: the text is no message of a server.
    """
    if text == KEEPALIVE:
        return None
    try:
        text.decode()  # the library skips unknown members without a look at their UTF-8
        replies = [reply for reply in msgspec.structs.astuple(_decode(text)) if reply is not _UNSET]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"no message of a server: {error}") from error
    if len(replies) != 1:
        raise RemoteProtocolError("no message of a server, or several in one")
    reply: Reply = replies[0]
    return reply


def decode_metadata(metadata: str) -> str:
    """Return the text of an `err`: JSON in a JSON string, or plain text of some servers for some codes."""
    try:
        return _decode_metadata(metadata)
    except msgspec.DecodeError:
        return metadata


class ReplyDecoder:
    """Cuts the bytes of one TCP or unix server into messages. Spent once it has raised.

    Args:
        line_bytes_max: longest line, its LF not counted.
    """

    def __init__(self, *, line_bytes_max: int) -> None:
        self._line_bytes_max = line_bytes_max
        self._chunks: list[bytes] = []
        self._held_bytes = 0

    def receive_data(self, data: bytes) -> list[Reply]:
        """Read bytes of the transport, cut anywhere, and return the complete messages in order.

        Raises:
            RemoteProtocolError: a line is too long, or no message of a server.
        """
        *lines, rest = data.split(b"\n")
        self._chunks.append(lines[0] if lines else rest)
        self._held_bytes += len(self._chunks[-1])
        if lines:
            lines[0] = b"".join(self._chunks)
            self._chunks, self._held_bytes = [rest], len(rest)
        if max(self._held_bytes, *map(len, lines), 0) > self._line_bytes_max:
            raise RemoteProtocolError(f"a line of over {self._line_bytes_max} bytes")
        replies = [decode_reply(line) for line in lines if line]
        return [reply for reply in replies if reply is not None]
