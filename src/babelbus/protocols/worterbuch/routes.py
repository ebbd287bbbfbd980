"""Which request of the HTTP port means what (docs/specifications/worterbuch.md, sections 12 and 13.1)."""

import re
from enum import Enum

import msgspec

from babelbus.errors import BabelbusError
from babelbus.protocols.worterbuch.errors import ErrorCode
from babelbus.protocols.worterbuch.privileges import Privilege
from babelbus.wire.http import Request, parse_query, percent_decode

_RAW = re.compile("raw/[^/]+")
NEW_PREFIX = "/api/v1/"
OLD_PREFIX = "/api/"
INFO_PATH = "/info"
FORM_TYPE = "application/x-www-form-urlencoded"


class RequestRefusedError(BabelbusError):
    """A request that is answered with a status and a text; the connection goes on."""

    def __init__(self, status: int, text: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(text)
        self.status, self.headers = status, headers


class Dialect(Enum):
    """The forms of answers."""

    NEW = "new"
    """Since 0.42, below `/api/v1`."""
    OLD = "old"
    """0.30 to 0.41, below `/api`: values come with their keys."""


class Argument(Enum):
    """The key, pattern or parent behind the name of a route."""

    NONE = "none"
    KEY = "key"
    PATTERN = "pattern"
    PARENT = "parent"
    """May be left out."""


class Action(Enum):
    """The kinds of calls, each with its word in the path, its method, its argument and the privilege that it needs."""

    INFO = ("info", "GET", Argument.NONE, None)
    GET = ("get", "GET", Argument.KEY, "read")
    PGET = ("pget", "GET", Argument.PATTERN, "read")
    SET = ("set", "POST", Argument.KEY, "write")
    SET_FORM = ("set", "POST", Argument.NONE, None)
    """Its body tells which privileges it needs."""
    PUBLISH = ("publish", "POST", Argument.KEY, "write")
    DELETE = ("delete", "DELETE", Argument.KEY, "delete")
    PDELETE = ("pdelete", "DELETE", Argument.PATTERN, "delete")
    LS = ("ls", "GET", Argument.PARENT, "read")
    SUBSCRIBE = ("subscribe", "GET", Argument.KEY, "read")
    PSUBSCRIBE = ("psubscribe", "GET", Argument.PATTERN, "read")
    SUBSCRIBE_LS = ("subscribels", "GET", Argument.PARENT, "read")
    EXPORT = ("export", "GET", Argument.NONE, "read")
    IMPORT = ("import", "POST", Argument.NONE, "write")
    LOGIN = ("login", "POST", Argument.NONE, None)

    def __init__(self, word: str, method: str, argument: Argument, privilege: Privilege | None) -> None:
        self.word = word
        self.method = method
        self.argument = argument
        self.privilege: Privilege | None = privilege

    @property
    def allowed(self) -> str:
        """The methods that its path has."""
        return "GET, HEAD, OPTIONS" if self.method == "GET" else f"{self.method}, OPTIONS"


CHANGING = frozenset((Action.SET, Action.SET_FORM, Action.PUBLISH, Action.DELETE, Action.PDELETE, Action.IMPORT))
STREAMS = frozenset((Action.SUBSCRIBE, Action.PSUBSCRIBE, Action.SUBSCRIBE_LS))
_NEW = {one.word: one for one in Action if one not in (Action.INFO, Action.SET_FORM)}
_OLD = {
    one.word: one
    for one in (Action.GET, Action.PGET, Action.SET, Action.PUBLISH, Action.DELETE, Action.PDELETE, Action.LS)
}


class Call(msgspec.Struct, frozen=True):
    """A request's call; `text` is the key, pattern or parent behind the route."""

    action: Action
    dialect: Dialect
    request: Request
    text: str | None = None
    query: dict[str, str] = {}

    def flag(self, name: str) -> bool:
        """Return whether the query has a name, with any value but `false`."""
        return self.query.get(name, "false").lower() != "false"

    @property
    def content_type(self) -> str:
        """The type of the body, without parameters, in lower case."""
        return self.request.headers.get("content-type", "").partition(";")[0].strip().lower()


def is_route(path: str) -> bool:
    """Return whether a path belongs to the API, and so to no file."""
    return path == INFO_PATH or path == "/api" or path.startswith(OLD_PREFIX)


def read_call(request: Request) -> Call:
    """Return what a request to the API asks for.

    Raises:
        RequestRefusedError: no such path, or another method.
        HttpError: the path or query has a wrong escape, or is not UTF-8.
    """
    path = request.path
    action, dialect, rest = _find(path)
    if request.method not in (action.method, "OPTIONS", "HEAD" if action.method == "GET" else "OPTIONS"):
        raise RequestRefusedError(405, f"the method here is {action.method}", (("allow", action.allowed),))
    text = None if rest is None else percent_decode(rest)
    query = dict(parse_query(request.query))
    if dialect is Dialect.OLD and action is Action.GET and _RAW.fullmatch(rest or "") and text is not None:
        # 0.40 had keys of one segment of the path: `raw/a` is not the key `raw/a` of 0.30.
        return Call(action, dialect, request, text.removeprefix("raw/"), query | {"raw": ""})
    return Call(action, dialect, request, text, query)


def _find(path: str) -> tuple[Action, Dialect, str | None]:
    if path == INFO_PATH:
        return Action.INFO, Dialect.NEW, None
    new = path.startswith(NEW_PREFIX)
    word, slash, rest = path[len(NEW_PREFIX if new else OLD_PREFIX) :].partition("/")
    if path == "/api/set":
        return Action.SET_FORM, Dialect.OLD, None
    action = (_NEW if new else _OLD).get(word)
    optional = action is not None and action.argument in (Argument.NONE, Argument.PARENT)
    if action is None or not ((action.argument is not Argument.NONE and rest) or (optional and not slash)):
        raise RequestRefusedError(404, "not found")
    return action, Dialect.NEW if new else Dialect.OLD, rest if slash else None


_NEW_STATUS = {
    400: (0, 1, 2, 19, 21, 25),
    401: (11,),
    403: (10, 14),
    404: (5,),
    405: (9,),
    409: (17, 18, 20),
    422: (6, 12, 15, 23),
}
_STATUS = {code: status for status, codes in _NEW_STATUS.items() for code in codes}
_OLD_STATUS = dict.fromkeys((0, 1, 2, 5, 9), 400) | {11: 401, 14: 403}


def refusal(dialect: Dialect, code: ErrorCode, text: str) -> RequestRefusedError:
    """Return what answers a request that ended with an error of the protocol (section 12.1)."""
    status = (_STATUS if dialect is Dialect.NEW else _OLD_STATUS).get(code, 500)
    # RFC 9110, section 15.5.6: 405 says what is allowed. Nothing may be done to what the server writes.
    headers = (("allow", "OPTIONS"),) if status == 405 else ()
    if status == 401:
        headers = (("www-authenticate", "Bearer"),)
    return RequestRefusedError(status, text, headers)
