"""Where a url leads (docs/specifications/zbus.md, sections 4.7, 6.1 and 6.2)."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, Protocol

import msgspec

from babelbus.protocols.zbus import messages
from babelbus.protocols.zbus.continuation import KeptBinding
from babelbus.protocols.zbus.errors import MalformedMessageError, NotFoundError
from babelbus.protocols.zbus.messages import HEADERS_MAX, Message, canonical_name
from babelbus.units import MIB
from babelbus.wire.http import parse_form

NAME_LENGTH_MAX: Final = 249
"""No MQ has a longer name: longer prefixes of a path are not looked up."""


class UrlEntry(msgspec.Struct, frozen=True):
    """An entry of `bind`: urls that begin with `url` go to `mq`."""

    url: str
    mq: str


ENTRIES_MAX = 10_000
"""Most urls that are bound."""
URLS_BYTES_MAX = 4 * MIB
"""Most bytes of UTF-8 that the bound urls have together."""

_decode_entries = msgspec.json.Decoder(list[UrlEntry]).decode


def read_bindings(message: Message, mq: str) -> list[UrlEntry]:
    """Return the entries that a `bind` for an MQ brings, as a JSON list or the text of one (HTTP).

    Raises:
        MalformedMessageError: there is no body, it is no such list, or one is of another MQ.
    """
    if message.body is None:
        raise MalformedMessageError(messages.BIND_NEEDS_BODY)
    try:
        entries = _decode_entries(message.body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError("bind command, body is no list of url and mq") from error
    if len(entries) > ENTRIES_MAX:  # before each is looked at
        raise MalformedMessageError(f"{len(entries)} urls to bind, limit {ENTRIES_MAX}")
    if any(entry.mq != mq for entry in entries):
        raise MalformedMessageError(messages.BIND_OTHER_MQ)
    return entries


class Prefixes:
    """Urls as prefixes, found by bisection: to compare ten thousand with ten thousand others takes ten seconds."""

    def __init__(self, urls: Iterable[str]) -> None:
        self._all = sorted(urls)
        self._shortest: list[str] = []
        """Those that begin with none of the others: of them, only the last one before a text can be its beginning."""
        for url in self._all:
            if not self._shortest or not url.startswith(self._shortest[-1]):
                self._shortest.append(url)

    def begin(self, text: str) -> bool:
        """Return whether a text begins with one of the urls."""
        at = bisect_right(self._shortest, text)
        return at > 0 and text.startswith(self._shortest[at - 1])

    def has_below(self, text: str) -> bool:
        """Return whether one of the urls begins with a text."""
        at = bisect_left(self._all, text)
        return at < len(self._all) and self._all[at].startswith(text)


class BindTable:
    """The bound url prefixes of a server. They survive their clients and belong to nobody; the last binding wins."""

    def __init__(self, *, entries_max: int = ENTRIES_MAX, bytes_max: int = URLS_BYTES_MAX) -> None:
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._by_url: dict[str, str] = {}
        self._principals: dict[str, str] = {}
        """Url -> the principal that has bound it, while the gate is on."""
        self._lengths: list[int] = []

    def __len__(self) -> int:
        return len(self._by_url)

    def items(self) -> list[tuple[str, str]]:
        """Return the prefixes with their MQs."""
        return list(self._by_url.items())

    def bind(self, mq: str, entries: Collection[UrlEntry], *, clear: bool = True, principal: str = "") -> None:
        """Register prefixes for an MQ; with `clear` its earlier ones are forgotten first.

        A `principal` may have half of the table; without one nobody is asked for rights.

        Raises:
            MalformedMessageError: there would be more than `entries_max` or `bytes_max`; nothing has changed.
        """
        table = {url: owner for url, owner in self._by_url.items() if not clear or owner != mq}
        table.update((entry.url, mq) for entry in entries)
        self._check(table, "bound", 1)
        principals = {url: name for url, name in self._principals.items() if url in table}
        principals.update((entry.url, principal) for entry in entries)
        if principal:
            own = [url for url, name in principals.items() if name == principal]
            self._check(own, f"bound by {principal!r}", 2)
        self._set(table, principals)

    def _check(self, urls: Collection[str], how: str, share: int) -> None:
        """Check that urls are no more than one share of the table. Raises: MalformedMessageError."""
        entries_max, bytes_max = self._entries_max // share, self._bytes_max // share
        if len(urls) > entries_max:
            raise MalformedMessageError(f"{len(urls)} urls {how}, limit {entries_max}")
        size_bytes = sum(len(url.encode("utf-8", "surrogatepass")) for url in urls)
        if size_bytes > bytes_max:
            raise MalformedMessageError(f"urls of {size_bytes} bytes {how}, limit {bytes_max}")

    def _set(self, table: dict[str, str], principals: dict[str, str]) -> None:
        self._by_url = table
        self._principals = principals
        self._lengths = sorted({len(url) for url in table}, reverse=True)

    def keep(self) -> list[KeptBinding]:
        """Return the prefixes, for the next server."""
        return [KeptBinding(url, mq, self._principals[url]) for url, mq in self._by_url.items()]

    def restore(self, kept: Sequence[KeptBinding]) -> None:
        """Register the prefixes that another server has kept, before there are others."""
        self._set({one.url: one.mq for one in kept}, {one.url: one.principal for one in kept})

    def find(self, url: str) -> str | None:
        """Return the MQ of the longest prefix. A plain string prefix: `/plus` catches `/plusX` too (6.1, DECISION)."""
        prefixes = (url[:length] for length in self._lengths if length <= len(url))
        return next((self._by_url[prefix] for prefix in prefixes if prefix in self._by_url), None)


class Bound(Protocol):
    """The part of a table of bindings that `route` uses."""

    def find(self, url: str) -> str | None:
        """Return the MQ of the longest prefix."""


def route(
    message: Message, bindings: Bound, exists: Callable[[str], bool], target: str | None = None
) -> Message | None:
    """Return the command that a message without `cmd` means; the first rule of section 6.1 that fits decides.

    That is the command of a query, or a `pub` without ack to the MQ that the url belongs to, with the url as it was;
    `None` for the welcome page. `exists` knows the names of MQs. `target` is what stood in the HTTP request line: a
    query is cut at its `&` before it is decoded, and `message.url` is decoded as a whole. Without one the url is taken
    as it is written (WebSocket).

    Raises:
        NotFoundError: the url leads nowhere: a static file, or else this answer.
        MalformedMessageError: there is no url, or a query has too many parameters.
    """
    url = message.url
    if url is None:
        raise MalformedMessageError(messages.CMD_REQUIRED)
    command = command_of_query(message, url if target is None else target)
    if command is not None:
        return command
    path = url.partition("?")[0]
    mq = bindings.find(url)
    if mq is None:
        mq = _mq_of_path(path, exists)
    if mq is not None:
        headers = {**message.headers, "cmd": "pub", "mq": mq, "ack": "false"}
        return msgspec.structs.replace(message, headers=headers)
    if path in ("", "/"):
        return None
    raise NotFoundError(messages.url_not_found(url))


def path_of(mq: str) -> str:
    """Return the path by which urls name an MQ."""
    return mq if mq.startswith("/") else f"/{mq}"


def _mq_of_path(path: str, exists: Callable[[str], bool]) -> str | None:
    """Return the MQ whose name is the longest prefix of a path by segments, else the one named by the first segment."""
    if path.startswith("/"):
        end = len(path)
        if end > NAME_LENGTH_MAX:
            end = path.rfind("/", 0, NAME_LENGTH_MAX + 1)
        while end > 0:
            if exists(path[:end]):
                return path[:end]
            end = path.rfind("/", 0, end)
    first = path.removeprefix("/").partition("/")[0]
    return first if first and exists(first) else None


def request_id_of(message: Message, target: str | None) -> str | None:
    """Return the id that the answer to a message has: the id of its query if the query is a command (6.2)."""
    command = None
    if target is not None and "cmd" not in message.headers:
        try:
            command = command_of_query(message, target)
        except MalformedMessageError:  # the answer to too many parameters has the id of the headers
            command = None
    return (command or message).headers.get("id")


def command_of_query(message: Message, target: str) -> Message | None:
    """Return the command that `/?cmd=...` says, `None` if the target is no command (6.2).

    Each parameter is a header and `body` the body; without one the body stays. The url keeps its path alone: the rest
    is said by the headers, and may hold a key.

    Raises:
        MalformedMessageError: there are too many parameters.
    """
    path, _, query = target.partition("?")
    if path not in ("", "/") or "cmd=" not in query.lower():
        return None
    try:
        pairs = parse_form(query, HEADERS_MAX)
    except ValueError as error:
        raise MalformedMessageError(f"more than {HEADERS_MAX} parameters") from error
    parameters = {canonical_name(name): value for name, value in pairs}
    if "cmd" not in parameters:
        return None
    headers = dict(message.headers)
    body = parameters.pop("body", None)
    headers.update(parameters)
    if len(headers) > HEADERS_MAX:
        raise MalformedMessageError(f"{len(headers)} headers, limit {HEADERS_MAX}")
    if body is None:
        return Message(headers, "/", message.method, message.status, message.body, message.body_kind)
    headers.pop("content-type", None)  # it told of the body that the request had
    return Message(headers, "/", message.method, message.status, body.encode(), "text")
