"""The administration API without HTTP: requests that came over the connection of another protocol."""

from collections.abc import Iterable, Mapping
from typing import Protocol
from urllib.parse import parse_qsl, unquote

from aiohttp import web

from babelbus.core.access import Identity
from babelbus.web.answers import answer_of
from babelbus.web.calls import BODY_BYTES_MAX, LINES_HEADERS, Handler, Lines, Route


class DirectLines(Lines, Protocol):
    """The lines of a connection, and the address of its client."""

    address: str


class DirectCall:
    """A request that came over the connection of another protocol, which proved the principal."""

    def __init__(self, principal: Identity, query: Mapping[str, str], body: bytes, lines: DirectLines) -> None:
        self.principal = principal
        self.address = lines.address
        self.path_values: Mapping[str, str] = {}
        self.query = query
        self._body = body
        self._lines = lines

    async def read(self, bytes_max: int = BODY_BYTES_MAX) -> bytes:
        """Return the body."""
        if len(self._body) > bytes_max:
            raise web.HTTPRequestEntityTooLarge(bytes_max, len(self._body))
        return self._body

    async def begin_lines(self, headers: Mapping[str, str] = LINES_HEADERS) -> Lines:
        """Return the lines of the connection; it has no headers."""
        return self._lines


class Api:
    """The handlers by method and path, for requests that do not come over HTTP."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._parts = [(method, path.split("/"), handler) for method, path, handler in self.routes]

    async def answer(
        self, principal: Identity, method: str, path: str, body: bytes, lines: DirectLines
    ) -> tuple[int, bytes]:
        """Answer a request of a principal: return the status and the body, which is empty behind lines.

        `path` is that of HTTP, with the query. When the task is cancelled, the request ends as if the client had
        closed its connection.
        """
        path, _, query = path.partition("?")
        call = DirectCall(principal, _parse(query), body, lines)
        try:
            answer = await self._find(method, path, call)(call)
        except Exception as error:
            answer = answer_of(error, f"{method} {path}", principal)
        if not isinstance(answer, web.Response):
            return 200, b""
        assert isinstance(answer.body, bytes)
        return answer.status, answer.body

    def _find(self, method: str, path: str, call: DirectCall) -> Handler:
        """Return the handler of a path, and set the values of the names in the path.

        Raises:
            web.HTTPException: nobody answers this path, or not with this method.
        """
        segments = path.split("/")
        methods = set()
        for known, parts, handler in self._parts:
            if len(parts) != len(segments):
                continue
            pairs = list(zip(parts, segments, strict=True))
            if all(part == segment or (part.startswith("{") and segment) for part, segment in pairs):
                methods.add(known)
                if known == method:
                    call.path_values = {part[1:-1]: unquote(segment) for part, segment in pairs if part[:1] == "{"}
                    return handler
        if methods:
            raise web.HTTPMethodNotAllowed(method, methods)
        raise web.HTTPNotFound


def _parse(query: str) -> dict[str, str]:
    """Return the parameters of a query; of two with one name the first counts, as over HTTP."""
    values: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True, errors="surrogateescape"):
        values.setdefault(name, value)
    return values
