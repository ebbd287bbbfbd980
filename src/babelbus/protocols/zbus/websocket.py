"""zbus over WebSocket: one JSON object a frame (docs/specifications/zbus.md, section 2.2)."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from babelbus.protocols.contract import Outbox
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus import routing
from babelbus.protocols.zbus.callers import Caller, is_signed
from babelbus.protocols.zbus.codec import decode_message, decode_messages, encode_message
from babelbus.protocols.zbus.errors import RequestError
from babelbus.protocols.zbus.hub import Hub
from babelbus.protocols.zbus.messages import Item, Message, Run
from babelbus.protocols.zbus.session import Session, is_free
from babelbus.protocols.zbus.signature import verify_frame
from babelbus.protocols.zbus.web_options import NOTHING_ELSE, WebOptions
from babelbus.wire.websocket import Decoder, WebSocketSession, encode_texts

_encode = msgspec.json.Encoder().encode
_PLACE = "\x00"


@lru_cache(maxsize=1024)
def _around_id(mq: str) -> tuple[bytes, bytes]:
    """Return the parts of the answer to `pub` before and behind the id, which is a JSON string."""
    text = encode_message(m.text_reply(_PLACE, m.OK, m.published(mq)))
    before, _, after = text.partition(_encode(_PLACE))
    return before, after


class FrameFraming:
    """Answers as frames."""

    def reply(self, message: Message, _asked: None) -> bytes:
        """Return the text of an answer."""
        return encode_message(message)

    def published(self, mq: str, ids: Sequence[str], _asked: None) -> list[bytes]:
        """Return the texts of answers to `pub`."""
        before, after = _around_id(mq)
        return [b"%b%b%b" % (before, _encode(request_id), after) for request_id in ids]

    def join(self, answers: list[bytes]) -> bytes:
        """Return the frames of answers."""
        return encode_texts(answers)


FRAMES = FrameFraming()


class SocketSession(WebSocketSession):
    """The bytes of one connection, from the upgrade on. It gets the deliveries of its subscriptions."""

    _outbox: Outbox
    takes_binaries = True

    def __init__(
        self,
        hub: Hub,
        outbox: Outbox,
        close: Callable[[], None],
        *,
        address: str | None,
        caller: Caller,
        session_id: str | None = None,
        held: bool = False,
        options: WebOptions = NOTHING_ELSE,
    ) -> None:
        decoder = Decoder(is_server=True, message_bytes_max=hub.settings.package_bytes_max, together=True)
        super().__init__(outbox, decoder)
        self._hub = hub
        self._close = close
        self._caller = caller
        self._signs = False
        """Whether the client has signed a message: then each of its messages is looked at."""
        self._open_urls = options.open_urls
        self._waiting: deque[bytes | Item] = deque()
        """Frames that came and are not done: texts where each has to prove who sent it, else messages."""
        self._put_off: Message | None = None
        """The message of the first text of `_waiting`, if it was verified and could not be handled yet."""
        self.held = held
        """Whether the client gets no deliveries for now; it has not come if the session goes on from another server."""
        self.sent = False
        """Whether something was sent since the last tick."""
        self.session: Session[None] = Session(
            hub, outbox, FRAMES, receiver=self, address=address, session_id=session_id, monitor=options.monitor
        )
        self.session.speak_for(caller.unproved, None)

    # -- what comes --------------------------------------------------------------------------------------------------

    def take(self, texts: list[bytes]) -> None:
        """Read frames, unless each has to prove who sent it."""
        caller = self._caller
        if self._signs or caller.must_sign:
            self._waiting += texts
            return
        items = decode_messages(texts)
        if caller.asked and any(not isinstance(one, RequestError) and is_signed(_headers(one)) for one in items):
            self._signs = True
            self._waiting += texts
        else:
            self._waiting += items

    def work(self) -> bool:
        """Handle what waits, as far as the outbox has room; return whether nothing waits any more."""
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
        """Handle one item; return `False` to be called again when the outbox has room."""
        if type(item) is Message:
            return self.session.handle(item, None)
        if type(item) is bytes:
            message = self._put_off or self._admit(item)
            done = message is None or self.session.handle(message, None)
            self._put_off = None if done else message  # a second look would take it for a replay
            return done
        if type(item) is Run:
            self.session.publish(item, None)
        else:
            assert isinstance(item, RequestError)
            self.session.refuse(item, None)
        return True

    def _admit(self, text: bytes) -> Message | None:
        """Return the message of a frame that proves who sent it, or needs not; `None` if it is refused."""
        request_id = None
        try:
            message = decode_message(text)
            request_id = message.headers.get("id")
            caller, api_key = self._caller, None
            if not is_free(message) and caller.must_verify(message, lambda: self._open_urls.has(message)):
                request_id = routing.request_id_of(message, message.url)
                partial = self._hub.settings.partial_sign_fields
                caller.verify(message, lambda: verify_frame(message, text, caller.keys, partial=partial))
                api_key = message.headers["apiKey"]
            self.session.speak_for(caller.identity(api_key), api_key)
        except RequestError as error:
            self.session.refuse(error, None, request_id)
            return None
        return message

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
        """Stop deliveries until `release`."""
        if not self.held:
            self.held = True
            self.session.hold(True)

    def release(self) -> None:
        """Resume deliveries if there is room and the server does not stop."""
        if self.held and not self._outbox.full and not self._hub.stopping:
            self.held = False
            self.session.hold(False)

    # -- the connection ----------------------------------------------------------------------------------------------

    @property
    def subscriptions(self) -> list[tuple[str, bool]]:
        """The MQs that the client consumes."""
        return self.session.subscriptions

    @property
    def established(self) -> bool:
        """Whether the client is as far as it has to be."""
        return True

    @property
    def is_copyable(self) -> bool:
        """Whether a copy of the session loses nothing: the client has come, and takes what it is sent."""
        return not (self.held or self.busy) and self.session.is_copyable

    def close(self) -> None:
        """Close the session: the connection is gone."""
        self.session.close()


def _headers(item: Message | Run) -> dict[str, str]:
    return item.headers if isinstance(item, Message) else item.message.headers
