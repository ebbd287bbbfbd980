"""WebSocket without I/O (RFC 6455): bytes -> messages, messages -> frames, the upgrade and compression."""

from babelbus.wire.websocket.decoder import (
    Close,
    Decoder,
    Event,
    Message,
    Ping,
    Pong,
    Texts,
    encode_close,
    encode_pong,
    encode_texts,
)
from babelbus.wire.websocket.deflate import Deflate, Deflater
from babelbus.wire.websocket.frames import WebSocketError
from babelbus.wire.websocket.session import WebSocketSession
from babelbus.wire.websocket.upgrade import (
    accept_upgrade,
    check_upgrade_response,
    encode_upgrade_request,
    make_key,
    read_upgrade_response,
)

__all__ = [
    "Close",
    "Decoder",
    "Deflate",
    "Deflater",
    "Event",
    "Message",
    "Ping",
    "Pong",
    "Texts",
    "WebSocketError",
    "WebSocketSession",
    "accept_upgrade",
    "check_upgrade_response",
    "encode_close",
    "encode_pong",
    "encode_texts",
    "encode_upgrade_request",
    "make_key",
    "read_upgrade_response",
]
