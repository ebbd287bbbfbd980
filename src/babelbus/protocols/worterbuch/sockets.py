"""Wörterbuch over WebSocket: one JSON message a text message (docs/specifications/worterbuch.md, section 3)."""

from collections.abc import Callable, Sequence

from babelbus.core.receipt import Promise
from babelbus.errors import RemoteProtocolError
from babelbus.protocols.contract import Encode, Outbox, PeerLeavesError
from babelbus.protocols.worterbuch.codec import decode_messages, decode_sets, encode_ack
from babelbus.protocols.worterbuch.errors import MalformedMessageError
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.messages import ClientMessage
from babelbus.protocols.worterbuch.profiles import Profile
from babelbus.protocols.worterbuch.session import Session
from babelbus.protocols.worterbuch.symbols import USUAL, Symbols
from babelbus.wire.websocket import (
    NO_STATUS,
    NORMAL,
    Close,
    Decoder,
    Deflate,
    Deflater,
    Message,
    Ping,
    WebSocketError,
    encode_close,
    encode_pong,
    encode_texts,
)

SUBPROTOCOL = "worterbuch"


class TextFraming:
    """Messages as text frames; never a ping among them, which ends the connection of clients in Rust."""

    def encode(self, texts: Sequence[bytes]) -> bytes:
        """Return the frames of these messages."""
        return encode_texts(texts)

    def encode_acks(self, transaction_ids: Sequence[int]) -> bytes:
        """Return the frames of an `ack` for each of these: in one format if all have the same length."""
        digits = len(str(transaction_ids[0]))
        low, high = 10 ** (digits - 1), 10**digits
        if low <= min(transaction_ids) and max(transaction_ids) < high:
            frame = encode_texts([encode_ack(low)]).replace(b"%", b"%%").replace(b"%d" % low, b"%d")
            return (frame * len(transaction_ids)) % tuple(transaction_ids)
        return encode_texts(list(map(encode_ack, transaction_ids)))


TEXTS = TextFraming()


class LateFraming:
    """Messages that `DeflatingSender` compresses: each behind its length."""

    def encode(self, texts: Sequence[bytes]) -> bytes:
        """Return these messages with their lengths."""
        return b"".join([b"%b%b" % (len(text).to_bytes(_LENGTH_BYTES, "big"), text) for text in texts])

    def encode_acks(self, transaction_ids: Sequence[int]) -> bytes:
        """Return an `ack` for each of these, with their lengths."""
        return self.encode(list(map(encode_ack, transaction_ids)))


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
        """The bound of what waits."""
        return self._outbox.bytes_max

    @property
    def size_bytes(self) -> int:
        """What waits."""
        return self._outbox.size_bytes

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


class SocketSession:
    """The bytes of one connection, from the upgrade on."""

    def __init__(
        self,
        hub: Hub,
        outbox: Outbox,
        close: Callable[[], None],
        *,
        profile: Profile,
        address: str | None,
        deflate: Deflate | None = None,
        symbols: Symbols = USUAL,
    ) -> None:
        self._outbox = outbox
        self._decoder = Decoder(is_server=True, message_bytes_max=hub.options.message_bytes_max, deflate=deflate)
        self._waiting: list[ClientMessage] = []
        self._last_word: RemoteProtocolError | PeerLeavesError | None = None
        self._close_code = NORMAL
        self.session = Session(
            hub,
            outbox if deflate is None else DeflatingSender(outbox, deflate),
            close,
            framing=TEXTS if deflate is None else LATE,
            profile=profile,
            transport_name="WS",
            address=address,
            symbols=symbols,
        )
        self.session.open()

    def receive_data(self, data: bytes) -> None:
        """Take what one read brought, and do all that it asks for.

        Raises:
            RemoteProtocolError: the client broke the protocol; what came before it was done.
            PeerLeavesError: it said its last word.
        """
        self._decoder.receive_data(data)
        self.resume()

    def resume(self) -> None:
        """Go on with what was put off while the outbox was full, then with what came."""
        if self._waiting and not self._work():
            return
        if self._last_word is None:
            try:
                self._read()
            except (RemoteProtocolError, PeerLeavesError) as error:
                self._last_word = error
        if self._work() and self._last_word is not None:
            self._end(self._last_word)

    def _work(self) -> bool:
        """Do what waits; return whether all of it is done.

        Raises:
            RemoteProtocolError: a request may not be made in this place; it was answered.
        """
        while self._waiting:
            try:
                done = self.session.receive(self._waiting)
            except RemoteProtocolError as error:
                self._waiting = []
                self._end(error)
                raise
            self._waiting = self._waiting[done:]
            if self._waiting and self._outbox.full:
                return False
        return True

    def _read(self) -> None:
        """Turn what arrived into messages, and answer pings.

        Raises:
            RemoteProtocolError: the client broke the protocol, or closes; `_waiting` has what came before.
        """
        texts: list[bytes] = []
        closing: Close | None = None
        for event in self._decoder.events():
            if type(event) is Message:
                if event.text:
                    texts.append(event.data)
            elif type(event) is Ping:
                pong = encode_pong(event.data)
                self._outbox.answer(lambda pong=pong: pong, len(pong))  # type: ignore[misc]
            elif type(event) is Close:
                closing = event
        run = None if self._waiting else decode_sets(texts)
        if run is None:
            decode_messages(texts, self._waiting)
        elif not self.session.receive_sets(run):
            self._waiting += run.messages()
        if closing is not None:
            self._close_code = NORMAL if closing.code == NO_STATUS else closing.code
            raise PeerLeavesError("closed by the client")
        if self._decoder.error is not None:
            raise self._decoder.error

    def _end(self, error: RemoteProtocolError | PeerLeavesError) -> None:
        """Answer what ended the connection, and say the last word.

        Raises:
            RemoteProtocolError, PeerLeavesError: always.
        """
        code = self._close_code if isinstance(error, PeerLeavesError) else POLICY_VIOLATION
        if isinstance(error, MalformedMessageError):
            self.session.malformed(error)
        elif isinstance(error, WebSocketError):
            code = error.code
        last = encode_close(code)
        self._outbox.answer(lambda: last, len(last))
        raise error

    @property
    def busy(self) -> bool:
        """Whether requests are put off."""
        return bool(self._waiting)

    @property
    def established(self) -> bool:
        """Whether the client is as far as it has to be: it need send nothing, unless a token is asked for."""
        return self.session.established

    def close(self) -> None:
        """The connection is gone."""
        self.session.close()


POLICY_VIOLATION = 1008
"""Closes a connection whose messages are texts but none of ours."""
