"""The administration endpoint of a member that reaches no owner: it tells that it is not ready, and why."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec

HEAD_BYTES_MAX = 64 * 1024
END = b"\r\n\r\n"


class WaitingRoom(asyncio.Protocol):
    """One connection: answers one request, and closes."""

    def __init__(self, why: Callable[[], str]) -> None:
        self._why = why
        self._head = bytearray()

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer when the head of a request has come; a body is not read."""
        if self._transport.is_closing():
            return
        self._head += data
        if END in self._head:
            words = bytes(self._head).split(None, 2)
            self._answer(words[1] if len(words) > 1 else b"")
        elif len(self._head) > HEAD_BYTES_MAX:
            self._transport.abort()

    def _answer(self, path: bytes) -> None:
        why = self._why()
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
