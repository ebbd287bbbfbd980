"""The inner object of each client message -> the message (docs/specifications/worterbuch.md, sections 5 and 13.1).

A reader takes valid UTF-8 and raises one of `READ_ERRORS`. Unknown members are ignored, members that may be absent may
be `null`. The JSON library checks a value's syntax while it skips it, but not the range of its numbers: we do.
"""

from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

import msgspec

from babelbus.protocols.worterbuch import messages as m
from babelbus.protocols.worterbuch.values import INTEGER_MAX, check_value, one_line

Read = Callable[[bytes], m.ClientMessage]

READ_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)
_QUOTE = ord('"')


class _Version(msgspec.Struct, gc=False):
    major: m.TransactionId
    minor: m.TransactionId


class _Pair(msgspec.Struct, gc=False):
    key: str
    value: msgspec.Raw


class _Handshake(msgspec.Struct, rename="camel", gc=False):
    supported_protocol_versions: tuple[_Version, ...]
    last_will: tuple[_Pair, ...] | None = None
    grave_goods: tuple[str, ...] | None = None


_decode_handshake = msgspec.json.Decoder(_Handshake).decode


def _check_integer(number: int) -> int:
    if number > INTEGER_MAX:
        raise ValueError("an integer of more than 64 bits")
    return number


def read_value(raw: msgspec.Raw | bytes) -> bytes:
    """Return a value in bytes of its own."""
    value = bytes(raw)
    if value[0] != _QUOTE:
        check_value(value)
        return one_line(value)
    return value


def read_values(raws: Iterable[msgspec.Raw]) -> list[bytes]:
    """Return values in bytes of their own."""
    values = list(map(bytes, raws))
    return values if all(map(bytes.startswith, values, repeat(b'"'))) else list(map(read_value, values))


def _read_handshake(text: bytes) -> m.Handshake:
    read = _decode_handshake(text)
    return m.Handshake(
        tuple((_check_integer(one.major), _check_integer(one.minor)) for one in read.supported_protocol_versions),
        tuple((pair.key, read_value(pair.value)) for pair in read.last_will or ()),
        read.grave_goods or (),
    )


def _reader(kind: type[m.ClientMessage]) -> Read:
    """Build the reader of a message without a value, which is decoded as it is."""
    decode = msgspec.json.Decoder(kind).decode
    numbers = [field.name for field in msgspec.structs.fields(kind) if field.type not in (str, str | None, bool | None)]

    def read(text: bytes) -> m.ClientMessage:
        message = decode(text)
        for name in numbers:
            if (getattr(message, name) or 0) > INTEGER_MAX:
                raise ValueError("an integer of more than 64 bits")
        return message

    return read


def _value_reader(kind: type[m.ClientMessage]) -> Read:
    """Build the reader of a message with a value, which stays JSON text."""
    fields = msgspec.structs.fields(kind)
    members = [(field.name, msgspec.Raw if field.type is bytes else field.type) for field in fields]
    text = msgspec.defstruct(kind.__name__, members, rename="camel", gc=False)
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(text).decode
    convert: dict[Any, Callable[[Any], Any]] = {bytes: read_value, str: str}
    converters = [convert.get(field.type, _check_integer) for field in fields]

    def read(text: bytes) -> m.ClientMessage:
        values = msgspec.structs.astuple(decode(text))
        return kind(*[one(value) for one, value in zip(converters, values, strict=True)])

    return read


class _Set(msgspec.Struct, rename="camel", gc=False):
    transaction_id: m.TransactionId
    key: str
    value: msgspec.Raw


_decode_set = msgspec.json.Decoder(_Set).decode
decode_sets = msgspec.json.Decoder(_Set).decode_lines
"""Reads one inner object of `set` behind the other."""


def _read_set(text: bytes) -> tuple[int, str, bytes]:
    """Return transaction id, key and value of a `set` or a `publish`."""
    inner = _decode_set(text)
    return _check_integer(inner.transaction_id), inner.key, read_value(inner.value)


READERS: dict[str, Read] = {
    m.name_of(kind): _value_reader(kind)
    if bytes in [field.type for field in msgspec.structs.fields(kind)]
    else _reader(kind)
    for kind in m.KINDS
    if kind not in (m.Handshake, m.Keepalive)
} | {
    "handshakeRequest": _read_handshake,
    "set": lambda text: m.Set(*_read_set(text)),
    "publish": lambda text: m.Publish(*_read_set(text)),
}
