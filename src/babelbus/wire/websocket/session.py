"""The WebSocket half of a connection, for every protocol over WebSocket: order, back-pressure, pongs and the close.

A protocol derives from `WebSocketSession`: `take` keeps the messages of a chunk, `work` carries them out.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection

from babelbus.errors import PeerLeavesError, RemoteProtocolError, without_frames
from babelbus.wire.contract import Outbox, Session
from babelbus.wire.websocket.decoder import Close, Decoder, Message, Ping, Texts, encode_close, encode_pong
from babelbus.wire.websocket.frames import MESSAGE_TOO_BIG, NO_STATUS, NORMAL, TRY_AGAIN_LATER, WebSocketError

POLICY_VIOLATION = 1008
"""Closes a connection whose messages the protocol does not know."""


class WebSocketSession(Session, ABC):
    """Messages of one connection from the upgrade on; a subclass may take binary messages like texts."""

    takes_binaries = False
    _waiting: Collection[object]
    """Messages that came and are not done."""

    def __init__(self, outbox: Outbox, decoder: Decoder) -> None:
        self._outbox = outbox
        self._decoder = decoder
        self._last_word: RemoteProtocolError | PeerLeavesError | None = None
        self._close_code = NORMAL

    # -- for the protocol --------------------------------------------------------------------------------------------

    @abstractmethod
    def take(self, texts: list[bytes]) -> None:
        """Keep the messages of a chunk; all earlier messages are done.

        Raises:
            RemoteProtocolError: the protocol does not have a message; the messages before it are kept.
        """

    @abstractmethod
    def work(self) -> bool:
        """Handle the kept messages, as far as the outbox has room; return whether all are done.

        Raises:
            RemoteProtocolError: a message is not allowed in this place.
        """

    def last_frame(self, error: RemoteProtocolError | PeerLeavesError) -> tuple[int, str]:
        """Return code and reason of the frame that closes the connection."""
        if isinstance(error, WebSocketError):
            return error.code, str(error)
        return self._close_code if isinstance(error, PeerLeavesError) else POLICY_VIOLATION, ""

    @property
    def busy(self) -> bool:
        """Whether messages are put off."""
        return bool(self._waiting) or self._decoder.has_more

    # -- bytes -------------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes) -> None:
        """Handle a chunk: carry out each message that is complete.

        Raises:
            RemoteProtocolError: the client broke the protocol; earlier messages were carried out.
            PeerLeavesError: the client closes the connection.
        """
        self._decoder.receive_data(data)
        self.resume()

    @property
    def unfinished_bytes(self) -> int:
        """Memory of messages that have not come whole, and of a message that was decompressed and is put off."""
        decoder = self._decoder
        return decoder.unfinished_bytes + (decoder.inflated_bytes if self._waiting else 0)

    def refuse_unfinished(self, text: str, *, later: bool) -> None:
        """Drop the message that has not come whole, and close behind all earlier answers.

        Raises:
            RemoteProtocolError, PeerLeavesError: as `receive_data`.
        """
        self._decoder.fail(WebSocketError(TRY_AGAIN_LATER if later else MESSAGE_TOO_BIG, text))
        self.resume()

    def resume(self) -> None:
        """Continue with messages that were put off while the outbox was full, then with messages that came.

        Raises:
            RemoteProtocolError, PeerLeavesError: as `receive_data`.
        """
        if self.busy and not self._works():
            return
        if self._last_word is None:
            try:
                self._read()
            except (RemoteProtocolError, PeerLeavesError) as error:
                self._last_word = without_frames(error)
        if self._works() and self._last_word is not None:
            self._end(self._last_word)

    def _works(self) -> bool:
        try:
            return self.work()
        except RemoteProtocolError as error:
            self._end(error)
            raise

    def _read(self) -> None:
        """Receive the messages that arrived, and answer pings.

        Raises:
            RemoteProtocolError, PeerLeavesError: the client broke the protocol, or closes; earlier messages are kept.
        """
        texts: list[bytes] = []
        closing: Close | None = None
        for event in self._decoder.events():
            if type(event) is Texts:
                texts += event.payloads
            elif type(event) is Message:
                if event.text or self.takes_binaries:
                    texts.append(event.data)
            elif type(event) is Ping:
                pong = encode_pong(event.data)
                self._outbox.answer(lambda pong=pong: pong, len(pong))  # type: ignore[misc]
            elif type(event) is Close:
                closing = event
        self.take(texts)
        if closing is not None:
            self._close_code = NORMAL if closing.code == NO_STATUS else closing.code
            raise PeerLeavesError("closed by the client")
        if self._decoder.error is not None:
            raise self._decoder.error

    def _end(self, error: RemoteProtocolError | PeerLeavesError) -> None:
        """Send the last frame.

        Raises:
            RemoteProtocolError, PeerLeavesError: always.
        """
        code, reason = self.last_frame(error)
        last = encode_close(code, reason)
        self._outbox.answer(lambda: last, len(last))
        raise error
