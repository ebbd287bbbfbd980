"""The proof of who sent a message: HMAC-SHA256 over its canonical JSON (docs/specifications/zbus.md, section 7).

The clients' serialisers differ in escapes, floats and nulls, so nothing is serialised again: the tokens of the wire
text stay as they were received, members are sorted by their decoded names, white space goes. Every function that takes
a text takes one that `decode_message` has accepted: the grammar is not looked at twice.
"""

import base64
import hmac
import re
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import msgspec

from babelbus.protocols.zbus import messages
from babelbus.protocols.zbus.content import is_json, parse_json
from babelbus.protocols.zbus.errors import AuthenticationError
from babelbus.protocols.zbus.messages import HEADER_NAMES, Message, canonical_name


class Keys(Protocol):
    """The keys of one listener; a dictionary is one. An empty secret proves nothing."""

    def get(self, api_key: str, /) -> str | None:
        """Return the secretKey of an apiKey, `None` if there is no such key."""


_tokens = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\]]|[^ \t\r\n"{}\[\],:]++', re.DOTALL).findall
_decode_string = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode

_FIELDS: Final = ("url", "method", "body")
_ALWAYS_SIGNED: Final = frozenset({"apiKey", "signFields"})
_COMMANDING: Final = frozenset(HEADER_NAMES) - {"id", "source", "remote-addr", "content-type", *messages.SECRETS}
"""Headers that say what is to be done: unsigned ones could be changed or added by whoever saw the message."""


_Node = bytes | list["_Node"]
"""A token, or a container: `{` with names and values in turn, or `[` with values."""


def _name_of(token: bytes) -> str:
    return _decode_string(token) if 92 in token else token[1:-1].decode()


def _parse(text: bytes) -> _Node:
    """Return the tree of a JSON text with every string and number as received. Iterative: depth costs no stack."""
    top: list[_Node] = []
    open_nodes = [top]
    for token in _tokens(text):
        if token == b"{" or token == b"[":
            node: list[_Node] = [token]
            open_nodes[-1].append(node)
            open_nodes.append(node)
        elif token == b"}" or token == b"]":
            open_nodes.pop()
        else:
            open_nodes[-1].append(token)
    return top[0]


def _members(node: _Node) -> Iterator[tuple[bytes, _Node]]:
    """Return the tokens of names, and the values, of an object."""
    return zip(node[1::2], node[2::2], strict=True)  # type: ignore[arg-type]  # it is a list, and names are tokens


def _pieces(node: list[_Node], *, nulls: bool) -> Iterator[_Node]:
    """Yield what a container is written as: bytes, and containers to be written in their place."""
    lead = b"[" if node[0] == b"[" else b"{"
    if lead == b"[":
        for item in node[1:]:
            yield lead
            yield item
            lead = b","
        yield b"[]" if lead == b"[" else b"]"
        return
    named = {_name_of(token): (token, value) for token, value in _members(node)}
    if 2 * len(named) + 1 < len(node):  # decoders keep the last of two: an addition could replace what was signed
        raise AuthenticationError(messages.SIGNATURE_MISMATCHED)
    for name in sorted(named):
        token, value = named[name]
        if nulls or value != b"null":
            yield b"%b%b:" % (lead, token)
            yield value
            lead = b","
    yield b"{}" if lead == b"{" else b"}"


def _write(node: _Node, *, nulls: bool) -> bytes:
    """Return the canonical text of a tree, without null members if `nulls` is false.

    Raises:
        AuthenticationError: an object has a name twice, so that readers may understand different things.
    """
    written: list[bytes] = []
    waiting = [iter([node])]
    while waiting:
        for piece in waiting[-1]:
            if isinstance(piece, bytes):
                written.append(piece)
            else:
                waiting.append(_pieces(piece, nulls=nulls))
                break
        else:
            waiting.pop()
    return b"".join(written)


def _selected(root: _Node, fields: "_Fields | None") -> list[_Node]:
    """Return what is signed of a message: all but the signature, or what the header `signFields` names."""
    chosen: list[_Node] = [b"{"]
    for token, node in _members(root):
        name = _name_of(token)
        if name == "headers" and node[0] == b"{":
            headers: list[_Node] = [b"{"]
            for header_token, value in _members(node):
                header = canonical_name(_name_of(header_token))
                if header != "signature" and (fields is None or fields.has_header(header)):
                    headers += (header_token, value)
            chosen += (token, headers)
        elif fields is None or name in fields.names:
            chosen += (token, node)
    return chosen


class _Fields:
    """The list of the header `signFields`."""

    def __init__(self, text: str) -> None:
        listed = {field.strip() for field in text.split(",")}
        self.names = listed.intersection(_FIELDS)
        self._headers = {canonical_name(field[2:]) for field in listed if field.startswith("h.")} | _ALWAYS_SIGNED
        self._all = "h.*" in listed

    def has_header(self, name: str) -> bool:
        return self._all or name in self._headers

    def cover(self, message: Message) -> bool:
        """Return whether the signature covers the body and all that says where the message goes.

        With a command that is every header that the command reads; without one it is the url.
        """
        if "body" not in self.names:
            return False
        if "cmd" not in message.headers:
            return "url" in self.names
        return self._all or all(name in self._headers for name in message.headers if name in _COMMANDING)


def digest(secret: str, canonical: bytes) -> str:
    """Return the signature of a canonical text: lower-case hex, as every client has it."""
    return hmac.digest(secret.encode(), canonical, "sha256").hex()


def canonical_text(text: bytes, *, sign_fields: str | None = None, nulls: bool = True) -> bytes:
    """Return what is signed of a frame (7.1; with `sign_fields` 7.2).

    Raises:
        AuthenticationError: an object has a name twice.
    """
    fields = None if sign_fields is None else _Fields(sign_fields)
    return _write(_selected(_parse(text), fields), nulls=nulls)


def verify_frame(message: Message, text: bytes, keys: Keys, *, partial: bool = False) -> str:
    """Check who sent a WebSocket frame, and return the apiKey. `message` is the result of `decode_message(text)`.

    `partial` accepts lists of signed fields that leave what matters unsigned (7.2).

    Raises:
        AuthenticationError: the proof fails; answer its status and text, which are section 7's.
    """
    fields = message.headers.get("signFields")
    # The .NET client sends nulls that it did not sign.
    return _verify(
        message, keys, lambda again: canonical_text(text, sign_fields=fields, nulls=not again), partial, whole=True
    )


def verify_request(message: Message, keys: Keys, *, partial: bool = False) -> str:
    """Check who sent an HTTP request, and return the apiKey. Only the scheme with `signFields` can work there (7.1).

    Raises:
        AuthenticationError: the proof fails.
    """
    fields = message.headers.get("signFields", "")
    return _verify(message, keys, lambda again: request_text(message, fields, escape=again), partial, whole=False)


def _verify(message: Message, keys: Keys, canonical: Callable[[bool], bytes], partial: bool, *, whole: bool) -> str:
    """Check the parts of the proof in the order of section 7: both forms of the canonical text are tried.

    `whole` allows a signature of the whole message, without a list of fields.
    """
    api_key, signature = message.headers.get("apiKey"), message.headers.get("signature")
    if api_key is None:
        raise AuthenticationError(messages.MISSING_API_KEY)
    if signature is None:
        raise AuthenticationError(messages.MISSING_SIGNATURE)
    secret = keys.get(api_key)
    if secret is None:
        raise AuthenticationError(messages.UNKNOWN_API_KEY)
    fields = message.headers.get("signFields")
    if not secret:
        raise AuthenticationError(messages.UNKNOWN_SECRET_KEY)
    signature_bytes = signature.lower().encode()
    if whole if fields is None else partial or _Fields(fields).cover(message):
        for again in (False, True):
            if hmac.compare_digest(digest(secret, canonical(again)).encode(), signature_bytes):
                return api_key
    raise AuthenticationError(messages.SIGNATURE_MISMATCHED)


def request_text(message: Message, sign_fields: str, *, escape: bool = False) -> bytes:
    """Return what is signed of an HTTP request (7.2): a body that is JSON text counts as its value.

    There are no JSON tokens on the wire; `escape` writes what is not ASCII as the Python client does.
    """
    fields = _Fields(sign_fields)
    headers: list[_Node] = [b"{"]
    for name, value in message.headers.items():
        if name != "signature" and fields.has_header(name):
            headers += (_string(name, escape=escape), _string(value, escape=escape))
    root: list[_Node] = [b"{", b'"headers"', headers]
    for name, text in (("url", message.url), ("method", message.method)):
        if name in fields.names and text is not None:
            root += (_string(name, escape=False), _string(text, escape=escape))
    if "body" in fields.names and message.body is not None:
        root += (b'"body"', _body(message, escape=escape))
    return _write(root, nulls=True)


def _body(message: Message, *, escape: bool) -> _Node:
    body = message.body
    assert body is not None
    content_type = message.headers.get("content-type", "")
    if message.body_kind == "json" or (is_json(content_type) and parse_json(body) is not None):
        return _parse(body)
    text = body.decode() if message.body_kind == "text" else base64.b64encode(body).decode()
    return _string(text, escape=escape)


def _string(text: str, *, escape: bool) -> bytes:
    written = _encode(text)
    if not escape or written.isascii():
        return written
    return re.sub(r"[^\x00-\x7f]", _escaped, written.decode()).encode()


def _escaped(found: "re.Match[str]") -> str:
    units = found[0].encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
