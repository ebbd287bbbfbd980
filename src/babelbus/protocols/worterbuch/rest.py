"""The requests of the HTTP port, one by one (docs/specifications/worterbuch.md, sections 10, 12 and 13.1).

Every request is answered at once; the caller commits its changes, and waits for the commit.
"""

import re

import msgspec

from babelbus import __version__
from babelbus.core.state import (
    NoSuchKeyError,
    State,
    VersionedError,
    check_key,
    check_pattern,
    children_pattern,
    size_fault,
    store_pattern,
)
from babelbus.protocols.worterbuch.codec import encode_info, encode_names, encode_pairs
from babelbus.protocols.worterbuch.errors import ErrorCode, TooManyTokensError, UnauthorizedError
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.names import is_below_sys
from babelbus.protocols.worterbuch.privileges import Privilege, Privileges
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
from babelbus.wire.http import Request, parse_query

COOKIE = "worterbuch_auth_jwt"
JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain"
TEXT_HEADER = ("content-type", "text/plain; charset=utf-8")
OK = b'"Ok"'

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


class Rest:
    """The requests of one connection to the HTTP port."""

    def __init__(self, hub: Hub, address: str | None = None) -> None:
        self._hub = hub
        self._address = address
        self._state = hub.state

    def identify(self, request: Request) -> Privileges | None:
        """Return what the token of a request grants, `None` where no key is configured and everybody may do all.

        Raises:
            RequestRefusedError: the token is missing or invalid.
        """
        if self._hub.verifier is None:
            return None
        token = _bearer(request) or _cookie(request)
        if token is None:
            raise RequestRefusedError(401, "a token is needed", (("www-authenticate", "Bearer"),))
        return self._verify(token)

    def proves_sender(self, request: Request) -> bool:
        """Return whether a request, whose body is still to come, has a valid token or needs none; counts no guess."""
        verifier = self._hub.verifier
        if verifier is None:
            return True
        token = _bearer(request) or _cookie(request)
        try:
            return token is not None and bool(verifier.verify(token, self._hub.clock.now_ms() / 1000))
        except UnauthorizedError:
            return False

    def _verify(self, token: str) -> Privileges:
        try:
            return self._hub.verify(token, self._address)
        except TooManyTokensError as error:
            raise RequestRefusedError(429, str(error), (("retry-after", str(error.seconds)),)) from error
        except UnauthorizedError as error:
            raise RequestRefusedError(403, str(error)) from error

    def need(self, call: Call, privileges: Privileges | None) -> None:
        """Check the key or pattern of a call, and the privilege of its client.

        Raises:
            RequestRefusedError: the key is invalid, or the privilege is missing.
        """
        action, text = call.action, call.text or ""
        argument, privilege = action.argument, action.privilege
        _check_size(self._state, text)
        if argument is Argument.PATTERN:
            fault, problem = check_pattern(text), "# before its end"
        else:
            fault = check_key(text) if argument is Argument.KEY else None
            problem = "a wildcard where a key is needed"
        if fault is not None:
            raise refusal(call.dialect, PATTERN_CODES[fault], f"'{text}' has {problem}")
        if argument is not Argument.NONE and privilege != "read":
            _check_writable(call, text)
        if privilege is not None:
            pattern = children_pattern(call.text) if argument is Argument.PARENT else text
            self._need(call, privileges, privilege, "#" if argument is Argument.NONE else pattern)

    def _need(self, call: Call, privileges: Privileges | None, privilege: Privilege, pattern: str) -> None:
        if privileges is not None and not privileges.may(privilege, pattern):
            raise refusal(call.dialect, ErrorCode.UNAUTHORIZED, f"no privilege to {privilege} '{pattern}'")

    def carry_out(self, call: Call, privileges: Privileges | None) -> Reply:
        """Handle a call, and return the answer of a success.

        Raises:
            RequestRefusedError: the call cannot be done; nothing was changed.
        """
        try:
            match call.action:
                case Action.INFO:
                    return self._info()
                case Action.GET:
                    return self._get(call)
                case Action.PGET:
                    return Reply(encode_pairs(self._state.match(store_pattern(call.text or ""))))
                case Action.LS:
                    return Reply(encode_names(self._state.children(call.text)))
                case Action.SET:
                    self._state.set(call.text or "", _json_body(call))
                    return Reply(OK)
                case Action.SET_FORM:
                    return self._set_form(call, privileges)
                case Action.PUBLISH:
                    self._state.note(call.text or "", _json_body(call))
                    return Reply(OK)
                case Action.DELETE:
                    value = self._state.delete(call.text or "")
                    return Reply(value if call.dialect is Dialect.NEW else _pair(call, value))
                case Action.PDELETE:
                    return Reply(encode_pairs(self._state.delete_matching(store_pattern(call.text or ""))))
                case Action.LOGIN:
                    return self._login(call)
                case _:
                    raise AssertionError(call.action)
        except NoSuchKeyError as error:
            raise refusal(call.dialect, ErrorCode.NO_SUCH_VALUE, str(error)) from None
        except VersionedError as error:
            raise refusal(call.dialect, ErrorCode.CAS, str(error)) from None

    def _info(self) -> Reply:
        return Reply(encode_info(MAIN.info(__version__, authorization=self._hub.verifier is not None)))

    def _get(self, call: Call) -> Reply:
        value = self._state.get(call.text or "")
        pointer = call.query.get("pointer" if call.dialect is Dialect.NEW else "extract")
        if pointer is not None:
            part = find_part(value, pointer)
            if part is None:
                raise refusal(call.dialect, ErrorCode.NO_SUCH_VALUE, f"nothing at '{pointer}' of this value")
            value = part
        if call.dialect is Dialect.OLD:
            return Reply(value if "raw" in call.query else _pair(call, value))
        if value[:1] == b'"' and ("raw" in call.query or call.content_type == TEXT_TYPE):
            return Reply(msgspec.json.decode(value, type=str).encode(), headers=(TEXT_HEADER,))
        return Reply(value)

    def _set_form(self, call: Call, privileges: Privileges | None) -> Reply:
        """Set each field of a form (0.30 to 0.34), all of them or none."""
        if call.content_type != FORM_TYPE:
            raise RequestRefusedError(415, f"the content type here is {FORM_TYPE}")
        fields = parse_query(call.request.body.decode("latin-1"))
        values = {key: _value(text.encode()) for key, text in fields}
        for key in values:
            _check_size(self._state, key)
            if check_key(key) is not None:
                raise refusal(call.dialect, ErrorCode.ILLEGAL_WILDCARD, f"'{key}' has a wildcard")
            _check_writable(call, key)
            self._need(call, privileges, "write", key)
        if not self._state.set_all(list(values), list(values.values())):
            raise refusal(call.dialect, ErrorCode.CAS, "a key holds a value with a version")
        return Reply(b"Ok", headers=(TEXT_HEADER,))

    def _login(self, call: Call) -> Reply:
        """Set a cookie with the client's token."""
        if self._hub.verifier is None:
            raise refusal(call.dialect, ErrorCode.FEATURE_DISABLED, "no key for tokens is configured")
        token = _bearer(call.request)
        if token is None:
            raise RequestRefusedError(401, "a token is needed", (("www-authenticate", "Bearer"),))
        if not self._verify(token).web_login:
            raise refusal(call.dialect, ErrorCode.UNAUTHORIZED, "no privilege for web-login")
        cookie = f"{COOKIE}={token}; Path=/api/v1/; HttpOnly; SameSite=Strict"
        return Reply(headers=(("set-cookie", cookie),))


def _check_writable(call: Call, key: str) -> None:
    """Check that a key is not below `$SYS`, where requests have no keys of their own (section 12.3)."""
    if is_below_sys(key):
        raise refusal(call.dialect, ErrorCode.READ_ONLY_KEY, f"'{key}' is read-only")


def _check_size(state: State, text: str) -> None:
    fault = size_fault(text, state.key_bytes_max)
    if fault is not None:
        raise RequestRefusedError(400, f"'{text[:80]}...' {fault}")


def _pair(call: Call, value: bytes) -> bytes:
    return b'{"key":%b,"value":%b}' % (text_json(call.text or ""), value)


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
        RequestRefusedError: the text is no pointer.
    """
    if not pointer:
        return value
    if pointer[0] != "/" or _BAD_ESCAPE.search(pointer):
        raise RequestRefusedError(400, f"no JSON pointer: '{pointer}'")
    for token in pointer[1:].split("/"):
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
