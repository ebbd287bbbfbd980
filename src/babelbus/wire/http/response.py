"""Responses of an HTTP/1.1 server -> bytes (RFC 9112): whole ones, streams of unknown length, refusals."""

from collections.abc import Sequence

from babelbus.errors import LocalProtocolError
from babelbus.wire.http.fields import HttpError, encode_fields, reason_of

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Asks a client that waits with its body to send the body."""


def encode_response(
    status: int,
    headers: Sequence[tuple[str, str]] = (),
    body: bytes = b"",
    *,
    keep_alive: bool = True,
    head_only: bool = False,
    version: str = "1.1",
) -> bytes:
    """Return a whole response. With `head_only` (the answer to HEAD) it has the body's length, without the body.

    `version` is that of the request: a client of HTTP/1.0 needs a header that keeps the connection.

    Raises:
        LocalProtocolError: a header has CR, LF or NUL or determines how the body ends, or the status allows no body.
    """
    head = _encode_head(status, headers, keep_alive)
    if keep_alive and version == "1.0":  # RFC 9112, appendix C.2.2
        head += "connection: keep-alive\r\n"
    if status < 200 or status in (204, 304):
        if body:
            raise LocalProtocolError(f"a response with status {status} has no body")
        return f"{head}\r\n".encode("latin-1")
    encoded = f"{head}content-length: {len(body)}\r\n\r\n".encode("latin-1")
    return encoded if head_only else encoded + body


def encode_stream_head(status: int, headers: Sequence[tuple[str, str]] = (), *, chunked: bool = True) -> bytes:
    """Return the head of a response without a length: `encode_chunk` for each part.

    Without `chunked` (for HTTP/1.0) the parts follow as they are, and closing the connection ends them.

    Raises:
        LocalProtocolError: a header has CR, LF or NUL, or determines how the body ends.
    """
    head = _encode_head(status, headers, chunked)
    return (head + ("transfer-encoding: chunked\r\n\r\n" if chunked else "\r\n")).encode("latin-1")


def encode_error(error: HttpError) -> bytes:
    """Return the response that says why a request was refused and that the connection closes."""
    headers = [*error.headers, ("content-type", "text/plain; charset=utf-8")]
    return encode_response(error.status, headers, f"{error}\n".encode(), keep_alive=False)


def _encode_head(status: int, headers: Sequence[tuple[str, str]], keep_alive: bool) -> str:
    if not 100 <= status <= 999:
        raise LocalProtocolError(f"invalid response status: {status}")
    close = "" if keep_alive else "connection: close\r\n"
    return f"HTTP/1.1 {status} {reason_of(status)}\r\n{encode_fields(headers)}{close}"
