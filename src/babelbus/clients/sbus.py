"""A small sbus client: blocking, and the same for an event loop. It speaks to any sbus server, as libsbus does."""

import asyncio
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Generic, TypeVar

from babelbus.errors import RemoteProtocolError
from babelbus.protocols.sbus.codec import decode, encode
from babelbus.protocols.sbus.messages import PACKET_BYTES_MAX, WHOAMI, Control, Message, Publish, Subscribe, Unsubscribe

R = TypeVar("R")

ABSTRACT = "/dev/unix/abstract/"
_NAME_BYTES = 108


def connect(address: str) -> socket.socket:
    """Connect to an address as servers print it: a path, or `/dev/unix/abstract/<hex>`.

    A path may be longer than the 107 bytes that a socket's address has room for.

    Raises:
        OSError: nothing listens there, or it may not be reached.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if address.startswith(ABSTRACT):  # bound with the whole length, so connected with it (section 13)
            connection.connect(bytes.fromhex(address.removeprefix(ABSTRACT)).ljust(_NAME_BYTES, b"\0"))
        elif len(os.fsencode(address)) < _NAME_BYTES:
            connection.connect(address)
        else:
            folder = os.open(os.path.dirname(address), os.O_PATH | os.O_DIRECTORY)
            try:
                connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(address)}")
            finally:
                os.close(folder)
    except BaseException:
        connection.close()
        raise
    return connection


class _Requests(ABC, Generic[R]):
    """The requests that both clients have; `R` is what a call returns."""

    socket: socket.socket

    @abstractmethod
    def send(self, message: Message) -> R:
        """Send a message.

        Raises:
            LocalProtocolError: it has no form in sbus.
            OSError: the connection is gone, or the packet is longer than the socket's buffer allows.
        """

    def subscribe(self, pattern: bytes) -> R:
        """Subscribe to messages with matching keys."""
        return self.send(Subscribe(pattern))

    def unsubscribe(self, pattern: bytes) -> R:
        """Remove one subscription with exactly this pattern."""
        return self.send(Unsubscribe(pattern))

    def publish(self, key: bytes, payload: bytes | None = b"") -> R:
        """Publish."""
        return self.send(Publish(key, payload))

    def control(self, key: bytes) -> R:
        """Send a control message, such as `b"echo/off"`."""
        return self.send(Control(key))

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


class Client(_Requests[None]):
    """A connection to a bus; calls block. `timeout_seconds` bounds each of them, None waits for ever."""

    def __init__(self, address: str | socket.socket, *, timeout_seconds: float | None = None) -> None:
        self.socket = connect(address) if isinstance(address, str) else address
        self.socket.settimeout(timeout_seconds)
        self._buffer = bytearray(PACKET_BYTES_MAX)  # made once: a buffer for each packet costs five times as much

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: Message) -> None:
        """Send a message; see `_Requests.send`."""
        self.socket.send(encode(message))

    def receive_packet(self) -> bytes:
        """Wait for a packet.

        Raises:
            ConnectionResetError: the server closed the connection.
            TimeoutError: nothing came in time.
        """
        return _packet(self._buffer, self.socket.recv_into(self._buffer))

    def receive(self) -> Message:
        """Wait for a message; otherwise as `receive_packet`."""
        return decode(self.receive_packet())

    def whoami(self) -> bytes:
        """Return our identity on the server (`!/cred/<gid>/<uid>/<pid>`); earlier requests are in force then.

        Raises:
            RemoteProtocolError: a message came before the answer; read expected ones with `receive`.
        """
        self.control(WHOAMI)
        return _identity(self.receive())


class AsyncClient(_Requests[Awaitable[None]]):
    """The same in an event loop."""

    def __init__(self, address: str | socket.socket) -> None:
        self.socket = connect(address) if isinstance(address, str) else address
        self.socket.setblocking(False)
        self._buffer = bytearray(PACKET_BYTES_MAX)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def send(self, message: Message) -> None:
        """Send a message; see `_Requests.send`."""
        # sock_sendall sends the packet whole or not at all: a packet is never divided.
        await asyncio.get_running_loop().sock_sendall(self.socket, encode(message))

    async def receive_packet(self) -> bytes:
        """Wait for a packet; raises as `Client.receive_packet`."""
        return _packet(self._buffer, await asyncio.get_running_loop().sock_recv_into(self.socket, self._buffer))

    async def receive(self) -> Message:
        """Wait for a message."""
        return decode(await self.receive_packet())

    async def whoami(self) -> bytes:
        """Return our identity on the server; raises as `Client.whoami`."""
        await self.control(WHOAMI)
        return _identity(await self.receive())


def _packet(buffer: bytearray, size: int) -> bytes:
    if not size:
        raise ConnectionResetError("the server closed the connection")
    return bytes(memoryview(buffer)[:size])


def _identity(answer: Message) -> bytes:
    if not isinstance(answer, Control) or answer.key != WHOAMI:
        raise RemoteProtocolError("a message came before the answer to whoami")
    return answer.payload
