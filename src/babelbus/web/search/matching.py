"""Filters compiled: a function of a record, and bytes that a record must contain so that the function is worth a call.

A record without any of the `needles` cannot match. That must never be wrong, so a needle is what every form of a value
contains: in JSON a text may have escapes (`\\u00fc`), and a number is written in many ways (`70`, `7e1`, `70.00`).
"""

import re
from collections.abc import Callable
from decimal import Decimal
from operator import ge, gt, le, lt
from typing import Any, Final

import msgspec

from babelbus.core.access.root import Root
from babelbus.core.rooted import relative_record
from babelbus.core.topic import event_of
from babelbus.records.record import Record
from babelbus.web.search.language import Both, Comparison, Either, Exists, Field, Node, Not, Value, parse

NEEDLES_MAX = 16
"""More than so many searches through a block cost more than they save."""
DIGITS_MAX = 15
"""Two numbers with so many digits at the most are equal as floats only if their digits are the same."""
_EXPONENT_MAX = 300
"""Beyond it floats have fewer digits."""
_AS_NUMBER: Final = bytes(ord("1") if chr(octet) in "0123456789." else ord("0") for octet in range(256))
_LONG_NUMBER: Final = b"1" * 16
"""A number of more digits than `DIGITS_MAX`, or one of those and a dot, in bytes that `_AS_NUMBER` has translated."""
_SPECIAL: Final = frozenset('"\\/\b\f\n\r\t')
"""Letters that JSON may write as a backslash and one letter."""
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_ORDERS: Final[dict[str, Callable[[Any, Any], bool]]] = {"<": lt, "<=": le, ">": gt, ">=": ge}
_MISSING: Final = object()
_UNREAD: Final = object()
_decode: Final = msgspec.json.Decoder().decode


class Needle(msgspec.Struct, frozen=True):
    """Bytes, or with `is_pattern` a regular expression. `weight` is the length that decides which needle is rarer.

    With a `table` the bytes are looked for in what `bytes.translate` makes of the records with it. For a class of
    letters in a row that is ten times as fast as a regular expression.
    """

    data: bytes
    weight: int
    is_pattern: bool = False
    table: bytes | None = None


Needles = tuple[Needle, ...]
"""One of them is in every record that matches."""


class Seen:
    """A record while its filter looks at it; JSON is read once, when a test asks for it first."""

    __slots__ = ("_json", "record", "topic")

    def __init__(self, record: Record, topic: str) -> None:
        self.record = record
        self.topic = topic
        self._json: Any = _UNREAD

    @property
    def json(self) -> Any:
        """The payload as JSON; no payload, and one that is no JSON, has no field."""
        if self._json is _UNREAD:
            payload = self.record.payload
            try:
                self._json = _MISSING if payload is None else _decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
                self._json = _MISSING
        return self._json


Matches = Callable[[Seen], bool]


class Filter:
    """A compiled filter for the records of a topic, as a principal with a root (or none) sees them.

    Raises:
        FilterError: the text is no filter.
    """

    def __init__(self, text: str, topic: str, root: Root | None = None) -> None:
        node = parse(text)
        self._root = root
        self._topic = topic if root is None else root.relative(topic)
        self._matches = _compile(node)
        found = _needles(node, self._topic)
        self.needles: Needles | None = None if found is None or len(found) > NEEDLES_MAX else found

    def matches(self, record: Record) -> bool:
        """Return whether a record, as it is stored, matches."""
        if self._root is not None:
            record = relative_record(record, self._root)
        return self._matches(Seen(record, self._topic))


# -- the function ----------------------------------------------------------------------------------------------------


def _compile(node: Node) -> Matches:
    if isinstance(node, Not):
        inner = _compile(node.of)
        return lambda seen: not inner(seen)
    if isinstance(node, Both):
        both = [_compile(part) for part in node.parts]
        return lambda seen: all(part(seen) for part in both)
    if isinstance(node, Either):
        either = [_compile(part) for part in node.parts]
        return lambda seen: any(part(seen) for part in either)
    get = _getter(node.field)
    if isinstance(node, Exists):
        return lambda seen: get(seen) is not _MISSING
    test = _tester(node, is_text=node.field.kind != "pointer")
    return lambda seen: test(get(seen))


def _getter(field: Field) -> Callable[[Seen], Any]:
    """Return a function that returns a text, a value of JSON, or `_MISSING`."""
    if field.kind == "pointer":
        parts = field.parts
        return lambda seen: _find(seen.json, parts)
    if field.kind == "subject":
        return lambda seen: event_of(seen.topic, seen.record).subject
    if field.kind == "header":
        name = field.name.encode()
        return lambda seen: _text(next((value for one, value in seen.record.headers if one == name), None))
    if field.kind == "key":
        return lambda seen: _text(seen.record.key)
    return lambda seen: _text(seen.record.payload)


def _text(data: bytes | None) -> Any:
    return _MISSING if data is None else data.decode("utf-8", "surrogateescape")


def _find(value: Any, parts: tuple[str, ...]) -> Any:
    for part in parts:
        if isinstance(value, dict):
            value = value.get(part, _MISSING)
        elif isinstance(value, list) and part.isascii() and part.isdigit() and (part == "0" or part[0] != "0"):
            value = value[int(part)] if len(part) < 10 and int(part) < len(value) else _MISSING
        else:
            return _MISSING
    return value


def _tester(test: Comparison, *, is_text: bool) -> Callable[[Any], bool]:
    """Return the comparison of a value with that of a test; a text that is a number compares as one with a number."""
    wanted, operator = test.value, test.operator
    check: Callable[[Any], bool]
    if operator == "=":
        check = _equal_to(wanted)
    elif operator == "!=":
        equal = _equal_to(wanted)
        check = lambda value: not equal(value)  # noqa: E731
    elif operator == "contains":
        check = _containing(wanted)
    elif operator == "like":
        assert isinstance(wanted, str)
        check = _glob(wanted)
    else:
        order = _ORDERS[operator]
        kinds = (str,) if isinstance(wanted, str) else (int, float)
        check = lambda value: type(value) in kinds and order(value, wanted)  # noqa: E731
    if is_text and type(wanted) in (int, float) and operator != "contains":
        return lambda value: check(_number(value))
    if is_text and wanted is None and operator in ("=", "!="):
        return lambda value: check(None if value is _MISSING else value)
    if is_text and operator == "contains" and not isinstance(wanted, str):
        text = test.text or msgspec.json.encode(wanted).decode()
        return lambda value: value is not _MISSING and text in value
    return check


def _number(value: Any) -> Any:
    if value is _MISSING or len(value) > 40 or not _NUMBER.fullmatch(value):
        return value
    return float(value) if set(value) & set(".eE") else int(value)


def _equal_to(wanted: Value) -> Callable[[Any], bool]:
    kinds = (int, float) if type(wanted) in (int, float) else (type(wanted),)
    return lambda value: type(value) in kinds and value == wanted


def _containing(wanted: Value) -> Callable[[Any], bool]:
    equal = _equal_to(wanted)

    def contains(value: Any) -> bool:
        if isinstance(value, str):
            return isinstance(wanted, str) and wanted in value
        return isinstance(value, list) and any(equal(one) for one in value)

    return contains


def _glob(pattern: str) -> Callable[[Any], bool]:
    """Return the test for a pattern in which `*` is any text and `?` is any letter; each part is searched once."""
    parts = [
        (re.compile("".join("." if one == "?" else re.escape(one) for one in part), re.DOTALL), len(part))
        for part in re.split(r"\*+", pattern)
    ]
    first, length = parts[0]

    def matches(value: Any) -> bool:
        if not isinstance(value, str):
            return False
        if len(parts) == 1:
            return first.fullmatch(value) is not None
        if first.match(value) is None:
            return False
        at = length
        for part, size in parts[1:-1]:
            found = part.search(value, at)
            if found is None:
                return False
            at = found.start() + size
        last, size = parts[-1]
        return len(value) - size >= at and last.match(value, len(value) - size) is not None

    return matches


# -- the needles -----------------------------------------------------------------------------------------------------


def _needles(node: Node, topic: str) -> Needles | None:
    """Return needles of which a record that matches has one, `None` if there are none for sure."""
    if isinstance(node, Both):
        return _rarest([_needles(part, topic) for part in node.parts])
    if isinstance(node, Either):
        parts = [_needles(part, topic) for part in node.parts]
        return None if None in parts else tuple({needle for part in parts if part is not None for needle in part})
    if isinstance(node, Not):
        return None
    field = node.field
    if isinstance(node, Exists):
        return _of_field(field)
    if node.operator == "!=":
        return None
    if node.value is None and field.kind != "pointer":  # a field that is missing
        return None
    if field.kind == "subject" and _tester(node, is_text=True)(topic):
        return None  # the name of the topic is not in the record
    return _rarest([_of_field(field), _of_value(node)])


def _rarest(parts: list[Needles | None]) -> Needles | None:
    some = [part for part in parts if part]
    return max(some, key=lambda part: min(needle.weight for needle in part)) if some else None


def _of_field(field: Field) -> Needles | None:
    if field.kind == "header" and field.name:
        return _plain(field.name)
    names = [part for part in field.parts if part and not part.isdigit()]
    return _json(max(names, key=len)) if names else None


def _of_value(test: Comparison) -> Needles | None:
    value, in_json = test.value, test.field.kind == "pointer"
    if isinstance(value, bool) or value is None:
        if in_json or test.operator == "contains":
            return _plain(str(value).lower() if value is not None else "null")
        return None
    if test.operator not in ("=", "contains", "like"):
        return None
    if isinstance(value, str):
        text = max(re.split(r"[*?]", value), key=len) if test.operator == "like" else value
        if not text:
            return None
        return _json(text) if in_json else _plain(text)
    if test.operator == "contains" and not in_json:
        return _plain(test.text)
    return _digits(test.text)


def _plain(text: str) -> Needles:
    data = text.encode()
    return (Needle(data, len(data)),)


def _json(text: str) -> Needles:
    """Return what a text in JSON contains: itself, or an escape. Escapes are rare, so they do not count as common."""
    data = text.encode()
    escape = b"\\" if _SPECIAL & set(text) else b"\\u"
    return Needle(data, len(data)), Needle(escape, len(data))


def _digits(text: str) -> Needles | None:
    number = Decimal(text).normalize()
    digits = [str(digit) for digit in number.as_tuple().digits]
    if not number or len(digits) > DIGITS_MAX or abs(number.adjusted()) > _EXPONENT_MAX:
        return None
    pattern = r"\.?".join(digits).encode()
    return Needle(pattern, len(digits), is_pattern=True), Needle(_LONG_NUMBER, len(digits), table=_AS_NUMBER)
