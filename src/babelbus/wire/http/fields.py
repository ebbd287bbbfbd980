"""Header fields of HTTP/1.1 (RFC 9112, section 5; RFC 9110, section 5), read and written strictly.

Fields that two readers could understand differently are refused (RFC 9112, section 11: request smuggling).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus

from babelbus.errors import LocalProtocolError, RemoteProtocolError

HEAD_BYTES_MAX = 65_536
HEADERS_MAX = 256
BODY_BYTES_MAX = 16 * 2**20
CHUNKED = -1
"""Instead of a length: the body comes in chunks that have their own lengths."""

TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TOKEN_BYTES = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_VALUE_BYTES = b"\t" + bytes(range(0x20, 0x7F)) + bytes(range(0x80, 0x100))
_FORBIDDEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_SINGLE = ("host", "content-length")
_LENGTH_DIGITS_MAX = 19
_REMEMBERED_BYTES = 2048
"""Names of a longer head are not remembered: peers choose them."""
_FRAMING = frozenset({"content-length", "transfer-encoding", "connection"})


class HttpError(RemoteProtocolError):
    """A request that is refused: answer with `status`, `headers` and the message, then close the connection."""

    def __init__(self, status: int, text: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(text)
        self.status = status
        self.headers = tuple(headers)


def read_fields(lines: Sequence[bytes]) -> dict[str, str]:
    """Read header lines without their line ends: names in lower case, values as Latin-1; repeated ones are joined.

    Raises:
        HttpError: an invalid header line, or a header that may not be repeated.
    """
    text = b"\n".join(lines)
    # `translate` deletes the allowed bytes of all lines at once: several times as fast as a regular expression.
    if len(text.translate(None, _VALUE_BYTES)) >= max(len(lines), 1):
        raise _invalid(next(line for line in lines if line.translate(None, _VALUE_BYTES)))
    headers: dict[str, str] = {}
    read_name = _known_name if len(text) <= _REMEMBERED_BYTES else _read_name
    for line in text.decode("latin-1").split("\n") if lines else ():
        name, colon, value = line.partition(":")
        name, value = read_name(name), value.strip(" \t")
        if not (colon and name):
            raise _invalid(line.encode("latin-1"))
        if name in headers:
            if name in _SINGLE:
                if name == "content-length" and headers[name] == value:
                    continue
                raise HttpError(400, f"more than one {name}")
            # Cookies have commas of their own (RFC 6265, section 5.4; RFC 9113, section 8.2.3).
            value = f"{headers[name]}{'; ' if name == 'cookie' else ', '}{value}"
        headers[name] = value
    return headers


def _read_name(name: str) -> str:
    """Return the name of a header in lower case, an empty text if no header can have this name."""
    return name.lower() if is_token(name.encode("latin-1")) else ""


_known_name = lru_cache(maxsize=1024)(_read_name)


def _invalid(line: bytes) -> HttpError:
    folded = line[:1] in (b" ", b"\t")
    return HttpError(400, "a header folded over lines" if folded else f"invalid header: {line[:40]!r}")


def is_token(name: bytes) -> bool:
    """Return whether these bytes may name a method or a header."""
    return bool(name) and not name.translate(None, _TOKEN_BYTES)


def tokens(value: str) -> list[str]:
    """Return the elements of a comma-separated header, in lower case."""
    return [element for part in value.split(",") if (element := part.strip(" \t").lower())]


def body_length(headers: Mapping[str, str], *, version: str) -> int | None:
    """Return how the headers say that the body ends: a number of bytes, `CHUNKED`, or None without a statement.

    Raises:
        HttpError: the headers contradict each other, or name an unsupported coding.
    """
    length = headers.get("content-length")
    coding = headers.get("transfer-encoding")
    if coding is not None:
        if length is not None:
            raise HttpError(400, "both content-length and transfer-encoding")
        if version == "1.0":
            raise HttpError(400, "transfer-encoding in HTTP/1.0")
        codings = tokens(coding)
        if codings == ["chunked"]:
            return CHUNKED
        if "chunked" in codings[:-1] or not codings:
            raise HttpError(400, f"transfer-encoding {coding[:40]!r}")
        raise HttpError(501, f"transfer-encoding {coding[:40]!r}, only chunked is supported")
    if length is None:
        return None
    if not (length.isascii() and length.isdigit()):
        raise HttpError(400, f"content-length {length[:40]!r}")
    if len(length) > _LENGTH_DIGITS_MAX:
        raise HttpError(413, f"content-length of {len(length)} digits")
    return int(length)


def keeps_alive(headers: Mapping[str, str], *, version: str) -> bool:
    """Return whether the connection stays open behind this message (RFC 9112, section 9.3)."""
    connection = headers.get("connection")
    if connection is None:
        return version != "1.0"
    options = tokens(connection)
    return "close" not in options and (version != "1.0" or "keep-alive" in options)


@lru_cache(maxsize=1024)
def reason_of(status: int) -> str:
    """Return the reason phrase; an unregistered status has its number as the phrase."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return f"Unknown Status ({status})"


@lru_cache(maxsize=1024)
def _check_name(name: str) -> None:
    if TOKEN.fullmatch(name) is None:
        raise LocalProtocolError(f"invalid header name: {name[:40]!r}")
    if name.lower() in _FRAMING:
        raise LocalProtocolError(f"the header {name} is set by the encoder, remove it")


def encode_fields(headers: Iterable[tuple[str, str]]) -> str:
    """Return header lines with their line ends.

    Raises:
        LocalProtocolError: a name or value would be misread on the wire (CR, LF, NUL, not Latin-1), or the
            header determines how the body ends.
    """
    lines = []
    for name, value in headers:
        _check_name(name)
        if not (value.isascii() and value.isprintable()) and not _is_value(value):
            raise LocalProtocolError(f"the header {name} cannot have the value {value[:40]!r}")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines)


def _is_value(value: str) -> bool:
    return _FORBIDDEN.search(value) is None and max(value) <= "\xff"
