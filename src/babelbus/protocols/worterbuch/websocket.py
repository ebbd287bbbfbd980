"""Wörterbuch over WebSocket: one JSON message a text message (docs/specifications/worterbuch.md, section 3)."""

from collections.abc import Callable, Sequence

from babelbus.core.receipt import Promise
from babelbus.errors import PeerLeavesError, RemoteProtocolError
from babelbus.protocols.contract import Encode, Outbox
from babelbus.protocols.worterbuch.codec import decode_chunk, decode_messages
from babelbus.protocols.worterbuch.continuation import KeptSession
from babelbus.protocols.worterbuch.errors import MalformedMessageError
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.messages import ClientMessage
from babelbus.protocols.worterbuch.profiles import Endpoint
from babelbus.protocols.worterbuch.session import Carrier, Session
from babelbus.wire.websocket import Decoder, Deflate, Deflater, WebSocketSession, encode_texts

SUBPROTOCOL = "worterbuch"


class TextFraming:
    """Messages as text frames; never a ping among them, which ends the connection of clients in Rust."""

    def encode(self, texts: Sequence[bytes]) -> bytes:
        """Return the frames of these messages."""
        return encode_texts(texts)


TEXTS = TextFraming()


class LateFraming:
    """Messages that `DeflatingSender` compresses: each behind its length."""

    def encode(self, texts: Sequence[bytes]) -> bytes:
        """Return these messages with their lengths."""
        return b"".join([b"%b%b" % (len(text).to_bytes(_LENGTH_BYTES, "big"), text) for text in texts])


_LENGTH_BYTES = 8
LATE = LateFraming()


class DeflatingSender:
    """Compresses what an outbox sends.

    A compressor remembers what it sent, so messages are compressed in the order in which they leave: when their turn
    has come, behind answers that waited for the disk, and not at all if they are dropped.
    """

    def __init__(self, outbox: Outbox, agreed: Deflate) -> None:
        self._outbox = outbox
        self._deflater = Deflater(agreed, is_server=True)

    @property
    def bytes_max(self) -> int:
        """The bound of the answers that wait."""
        return self._outbox.bytes_max

    @property
    def size_bytes(self) -> int:
        """The size of the answers that wait."""
        return self._outbox.size_bytes

    @property
    def is_stuck(self) -> bool:
        """Whether the client does not take what was sent."""
        return self._outbox.is_stuck

    def answer(self, encode: Encode, weight: int = 0) -> None:
        """Send what `encode` returns, compressed, behind all answers that were promised before."""
        self._outbox.answer(lambda: self._deflate(encode()), weight)

    def answer_when(self, promises: Sequence[Promise], encode: Encode, weight: int = 0) -> None:
        """Send what `encode` returns, compressed, once all promises are done."""
        self._outbox.answer_when(promises, lambda: self._deflate(encode()), weight)

    def _deflate(self, data: bytes | bytearray) -> bytes:
        texts = []
        position = 0
        while position < len(data):
            start = position + _LENGTH_BYTES
            position = start + int.from_bytes(data[position:start], "big")
            texts.append(bytes(data[start:position]))
        return self._deflater.encode_texts(texts)


class SocketSession(Carrier, WebSocketSession):
    """The bytes of one connection, from the upgrade on."""

    def __init__(
        self,
        hub: Hub,
        outbox: Outbox,
        close: Callable[[], None],
        *,
        endpoint: Endpoint,
        address: str | None,
        deflate: Deflate | None = None,
        kept: KeptSession | None = None,
    ) -> None:
        super().__init__(
            outbox,
            Decoder(
                is_server=True,
                message_bytes_max=hub.settings.message_bytes_max,
                deflate=deflate,
                room_bytes=outbox.room_bytes,
            ),
        )
        self._waiting: list[ClientMessage] = []
        self._deflates = deflate is not None
        self.session = Session(
            hub,
            outbox if deflate is None else DeflatingSender(outbox, deflate),
            close,
            framing=TEXTS if deflate is None else LATE,
            endpoint=endpoint,
            transport_name="WS",
            address=address,
            certificate=outbox.peer_certificate,
            kept=kept,
        )
        if kept is None:
            self.session.open()

    @property
    def is_portable(self) -> bool:
        """Whether another server can continue the session: a compressor remembers too much."""
        return not self._deflates

    def take(self, texts: list[bytes]) -> None:
        """Read the messages.

        Raises:
            MalformedMessageError: a text is no message; the messages before it are kept.
        """
        run = decode_chunk(texts)
        if run is None:
            decode_messages(texts, self._waiting)
        else:
            self._waiting = self.session.receive(run)

    def work(self) -> bool:
        """Handle the messages that wait; return whether all are handled.

        Raises:
            RemoteProtocolError: a request is not allowed in this place; it was answered.
        """
        while self._waiting:
            try:
                self._waiting = self.session.receive(self._waiting)
            except RemoteProtocolError:
                self._waiting = []
                raise
            if self._waiting and self._outbox.full:
                return False
        return True

    def last_frame(self, error: RemoteProtocolError | PeerLeavesError) -> tuple[int, str]:
        """Answer a malformed message, and return the code without a reason, as upstream does."""
        if isinstance(error, MalformedMessageError):
            self.session.malformed(error)
        return super().last_frame(error)[0], ""
