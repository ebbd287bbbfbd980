"""gRPC over HTTP/2 without I/O (RFC 9113, gRPC's PROTOCOL-HTTP2): bytes -> calls, answers -> bytes."""

from babelbus.wire.http2.calls import Asked, Began, CallLimit, Calls, Came, Cancelled, Event, Finished
from babelbus.wire.http2.frames import ENHANCE_YOUR_CALM, Http2Error
from babelbus.wire.http2.requests import (
    DEADLINE_EXCEEDED,
    FAILED_PRECONDITION,
    INTERNAL,
    INVALID_ARGUMENT,
    PERMISSION_DENIED,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
)

__all__ = [
    "DEADLINE_EXCEEDED",
    "ENHANCE_YOUR_CALM",
    "FAILED_PRECONDITION",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "Asked",
    "Began",
    "CallLimit",
    "Calls",
    "Came",
    "Cancelled",
    "Event",
    "Finished",
    "Http2Error",
]
