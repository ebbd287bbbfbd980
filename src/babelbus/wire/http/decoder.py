"""HTTP/1.1 as a server speaks it (RFC 9112): bytes -> requests, responses -> bytes.

A chunk's requests are cut in one loop. A head that has the bytes of the head before it is not read again.
"""

import re
from collections.abc import Sequence

import msgspec

from babelbus.wire.buffer import Buffer
from babelbus.wire.http.chunks import ChunkedBody
from babelbus.wire.http.fields import (
    BODY_BYTES_MAX,
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    HttpError,
    body_length,
    is_token,
    keeps_alive,
    read_fields,
    tokens,
)
from babelbus.wire.http.request import Request, RequestRun
from babelbus.wire.http.runs import RunCutter
from babelbus.wire.http.target import is_target

_END = b"\r\n\r\n"
_VERSIONS = {b"HTTP/1.%d" % minor: "1.1" if minor else "1.0" for minor in range(10)}
_OTHER_VERSION = re.compile(rb"HTTP/[0-9]\.[0-9]")
_TARGET_BYTES = bytes(range(0x21, 0x7F)) + bytes(range(0x80, 0x100))
_BARE_LF = re.compile(rb"(?<!\r)\n")
_KNOWN_HEAD_BYTES = 1024
"""Larger heads are not kept: each connection would keep one."""


class _Head(msgspec.Struct, frozen=True, gc=False):
    request: Request
    length: int
    stops: bool  # nothing behind the request is cut for now
    upgrades: bool  # the request asks for a WebSocket
    expects_continue: bool


class RequestDecoder:
    """Cuts the bytes of one client into requests.

    Behind a request that asks for a WebSocket it stops: `unread` returns the bytes that follow, or `go_on` continues to
    read them as further requests. Behind a request that closes the connection nothing is read any more.

    With `varying`, the name of a header in lower case, `runs` groups requests that differ only in this header.

    Attributes:
        error: why nothing more can be read; behind the last of `requests`, answer with `encode_error`, then
            close the connection.
    """

    def __init__(
        self,
        *,
        head_bytes_max: int = HEAD_BYTES_MAX,
        headers_max: int = HEADERS_MAX,
        body_bytes_max: int = BODY_BYTES_MAX,
        varying: str | None = None,
    ) -> None:
        self.error: HttpError | None = None
        self._head_bytes_max = head_bytes_max
        self._headers_max = headers_max
        self._body_bytes_max = body_bytes_max
        self._held = Buffer()
        self._scanned = 0  # so many buffered bytes have no end of a head in them
        self._head: _Head | None = None  # of the request whose body has not arrived
        self._chunks: ChunkedBody | None = None
        self._asked_to_continue = False
        self._stopped = False
        self._last = False  # the request returned last closes the connection
        self._closed = False
        self._runs = None if varying is None else RunCutter(varying, body_bytes_max=body_bytes_max)
        self._known: bytes | None = None
        """The last head, if it is small."""
        self._known_head: _Head
        self._repeated = False

    def receive_data(self, data: bytes) -> None:
        """Receive bytes from the transport, cut anywhere; parse them with `requests`."""
        if self._closed or self.error is not None:
            return
        self._held.add(data)

    def requests(self) -> list[Request]:
        """Return the complete requests in order; the rest waits for more data.

        Requests that were complete before the peer broke the protocol are returned first, with `error` set; carry them
        out, then answer the error and close.

        Raises:
            HttpError: the peer broke the protocol and no complete request is left.
        """
        assert self._runs is None
        requests: list[Request | RequestRun] = []
        self._read(requests)
        return requests  # type: ignore[return-value]  # there are no runs among them

    def runs(self) -> list[Request | RequestRun]:
        """Return the complete requests in order, with equal ones that follow each other grouped in a run.

        Raises:
            HttpError: as `requests`.
        """
        requests: list[Request | RequestRun] = []
        self._read(requests)
        return requests

    def _read(self, requests: list[Request | RequestRun]) -> None:
        if self.error is None and not self._stopped and self._held.size_bytes and self._ready():
            data = self._held.take()
            try:
                end = self._cut(data, requests)
                if end < len(data):
                    self._held.add(data[end:])
            except HttpError as error:
                self.fail(error)
        if self.error is not None and not requests:
            raise self.error

    def take_continue(self) -> bool:
        """Return, once per request, whether the client waits for `CONTINUE` before it sends the body of its request.

        Call it behind `requests`; the answers to the requests before go out first.
        """
        head = self._head
        if head is None or not head.expects_continue or self._asked_to_continue or self.error is not None:
            return False
        self._asked_to_continue = True
        return True

    @property
    def has_more(self) -> bool:
        """Whether `runs` may have more to return, or an error to raise, without more data."""
        return self._held.size_bytes > 0 or self.error is not None

    def refuse_runs(self) -> None:
        """Stop runs with the head of the last run: they save nothing."""
        if self._runs is not None:
            self._runs.forget()

    @property
    def begun(self) -> Request | None:
        """The request whose head is complete and whose body is not, without its body."""
        return None if self._head is None else self._head.request

    @property
    def unfinished_bytes(self) -> int:
        """Bytes that are kept of a request that is not complete."""
        return self._held.memory_bytes + (0 if self._chunks is None else self._chunks.data.memory_bytes)

    def fail(self, error: HttpError) -> None:
        """Read nothing more, and drop the request that is not complete."""
        self.error = error
        self._drop()

    def unread(self) -> bytes:
        """Return and remove the bytes behind the request that upgraded the connection."""
        return self._held.take()

    def go_on(self) -> None:
        """Read on behind a request that asked for a WebSocket and was answered otherwise."""
        self._stopped = self._closed = self._last
        if self._last:
            self._drop()

    def _drop(self) -> None:
        self._held.clear()
        self._head = self._chunks = None

    def _ready(self) -> bool:
        """Return whether cutting can come further than the last time, so that a slow peer costs no copies."""
        if self._head is not None:
            return self._chunks is not None or self._held.size_bytes >= self._head.length
        if not self._scanned:
            return True
        held = self._held.peek()
        if held.find(_END, max(0, self._scanned - 3)) >= 0:
            return True
        if len(held) >= self._head_bytes_max or _BARE_LF.search(held, max(0, self._scanned - 1)):
            return True  # to be refused
        self._scanned = len(held)
        return False

    def _cut(self, data: bytes, requests: list[Request | RequestRun]) -> int:
        position, size = 0, len(data)
        head_bytes_max, find, runs = self._head_bytes_max, data.find, self._runs
        self._scanned = 0
        while position < size:
            head = self._head
            if head is None:
                if runs is not None:
                    run, position = runs.cut(data, position)
                    if run is not None:
                        requests.append(run)
                        continue
                end = find(_END, position, position + head_bytes_max)
                if end < 0:
                    self._refuse_endless(data, position)
                    self._scanned = size - position
                    break
                raw = data[position:end]
                if raw != self._known:
                    head = self._read_head(raw)
                else:
                    head = self._known_head
                    if not self._repeated:
                        self._repeated = True
                        self._learn(raw.split(b"\r\n"), head)
                position = end + 4
            request = head.request
            length = head.length
            if length > 0:
                end = position + length
                if end > size:
                    self._head = head
                    break
                body = data[position:end]
                position = end
            elif length == 0:
                body = b""
            else:
                position, whole = self._cut_chunks(data, position)
                if whole is None:
                    self._head = head
                    break
                body = whole
            requests.append(
                Request(
                    request.method, request.target, request.headers.copy(), body, request.keep_alive, request.version
                )
            )
            self._head = None
            self._asked_to_continue = False
            if head.stops:
                self._stopped = True
                # RFC 9112, section 9.6: nothing behind a request with `close` may be carried out.
                self._last = not request.keep_alive
                self._closed = self._last and not head.upgrades
                return position if head.upgrades else size
        return position

    def _cut_chunks(self, data: bytes, position: int) -> tuple[int, bytes | None]:
        if self._chunks is None:
            self._chunks = ChunkedBody(
                bytes_max=self._body_bytes_max,
                trailer_bytes_max=self._head_bytes_max,
                trailers_max=self._headers_max,
            )
        position = self._chunks.feed(data, position)
        if not self._chunks.done:
            return position, None
        body = self._chunks.data.take()
        self._chunks = None
        return position, body

    def _refuse_endless(self, data: bytes, position: int) -> None:
        """Refuse the beginning of a head that is too long already, or has invalid line ends."""
        limit = self._head_bytes_max
        if _BARE_LF.search(data, position, position + limit):
            raise HttpError(400, "a line ends with LF alone")
        if len(data) - position >= limit:
            line = data.find(b"\r\n", position, position + limit)
            raise HttpError(414 if line < 0 else 431, f"a head of more than {limit} bytes")

    def _read_head(self, raw: bytes) -> _Head:
        # RFC 9112, section 2.2: one empty line before a request is forgiven, old clients send it behind a body.
        line, *lines = (raw[2:] if raw[:2] == b"\r\n" else raw).split(b"\r\n")
        method, target, version = _read_request_line(line)
        if len(lines) > self._headers_max:
            raise HttpError(431, f"{len(lines)} headers, limit {self._headers_max}")
        headers = read_fields(lines)
        if version != "1.0" and "host" not in headers:
            raise HttpError(400, "no host")
        length = body_length(headers, version=version) or 0
        if length > self._body_bytes_max:
            raise HttpError(413, f"a body of {length} bytes, limit {self._body_bytes_max}")
        expects = headers.get("expect")
        if expects is not None and expects.lower() != "100-continue":
            raise HttpError(417, f"expect {expects[:40]!r}")
        keep_alive = keeps_alive(headers, version=version)
        upgrades = "upgrade" in headers and "websocket" in tokens(headers["upgrade"])
        head = _Head(
            request=Request(method, target, headers, b"", keep_alive, version),
            length=length,
            stops=upgrades or not keep_alive,
            upgrades=upgrades,
            expects_continue=expects is not None and version != "1.0",
        )
        self._known = None
        if len(raw) <= _KNOWN_HEAD_BYTES and raw[:2] != b"\r\n":
            self._known, self._known_head, self._repeated = raw, head, False
            self._learn((line, *lines), head)
        return head

    def _learn(self, lines: Sequence[bytes], head: _Head) -> None:
        """Record a plain head in the cutter, so that requests with nearly the same head are cut together."""
        if self._runs is not None and head.length >= 0 and not head.stops and not head.expects_continue:
            self._runs.learn(lines, head.request)


def _read_request_line(line: bytes) -> tuple[str, str, str]:
    parts = line.split(b" ")
    if len(parts) != 3 or not is_token(parts[0]) or not parts[1] or parts[1].translate(None, _TARGET_BYTES):
        raise HttpError(400, f"invalid request line: {line[:40]!r}")
    version = _VERSIONS.get(parts[2])
    if version is None:
        if _OTHER_VERSION.fullmatch(parts[2]) is None:
            raise HttpError(400, f"invalid request line: {line[:40]!r}")
        raise HttpError(505, f"{parts[2].decode()}, only HTTP/1 is supported")
    method, target = parts[0].decode("ascii"), parts[1].decode("latin-1")
    if not is_target(method, target):
        raise HttpError(400, f"invalid request target: {target[:40]!r}")
    return method, target, version
