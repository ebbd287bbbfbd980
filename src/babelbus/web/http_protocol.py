"""The HTTP of aiohttp, without the releases of aiohttp and Python in its answers: strangers need not know them."""

from typing import Any, Final

from aiohttp import hdrs, web

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
