"""Static files beside services, as answers to GET and HEAD (docs/specifications/zbus.md, 8: R3's `staticFileDir`)."""

import asyncio
import logging

from babelbus.core.receipt import Promise
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus.http_mapping import Response
from babelbus.wire.http import FileRefusedError, Files, HttpError, Request, percent_decode

log = logging.getLogger(__name__)

METHODS = ("GET", "HEAD")


class StaticFiles:
    """The files of one folder; `cache_seconds` is how long browsers may use one without asking whether it changed."""

    def __init__(self, files: Files, *, cache_seconds: int = 0) -> None:
        self._files = files
        self._caching = f"max-age={cache_seconds}" if cache_seconds else "no-cache"

    def read(self, request: Request) -> Response | None:
        """Return the response with the file that a request asks for, `None` if there is none. Waits for the disk."""
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

    def begin(self, request: Request) -> "Reading":
        """Start to read in another thread: the event loop goes on meanwhile."""
        return Reading(self, request)


class Reading:
    """A file that is being read. `done` resolves when `response` is there, `None` for none."""

    def __init__(self, files: StaticFiles, request: Request) -> None:
        self.done = Promise()
        self.response: Response | None = None
        future = asyncio.get_running_loop().run_in_executor(None, files.read, request)
        future.add_done_callback(self._end)

    def _end(self, future: "asyncio.Future[Response | None]") -> None:
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or error is not None:
            log.error("a file was not read", exc_info=error)
            self.response = Response(m.FAILED, (("content-type", m.TEXT_TYPE),), b"the file cannot be read")
        else:
            self.response = future.result()
        self.done.resolve()
