"""Values as JSON texts: their check, their form on a wire, and their equality.

A value is kept and passed on as the text that its client wrote. Section numbers are those of
docs/specifications/worterbuch.md.
"""

import json
import re
from itertools import accumulate
from json.encoder import encode_basestring_ascii
from typing import Any

import msgspec

from babelbus.arrays import np
from babelbus.errors import LocalProtocolError

NESTING_MAX = 120
"""Deepest value: subscribers in Rust give up at 128, and a `pState` wraps four levels around it (section 16)."""
INTEGER_MAX = 2**64 - 1

_QUOTE = ord('"')
_CONSTANTS = (b"true", b"false", b"null")
_ANY = msgspec.json.Decoder()
_STRINGS = re.compile(rb'"[^"]*"')  # of a text without escaped quotes
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
ARRAYS_BYTES_MIN = 4096
"""A text that is longer is escaped by arrays, four times as fast."""
_BLOCK = 2**16
_ESCAPE_BYTES = len(r"\uXXXX")
_NON_ASCII = re.compile("[^\x00-\x7f]+")
_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")
_MANY_DIGITS = b"0" * 309  # with fewer and no exponent, no number is beyond all floats


def nesting(text: bytes) -> int:
    """Return how deep arrays and objects are nested in a JSON text; of what is no JSON, some number."""
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    steps = _STRINGS.sub(b"", text).translate(_STEPS, _NO_BRACKETS)
    if not steps:
        return 0
    try:
        return int(np.frombuffer(steps, np.int8).cumsum(dtype=np.int64).max())
    except ImportError:  # of a client, whose values nobody makes deep to hold up a server
        return max(accumulate(memoryview(steps).cast("b")))


def _check_depth(text: bytes) -> None:
    # Brackets are counted first: cheap, and enough for most values.
    many = len(text) > 2 * NESTING_MAX and text.count(b"[") + text.count(b"{") > NESTING_MAX
    if many and nesting(text) > NESTING_MAX:
        raise ValueError(f"nested deeper than {NESTING_MAX}")


def check_value(value: bytes) -> None:
    """Check that a text, known to be JSON but for its numbers and the depth, is a value that every client can read.

    Raises:
        ValueError: a number is beyond all floats, or it is nested deeper than `NESTING_MAX`.
    """
    if value[0] == _QUOTE or value in _CONSTANTS or (len(value) < 20 and value.isdigit()):
        return
    _check_depth(value)
    shape = value.translate(_DIGITS)
    if b"0e" in shape or (len(value) >= len(_MANY_DIGITS) and _MANY_DIGITS in shape):
        _ANY.decode(value)  # finds 1e400
        json.loads(value, parse_int=_parse_integer)


def parse_value(text: bytes) -> bytes:
    """Return a text of unknown origin as a value, without blanks around it.

    Raises:
        ValueError: the text is no JSON, has invalid UTF-8, a lone surrogate, a number beyond all floats, or too deep.
    """
    value = bytes(text).strip(b" \t\r\n")
    if not value:
        raise ValueError("no JSON")
    _check_depth(value)
    try:
        _ANY.decode(value)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    check_value(value)
    return one_line(value)


def one_line(text: bytes) -> bytes:
    """Return a JSON text without raw line ends: one that has any loses all blanks between its tokens."""
    return msgspec.json.format(text, indent=-1) if b"\n" in text or b"\r" in text else text


def text_json(text: str) -> bytes:
    """Return a text as a JSON string in ASCII: right for every transport.

    Raises:
        LocalProtocolError: it has a lone surrogate (a subject that came as bytes), which JSON clients cannot read.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise LocalProtocolError("a text that is not valid Unicode cannot be said in JSON") from error
    return encode_basestring_ascii(text).encode()


def ascii_json(text: bytes) -> bytes:
    r"""Return JSON texts as TCP and unix clients need them (section 3): in ASCII.

    Anything beyond ASCII stands in a string, and becomes `\uXXXX`.
    """
    if text.isascii():
        return text
    decoded = text.decode()
    if len(text) < ARRAYS_BYTES_MIN:
        return _NON_ASCII.sub(_escape, decoded).encode()
    blocks = range(0, len(decoded), _BLOCK)  # the arrays of all would take thirty times the memory of the text
    return b"".join([_escape_block(decoded[at : at + _BLOCK]) for at in blocks])


def _escape_block(text: str) -> bytes:
    """Return a part of a JSON text in ASCII, by arrays."""
    units = np.frombuffer(text.encode("utf-16-le"), "<u2")
    wide = np.flatnonzero(units > 0x7F)
    shifts = np.zeros(len(units), np.int64)
    shifts[wide] = _ESCAPE_BYTES - 1
    ends = np.arange(1, len(units) + 1) + shifts.cumsum()
    escaped = np.empty(ends[-1], np.uint8)
    escaped[ends - 1] = units
    starts, numbers = ends[wide] - _ESCAPE_BYTES, units[wide]
    escaped[starts], escaped[starts + 1] = b"\\u"
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    for at, shift in enumerate((12, 8, 4, 0), 2):
        escaped[starts + at] = digits[numbers >> shift & 0xF]
    return escaped.tobytes()


def same_value(one: bytes, other: bytes) -> bool:
    """Return whether two values are equal by JSON types (section 2.3): `1`, `1.0`, `true` and `"1"` are four values.

    Integers that do not fit into 64 bits are floats, as they are upstream. Values of other protocols may be nested too
    deep to be compared; those differ unless they are spelled the same.
    """
    if one == other:
        return True
    try:
        return _same(json.loads(one, parse_int=_parse_integer), json.loads(other, parse_int=_parse_integer))
    except RecursionError:
        return False


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if type(one) is dict:
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if type(one) is list:
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _parse_integer(digits: str) -> int | float:
    """Read an integer as upstream does; it takes no quadratic time, and no error, for many digits.

    Raises:
        ValueError: it is beyond all floats.
    """
    if len(digits) <= 20 and digits != "-0":
        number = int(digits)
        if -(2**63) <= number <= INTEGER_MAX:
            return number
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number beyond all floats")
    return value


def _escape(found: re.Match[str]) -> str:
    return encode_basestring_ascii(found.group())[1:-1]
