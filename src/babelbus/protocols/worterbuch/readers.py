"""The inner object of each client message -> the message (docs/specifications/worterbuch.md, sections 5 and 13.1).

A reader takes valid UTF-8 and raises one of `READ_ERRORS`. Unknown members are ignored, members that may be absent may
be `null`. The JSON library checks a value's syntax while it skips it, but not the range of its numbers: we do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from babelbus.protocols.worterbuch import messages as m
from babelbus.protocols.worterbuch.values import INTEGER_MAX, check_value, one_line

Read = Callable[[bytes], m.ClientMessage]
ReadLines = Callable[[bytes], Sequence[m.ClientMessage]]

_QUOTE = ord('"')

READ_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)


class _Named(msgspec.Struct, rename="camel", gc=False):
    transaction_id: m.TransactionId
    key: str


class _SetText(_Named, gc=False):
    value: msgspec.Raw


class _CSetText(_SetText, gc=False):
    version: m.TransactionId


class _SPubText(msgspec.Struct, rename="camel", gc=False):
    transaction_id: m.TransactionId
    value: msgspec.Raw


class _TransformText(_Named, gc=False):
    template: msgspec.Raw


class _SubscribeText(_Named, gc=False):
    unique: bool | None = None
    live_only: bool | None = None


class _PSubscribeText(msgspec.Struct, rename="camel", gc=False):
    transaction_id: m.TransactionId
    request_pattern: str
    unique: bool | None = None
    aggregate_events: m.TransactionId | None = None
    live_only: bool | None = None


class _PDeleteText(msgspec.Struct, rename="camel", gc=False):
    transaction_id: m.TransactionId
    request_pattern: str
    quiet: bool | None = None


class _VersionText(msgspec.Struct, gc=False):
    major: m.TransactionId
    minor: m.TransactionId


class _PairText(msgspec.Struct, gc=False):
    key: str
    value: msgspec.Raw


class _HandshakeText(msgspec.Struct, rename="camel", gc=False):
    supported_protocol_versions: tuple[_VersionText, ...]
    last_will: tuple[_PairText, ...] | None = None
    grave_goods: tuple[str, ...] | None = None


def _integer(number: int) -> int:
    if number > INTEGER_MAX:
        raise ValueError("an integer of more than 64 bits")
    return number


def _value(raw: msgspec.Raw) -> bytes:
    value = bytes(raw)
    if value[0] == _QUOTE:
        return value
    check_value(value)
    return one_line(value)


def _reader(kind: type[Any]) -> Read:
    decode = msgspec.json.Decoder(kind).decode
    if kind in (m.Authorization, m.Authentication):
        return decode

    def read(text: bytes) -> m.ClientMessage:
        message = decode(text)
        if message.transaction_id > INTEGER_MAX:
            raise ValueError("a transaction id of more than 64 bits")
        return message  # type: ignore[no-any-return]  # of `kind`

    return read


_decode_switch = msgspec.json.Decoder(m.ProtocolSwitch).decode
_decode_set = msgspec.json.Decoder(_SetText).decode
_decode_cset = msgspec.json.Decoder(_CSetText).decode
_decode_spub = msgspec.json.Decoder(_SPubText).decode
_decode_transform = msgspec.json.Decoder(_TransformText).decode
_decode_subscribe = msgspec.json.Decoder(_SubscribeText).decode
_decode_psubscribe = msgspec.json.Decoder(_PSubscribeText).decode
_decode_pdelete = msgspec.json.Decoder(_PDeleteText).decode
_decode_handshake = msgspec.json.Decoder(_HandshakeText).decode


def _read_switch(text: bytes) -> m.ProtocolSwitch:
    message = _decode_switch(text)
    _integer(message.version)
    return message


def _read_set(text: bytes) -> m.Set:
    read = _decode_set(text)
    return m.Set(_integer(read.transaction_id), read.key, _value(read.value))


def _read_publish(text: bytes) -> m.Publish:
    read = _decode_set(text)
    return m.Publish(_integer(read.transaction_id), read.key, _value(read.value))


def _read_cset(text: bytes) -> m.CSet:
    read = _decode_cset(text)
    return m.CSet(_integer(read.transaction_id), read.key, _value(read.value), _integer(read.version))


def _read_spub(text: bytes) -> m.SPub:
    read = _decode_spub(text)
    return m.SPub(_integer(read.transaction_id), _value(read.value))


def _read_transform(text: bytes) -> m.Transform:
    read = _decode_transform(text)
    return m.Transform(_integer(read.transaction_id), read.key, _value(read.template))


def _read_subscribe(text: bytes) -> m.Subscribe:
    read = _decode_subscribe(text)
    return m.Subscribe(_integer(read.transaction_id), read.key, bool(read.unique), bool(read.live_only))


def _read_psubscribe(text: bytes) -> m.PSubscribe:
    read = _decode_psubscribe(text)
    aggregate_ms = None if read.aggregate_events is None else _integer(read.aggregate_events)
    return m.PSubscribe(
        _integer(read.transaction_id), read.request_pattern, bool(read.unique), aggregate_ms, bool(read.live_only)
    )


def _read_pdelete(text: bytes) -> m.PDelete:
    read = _decode_pdelete(text)
    return m.PDelete(_integer(read.transaction_id), read.request_pattern, bool(read.quiet))


def _read_handshake(text: bytes) -> m.Handshake:
    read = _decode_handshake(text)
    return m.Handshake(
        tuple((_integer(version.major), _integer(version.minor)) for version in read.supported_protocol_versions),
        tuple((pair.key, _value(pair.value)) for pair in read.last_will or ()),
        read.grave_goods or (),
    )


READERS: dict[str, Read] = {
    "protocolSwitchRequest": _read_switch,
    "authorizationRequest": _reader(m.Authorization),
    "authenticationRequest": _reader(m.Authentication),
    "handshakeRequest": _read_handshake,
    "get": _reader(m.Get),
    "cGet": _reader(m.CGet),
    "pGet": _reader(m.PGet),
    "set": _read_set,
    "cSet": _read_cset,
    "sPubInit": _reader(m.SPubInit),
    "sPub": _read_spub,
    "publish": _read_publish,
    "subscribe": _read_subscribe,
    "pSubscribe": _read_psubscribe,
    "unsubscribe": _reader(m.Unsubscribe),
    "delete": _reader(m.Delete),
    "pDelete": _read_pdelete,
    "ls": _reader(m.Ls),
    "pLs": _reader(m.PLs),
    "subscribeLs": _reader(m.SubscribeLs),
    "unsubscribeLs": _reader(m.UnsubscribeLs),
    "lock": _reader(m.Lock),
    "acquireLock": _reader(m.AcquireLock),
    "releaseLock": _reader(m.ReleaseLock),
    "transform": _read_transform,
    "export": _reader(m.Export),
    "import": _reader(m.Import),
}


_BRACE, _LINE_END = ord("}"), ord("\n")
_MAY_FOLLOW_A_BRACE = np.zeros(256, np.bool_)
_MAY_FOLLOW_A_BRACE[[*b"}]\n"]] = True


def _line_decoder(name: str, kind: type[Any]) -> Callable[[bytes], Sequence[Any]]:
    """Build the decoder of many lines that all hold the message `name`: in one call of C, into objects with `inner`.

    It raises one of `READ_ERRORS` if the lines, all of them complete, are not one message each.
    """
    line = msgspec.defstruct("_Line", [("inner", kind)], gc=False, rename={"inner": name}, forbid_unknown_fields=True)
    decode_lines = msgspec.json.Decoder(line).decode_lines

    def decode(text: bytes) -> Sequence[Any]:
        found = decode_lines(text)
        octets = np.frombuffer(text, np.uint8)
        # The library takes objects that share a line or span several, and a member that comes twice. Twice as many
        # braces as lines rules all that out. With more (objects as values) look at what follows each: a second
        # member needs a comma behind the first, a second object its own brace.
        if np.count_nonzero(octets == _LINE_END) != len(found):
            raise ValueError("not one message in each line")
        braces = np.flatnonzero(octets == _BRACE)
        if len(braces) != 2 * len(found) and not _MAY_FOLLOW_A_BRACE[octets[braces + 1]].all():
            raise ValueError("perhaps more than one member")
        return found

    return decode


def _plain_lines(name: str, kind: type[Any]) -> ReadLines:
    decode = _line_decoder(name, kind)

    def read(text: bytes) -> list[m.ClientMessage]:
        messages = []
        for line in decode(text):
            message = line.inner
            if message.transaction_id > INTEGER_MAX:
                raise ValueError("a transaction id of more than 64 bits")
            messages.append(message)
        return messages

    return read


def _value_lines(name: str, kind: type[m.Set | m.Publish]) -> ReadLines:
    decode = _line_decoder(name, _SetText)

    def read(text: bytes) -> list[m.Set | m.Publish]:
        messages: list[m.Set | m.Publish] = []
        returns = b"\r" in text  # some readers of lines end them there, too
        for line in decode(text):
            inner = line.inner
            value = bytes(inner.value)
            if value[0] != _QUOTE:
                check_value(value)
                if returns:
                    value = one_line(value)
            if inner.transaction_id > INTEGER_MAX:
                raise ValueError("a transaction id of more than 64 bits")
            messages.append(kind(inner.transaction_id, inner.key, value))
        return messages

    return read


def _set_run() -> Callable[[bytes], m.SetRun]:
    decode = _line_decoder("set", _SetText)

    def read(text: bytes) -> m.SetRun:
        inner = [line.inner for line in decode(text)]
        values = [bytes(one.value) for one in inner]
        others = [number for number, value in enumerate(values) if value[0] != _QUOTE]
        returns = bool(others) and b"\r" in text
        for number in others:
            check_value(values[number])
            if returns:
                values[number] = one_line(values[number])
        run = m.SetRun([one.transaction_id for one in inner], [one.key for one in inner], values)
        if max(run.transaction_ids) > INTEGER_MAX:
            raise ValueError("a transaction id of more than 64 bits")
        return run

    return read


read_set_run = _set_run()
"""Reads lines that are nothing but sets, by columns; raises as `LINE_READERS` do."""

LINE_READERS: dict[str, ReadLines] = {
    "set": _value_lines("set", m.Set),
    "publish": _value_lines("publish", m.Publish),
    "get": _plain_lines("get", m.Get),
    "cGet": _plain_lines("cGet", m.CGet),
    "pGet": _plain_lines("pGet", m.PGet),
    "delete": _plain_lines("delete", m.Delete),
    "lock": _plain_lines("lock", m.Lock),
    "releaseLock": _plain_lines("releaseLock", m.ReleaseLock),
}
"""For the messages that come in long runs: many lines at once, in a third of the time. They raise for lines that are
not all the same message in its usual spelling, too: then go line by line."""
