"""From HTTP to WebSocket: the handshake of both sides (RFC 6455, section 4; RFC 7692, section 7.1)."""

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence

import msgspec

from babelbus.errors import LocalProtocolError
from babelbus.wire.http import HEAD_BYTES_MAX, TOKEN, HttpError, Request, encode_fields, read_fields, tokens
from babelbus.wire.websocket.deflate import WINDOW_BITS_MAX, Deflate

VERSION = "13"
_EXTENSION = "permessage-deflate"
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_OUR_WINDOW_BITS = 12  # 4 KiB: thousands of connections share the memory of a few large windows
_OUR_WINDOW_BITS_MIN = 9  # zlib makes no raw stream with a smaller window
_STATUS_LINE = re.compile(rb"HTTP/1\.[0-9] ([1-9][0-9]{2})(?: ([\t\x20-\x7e\x80-\xff]*))?")
_HEAD_END = b"\r\n\r\n"
_PART = re.compile(r'\s*([^\s;,="]+)\s*(?:=\s*(?:"([^"\\]*)"|([^\s;,="]+))\s*)?([;,]|$)')


class Upgrade(msgspec.Struct, frozen=True):
    """A complete handshake: send `response`, then speak WebSocket, compressed if `deflate` is set."""

    response: bytes
    subprotocol: str | None
    deflate: Deflate | None


class Response(msgspec.Struct, frozen=True):
    """A server's answer to a handshake; the values of `headers` are Latin-1 (bytes as characters)."""

    status: int
    reason: str
    headers: dict[str, str]


def make_key() -> str:
    """Return a new key for a client's handshake: 16 random bytes in base64."""
    return base64.b64encode(secrets.token_bytes(16)).decode()


def accept_key(key: str) -> str:
    """Return the proof that a server has read `key`."""
    return base64.b64encode(hashlib.sha1(key.encode("latin-1") + _GUID, usedforsecurity=False).digest()).decode()


def accept_upgrade(
    request: Request,
    *,
    subprotocols: Sequence[str] = (),
    deflate: bool = False,
    headers: Sequence[tuple[str, str]] = (),
) -> Upgrade:
    """Return the answer to a client's handshake.

    Args:
        request: the client's request; the caller checks its path, origin and credentials.
        subprotocols: those of the server; the client's first that is among them is chosen.
        deflate: whether messages may be compressed.
        headers: further headers for the response.

    Raises:
        HttpError: the request is no valid handshake; the error's `headers` name what is expected.
    """
    offer = request.headers
    upgrades = "websocket" in tokens(offer.get("upgrade", "")) and "upgrade" in tokens(offer.get("connection", ""))
    if request.method != "GET":
        raise HttpError(405, "a WebSocket begins with GET", [("allow", "GET")])
    if not upgrades or request.version == "1.0":
        raise HttpError(426, "only WebSocket is supported here", [("upgrade", "websocket")])
    if offer.get("sec-websocket-version") != VERSION:
        raise HttpError(426, "the version of WebSocket here is 13", [("sec-websocket-version", VERSION)])
    key = offer.get("sec-websocket-key", "")
    if not _is_key(key):
        raise HttpError(400, "no sec-websocket-key of 16 bytes")
    subprotocol = _choose(offer.get("sec-websocket-protocol", ""), subprotocols)
    agreed = _agree(offer.get("sec-websocket-extensions", "")) if deflate else None
    lines = [("upgrade", "websocket"), ("sec-websocket-accept", accept_key(key))]
    if subprotocol is not None:
        lines.append(("sec-websocket-protocol", subprotocol))
    if agreed is not None:
        lines.append(("sec-websocket-extensions", agreed[1]))
    fields = encode_fields([*lines, *headers])
    response = f"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\n{fields}\r\n".encode("latin-1")
    return Upgrade(response, subprotocol, None if agreed is None else agreed[0])


def _is_key(key: str) -> bool:
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        return False


def _choose(asked: str, ours: Sequence[str]) -> str | None:
    offered = [part.strip(" \t") for part in asked.split(",")] if asked else []
    if any(TOKEN.fullmatch(name) is None for name in offered) or len(set(offered)) != len(offered):
        raise HttpError(400, "sec-websocket-protocol with an invalid or repeated name")
    return next((name for name in offered if name in ours), None)


def _agree(value: str) -> tuple[Deflate, str] | None:
    """Return the first offer that we support with the text that accepts it; invalid offers are declined."""
    for name, parameters in _read_extensions(value):
        agreed = _read_offer(parameters) if name == _EXTENSION else None
        if agreed is not None:
            accepted = f"{_EXTENSION}; server_max_window_bits={agreed.server_max_window_bits}"
            if agreed.server_no_context_takeover:
                accepted += "; server_no_context_takeover"
            if agreed.client_no_context_takeover:
                accepted += "; client_no_context_takeover"
            return agreed, accepted
    return None


def _read_extensions(value: str) -> list[tuple[str, list[tuple[str, str | None]]]]:
    extensions: list[tuple[str, list[tuple[str, str | None]]]] = []
    position, begins = 0, True
    if value.rstrip().endswith(";"):
        raise HttpError(400, f"sec-websocket-extensions {value[:80]!r}")
    while position < len(value):
        match = _PART.match(value, position)
        if match is None or (begins and match.group(2, 3) != (None, None)):
            raise HttpError(400, f"sec-websocket-extensions {value[:80]!r}")
        name = match[1].lower()
        if begins:
            extensions.append((name, []))
        else:
            extensions[-1][1].append((name, match[2] if match[2] is not None else match[3]))
        begins = match[4] == ","
        position = match.end()
    return extensions


def _read_offer(parameters: list[tuple[str, str | None]]) -> Deflate | None:
    values = dict(parameters)
    if len(values) != len(parameters):
        return None
    bits = WINDOW_BITS_MAX
    for name, value in parameters:
        if name in ("server_no_context_takeover", "client_no_context_takeover"):
            good = value is None
        elif name == "server_max_window_bits":
            good = _is_bits(value) and int(value or 0) >= _OUR_WINDOW_BITS_MIN
            bits = int(value or 0) if good else bits
        else:
            good = name == "client_max_window_bits" and (value is None or _is_bits(value))
        if not good:
            return None
    return Deflate(
        server_no_context_takeover="server_no_context_takeover" in values,
        client_no_context_takeover="client_no_context_takeover" in values,
        server_max_window_bits=min(bits, _OUR_WINDOW_BITS),
    )


def _is_bits(value: str | None) -> bool:
    return value in ("8", "9", "10", "11", "12", "13", "14", "15")


def encode_upgrade_request(
    host: str,
    path: str,
    key: str,
    *,
    subprotocols: Sequence[str] = (),
    deflate: bool = False,
    headers: Sequence[tuple[str, str]] = (),
) -> bytes:
    """Return a client's handshake; `key` is from `make_key`.

    Raises:
        LocalProtocolError: a path or header would be misread on the wire.
    """
    if not path.startswith("/") or not path.isascii() or not path.isprintable() or " " in path:
        raise LocalProtocolError(f"invalid path: {path[:40]!r}")
    lines = [("host", host), ("upgrade", "websocket"), ("sec-websocket-key", key), ("sec-websocket-version", VERSION)]
    if subprotocols:
        lines.append(("sec-websocket-protocol", ", ".join(subprotocols)))
    if deflate:
        lines.append(("sec-websocket-extensions", _EXTENSION))
    fields = encode_fields([*lines, *headers])
    return f"GET {path} HTTP/1.1\r\nconnection: Upgrade\r\n{fields}\r\n".encode("latin-1")


def read_upgrade_response(data: bytes) -> tuple[Response, bytes] | None:
    """Return the server's answer to a handshake and the bytes behind its head; None while the head is incomplete.

    Raises:
        HttpError: the head is malformed or too long.
    """
    while (end := data.find(_HEAD_END, 0, HEAD_BYTES_MAX)) >= 0:
        line, *lines = data[:end].split(b"\r\n")
        match = _STATUS_LINE.fullmatch(line)
        if match is None:
            raise HttpError(400, f"invalid status line: {line[:40]!r}")
        response = Response(int(match[1]), (match[2] or b"").decode("latin-1"), read_fields(lines))
        data = data[end + len(_HEAD_END) :]
        if response.status == 101 or response.status >= 200:  # interim answers are passed over
            return response, data
    if len(data) >= HEAD_BYTES_MAX:
        raise HttpError(431, f"a head of more than {HEAD_BYTES_MAX} bytes")
    return None


def check_upgrade_response(
    response: Response, key: str, *, subprotocols: Sequence[str] = (), deflate: bool = False
) -> tuple[str | None, Deflate | None]:
    """Check a server's answer to our handshake, and return its choice of subprotocol and compression.

    Raises:
        HttpError: the server refused (with its status), or chose an option that was not offered.
    """
    headers = response.headers
    if response.status != 101:
        raise HttpError(response.status, f"the server refused to speak WebSocket: {response.status} {response.reason}")
    if "websocket" not in tokens(headers.get("upgrade", "")) or "upgrade" not in tokens(headers.get("connection", "")):
        raise HttpError(400, "the server switched to something that is not WebSocket")
    accepted = headers.get("sec-websocket-accept", "").encode("latin-1")
    if not hmac.compare_digest(accepted, accept_key(key).encode("latin-1")):
        raise HttpError(400, "the server's sec-websocket-accept does not match our key")
    subprotocol = headers.get("sec-websocket-protocol")
    if subprotocol is not None and subprotocol not in subprotocols:
        raise HttpError(400, f"the server chose the subprotocol {subprotocol[:40]!r}, which was not offered")
    extensions = _read_extensions(headers.get("sec-websocket-extensions", ""))
    if not extensions:
        return subprotocol, None
    if not deflate or len(extensions) != 1 or extensions[0][0] != _EXTENSION:
        raise HttpError(400, "the server chose an extension that was not offered")
    return subprotocol, _read_answer(extensions[0][1])


def _read_answer(parameters: list[tuple[str, str | None]]) -> Deflate:
    values = dict(parameters)
    bits = values.pop("server_max_window_bits", str(WINDOW_BITS_MAX))
    flags = {name: values.pop(name, "") for name in ("server_no_context_takeover", "client_no_context_takeover")}
    # `client_max_window_bits` is allowed only when it was offered (section 7.1.2.2), and we do not offer it.
    if values or not _is_bits(bits) or any(value not in ("", None) for value in flags.values()):
        raise HttpError(400, f"the server accepted {_EXTENSION} with parameters that were not offered")
    return Deflate(
        server_no_context_takeover=flags["server_no_context_takeover"] is None,
        client_no_context_takeover=flags["client_no_context_takeover"] is None,
        server_max_window_bits=int(bits or 0),
    )
