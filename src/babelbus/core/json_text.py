"""A payload as JSON text, for receivers that know nothing else (docs/design/design.md, section 5)."""

from base64 import b64encode

import msgspec

from babelbus.errors import UNREADABLE
from babelbus.records.envelope import CONTENT_TYPE, JSON_TYPE
from babelbus.records.record import Headers

NESTING_MAX = 120
"""Deepest JSON that is passed on as JSON: readers in Rust give up at 128."""
_check = msgspec.json.Decoder().decode
_encode = msgspec.json.encode
_TOO_DEEP = object()


def json_text(payload: bytes | None, headers: Headers) -> bytes:
    """Return a payload as JSON: unchanged if the headers say that it is JSON, else its text as a string.

    Bytes that are no text become an object with the one member `base64`, which no text becomes. JSON with line
    ends between its tokens loses all its blanks: a value is one line wherever lines are messages.
    """
    if not payload:
        return b'""'
    if headers and is_json(headers):
        try:
            value = _check(payload)
        except UNREADABLE:
            value = _TOO_DEEP
        if payload.count(b"[") + payload.count(b"{") > NESTING_MAX and _nests_deeper(value, NESTING_MAX):
            value = _TOO_DEEP
        if value is not _TOO_DEEP:
            return msgspec.json.format(payload, indent=-1) if b"\n" in payload or b"\r" in payload else payload
    try:
        return _encode(payload.decode())
    except UnicodeDecodeError:
        return b'{"base64":"%b"}' % b64encode(payload)


def _nests_deeper(value: object, levels: int) -> bool:
    """Return whether arrays and objects are nested deeper than this, level by level."""
    inner = [value]
    while inner and levels > 0:
        inner = [
            one
            for outer in inner
            if isinstance(outer, list | dict)
            for one in (outer if isinstance(outer, list) else outer.values())
        ]
        levels -= 1
    return any(isinstance(one, list | dict) for one in inner)


def is_json(headers: Headers) -> bool:
    """Return whether the content type is JSON or based on it."""
    for name, value in headers:
        if name == CONTENT_TYPE and value:
            kind = value.partition(b";")[0].strip().lower()
            return kind == JSON_TYPE or kind.endswith(b"+json")
    return False
