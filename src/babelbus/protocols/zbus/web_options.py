"""The options of one HTTP port of zbus: static files beside services, and urls that need no signature.

Specification: docs/specifications/zbus.md, 8: R3's `staticFileDir` and `authExcluedList`.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

import msgspec

from babelbus.core.work import Work
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus.http_mapping import Response
from babelbus.protocols.zbus.messages import Message
from babelbus.protocols.zbus.routing import command_of_query
from babelbus.wire.browsers import BrowserGuard
from babelbus.wire.cors import Cors
from babelbus.wire.http import FileRefusedError, Files, HttpError, Request, percent_decode

METHODS = ("GET", "HEAD")


class StaticFiles:
    """The files of one folder; `cache_seconds` is how long browsers may use one without asking whether it changed."""

    def __init__(self, files: Files, *, cache_seconds: int = 0) -> None:
        self._files = files
        self._caching = f"max-age={cache_seconds}" if cache_seconds else "no-cache"

    def read(self, request: Request) -> Response | None:
        """Return the response with the file that a request asks for, `None` if there is no file. Waits for the disk."""
        try:
            path = percent_decode(request.path)
        except HttpError:
            return None
        try:
            found = self._files.read(path, asked=request.headers)
        except FileRefusedError as error:
            return Response(m.FAILED, (("content-type", m.TEXT_TYPE),), str(error).encode())
        if found is None:
            return None
        headers = (
            ("etag", found.tag),
            ("last-modified", found.changed),
            ("cache-control", self._caching),
            ("x-content-type-options", "nosniff"),
        )
        if found.unchanged:
            return Response(304, headers, b"")
        return Response(m.OK, (("content-type", found.content_type), *headers), found.data)

    def begin(self, request: Request) -> Work[Response | None]:
        """Start to read in another thread: the event loop goes on meanwhile."""

        async def read() -> Response | None:
            return await asyncio.get_running_loop().run_in_executor(None, self.read, request)

        return Work(read())


class OpenUrls:
    """Patterns of paths: each is a whole path, or a prefix with `*` behind it."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        listed = list(patterns)
        self._paths = frozenset(one for one in listed if not one.endswith("*"))
        self._prefixes = tuple(one[:-1] for one in listed if one.endswith("*"))

    def __bool__(self) -> bool:
        return bool(self._paths or self._prefixes)

    def has(self, message: Message, target: str | None = None) -> bool:
        """Return whether a message needs no proof: it only asks for a url, and this one is open.

        A command never is, wherever it stands: in a header, or in the query of `/`. `target` as for `routing.route`.

        Raises:
            MalformedMessageError: a query has too many parameters.
        """
        url = message.url
        if url is None or "cmd" in message.headers or not self:
            return False
        path = url.partition("?")[0]
        if path not in self._paths and not path.startswith(self._prefixes):
            return False
        return command_of_query(message, url if target is None else target) is None


NO_PAGES: Final = BrowserGuard()
"""Lets no page of another origin in."""


class WebOptions(msgspec.Struct, frozen=True):
    """By default there is nothing but the protocol."""

    monitor: bool = False
    """Whether it is the port of the list of queues, where no url is a service's."""
    cors: Cors | None = None
    files: StaticFiles | None = None
    """The files that GET returns where no url belongs to a service."""
    open_urls: OpenUrls = OpenUrls()
    """The urls that need no signature."""
    guard: BrowserGuard = NO_PAGES


NOTHING_ELSE = WebOptions()
