"""The requests of the HTTP port, one by one (docs/specifications/worterbuch.md, sections 10, 12 and 13.1).

Every request is answered at once; the caller commits its changes, and waits for the commit.
"""

import re

import msgspec

from babelbus import __version__
from babelbus.core.access import AccessRefusedError, Identity, has_lost
from babelbus.core.state import (
    NoSuchKeyError,
    VersionedError,
    check_key,
    check_pattern,
    children_pattern,
    size_fault,
    store_pattern,
)
from babelbus.listening.certificates import PeerCertificate
from babelbus.protocols.worterbuch.access import Access
from babelbus.protocols.worterbuch.codec import encode_info, encode_names, encode_pairs
from babelbus.protocols.worterbuch.errors import ErrorCode, RefusedError, TooManyTokensError, UnauthorizedError
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.names import check_writable
from babelbus.protocols.worterbuch.privileges import Privilege
from babelbus.protocols.worterbuch.profiles import MAIN
from babelbus.protocols.worterbuch.routes import (
    FORM_TYPE,
    Action,
    Argument,
    Call,
    Dialect,
    RequestRefusedError,
    refusal,
)
from babelbus.protocols.worterbuch.translator import PATTERN_CODES
from babelbus.protocols.worterbuch.values import parse_value, text_json
from babelbus.units import MIB
from babelbus.wire.http import Request, parse_query

COOKIE = "worterbuch_auth_jwt"
JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain"
TEXT_HEADER = ("content-type", "text/plain; charset=utf-8")
OK = b'"Ok"'
POINTER_BYTES_MAX = MIB
"""A pointer looks at no more bytes, each as often as it is deep: of each element of a list it makes an object."""

_BEARER = re.compile(r"bearer +([A-Za-z0-9\-._~+/]+=*) *", re.IGNORECASE)
_COOKIE_TOKEN = re.compile(r"[A-Za-z0-9\-._]+")
_INDEX = re.compile(r"0|[1-9][0-9]{0,9}")
_BAD_ESCAPE = re.compile(r"~(?![01])")
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Reply(msgspec.Struct, frozen=True):
    """One answer; its body is JSON unless the headers say otherwise."""

    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("content-type", JSON_TYPE),)


def error_reply(error: RequestRefusedError) -> Reply:
    """Return the plain text that tells why a request was refused."""
    return Reply(f"{error}\n".encode(), error.status, (TEXT_HEADER, *error.headers))


def absolute(call: Call, access: Access) -> Call:
    """Return a call with the key, pattern or parent that a client with a root means."""
    root, argument = access.identity.root, call.action.argument
    if root is None or argument is Argument.NONE:
        return call
    text = root.name if argument is Argument.PARENT and call.text is None else root.absolute(call.text or "")
    return msgspec.structs.replace(call, text=text)


class Rest:
    """The requests of one connection to the HTTP port."""

    def __init__(
        self, hub: Hub, client_id: str, address: str | None = None, certificate: PeerCertificate | None = None
    ) -> None:
        self._keeper = hub.keeper
        self._client_id = client_id
        self._address = address
        self._certificate = certificate
        self._key_bytes_max = hub.state.key_bytes_max
        self._own: Access | None = None
        self._last: Identity | None = None
        """The identity of who sent the last request."""
        self.name: str | None = None
        """The principal that the last request has proved."""

    def identify(self, request: Request) -> Access:
        """Return the rights of who sent a request: by its token, else by the certificate of the connection.

        Raises:
            RequestRefusedError: the token is missing or invalid.
        """
        keeper = self._keeper
        token = None if keeper.verifier is None else _bearer(request) or _cookie(request)
        if token is not None:
            return self._verify(token)
        own = self._own
        if own is None:
            own = self._own = Access(keeper, self._client_id, self._address, self._certificate)
        if own.locked:
            raise RequestRefusedError(401, "a token is needed", (("www-authenticate", "Bearer"),))
        self.name, self._last = own.name, own.identity
        return own

    def access_changed(self) -> bool:
        """Drop what the connection has proved: the next request asks the gate.

        Returns whether who sent the last request may read less than before.
        """
        self._own = None
        return self._last is not None and has_lost(self._last, self._last)

    def proves_sender(self, request: Request) -> bool:
        """Return whether a request, whose body is still to come, has a valid token or needs none; counts no guess."""
        if self._keeper.verifier is None:
            return True
        token = _bearer(request) or _cookie(request)
        return token is not None and self._keeper.proves(token)

    def _verify(self, token: str) -> Access:
        """Return the rights of a token; a connection that goes on under one name is one login."""
        access = Access(self._keeper, self._client_id, self._address)
        try:
            access.authorize(token)
        except TooManyTokensError as error:
            raise RequestRefusedError(429, str(error), (("retry-after", str(error.seconds)),)) from error
        except UnauthorizedError as error:
            raise RequestRefusedError(403, str(error)) from error
        if access.name != self.name:
            self.name = access.name
            self._keeper.login(access.name or "", self._address)
        self._last = access.identity
        return access

    def need(self, call: Call, access: Access) -> None:
        """Check the key or pattern of a call, and the privilege that the token of its client grants.

        Raises:
            RequestRefusedError: the key is invalid, or the privilege is missing.
        """
        action, text = call.action, call.text or ""
        argument, privilege = action.argument, action.privilege
        _check_size(text, self._key_bytes_max)
        if argument is Argument.PATTERN:
            fault, problem = check_pattern(text), "# before its end"
        else:
            fault = check_key(text) if argument is Argument.KEY else None
            problem = "a wildcard where a key is needed"
        if fault is not None:
            shown = access.identity.relative(text)
            raise refusal(call.dialect, PATTERN_CODES[fault], f"'{shown}' has {problem}")
        if argument is not Argument.NONE and privilege != "read":
            _check_writable(call, text)
        if privilege is not None:
            pattern = children_pattern(call.text) if argument is Argument.PARENT else text
            _need(call, access, privilege, "#" if argument is Argument.NONE else pattern)

    def carry_out(self, call: Call, access: Access) -> Reply:
        """Handle a call, and return the answer of a success.

        Raises:
            RequestRefusedError: the call cannot be done; nothing was changed.
        """
        text, state, relative_text = call.text or "", access.state, access.identity.relative_text
        try:
            match call.action:
                case Action.GET:
                    return self._get(call, access.state_of(text).get(text), access)
                case Action.PGET:
                    return Reply(encode_pairs(_relative(access.match(store_pattern(text)), access)))
                case Action.LS:
                    return Reply(encode_names(state.children(call.text)))
                case Action.SET:
                    state.set(text, _json_body(call))
                    return Reply(OK)
                case Action.SET_FORM:
                    return self._set_form(call, access)
                case Action.PUBLISH:
                    state.note(text, _json_body(call))
                    return Reply(OK)
                case Action.DELETE:
                    value = state.delete(text)
                    return Reply(value if call.dialect is Dialect.NEW else _pair(call, value, access))
                case Action.PDELETE:
                    return Reply(encode_pairs(_relative(state.delete_matching(store_pattern(text)), access)))
                case _:
                    raise AssertionError(call.action)
        except NoSuchKeyError as error:
            raise refusal(call.dialect, ErrorCode.NO_SUCH_VALUE, relative_text(str(error))) from None
        except VersionedError as error:
            raise refusal(call.dialect, ErrorCode.CAS, relative_text(str(error))) from None
        except AccessRefusedError as error:
            raise refusal(call.dialect, ErrorCode.UNAUTHORIZED, relative_text(str(error))) from None

    def info(self) -> Reply:
        """Return what every client is told of the server."""
        return Reply(encode_info(MAIN.info(__version__, authorization=self._keeper.verifier is not None)))

    def _get(self, call: Call, value: bytes, access: Access) -> Reply:
        pointer = call.query.get("pointer" if call.dialect is Dialect.NEW else "extract")
        if pointer is not None:
            part = find_part(value, pointer)
            if part is None:
                raise refusal(call.dialect, ErrorCode.NO_SUCH_VALUE, f"nothing at '{pointer}' of this value")
            value = part
        if call.dialect is Dialect.OLD:
            return Reply(value if "raw" in call.query else _pair(call, value, access))
        if value[:1] == b'"' and ("raw" in call.query or call.content_type == TEXT_TYPE):
            return Reply(msgspec.json.decode(value, type=str).encode(), headers=(TEXT_HEADER,))
        return Reply(value)

    def _set_form(self, call: Call, access: Access) -> Reply:
        """Set each field of a form (0.30 to 0.34), all of them or none."""
        if call.content_type != FORM_TYPE:
            raise RequestRefusedError(415, f"the content type here is {FORM_TYPE}")
        fields = parse_query(call.request.body.decode("latin-1"))
        values = {access.identity.absolute(key): _value(text.encode()) for key, text in fields}
        for key in values:
            _check_size(key, self._key_bytes_max)
            if check_key(key) is not None:
                raise refusal(call.dialect, ErrorCode.ILLEGAL_WILDCARD, f"'{key}' has a wildcard")
            _check_writable(call, key)
            _need(call, access, "write", key)
        if not access.state.set_all(list(values), list(values.values())):
            raise refusal(call.dialect, ErrorCode.CAS, "a key holds a value with a version")
        return Reply(b"Ok", headers=(TEXT_HEADER,))

    def login(self, call: Call, *, is_encrypted: bool) -> Reply:
        """Set a cookie with the client's token, which browsers send over TLS alone if it came over TLS.

        Raises:
            RequestRefusedError: the token is missing or invalid, or may not do this.
        """
        if self._keeper.verifier is None:
            raise refusal(call.dialect, ErrorCode.FEATURE_DISABLED, "no key for tokens is configured")
        token = _bearer(call.request)
        if token is None:
            raise RequestRefusedError(401, "a token is needed", (("www-authenticate", "Bearer"),))
        privileges = self._verify(token).privileges
        if privileges is None or not privileges.web_login:
            raise refusal(call.dialect, ErrorCode.UNAUTHORIZED, "no privilege for web-login")
        cookie = f"{COOKIE}={token}; Path=/api/v1/; HttpOnly; SameSite=Strict{'; Secure' if is_encrypted else ''}"
        return Reply(headers=(("set-cookie", cookie),))


def _need(call: Call, access: Access, privilege: Privilege, pattern: str) -> None:
    try:
        access.need(privilege, pattern)
    except RefusedError as error:
        raise refusal(call.dialect, error.code, error.text) from None


def _check_writable(call: Call, key: str) -> None:
    """Check that a key is not below `$SYS`, where requests have no keys of their own (section 12.3)."""
    try:
        check_writable(key)
    except RefusedError as error:
        raise refusal(call.dialect, error.code, error.text) from None


def _check_size(text: str, bytes_max: int) -> None:
    fault = size_fault(text, bytes_max)
    if fault is not None:
        raise RequestRefusedError(400, f"'{text[:80]}...' {fault}")


def _pair(call: Call, value: bytes, access: Access) -> bytes:
    return b'{"key":%b,"value":%b}' % (text_json(access.identity.relative(call.text or "")), value)


def _relative(pairs: list[tuple[str, bytes]], access: Access) -> list[tuple[str, bytes]]:
    """Return pairs with the keys as the client has them."""
    if access.identity.root is None:
        return pairs
    return [(access.identity.relative(key), value) for key, value in pairs]


def _json_body(call: Call) -> bytes:
    kind = call.content_type
    if kind != JSON_TYPE and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RequestRefusedError(415, f"the content type here is {JSON_TYPE}")
    return _value(call.request.body)


def _value(text: bytes) -> bytes:
    try:
        return parse_value(text)
    except (ValueError, msgspec.DecodeError) as error:
        raise RequestRefusedError(400, f"no value: {error}") from error


def _bearer(request: Request) -> str | None:
    """Return the token of the `Authorization` header, `None` without a bearer token."""
    match = _BEARER.fullmatch(request.headers.get("authorization", ""))
    return match[1] if match is not None else None


def _cookie(request: Request) -> str | None:
    for part in request.headers.get("cookie", "").split(";"):
        name, _, value = part.strip(" \t").partition("=")
        if name == COOKIE and _COOKIE_TOKEN.fullmatch(value):
            return value
    return None


def find_part(value: bytes, pointer: str) -> bytes | None:
    """Return the JSON text of the part that a pointer (RFC 6901) names, unchanged; `None` if there is no such part.

    Raises:
        RequestRefusedError: the text is no pointer, or the value is too large for it.
    """
    if not pointer:
        return value
    if pointer[0] != "/" or _BAD_ESCAPE.search(pointer):
        raise RequestRefusedError(400, f"no JSON pointer: '{pointer}'")
    left = POINTER_BYTES_MAX
    for token in pointer[1:].split("/"):
        left -= len(value)
        if left < 0:
            raise RequestRefusedError(413, f"a pointer looks at {POINTER_BYTES_MAX} bytes at most: get the whole value")
        first = value.lstrip()[:1]
        if first == b"{":
            part = _members(value).get(token.replace("~1", "/").replace("~0", "~"))
        elif first == b"[" and _INDEX.fullmatch(token):
            items = _items(value)
            index = int(token)
            part = items[index] if index < len(items) else None
        else:
            part = None
        if part is None:
            return None
        value = bytes(part)
    return value.strip()
