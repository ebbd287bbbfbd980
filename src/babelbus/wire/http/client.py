"""HTTP/1.1 as a client reads it (RFC 9112): bytes -> responses."""

import re
from collections import deque

import msgspec

from babelbus.wire.http.chunks import ChunkedBody
from babelbus.wire.http.fields import (
    BODY_BYTES_MAX,
    CHUNKED,
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    HttpError,
    body_length,
    keeps_alive,
    read_fields,
)

UNTIL_CLOSE = -2
"""Instead of a length: the body of a response ends with the connection."""
_END = b"\r\n\r\n"
_STATUS_LINE = re.compile(rb"HTTP/1\.([0-9]) ([1-9][0-9]{2})(?: ([\t\x20-\x7e\x80-\xff]*))?")


class Response(msgspec.Struct, frozen=True):
    """One response; the values of `headers` are Latin-1 (bytes as characters)."""

    status: int
    reason: str
    headers: dict[str, str]
    body: bytes = b""
    keep_alive: bool = True


class ResponseDecoder:
    """Cuts the bytes of a server into responses. Behind status 101 it stops: `unread` returns the rest.

    Attributes:
        error: why nothing more can be read; close the connection.
    """

    def __init__(
        self,
        *,
        head_bytes_max: int = HEAD_BYTES_MAX,
        headers_max: int = HEADERS_MAX,
        body_bytes_max: int = BODY_BYTES_MAX,
    ) -> None:
        self.error: HttpError | None = None
        self._head_bytes_max = head_bytes_max
        self._headers_max = headers_max
        self._body_bytes_max = body_bytes_max
        self._methods: deque[str] = deque()
        self._held = bytearray()
        self._head: Response | None = None
        self._left = 0  # bytes of the body that have not arrived, or CHUNKED or UNTIL_CLOSE
        self._chunks: ChunkedBody | None = None
        self._body = bytearray()
        self._taken = 0
        self._stopped = False

    def expect(self, method: str) -> None:
        """Record that a request was sent: the response to HEAD has no body. Without this call no request was HEAD."""
        self._methods.append(method)

    def receive_data(self, data: bytes) -> None:
        """Receive bytes from the transport, cut anywhere; parse them with `responses`."""
        self._held += data

    def responses(self) -> list[Response]:
        """Return the complete responses in order, without the interim ones (100, 102, 103).

        Raises:
            HttpError: the server broke the protocol and no complete response is left.
        """
        responses: list[Response] = []
        while self.error is None and not self._stopped:
            try:
                response = self._next()
            except HttpError as error:
                self.error = error
                break
            if response is None:
                break
            responses.append(response)
        if self.error is not None and not responses:
            raise self.error
        return responses

    def receive_end(self) -> Response | None:
        """Return the response whose body the end of the connection completes (RFC 9112, 6.3); others are cut off."""
        head = self._head
        if head is None or self._left != UNTIL_CLOSE or self.error is not None:
            return None
        self._head = None
        return Response(head.status, head.reason, head.headers, self.take_body(), keep_alive=False)

    @property
    def begun(self) -> Response | None:
        """The response whose head is complete and whose body is not, with an empty body: a stream of events, maybe."""
        return self._head

    def take_body(self) -> bytes:
        """Return and remove the bytes of the body of `begun` so far; the whole response will have only the rest."""
        data = bytes(self._body)
        self._taken += len(data)
        self._body.clear()
        return data

    def unread(self) -> bytes:
        """Return and remove the bytes behind a response with status 101."""
        data = bytes(self._held)
        self._held.clear()
        return data

    def _next(self) -> Response | None:
        while self._head is None:
            end = self._held.find(_END, 0, self._head_bytes_max)
            if end < 0:
                if len(self._held) >= self._head_bytes_max:
                    raise HttpError(431, f"a head of more than {self._head_bytes_max} bytes")
                return None
            head = self._read_head(bytes(self._held[:end]))
            del self._held[: end + len(_END)]
            if head.status >= 200 or head.status == 101:
                self._begin(head)
        if not self._body_is_whole():
            return None
        head = self._head
        self._head = None
        self._stopped = head.status == 101
        self._taken = 0
        return Response(head.status, head.reason, head.headers, self.take_body(), head.keep_alive)

    def _begin(self, head: Response) -> None:
        method = self._methods.popleft() if self._methods else ""
        length = body_length(head.headers, version="1.1")
        if method == "HEAD" or head.status in (101, 204, 304):
            length = 0
        self._left = UNTIL_CLOSE if length is None else length
        if self._left > self._body_bytes_max:
            raise HttpError(413, f"a body of {self._left} bytes, limit {self._body_bytes_max}")
        if self._left == CHUNKED:
            self._chunks = ChunkedBody(
                bytes_max=self._body_bytes_max,
                trailer_bytes_max=self._head_bytes_max,
                trailers_max=self._headers_max,
            )
        self._body = bytearray()
        self._taken = 0
        self._head = head

    def _body_is_whole(self) -> bool:
        if self._left == CHUNKED and self._chunks is not None:
            del self._held[: self._chunks.feed(bytes(self._held), 0)]
            self._body += self._chunks.data.take()
            return self._chunks.done
        if self._left == UNTIL_CLOSE:
            if self._taken + len(self._body) + len(self._held) > self._body_bytes_max:
                raise HttpError(413, f"a body of more than {self._body_bytes_max} bytes")
            self._body += self._held
            self._held.clear()
            return False
        part = self._held[: self._left]
        self._body += part
        self._left -= len(part)
        del self._held[: len(part)]
        return not self._left

    def _read_head(self, raw: bytes) -> Response:
        line, *lines = raw.split(b"\r\n")
        match = _STATUS_LINE.fullmatch(line)
        if match is None:
            raise HttpError(400, f"invalid status line: {line[:40]!r}")
        if len(lines) > self._headers_max:
            raise HttpError(431, f"{len(lines)} headers, limit {self._headers_max}")
        headers = read_fields(lines)
        keep_alive = keeps_alive(headers, version="1.0" if match[1] == b"0" else "1.1")
        return Response(int(match[2]), (match[3] or b"").decode("latin-1"), headers, b"", keep_alive)
