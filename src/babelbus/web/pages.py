"""The pages of the documentation, below /docs/: files of one folder, for everybody who reaches the endpoint."""

import asyncio
from pathlib import Path
from weakref import WeakValueDictionary

from aiohttp import hdrs, web

import babelbus
from babelbus.config import AdminSettings
from babelbus.web.calls import SAFE_HEADERS
from babelbus.wire.http import File, FileRefusedError, Files

FILE_BYTES_MAX = 2**24
PIECE_BYTES = 2**16
"""How much of a file is sent at once: a client that does not read costs no more."""
PACKAGED = Path(babelbus.__file__).parent / "pages"
"""The folder of pages in a wheel that was built with them."""
HEADERS = {
    **SAFE_HEADERS,
    # A browser asks each time whether a page has changed, and gets 304: a new release shows its own pages.
    hdrs.CACHE_CONTROL: "no-cache",
    # The theme has scripts in its pages. They load from here alone, and no other page may show these in a frame.
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'",
}


class PageRoutes:
    """The handlers of /docs/. They need no token: the pages are the same on every server."""

    def __init__(self, settings: AdminSettings) -> None:
        self._files = Files(settings.docs_folder or str(PACKAGED), bytes_max=FILE_BYTES_MAX)
        self._sent: WeakValueDictionary[tuple[str, str], File] = WeakValueDictionary()
        """The files that are being sent, by path and tag: all who read one of them slowly share its bytes."""
        self.routes = (("/docs", self._redirect), ("/docs/{path:.*}", self._get))

    async def _redirect(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=308, headers={**HEADERS, hdrs.LOCATION: "/docs/"})

    async def _get(self, request: web.Request) -> web.StreamResponse:
        """Answer a file of the folder; the disk is read in a thread.

        Raises:
            web.HTTPNotFound: there is no such page, its file is unreadable, or the path leaves the folder.
        """
        asked = {name.lower(): value for name, value in request.headers.items()}
        path = "/" + request.match_info["path"]
        try:
            file = await asyncio.to_thread(self._files.read, path, asked=asked)
        except FileRefusedError as error:
            raise web.HTTPNotFound from error
        if file is None:
            raise web.HTTPNotFound
        headers = {**HEADERS, hdrs.ETAG: file.tag, hdrs.LAST_MODIFIED: file.changed}
        if file.unchanged:
            return web.Response(status=304, headers=headers)
        file = self._sent.setdefault((path, file.tag), file)
        response = web.StreamResponse(headers={**headers, hdrs.CONTENT_TYPE: file.content_type})
        response.content_length = len(file.data)
        await response.prepare(request)
        if request.method != hdrs.METH_HEAD:
            for start in range(0, len(file.data), PIECE_BYTES):
                await response.write(file.data[start : start + PIECE_BYTES])
        return response
