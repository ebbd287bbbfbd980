"""The messages of sbus (docs/specifications/sbus.md, sections 2 and 3)."""

import msgspec

PACKET_BYTES_MAX = 409_600
"""Longest packet, word, key and NUL included (section 10)."""


class Subscribe(msgspec.Struct, frozen=True):
    """Send me what is published under keys that match."""

    pattern: bytes


class Unsubscribe(msgspec.Struct, frozen=True):
    """Take one of my subscriptions with exactly this pattern away."""

    pattern: bytes


class Publish(msgspec.Struct, frozen=True):
    """Publish a payload. One of `None` has no NUL in front: the document forbids it, the bus passes it on."""

    key: bytes
    payload: bytes | None


class Control(msgspec.Struct, frozen=True):
    """A wish of a client, or an answer of the server; never passed on from client to client."""

    key: bytes
    payload: bytes = b""


Message = Subscribe | Unsubscribe | Publish | Control

WHOAMI = b"!/cred/whoami"
ECHO_ON, ECHO_OFF = b"echo/on", b"echo/off"
SOFT_MODES = {b"blocking/soft/" + mode: mode.decode() for mode in (b"queue", b"discard", b"block", b"error")}
HARD_MODES = {b"blocking/hard/" + mode: mode.decode() for mode in (b"discard", b"block", b"error")}
ORDERS = {b"order/" + order: order.decode() for order in (b"queue", b"stack", b"random")}
