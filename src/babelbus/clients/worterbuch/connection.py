"""The connection of a Wörterbuch client: bytes of a TCP, unix or WebSocket server -> its messages, and back."""

import asyncio
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

from babelbus.clients.worterbuch.codec import Reply, ReplyDecoder, decode_reply
from babelbus.clients.worterbuch.errors import ConnectionLostError
from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.units import MIB
from babelbus.wire.websocket import (
    Close,
    Decoder,
    Message,
    Ping,
    check_upgrade_response,
    encode_close,
    encode_pong,
    encode_texts,
    encode_upgrade_request,
    make_key,
    read_upgrade_response,
)

PORTS = {"tcp": 9090, "ws": 8080, "tcps": 9090, "wss": 8080}
ENCRYPTED = {"tcps", "wss"}
MESSAGE_BYTES_MAX = 256 * MIB

Hear = Callable[[Reply], None]
Lost = Callable[[Exception | None], None]


class Connection(asyncio.Protocol):
    """Bytes of the server -> its messages.

    Attributes:
        heard_at: when (loop time, seconds) the server last sent data.
    """

    def __init__(self, hear: Hear, lost: Lost) -> None:
        self._hear = hear
        self._lost = lost
        self._decoder = ReplyDecoder(line_bytes_max=MESSAGE_BYTES_MAX)
        self._now = asyncio.get_running_loop().time
        self.heard_at = 0.0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = transport  # type: ignore[assignment]  # of a stream

    def connection_lost(self, error: Exception | None) -> None:
        """Handle the end of the connection."""
        self._lost(error)

    def data_received(self, data: bytes) -> None:
        """Handle the bytes of one read; close the connection if the server breaks the protocol."""
        self.heard_at = self._now()
        try:
            self.read(data)
        except RemoteProtocolError as error:
            self.transport.abort()
            self._lost(error)

    def read(self, data: bytes) -> None:
        """Handle the bytes of one read."""
        for message in self._decoder.receive_data(data):
            self._hear(message)

    def send(self, texts: list[bytes]) -> None:
        """Send messages with one write."""
        self.transport.write(b"\n".join(texts) + b"\n")

    def say_goodbye(self) -> None:
        """Send the last message, if the protocol has one."""


class WebConnection(Connection):
    """The same in WebSocket, from the handshake on."""

    def __init__(self, hear: Hear, lost: Lost, host: str, path: str) -> None:
        super().__init__(hear, lost)
        self._key = make_key()
        self._request = encode_upgrade_request(host, path, self._key, subprotocols=("worterbuch",))
        self._answer: bytes | None = b""
        self._frames = Decoder(is_server=False, message_bytes_max=MESSAGE_BYTES_MAX)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin: ask for the upgrade."""
        super().connection_made(transport)
        self.transport.write(self._request)

    def read(self, data: bytes) -> None:
        """Handle the bytes of one read."""
        if self._answer is not None:
            self._answer += data
            answer = read_upgrade_response(self._answer)
            if answer is None:
                return
            check_upgrade_response(answer[0], self._key, subprotocols=("worterbuch",))
            data, self._answer = answer[1], None
        self._frames.receive_data(data)
        for event in self._frames.events():
            if isinstance(event, Message):
                reply = decode_reply(event.data)
                if reply is not None:
                    self._hear(reply)
            elif isinstance(event, Ping):
                self.transport.write(encode_pong(event.data, mask=True))
            elif isinstance(event, Close):
                self.transport.close()
        if self._frames.error is not None:
            raise self._frames.error

    def send(self, texts: list[bytes]) -> None:
        """Send messages with one write."""
        self.transport.write(encode_texts(texts, mask=True))

    def say_goodbye(self) -> None:
        """Send the close frame."""
        self.transport.write(encode_close(mask=True))


async def dial(url: str, hear: Hear, lost: Lost, tls: ssl.SSLContext | None = None) -> Connection:
    """Connect to `tcp://host:port`, `ws://host:port/path` or `unix:///path`; `tcps` and `wss` with TLS.

    Raises:
        LocalProtocolError: the address is invalid.
        ConnectionLostError: nothing listens there.
    """
    loop = asyncio.get_running_loop()
    parts = urlsplit(url)
    try:
        if parts.scheme == "unix" and parts.path:
            _, connection = await loop.create_unix_connection(lambda: Connection(hear, lost), parts.path)
        elif parts.scheme in PORTS and parts.hostname:
            port = parts.port or PORTS[parts.scheme]
            _, connection = await loop.create_connection(
                lambda: (
                    Connection(hear, lost)
                    if parts.scheme in ("tcp", "tcps")
                    else WebConnection(hear, lost, parts.netloc, parts.path or "/ws")
                ),
                parts.hostname,
                port,
                ssl=(tls or ssl.create_default_context()) if parts.scheme in ENCRYPTED else None,
            )
        else:
            raise LocalProtocolError(
                f"{url}: write tcp://host:port, ws://host:port/path or unix:///path, with TLS tcps:// or wss://"
            )
    except (OSError, ValueError) as error:
        raise ConnectionLostError(f"{url}: {error}") from error
    return connection
