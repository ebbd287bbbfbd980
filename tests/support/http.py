"""HTTP/1.1 as a client of a test speaks it (RFC 9112): requests -> bytes, bytes -> responses."""

import re
from collections.abc import Sequence

from babelbus.errors import LocalProtocolError
from babelbus.wire.http import TOKEN, Response, ResponseDecoder, encode_fields

__all__ = ["Response", "ResponseDecoder", "encode_request"]

_TARGET = re.compile(r"[\x21-\x7e]+")
_WITH_BODY = ("POST", "PUT", "PATCH")


def encode_request(
    method: str,
    target: str,
    headers: Sequence[tuple[str, str]] = (),
    body: bytes = b"",
    *,
    host: str,
    keep_alive: bool = True,
) -> bytes:
    """Return a whole request.

    Raises:
        LocalProtocolError: the method, target or a header would be misread on the wire.
    """
    if TOKEN.fullmatch(method) is None:
        raise LocalProtocolError(f"invalid method: {method[:40]!r}")
    if _TARGET.fullmatch(target) is None:
        raise LocalProtocolError(f"invalid request target: {target[:40]!r}")
    length = f"content-length: {len(body)}\r\n" if body or method in _WITH_BODY else ""
    close = "" if keep_alive else "connection: close\r\n"
    lines = encode_fields([("host", host), *headers])
    return f"{method} {target} HTTP/1.1\r\n{lines}{length}{close}\r\n".encode("latin-1") + body
