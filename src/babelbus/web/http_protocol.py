"""The HTTP of aiohttp, without the releases of aiohttp and Python in its answers: strangers need not know them."""

from typing import Any, Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from babelbus.web.answers import HttpHandler

SERVER: Final = "babelbus"
"""The header `Server` of every answer."""


class HttpProtocol(web.RequestHandler):
    """The protocol of one connection."""

    __slots__ = ()

    def handle_error(self, *args: Any, **kwargs: Any) -> web.StreamResponse:
        """Return the answer to bytes that are no HTTP; no signal of an application is sent for such an answer."""
        response = super().handle_error(*args, **kwargs)
        response.headers[hdrs.SERVER] = SERVER
        return response


async def name_server(_: web.Request, response: web.StreamResponse) -> None:
    """Write the name of the server into an answer of an application."""
    response.headers[hdrs.SERVER] = SERVER


class Handlers:
    """The handlers of an application, until it ends.

    aiohttp remembers up to 1024 handlers for the whole process, each with its application: a member that was the owner
    many times would keep everything of each time in memory.
    """

    def __init__(self) -> None:
        self._handlers: list[HttpHandler] = []
        self._middlewares: list[Middleware] = []

    def add(self, handler: HttpHandler) -> HttpHandler:
        """Return what an application calls in place of a handler."""
        number, handlers = len(self._handlers), self._handlers
        handlers.append(handler)

        async def handle(request: web.Request) -> web.StreamResponse:
            return await handlers[number](request)

        return handle

    def add_middleware(self, middleware: Middleware) -> Middleware:
        """Return what an application calls in place of a middleware."""
        number, middlewares = len(self._middlewares), self._middlewares
        middlewares.append(middleware)

        @web.middleware
        async def handle(request: web.Request, handler: HttpHandler) -> web.StreamResponse:
            return await middlewares[number](request, handler)

        return handle

    def close(self) -> None:
        """Drop all of them: the application has ended."""
        self._handlers.clear()
        self._middlewares.clear()
