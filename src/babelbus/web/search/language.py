"""The language of filters (docs/console.md, "Search"): text -> tree, with errors that name the column.

filter  := all ("or" all)*          all := term ("and" term)*          term := "not" term | "(" filter ")" | test
test    := field "exists" | field operator value
field   := "key" | "subject" | "payload" | headers["name"] | payload["/pointer"] | /pointer
operator:= "=" | "!=" | "<" | "<=" | ">" | ">=" | "contains" | "like" | "~"          value := string | number | true ...
"""

import re
from typing import Final, Literal, NamedTuple

import msgspec

from babelbus.errors import BabelbusError

LENGTH_MAX = 2_000
DEPTH_MAX = 50
TESTS_MAX = 100
LETTERS_MAX = 200
"""Most characters of all patterns in pieces with `?`: each may be compared with each character of a payload."""
Operator = Literal["=", "!=", "<", "<=", ">", ">=", "contains", "like"]
Value = str | int | float | bool | None
Kind = Literal["key", "subject", "payload", "header", "pointer"]

CONSTANTS: Final[dict[str, bool | None]] = {"true": True, "false": False, "null": None}
SIGNS: Final = frozenset(("=", "==", "!=", "<", "<=", ">", ">=", "~", "contains", "like"))
ESCAPES: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<pointer>(?:/(?:[^\s/()=!<>~"'\[\]]|~[01])*)+)
    |(?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![\w.]))
    |(?P<word>[A-Za-z_]+)
    |(?P<sign><=|>=|!=|==|[=<>~()\[\]])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_CHARACTERS_OF_NUMBERS_MAX = 40


class FilterError(BabelbusError):
    """The filter cannot be read; `column` counts its characters from 1."""

    def __init__(self, text: str, column: int) -> None:
        super().__init__(f"column {column}: {text}")
        self.column = column


class Field(msgspec.Struct, frozen=True):
    """A part of a record; `name` is that of a header, `parts` are the steps of a pointer."""

    kind: Kind
    name: str = ""
    parts: tuple[str, ...] = ()


class Comparison(msgspec.Struct, frozen=True):
    """A comparison; `text` is a number as it was written."""

    field: Field
    operator: Operator
    value: Value
    text: str = ""


class Exists(msgspec.Struct, frozen=True):
    """Whether a record has a field."""

    field: Field


class Not(msgspec.Struct, frozen=True):
    """The opposite."""

    of: "Node"


class Both(msgspec.Struct, frozen=True):
    """All of several conditions."""

    parts: tuple["Node", ...]


class Either(msgspec.Struct, frozen=True):
    """One of several conditions at least."""

    parts: tuple["Node", ...]


Node = Comparison | Exists | Not | Both | Either


class Token(NamedTuple):
    """A piece of a filter; `value` of a string is its content."""

    kind: str
    text: str
    column: int
    value: str = ""


def parse(text: str) -> Node:
    """Return the tree of a filter.

    Raises:
        FilterError: it is no filter, or passes a limit.
    """
    if len(text) > LENGTH_MAX:
        raise FilterError(f"a filter has {LENGTH_MAX} characters at the most, this one has {len(text)}", LENGTH_MAX + 1)
    return _Parser(_tokens(text)).parse()


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise _unreadable(text, position)
        kind, piece, column = str(found.lastgroup), found.group(), position + 1
        position = found.end()
        if kind == "string":
            tokens.append(Token(kind, piece, column, _content(piece, column)))
        elif kind == "word":
            tokens.append(Token(kind, piece.lower(), column, piece))
        elif kind != "space":
            tokens.append(Token(kind, piece, column))
    tokens.append(Token("end", "", len(text) + 1))
    return tokens


def _unreadable(text: str, position: int) -> FilterError:
    letter = text[position]
    if letter in "\"'":
        return FilterError("this string does not end: its closing quote is missing", position + 1)
    if letter.isdigit() or letter in "-.":
        return FilterError("this is no number; numbers are written as in JSON, and texts in quotes", position + 1)
    return FilterError(f"{letter!r} means nothing here", position + 1)


def _content(piece: str, column: int) -> str:
    def replace(found: re.Match[str]) -> str:
        code = found.group(1)
        if len(code) == 5:
            return chr(int(code[1:], 16))
        if code in ESCAPES:
            return ESCAPES[code]
        if code in "\"'\\/":
            return code
        raise FilterError(f"a string has no escape \\{code}", column + 1 + found.start())

    text = _ESCAPE.sub(replace, piece[1:-1])
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise FilterError("half of a letter: \\ud800 to \\udfff come in pairs", column) from None


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._tests = 0
        self._letters = 0

    def parse(self) -> Node:
        if self._next.kind == "end":
            raise FilterError("the filter is empty", 1)
        node = self._either()
        token = self._next
        if token.kind != "end":
            raise FilterError(f"'and' or 'or' is expected, not {_shown(token)}", token.column)
        return node

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _take(self) -> Token:
        token = self._tokens[self._at]
        self._at += 1
        return token

    def _took(self, text: str) -> bool:
        token = self._next
        if token.kind in ("word", "sign") and token.text == text:
            self._at += 1
            return True
        return False

    def _expect(self, text: str, where: str) -> None:
        if not self._took(text):
            raise FilterError(f"{text!r} is expected {where}, not {_shown(self._next)}", self._next.column)

    def _either(self) -> Node:
        parts = [self._both()]
        while self._took("or"):
            parts.append(self._both())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _both(self) -> Node:
        parts = [self._term()]
        while self._took("and"):
            parts.append(self._term())
        return parts[0] if len(parts) == 1 else Both(tuple(parts))

    def _term(self) -> Node:
        column = self._next.column
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise FilterError(f"a filter is nested {DEPTH_MAX} levels deep at the most", column)
        if self._took("not"):
            node: Node = Not(self._term())
        elif self._took("("):
            node = self._either()
            self._expect(")", f"for the '(' of column {column}")
        else:
            node = self._test()
        self._depth -= 1
        return node

    def _test(self) -> Node:
        self._tests += 1
        if self._tests > TESTS_MAX:
            raise FilterError(f"a filter has {TESTS_MAX} comparisons at the most", self._next.column)
        field = self._field()
        if self._took("exists"):
            return Exists(field)
        sign = self._take()
        if sign.text not in SIGNS or sign.kind not in ("sign", "word"):
            raise FilterError(
                f"=, !=, <, <=, >, >=, contains, like or exists is expected, not {_shown(sign)}", sign.column
            )
        operator: Operator = {"==": "=", "~": "like"}.get(sign.text, sign.text)  # type: ignore[assignment]
        column = self._next.column
        value, text = self._value()
        if operator in ("<", "<=", ">", ">=") and (value is None or isinstance(value, bool)):
            raise FilterError(f"{operator} compares numbers or strings", column)
        if operator == "like" and not isinstance(value, str):
            raise FilterError("like compares with a string, such as 'ord*'", column)
        if operator == "like":
            self._letters += sum(len(piece) for piece in str(value).split("*") if "?" in piece)
            if self._letters > LETTERS_MAX:
                raise FilterError(f"pieces of patterns with ? have {LETTERS_MAX} characters at the most", column)
        if operator == "contains" and value == "":
            raise FilterError("contains needs a string that is not empty", column)
        return Comparison(field, operator, value, text)

    def _field(self) -> Field:
        token = self._take()
        if token.kind == "pointer":
            return _pointer(token.text)
        if token.kind == "word" and token.text in ("key", "subject"):
            return Field("key" if token.text == "key" else "subject")
        if token.kind == "word" and token.text in ("headers", "payload"):
            if token.text == "payload" and not (self._next.kind == "sign" and self._next.text == "["):
                return Field("payload")
            self._expect("[", f'behind {token.text}, as in {token.text}["name"]')
            name = self._take()
            if name.kind != "string":
                raise FilterError(f"a name in quotes is expected, not {_shown(name)}", name.column)
            self._expect("]", "behind the name")
            if token.text == "headers":
                return Field("header", name.value)
            if name.value and not name.value.startswith("/"):
                raise FilterError("a JSON pointer begins with /", name.column)
            return _pointer(name.value)
        if token.kind == "end":
            raise FilterError("the filter ends here, where a field is expected", token.column)
        raise FilterError(
            f'a field is expected (key, subject, payload, headers["name"] or /pointer), not {_shown(token)}',
            token.column,
        )

    def _value(self) -> tuple[Value, str]:
        token = self._take()
        if token.kind == "string":
            return token.value, ""
        if token.kind == "word" and token.text in CONSTANTS:
            return CONSTANTS[token.text], ""
        if token.kind == "number":
            if len(token.text) > _CHARACTERS_OF_NUMBERS_MAX:
                raise FilterError("this number is too long", token.column)
            value = float(token.text) if set(token.text) & set(".eE") else int(token.text)
            if abs(value) > 1.7e308:
                raise FilterError("this number is too large", token.column)
            return value, token.text
        if token.kind == "word":
            raise FilterError(f'a text is written in quotes: "{token.value}"', token.column)
        raise FilterError(
            f"a value is expected (string, number, true, false or null), not {_shown(token)}", token.column
        )


def _pointer(text: str) -> Field:
    """Return the field of a JSON pointer (RFC 6901)."""
    parts = tuple(part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:])
    return Field("pointer", parts=parts)


def _shown(token: Token) -> str:
    return "the end of the filter" if token.kind == "end" else repr(token.text[:40])
