"""The administration endpoint of a member that reaches no owner: it tells that it is not ready, and why."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec

HEAD_BYTES_MAX = 64 * 1024
END = b"\r\n\r\n"
REQUEST_SECONDS = 5.0
"""How long a connection may last."""
VISITORS_MAX = 100


class WaitingRoom:
    """The connections. Each new one is let in: a request is answered at once, and slow ones must not keep it out."""

    def __init__(self, why: Callable[[], str]) -> None:
        self.why = why
        self._visitors: dict[Visitor, None] = {}
        """The oldest first."""

    def make(self) -> "Visitor":
        """Return the protocol of a new connection."""
        return Visitor(self)

    def enter(self, visitor: "Visitor") -> None:
        """Count a connection, and end the oldest one if there are too many."""
        self._visitors[visitor] = None
        if len(self._visitors) > VISITORS_MAX:
            next(iter(self._visitors)).end()

    def leave(self, visitor: "Visitor") -> None:
        """Count a connection as closed."""
        self._visitors.pop(visitor, None)


class Visitor(asyncio.Protocol):
    """One connection: answers one request, and closes."""

    def __init__(self, room: WaitingRoom) -> None:
        self._room = room
        self._head = bytearray()

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self._transport = transport
        self._deadline = asyncio.get_running_loop().call_later(REQUEST_SECONDS, self.end)
        self._room.enter(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Handle the end of the connection."""
        self._deadline.cancel()
        self._room.leave(self)

    def end(self) -> None:
        """Close at once."""
        self._room.leave(self)
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Answer when the head of a request has come; a body is not read."""
        if self._transport.is_closing():
            return
        self._head += data
        if END in self._head:
            words = bytes(self._head).split(None, 2)
            self._answer(words[1].partition(b"?")[0] if len(words) > 1 else b"")
        elif len(self._head) > HEAD_BYTES_MAX:
            self._transport.abort()

    def _answer(self, path: bytes) -> None:
        why = self._room.why()
        status, content = HTTPStatus.SERVICE_UNAVAILABLE, {"error": why, "code": "no_owner"}
        if path == b"/ready":
            content = {"ready": False, "reasons": [why]}  # type: ignore[dict-item]
        elif path == b"/health":
            status, content = HTTPStatus.OK, {"status": "degraded", "reasons": [why]}  # type: ignore[dict-item]
        body = msgspec.json.encode(content)
        self._transport.write(
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        self._transport.close()
