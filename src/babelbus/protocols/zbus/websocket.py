"""zbus over WebSocket: one JSON object a frame (docs/specifications/zbus.md, section 2.2)."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from babelbus.errors import RemoteProtocolError
from babelbus.protocols.contract import Outbox, PeerLeavesError
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus import pages
from babelbus.protocols.zbus.codec import decode_message, encode_message
from babelbus.protocols.zbus.errors import RequestError
from babelbus.protocols.zbus.hub import Hub
from babelbus.protocols.zbus.messages import Message
from babelbus.protocols.zbus.runs import FrameReader, Item, Run
from babelbus.protocols.zbus.session import PING, Session
from babelbus.protocols.zbus.signature import Keys, verify_frame
from babelbus.protocols.zbus.web_options import NOTHING_ELSE, WebOptions
from babelbus.wire.websocket import (
    NO_STATUS,
    NORMAL,
    Close,
    Decoder,
    Ping,
    Texts,
    WebSocketError,
    encode_close,
    encode_pong,
    encode_texts,
)
from babelbus.wire.websocket import Message as Frame

_encode = msgspec.json.Encoder().encode
_PLACE = "\x00"


@lru_cache(maxsize=1024)
def _published(mq: str) -> tuple[bytes, bytes]:
    """Return what stands in front of the id, a JSON string, in the answer to `pub`, and what behind it."""
    text = encode_message(m.text_reply(_PLACE, m.OK, m.published(mq)))
    before, _, after = text.partition(_encode(_PLACE))
    return before, after


class FrameFraming:
    """Answers as frames."""

    def reply(self, message: Message, _asked: None) -> bytes:
        """Return the frame of an answer."""
        return encode_texts([encode_message(message)])

    def published(self, mq: str, ids: Sequence[bytes], _asked: None) -> bytes:
        """Return the frames of answers to `pub`."""
        before, after = _published(mq)
        if b"".join(ids).replace(b"-", b"").isalnum():
            first = b'%b"%b"%b' % (before, ids[0], after)
            if len(set(map(len, ids))) == 1:
                front = encode_texts([first])[: -len(first)] + before + b'"'
                back = b'"' + after
                return b"%b%b%b" % (front, (back + front).join(ids), back)
        return encode_texts([b"%b%b%b" % (before, _encode(one.decode()), after) for one in ids])


FRAMES = FrameFraming()


class SocketSession:
    """The bytes of one connection, from the upgrade on. It gets the deliveries of its subscriptions."""

    def __init__(
        self,
        hub: Hub,
        outbox: Outbox,
        close: Callable[[], None],
        *,
        address: str | None,
        keys: Keys,
        session_id: str | None = None,
        options: WebOptions = NOTHING_ELSE,
    ) -> None:
        self._hub = hub
        self._outbox = outbox
        self._close = close
        self._keys = keys
        self._open_urls = options.open_urls
        self._decoder = Decoder(is_server=True, message_bytes_max=hub.settings.package_bytes_max, together=True)
        self._reader = FrameReader()
        self._waiting: deque[bytes | Item] = deque()
        """What came and is not done: texts where each has to prove who sent it, else what they say."""
        self._put_off: Message | None = None
        """What the first text of `_waiting` says, if it was looked at and could not be done yet."""
        self._last_word: RemoteProtocolError | PeerLeavesError | None = None
        self._close_code = NORMAL
        self.held = False
        self.sent = False
        """Whether something was sent since the last tick."""
        self.session: Session[None] = Session(
            hub, outbox, FRAMES, receiver=self, address=address, session_id=session_id, monitor=options.monitor
        )

    # -- what comes --------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes) -> None:
        """Take what one read brought, and do all that it asks for.

        Raises:
            RemoteProtocolError: the client broke the protocol; what came before it was done.
            PeerLeavesError: it said its last word.
        """
        self._decoder.receive_data(data)
        self.resume()

    def resume(self) -> None:
        """Go on with what was put off while the outbox was full, then with what came.

        Raises:
            RemoteProtocolError, PeerLeavesError: as `receive_data`.
        """
        while True:
            if not self._work():
                return
            if self._last_word is not None:
                self._end(self._last_word)
            try:
                self._read()
            except (RemoteProtocolError, PeerLeavesError) as error:
                self._last_word = error
            else:
                if not self._waiting:
                    return

    def _read(self) -> None:
        """Take the frames that arrived, and answer pings.

        Raises:
            RemoteProtocolError: the client broke the protocol, or closes; `_waiting` has what came before.
        """
        texts: list[bytes] = []
        try:
            for event in self._decoder.events():
                if type(event) is Texts:
                    texts += event.payloads
                elif type(event) is Frame:
                    texts.append(event.data)
                elif type(event) is Ping:
                    pong = encode_pong(event.data)
                    self._outbox.answer(lambda pong=pong: pong, len(pong))  # type: ignore[misc]
                elif type(event) is Close:
                    self._close_code = NORMAL if event.code == NO_STATUS else event.code
                    raise PeerLeavesError("closed by the client")
        finally:
            self._waiting += texts if self._keys else self._reader.read(texts)
        if self._decoder.error is not None:
            raise self._decoder.error

    def _work(self) -> bool:
        """Do what waits, as far as the outbox has room; return whether all of it is done."""
        waiting = self._waiting
        if waiting and self._outbox.full:
            return False
        done = True
        while waiting:
            if not self._handle(waiting[0]):
                done = False
                break
            waiting.popleft()
        self.session.settle()
        return done

    def _handle(self, item: bytes | Item) -> bool:
        """Do one of what waits; `False`: not before the outbox has room again."""
        if type(item) is Run:
            self.session.publish(item, None)
            return True
        if type(item) is bytes:
            message = self._put_off or self._admit(item)
            done = message is None or self._do(message)
            self._put_off = None if done else message  # a second look would take it for a replay
            return done
        if type(item) is Message:
            return self._do(item)
        assert isinstance(item, RequestError)
        self.session.refuse(item, None)
        return True

    def _do(self, message: Message) -> bool:
        headers = message.headers
        command = headers.get("cmd")
        if command == PING:
            return True
        if command is None and message.body is None and message.url == pages.FAVICON_URL:
            self.session.answer(pages.icon(headers.get("id")), None)
            return True
        return self.session.handle(message, None)

    def _admit(self, text: bytes) -> Message | None:
        """Return the message of a frame that proves who sent it, or needs not; `None` if it is refused."""
        request_id = None
        try:
            message = decode_message(text)
            command, request_id = message.headers.get("cmd"), message.headers.get("id")
            free = command is None and message.body is None and message.url == pages.FAVICON_URL
            if command != PING and not free and not self._open_urls.has(message):
                verify_frame(message, text, self._keys, partial=self._hub.settings.partial_sign_fields)
                self._hub.admit(message)
        except RequestError as error:
            self.session.refuse(error, None, request_id)
            return None
        return message

    def _end(self, error: RemoteProtocolError | PeerLeavesError) -> None:
        """Say the last word.

        Raises:
            RemoteProtocolError, PeerLeavesError: always.
        """
        code = error.code if isinstance(error, WebSocketError) else self._close_code
        last = encode_close(code, str(error) if isinstance(error, WebSocketError) else "")
        self._outbox.answer(lambda: last, len(last))
        raise error

    # -- what goes ---------------------------------------------------------------------------------------------------

    def deliver(self, texts: list[bytes]) -> None:
        """Send deliveries; when the peer does not take them, no more come until it does."""
        data = encode_texts(texts)
        self.sent = True
        outbox = self._outbox
        outbox.answer(lambda: data, len(data))
        if outbox.full:
            self.hold()

    def push(self, message: Message) -> bool:
        """Send the answer of a service. A peer that has too many of them waiting loses its connection."""
        outbox = self._outbox
        if outbox.closed:
            return False
        if outbox.size_bytes >= 2 * outbox.bytes_max:
            self._close()
            return False
        self.deliver([encode_message(message)])
        return True

    def hold(self) -> None:
        """Take no deliveries until `release`."""
        if not self.held:
            self.held = True
            self.session.hold(True)

    def release(self) -> None:
        """Take deliveries again if there is room and the server does not stop."""
        if self.held and not self._outbox.full and not self._hub.stopping:
            self.held = False
            self.session.hold(False)

    # -- the connection ----------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether requests are put off."""
        return bool(self._waiting)

    @property
    def established(self) -> bool:
        """Whether the client is as far as it has to be."""
        return True

    def close(self) -> None:
        """The connection is gone."""
        self.session.close()
