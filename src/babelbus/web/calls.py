"""Requests of the administration API, over HTTP or over the connection of another protocol (docs/operations.md).

The handlers see a `Call`: they know neither how the request came nor how its caller proved its name.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

from aiohttp import hdrs, web

from babelbus.core.access import Identity

LINES_TYPE = "application/x-ndjson"
LINES_HEADERS: Mapping[str, str] = {hdrs.CONTENT_TYPE: LINES_TYPE}
SAFE_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
"""No cache keeps an answer, and no browser takes it for anything else."""
LINES_BEGUN: Final = web.RequestKey("lines_begun", bool)
"""Of a request whose answer of lines has begun: an error can only cut it short."""
BODY_BYTES_MAX = 2**20
"""The longest body, unless a handler takes longer ones."""


class Lines(Protocol):
    """An answer of JSON lines that has begun."""

    async def write(self, data: bytes) -> None:
        """Send whole lines; wait while the reader does not take them.

        Raises:
            ConnectionError: the reader has disconnected.
        """


class Call(Protocol):
    """One request, as its handler sees it."""

    principal: Identity
    """The principal that asks."""
    address: str
    """The address of its client; empty if that is not known."""

    @property
    def path_values(self) -> Mapping[str, str]:
        """The values of the names in the path of the handler."""

    @property
    def query(self) -> Mapping[str, str]:
        """The parameters of the query."""

    async def read(self, bytes_max: int = BODY_BYTES_MAX) -> bytes:
        """Read the body; a longer body is refused before all of it has arrived.

        Raises:
            web.HTTPRequestEntityTooLarge: the body is longer.
        """

    async def begin_lines(self, headers: Mapping[str, str] = LINES_HEADERS) -> Lines:
        """Begin an answer of lines: of JSON, unless `headers` name another type."""


Answer = web.Response | Lines
"""The result of a handler: the whole answer, or that of `begin_lines` when all lines are written."""
Handler = Callable[[Call], Awaitable[Answer]]
Route = tuple[str, str, Handler]
"""Method, path, and who answers; `{name}` in a path is one segment."""


class HttpCall:
    """A request that came over HTTP; `take_room` is called for each part of its body, and may refuse it."""

    def __init__(
        self, request: web.Request, principal: Identity, take_room: Callable[[int], None] = lambda size: None
    ) -> None:
        self.principal = principal
        self.address = request.remote or "local"
        self.size_bytes = 0
        """Bytes of the body that room was taken for."""
        self._request = request
        self._take_room = take_room

    @property
    def path_values(self) -> Mapping[str, str]:
        """The values of the names in the path of the handler."""
        return self._request.match_info

    @property
    def query(self) -> Mapping[str, str]:
        """The parameters of the query."""
        return self._request.query

    async def read(self, bytes_max: int = BODY_BYTES_MAX) -> bytes:
        """Read the body; a longer body is refused before all of it has arrived."""
        if hdrs.CONTENT_ENCODING in self._request.headers:
            raise web.HTTPBadRequest(text="a body with content-encoding is not read: send it as it is")
        content = bytearray()
        async for chunk in self._request.content.iter_any():
            self._take_room(len(chunk))
            self.size_bytes += len(chunk)
            content += chunk
            if len(content) > bytes_max:
                raise web.HTTPRequestEntityTooLarge(bytes_max, len(content))
        return bytes(content)

    async def begin_lines(self, headers: Mapping[str, str] = LINES_HEADERS) -> Lines:
        """Begin an answer of lines."""
        response = web.StreamResponse(headers={**headers, **SAFE_HEADERS})
        self._request[LINES_BEGUN] = True
        await response.prepare(self._request)
        return response
