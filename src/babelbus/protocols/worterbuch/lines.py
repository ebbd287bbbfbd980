"""Wörterbuch over TCP and unix sockets: one JSON message a line (docs/specifications/worterbuch.md, section 3)."""

from collections.abc import Callable, Sequence

from babelbus.protocols import contract
from babelbus.protocols.contract import Outbox
from babelbus.protocols.worterbuch.codec import LineDecoder
from babelbus.protocols.worterbuch.continuation import KeptSession
from babelbus.protocols.worterbuch.errors import ErrorCode, MalformedMessageError
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.messages import ClientMessage
from babelbus.protocols.worterbuch.profiles import Endpoint
from babelbus.protocols.worterbuch.session import Carrier, Session
from babelbus.protocols.worterbuch.values import ascii_json, one_line


class LineFraming:
    """Messages as lines in ASCII: some clients decode each piece that they read on its own."""

    def encode(self, texts: Sequence[bytes]) -> bytes:
        """Return the lines of these messages."""
        data = b"\n".join(texts) + b"\n"
        if data.count(b"\n") > len(texts) or b"\r" in data:
            data = b"\n".join(map(one_line, texts)) + b"\n"
        return ascii_json(data)


LINES = LineFraming()


class LineSession(Carrier, contract.Session):
    """The bytes of one TCP or unix connection."""

    def __init__(
        self,
        hub: Hub,
        outbox: Outbox,
        close: Callable[[], None],
        *,
        endpoint: Endpoint,
        transport_name: str,
        address: str | None,
        kept: KeptSession | None = None,
    ) -> None:
        self._decoder = LineDecoder(line_bytes_max=hub.settings.message_bytes_max)
        self._waiting: list[ClientMessage] = []
        self.session = Session(
            hub,
            outbox,
            close,
            framing=LINES,
            endpoint=endpoint,
            transport_name=transport_name,
            address=address,
            certificate=outbox.peer_certificate,
            kept=kept,
        )
        if kept is None:
            self.session.open()

    def receive_data(self, data: bytes) -> None:
        """Receive the bytes of one read, and handle the messages that are complete.

        Raises:
            RemoteProtocolError: the client broke the protocol; what came before it was done and answered.
        """
        self._decoder.receive_data(data)
        self.resume()

    def resume(self) -> None:
        """Continue with the messages that were put off while the outbox was full, then with those that arrived."""
        decoder, receive = self._decoder, self.session.receive
        try:
            if self._waiting:
                self._waiting = receive(self._waiting)
            if not self._waiting:
                messages = decoder.messages()
                if messages:
                    self._waiting = receive(messages)
                if decoder.error is not None and not self._waiting:
                    raise decoder.error
        except MalformedMessageError as error:
            self.session.malformed(error)
            raise

    @property
    def busy(self) -> bool:
        """Whether requests are put off."""
        return bool(self._waiting)

    @property
    def unfinished_bytes(self) -> int:
        """Memory of the line that has not come whole."""
        return self._decoder.unfinished_bytes

    def refuse_unfinished(self, text: str, *, later: bool) -> None:
        """Drop the line that has not come whole; no message could tell which line it was.

        Raises:
            RemoteProtocolError: everything that came before is done.
        """
        self._decoder.fail(MalformedMessageError(None, ErrorCode.SERDE_ERROR, text))
        self.resume()
