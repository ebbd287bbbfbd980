"""The meaning of a content type for a body (docs/specifications/zbus.md, section 2.4)."""

from functools import lru_cache
from typing import Final

import msgspec

from babelbus.protocols.zbus.messages import BodyKind

TYPE_LENGTH_MAX: Final = 512
"""Characters of a content type that are looked at; what is cached under it stays small."""

_validate: Final = msgspec.json.Decoder(msgspec.Raw).decode
_decode_string: Final = msgspec.json.Decoder(str).decode


class ContentType(msgspec.Struct, frozen=True):
    """A content type: what stands before the first `;` in lower case, and the parameters behind it."""

    name: str
    parameters: dict[str, str]


def parse_content_type(text: str) -> ContentType:
    """Read a content type. Only `name=value` behind a `;` is a parameter; the first of two stays."""
    return _parse(text[:TYPE_LENGTH_MAX])


def parse_parameters(text: str) -> ContentType:
    """Read a header value of this form, whatever its length."""
    name, _, rest = text.partition(";")
    parameters: dict[str, str] = {}
    while rest:
        parameter, equals, rest = rest.partition("=")
        if not equals:
            break
        rest = rest.lstrip()
        if rest.startswith('"'):
            value, rest = _quoted(rest[1:])
            rest = rest.partition(";")[2]
        else:
            value, _, rest = rest.partition(";")
            value = value.strip()
        parameters.setdefault(parameter.rpartition(";")[2].strip().lower(), value)
    return ContentType(name.strip().lower(), parameters)


_parse: Final = lru_cache(maxsize=1024)(parse_parameters)


def _quoted(text: str) -> tuple[str, str]:
    """Return a quoted value and what follows its end."""
    value: list[str] = []
    letters = iter(range(len(text)))
    for at in letters:
        if text[at] == '"':
            return "".join(value), text[at + 1 :]
        if text[at] == "\\" and at + 1 < len(text):
            value.append(text[at + 1])
            next(letters)
        else:
            value.append(text[at])
    return "".join(value), ""


def is_json(content_type: str) -> bool:
    """Return whether the type is JSON's: `application/json` or `application/...+json`."""
    name = parse_content_type(content_type).name
    return name.startswith("application/json") or name.endswith("+json")


def body_kind_of(content_type: str) -> tuple[BodyKind, str]:
    """Return the kind that a stored body of this type has, and the type that it has once it is UTF-8."""
    return _kind_of(content_type) if len(content_type) <= TYPE_LENGTH_MAX else ("bytes", content_type)


@lru_cache(maxsize=1024)
def _kind_of(content_type: str) -> tuple[BodyKind, str]:
    parsed = parse_content_type(content_type)
    kind: BodyKind = "json" if is_json(content_type) else "text" if parsed.name.startswith("text/") else "bytes"
    charset = parsed.parameters.get("charset")
    if charset is None or charset.lower() in ("utf-8", "utf8"):
        return kind, content_type
    return kind, f"{parsed.name}; charset=utf-8"


CHARSETS: Final = frozenset(
    [
        *("utf-8", "utf8", "us-ascii", "ascii", "latin1", "latin-1", "utf-16", "utf-16le", "utf-16be", "koi8-r"),
        *(f"iso-8859-{number}" for number in (*range(1, 12), 13, 14, 15, 16)),
        *(f"windows-{number}" for number in range(1250, 1259)),
        *("gbk", "gb2312", "gb18030", "big5", "shift_jis", "euc-jp", "euc-kr", "iso-2022-jp"),
    ]
)
"""Those that may be named: Python knows others that are no charsets, or that take a peer's name as one of a module."""


def charset_of(content_type: str) -> str | None:
    """Return the charset of a text, UTF-8 if none is named, `None` if it is not in `CHARSETS`."""
    name = parse_content_type(content_type).parameters.get("charset", "utf-8").lower()
    return name if name in CHARSETS else None


def json_body(raw: bytes) -> tuple[bytes | None, BodyKind]:
    """Return the body that a JSON text is, empty or null for none; its syntax was looked at already.

    Raises:
        ValueError: it is no UTF-8, which the JSON decoder does not see where it makes no string.
    """
    if not raw.isascii():
        raw.decode()
    if raw[:1] == b'"':
        return (_decode_string(raw).encode() if 92 in raw else raw[1:-1]), "text"
    return (None if not raw or raw == b"null" else raw), "json"


def parse_json(text: bytes) -> tuple[bytes | None, BodyKind] | None:
    """Return the body that a text is as JSON; `None`: it is no JSON."""
    try:
        _validate(text)
        return json_body(text.strip(b" \t\r\n"))
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None


def is_utf8(payload: bytes) -> bool:
    """Return whether bytes are UTF-8."""
    if payload.isascii():
        return True
    try:
        payload.decode()
    except UnicodeDecodeError:
        return False
    return True
