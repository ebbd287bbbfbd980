"""The head of a call of gRPC: header fields -> method, deadline and encoding, or why the call is refused."""

from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

import msgspec

OK: Final = 0
UNKNOWN: Final = 2
INVALID_ARGUMENT: Final = 3
DEADLINE_EXCEEDED: Final = 4
PERMISSION_DENIED: Final = 7
RESOURCE_EXHAUSTED: Final = 8
FAILED_PRECONDITION: Final = 9
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13
UNAVAILABLE: Final = 14

IDENTITY: Final = b"identity"
GZIP: Final = b"gzip"
CONTENT_TYPE: Final = b"application/grpc"
PSEUDO: Final = frozenset((b":method", b":scheme", b":path", b":authority"))
OF_CONNECTIONS: Final = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
LENGTH: Final = b"content-length"
LENGTH_DIGITS_MAX: Final = 18
UNITS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
MESSAGE_LETTERS_MAX: Final = 1000
_SAFE: Final = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"


class Head(msgspec.Struct, frozen=True, gc=False):
    """The fields of a request."""

    path: bytes = b""
    timeout_seconds: float | None = None
    encoding: bytes = IDENTITY
    malformed: bool = False
    """Whether the request breaks HTTP/2: the stream is reset."""
    body_bytes: int | None = None
    """The length of the body, if the client names it."""
    http_status: int = 200
    """The answer to a client that does not speak gRPC."""
    status: int = OK
    """Why the call is refused."""
    text: str = ""


def read_head(fields: Iterable[tuple[bytes, bytes]]) -> Head:
    """Read the fields of a request (RFC 9113, 8.2 and 8.3; gRPC's PROTOCOL-HTTP2, Requests)."""
    pseudo: dict[bytes, bytes] = {}
    others: dict[bytes, bytes] = {}
    for name, value in fields:
        if name.startswith(b":"):
            if others or name not in PSEUDO or name in pseudo:
                return Head(malformed=True)
            pseudo[name] = value
            continue
        if not name or name != name.lower() or name in OF_CONNECTIONS or (name == b"te" and value != b"trailers"):
            return Head(malformed=True)
        if name == LENGTH and (
            not value.isdigit() or len(value) > LENGTH_DIGITS_MAX or others.get(name, value) != value
        ):
            return Head(malformed=True)
        others[name] = value
    if not (pseudo.get(b":method") and pseudo.get(b":scheme") and pseudo.get(b":path")):
        return Head(malformed=True)
    if pseudo[b":method"] != b"POST":
        return Head(http_status=405, status=INTERNAL, text="a call of gRPC is a POST")
    kind = others.get(b"content-type", b"").lower()
    if not kind.startswith(CONTENT_TYPE) or kind[len(CONTENT_TYPE) : len(CONTENT_TYPE) + 1] not in (b"", b"+", b";"):
        return Head(http_status=415, status=UNKNOWN, text="the content-type is application/grpc")
    encoding = others.get(b"grpc-encoding", IDENTITY)
    if encoding not in (IDENTITY, GZIP):
        return Head(status=UNIMPLEMENTED, text="grpc-encoding is identity or gzip")
    timeout, path = others.get(b"grpc-timeout"), pseudo[b":path"]
    body_bytes = int(others[LENGTH]) if LENGTH in others else None
    if timeout is None:
        return Head(path, None, encoding, body_bytes=body_bytes)
    number, unit = timeout[:-1], UNITS.get(timeout[-1:])
    if unit is None or len(number) > 8 or not number.isdigit():
        return Head(status=INTERNAL, text="grpc-timeout is a number of at most 8 digits and a unit")
    return Head(path, int(number) * unit, encoding, body_bytes=body_bytes)


def encode_message(text: str) -> bytes:
    """Return the value of grpc-message."""
    return quote(text[:MESSAGE_LETTERS_MAX], safe=_SAFE).encode()
