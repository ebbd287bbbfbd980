"""HTTP <-> messages of zbus (docs/specifications/zbus.md, sections 2.3 and 2.4)."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import msgspec

from babelbus.protocols.zbus.codec import body_json
from babelbus.protocols.zbus.content import TYPE_LENGTH_MAX, charset_of, is_utf8, parse_content_type
from babelbus.protocols.zbus.errors import MalformedMessageError, UnsendableMessageError
from babelbus.protocols.zbus.messages import (
    BY_LOWER,
    COOKIES_BETWEEN,
    HEADER_NAMES,
    HEADERS_MAX,
    JSON_TYPE,
    NO_DATA,
    OK,
    SECRETS,
    SET_COOKIE,
    BodyKind,
    Message,
)
from babelbus.protocols.zbus.multipart import read_multipart, read_urlencoded
from babelbus.wire.http import TOKEN, HttpError, Request, percent_decode, split_target

HOP_BY_HOP: Final = frozenset(
    ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "te", "trailer", "upgrade", "expect")
)
"""Headers about one connection: they are no part of a message."""

_NOT_ANSWERED: Final = HOP_BY_HOP | SECRETS | {"host", "content-length"}
_TOUCHED: Final = HOP_BY_HOP | {lower for lower, name in BY_LOWER.items() if lower != name}
_SAFE_NAMES: Final = frozenset(HEADER_NAMES)
_FORBIDDEN: Final = re.compile("[\x00-\x08\x0a-\x1f\x7f]")
_BODILESS: Final = frozenset({204, 304})
_FORMS: Final = frozenset({"multipart/form-data", "application/x-www-form-urlencoded"})


class Response(msgspec.Struct, frozen=True):
    """A response, as `wire.http.encode_response` takes it: that adds reason, `content-length` and `connection`."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def decode_request(request: Request) -> Message:
    """Read one request. The url is the target, percent-decoded as a whole with `+` as a space.

    Raises:
        MalformedMessageError: there are too many headers, or they or the body are not what they say.
    """
    given = request.headers
    if len(given) > HEADERS_MAX:
        raise MalformedMessageError(f"{len(given)} headers, limit {HEADERS_MAX}")
    headers = given
    if not _TOUCHED.isdisjoint(given):
        headers = {BY_LOWER.get(name, name): value for name, value in given.items() if name not in HOP_BY_HOP}
    if not "".join(headers.values()).isascii():
        headers = {name: _utf8(value) for name, value in headers.items()}
    url = request.target if request.target == "/" else _url(request.target)
    if not request.body:
        return Message(headers, url, request.method)
    body, kind = _body(request.body, given.get("content-type"))
    return Message(headers, url, request.method, None, body, kind)


def target_of(request: Request) -> str:
    """Return the target for `routing.route`: path and query with their escapes; other bytes are UTF-8."""
    path, query = split_target(request.target)
    target = f"{path}?{query}" if query else path
    return target if target.isascii() else target.encode("latin-1").decode("utf-8", "replace")


def _url(target: str) -> str:
    if not target.startswith("/"):  # a whole URL, as it is asked of a proxy
        path, query = split_target(target)
        target = f"{path}?{query}" if query else path
    try:
        return percent_decode(target, plus=True)
    except HttpError as error:
        raise MalformedMessageError("the target is no url") from error


def _utf8(value: str) -> str:
    """Return the text of a header value, whose letters are bytes: UTF-8 if it can be, else Latin-1."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError:
        return value


def _body(body: bytes, content_type: str | None) -> tuple[bytes, BodyKind]:
    """Return the body that a request has, by the table of section 2.4. JSON text is a string: services parse it."""
    kind = run_kind(content_type, (body,))
    if kind is not None or content_type is None:
        return body, kind or "bytes"
    parsed = parse_content_type(content_type)
    if parsed.name == "multipart/form-data":
        return read_multipart(body, parsed.parameters.get("boundary", "")), "json"
    if parsed.name == "application/x-www-form-urlencoded":
        return read_urlencoded(body), "json"
    return _text(body, content_type), "text"


def run_kind(content_type: str | None, bodies: Sequence[bytes]) -> BodyKind | None:
    """Return the kind that bodies of one content type have that are taken as they are, `None`: look at each of them."""
    if content_type is None:
        return "bytes"
    kind = _kind_as_sent(content_type[:TYPE_LENGTH_MAX])
    if kind == "text" and not b"".join(bodies).isascii() and not all(map(is_utf8, bodies)):
        return None
    return kind


@lru_cache(maxsize=1024)
def _kind_as_sent(content_type: str) -> BodyKind | None:
    name = parse_content_type(content_type).name
    if name.startswith(("text/", "application/json")):
        return "text" if charset_of(content_type) in ("utf-8", "utf8") else None
    return None if name in _FORMS else "bytes"


def _text(body: bytes, content_type: str) -> bytes:
    charset = charset_of(content_type)
    if charset is None:
        raise MalformedMessageError("body has an unknown charset")
    try:
        return body.decode(charset).encode()
    except UnicodeError as error:
        name = "UTF-8" if charset in ("utf-8", "utf8") else charset
        raise MalformedMessageError(f"body is no {name}") from error


def encode_response(message: Message) -> Response:
    """Return the response that says a message; one without status is a 200 (6.3, DECISION).

    Raises:
        UnsendableMessageError: a header or the status would end the response early, or begin another one.
    """
    status = OK if message.status is None else message.status
    if status < 200:
        raise UnsendableMessageError(f"status {status} is no answer")
    content_type = message.headers.get("content-type")
    headers = [("content-type", JSON_TYPE)] if content_type is None else []
    for name, value in message.headers.items():
        if name in _NOT_ANSWERED or (name not in _SAFE_NAMES and name.lower() in _NOT_ANSWERED):
            continue
        if not (value.isascii() and value.isprintable()):
            if COOKIES_BETWEEN in value and name.lower() == SET_COOKIE:
                *others, value = value.split(COOKIES_BETWEEN)
                headers += [(name, _carried(cookie)) for cookie in others]
            value = _carried(value)
        if name not in _SAFE_NAMES and TOKEN.fullmatch(name) is None:
            raise UnsendableMessageError("a header has a name that HTTP cannot carry")
        headers.append((name, value))
    return Response(status, tuple(headers), _response_body(message, status, content_type))


def _carried(value: str) -> str:
    """Return a header value as HTTP says it: UTF-8, whose bytes are the letters here."""
    if _FORBIDDEN.search(value) is not None:
        raise UnsendableMessageError("a header has a value that HTTP cannot carry")
    return value.encode().decode("latin-1")


def _response_body(message: Message, status: int, content_type: str | None) -> bytes:
    """Return the body by the second part of section 2.4: JSON for JSON, otherwise texts and bytes as they are."""
    if status in _BODILESS:
        return b""
    if message.body is None:
        return b"[]" if status == NO_DATA else b""
    if content_type is None or content_type.lower().startswith("application/json"):
        return body_json(message)
    return message.body
