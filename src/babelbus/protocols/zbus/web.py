"""zbus over HTTP, and the upgrade to WebSocket: one port for both (docs/specifications/zbus.md, sections 2.3 and 2.5).

Requests of one connection are done and answered in order; each waits while the outbox is full.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from babelbus.errors import BabelbusError, LocalProtocolError, RemoteProtocolError
from babelbus.protocols.contract import Outbox, PeerLeavesError
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus import pages, routing
from babelbus.protocols.zbus.cors import OURS, Cors
from babelbus.protocols.zbus.errors import BrowserRefusedError, RequestError, UnsendableMessageError
from babelbus.protocols.zbus.http_mapping import Response, decode_request, target_of
from babelbus.protocols.zbus.http_mapping import encode_response as map_response
from babelbus.protocols.zbus.hub import Hub
from babelbus.protocols.zbus.messages import Message, text_reply
from babelbus.protocols.zbus.repeat import Repeat
from babelbus.protocols.zbus.runs import RequestReader
from babelbus.protocols.zbus.session import PING, Session
from babelbus.protocols.zbus.signature import Keys, verify_request
from babelbus.protocols.zbus.singles import Singles
from babelbus.protocols.zbus.sockets import SocketSession
from babelbus.protocols.zbus.static import METHODS, StaticFiles
from babelbus.protocols.zbus.web_options import NOTHING_ELSE, WebOptions
from babelbus.wire.browsers import Refusal
from babelbus.wire.http import (
    CONTINUE,
    HttpError,
    Request,
    RequestDecoder,
    RequestRun,
    encode_error,
    encode_response,
    tokens,
)
from babelbus.wire.websocket import accept_upgrade

HEAD = "HEAD"
ID = "id"
READING = frozenset({"query", PING})
"""Commands that change nothing; `take` moves its channel on."""


@lru_cache(maxsize=1024)
def _published(mq: str, version: str) -> tuple[bytes, bytes]:
    """Return what stands in front of the id in the answer to `pub` over a connection that stays, and what behind it."""
    response = map_response(text_reply("@", m.OK, m.published(mq)))
    encoded = encode_response(response.status, response.headers, response.body, version=version)
    before, _, after = encoded.partition(b"id: @\r\n")
    return before + b"id: ", b"\r\n" + after


class HttpFraming:
    """Answers as responses."""

    def __init__(self, cors: Cors | None = None) -> None:
        self._cors = cors

    def reply(self, message: Message, request: Request) -> bytes:
        """Return the response that says a message.

        Raises:
            UnsendableMessageError: HTTP cannot say it.
        """
        return self.encode(map_response(message), request)

    def encode(self, response: Response, request: Request) -> bytes:
        """Return the bytes of a response.

        Raises:
            UnsendableMessageError: HTTP cannot say it.
        """
        headers, cors = response.headers, self._cors
        if cors is not None:
            headers = (*[one for one in headers if one[0].lower() not in OURS], *cors.answer_headers(request))
        try:
            return encode_response(
                response.status,
                headers,
                response.body,
                keep_alive=request.keep_alive,
                head_only=request.method == HEAD,
                version=request.version,
            )
        except LocalProtocolError as error:
            raise UnsendableMessageError("a header has a value that HTTP cannot carry") from error

    def published(self, mq: str, ids: Sequence[bytes], request: Request) -> bytes:
        """Return the responses to `pub`."""
        joined = b"".join(ids)
        plain = joined.isascii() and joined.decode().isprintable()
        if plain and self.is_plain(request):
            before, after = _published(mq, request.version)
            return b"%b%b%b" % (before, (after + before).join(ids), after)
        return b"".join([self._published(mq, one.decode(), request) for one in ids])

    def is_plain(self, request: Request) -> bool:
        """Return whether the answer has no more headers than usual."""
        if self._cors is not None and "origin" in request.headers:
            return False
        return request.keep_alive and request.method != HEAD

    def around_id(self, mq: str, request: Request) -> tuple[bytes, bytes]:
        """Return what stands before and behind the id in the answer to `pub`, where `is_plain` holds."""
        return _published(mq, request.version)

    def refused(self, request_id: bytes, error: BabelbusError, request: Request) -> bytes:
        """Return the response to a `pub` that was not stored."""
        return self.reply(text_reply(request_id.decode(), m.FAILED, str(error)), request)

    def _published(self, mq: str, request_id: str, request: Request) -> bytes:
        try:
            return self.reply(text_reply(request_id, m.OK, m.published(mq)), request)
        except UnsendableMessageError as error:
            return self.reply(text_reply(None, error.status, error.text), request)


class WebSession:
    """The bytes of one connection. A connection that becomes a WebSocket keeps its id."""

    def __init__(
        self,
        hub: Hub,
        outbox: Outbox,
        close: Callable[[], None],
        *,
        address: str | None,
        keys: Keys,
        options: WebOptions = NOTHING_ELSE,
    ) -> None:
        self._hub = hub
        self._outbox = outbox
        self._close = close
        self._address = address
        self._keys = keys
        self._options = options
        self._guard = options.guard
        self._admitted: Request | None = None
        """What the last run had in common whose head the guard let in."""
        self._framing = HttpFraming(options.cors)
        # Where each request proves who sent it, each is looked at by itself.
        varying = None if keys else ID
        self._decoder = RequestDecoder(body_bytes_max=hub.options.package_bytes_max, varying=varying)
        self._reader = RequestReader()
        self._repeat: Repeat | None = None
        self._ready = False
        """Whether the next chunk may be for `publish_again`: nothing is put off, and no request has begun."""
        self._singles: Singles | None = None
        """Where the last publication of `publish_again` is, which waits for the end of its turn while they are open."""
        self._waiting: deque[Request | RequestRun] = deque()
        self._put_off: Message | None = None
        """What the first of `_waiting` says, if it was looked at and could not be done yet."""
        self._socket: SocketSession | None = None
        self._last_word: RemoteProtocolError | PeerLeavesError | None = None
        self._heard = False
        self._active = True
        self._idle_since: float | None = None
        self.session: Session[Request] = Session(
            hub, outbox, self._framing, receiver=None, address=address, monitor=options.monitor
        )
        hub.peers[self.session.id] = self

    # -- bytes -------------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes) -> None:
        """Take what one read brought, and do all that it asks for.

        Raises:
            RemoteProtocolError: the client broke the protocol; what came before it was done and answered.
            PeerLeavesError: it wants the connection closed, and has all its answers.
        """
        self._active = True
        self._ready = False
        if self._singles is not None and self._singles.open:
            self._singles.topic.flush()  # what this connection published before is answered first
        if self._socket is not None:
            self._socket.receive_data(data)
        elif self._last_word is None:  # else nothing that follows can be answered
            self._decoder.receive_data(data)
            self.resume()

    def resume(self) -> None:
        """Go on with what was put off while the outbox was full, then with what came.

        Raises:
            RemoteProtocolError, PeerLeavesError: it is over, and everything is answered.
        """
        if self._socket is not None:
            self._socket.resume()
            return
        if self._last_word is None:
            self._work()
            self._ready = self._decoder.idle and not self._waiting and not self._is_over
        if self._last_word is not None and not self._outbox.waiting and not self._waiting:
            raise self._last_word

    def publish_again(self, data: bytes) -> bool:
        """Publish what one request says that is like the last one; `False`: the chunk is for `receive_data`."""
        repeat, singles = self._repeat, self._singles
        # One a turn: behind the answer to the first, a connection that has ended may be closed.
        if repeat is None or not self._ready or (singles is not None and singles.open) or not self._outbox.idle:
            return False
        request_id: bytes | None = None
        if len(data) == repeat.size and data.startswith(repeat.head):
            body = data[len(repeat.head) :]
        else:
            single = self._decoder.take_single(data)
            if single is None:
                return False
            request, request_id, body = single
            if request is not repeat.request:
                return False
            if request_id is None:
                repeat.remember(data, body)
            elif not request_id.replace(b"-", b"").isalnum():
                return False
        if not repeat.takes(body):
            return False
        self._active = True
        self._singles = self._hub.publish_single((repeat, request_id, body, self._outbox))
        return self._singles is not None

    def _learn(self, request: Request, message: Message) -> None:
        """Remember the publication that came by itself: the next one may be like it."""
        known = self.session.mould
        if known is not None and self._framing.is_plain(request):
            mq, mould = known
            answer = self._framing.around_id(mq, request)
            self._repeat = Repeat(request, mq, mould, message.body_kind, answer, self._framing.refused)

    def _work(self) -> None:
        if self._waiting and not self._answer_waiting():
            return
        if self._is_over:
            return
        decoder = self._decoder
        try:
            if decoder.error is not None:
                raise decoder.error
            self._waiting += decoder.runs()
            if not self._answer_waiting() or self._is_over:
                return
            if decoder.error is not None:
                raise decoder.error
        except HttpError as error:
            self._end(error)
            return
        if decoder.take_continue():
            self._outbox.answer(lambda: CONTINUE, len(CONTINUE))

    @property
    def _is_over(self) -> bool:
        """Whether no further request can come: it is a WebSocket now, or closes."""
        return self._socket is not None or self._last_word is not None

    def _answer_waiting(self) -> bool:
        """Answer what waits, as far as the outbox has room; return whether all of it is."""
        waiting = self._waiting
        if waiting and self._outbox.full:
            return False
        while waiting:
            request = waiting[0]
            if type(request) is RequestRun:
                waiting.popleft()
                run = self._reader.read(request) if self._admits_run(request.request) else None
                if run is None:
                    waiting.extendleft(reversed(request.requests(ID)))
                else:
                    self._heard = True
                    self.session.publish(run, request.request)
                    if not waiting and len(run.bodies) == 1:
                        self._learn(request.request, run.message)
                continue
            assert type(request) is Request
            if not self._answer(request):
                self.session.settle()
                return False
            waiting.popleft()
            if self._is_over:
                waiting.clear()
                return True
            if not request.keep_alive:
                waiting.clear()  # nothing behind it can be answered
                self.session.settle()
                self._last_word = PeerLeavesError("the client wants the connection closed")
                # The outbox counts as full until the last answer is written: then `resume` ends the connection.
                self._outbox.answer(bytes, self._outbox.bytes_max)
                return True
        self.session.settle()
        return True

    def _end(self, error: HttpError, last_word: PeerLeavesError | None = None) -> None:
        """Answer what is no request, behind all that were; the connection closes when that is sent."""
        self._last_word = last_word or error
        self._outbox.answer(lambda: encode_error(error), self._outbox.bytes_max)

    # -- one request -------------------------------------------------------------------------------------------------

    def _answer(self, request: Request) -> bool:
        """Do what a request asks for; `False`: not before the outbox has room again."""
        self._heard = True
        refusal = self._guard.check(request.headers)
        # As the decoder looks at it, which reads nothing behind such a request.
        upgrades = "upgrade" in request.headers and "websocket" in tokens(request.headers["upgrade"])
        if refusal is not None and (upgrades or not refusal.allows_reading):
            self._refuse(refusal)
            return True
        if upgrades:
            self._upgrade(request)
            return True
        cors = self._options.cors
        if cors is not None and cors.is_preflight(request):
            self._answer_preflight(cors, request)
            return True
        message = self._put_off or self._admit(request)
        if message is None:
            return True
        target = None if "cmd" in message.headers else target_of(request)
        if refusal is not None and self._changes(message, target):
            self._guard.refused(refusal)
            self.session.refuse(BrowserRefusedError(refusal.text), request, request.headers.get(ID))
            return True
        files = self._options.files
        if (
            files is not None
            and target is not None
            and request.method in METHODS
            and self._leads_nowhere(message, target)
        ):
            done = self._begin_file(files, message, request)
        else:
            done = self.session.handle(message, request, target=target)
        self._put_off = None if done else message  # a second look would take it for a replay
        return done

    def _admits_run(self, common: Request) -> bool:
        """Return whether requests that have this in common may publish; each run of one head costs one comparison."""
        if common is not self._admitted and self._guard.check(common.headers) is None:
            self._admitted = common
        return common is self._admitted

    def _refuse(self, refusal: Refusal) -> None:
        """Answer a request that may not even read, and close the connection behind it."""
        self._guard.refused(refusal)
        self.session.settle()
        self._end(HttpError(refusal.status, refusal.text), PeerLeavesError(refusal.text))

    def _changes(self, message: Message, target: str | None) -> bool:
        """Return whether a message does more than read: another command than `query`, or a call of a service."""
        if "cmd" not in message.headers:
            found = self._route(message, target)
            if not isinstance(found, routing.Command | routing.Publish):
                return False
            message = found.message
        return message.headers["cmd"].lower() not in READING

    def _admit(self, request: Request) -> Message | None:
        """Return the message of a request that proves who sent it; `None` if it is answered already."""
        session = self.session
        request_id = request.headers.get("id")
        try:
            message = decode_request(request)
            command = message.headers.get("cmd")
            if command == PING:
                session.answer(Message({"content-type": m.TEXT_TYPE}, status=m.OK), request)
                return None
            if command is None and message.body is None and message.url == pages.FAVICON_URL:
                session.answer(pages.icon(request_id), request)
                return None
            if self._keys and not self._options.open_urls.has(message, target_of(request)):
                verify_request(message, self._keys, partial=self._hub.options.partial_sign_fields)
                self._hub.admit(message)
        except RequestError as error:
            session.refuse(error, request, request_id)
            return None
        return message

    def _answer_preflight(self, cors: Cors, request: Request) -> None:
        self.session.settle()
        headers = cors.preflight_headers(request)
        response = encode_response(204, headers, keep_alive=request.keep_alive, version=request.version)
        self._outbox.answer(lambda: response, len(response))

    # -- files -------------------------------------------------------------------------------------------------------

    def _leads_nowhere(self, message: Message, target: str) -> bool:
        """Return whether no service and no command has this url."""
        return isinstance(self._route(message, target), routing.Nowhere | routing.Welcome)

    def _route(self, message: Message, target: str | None) -> routing.Route | None:
        """Find what a message without `cmd` asks for, `None` if that is malformed, which the session answers."""
        try:
            return routing.route(message, self._hub.bindings, self._hub.exists, target)
        except RequestError:
            return None

    def _begin_file(self, files: StaticFiles, message: Message, request: Request) -> bool:
        """Answer with a file when it is read; until then the outbox is full, and nothing else is done here."""
        self.session.settle()
        if self._outbox.full:
            return False
        reading = files.begin(request)

        def encode() -> bytes:
            response = reading.response
            if response is None:
                return self._framing.reply(self._without_file(message), request)
            given = request.headers.get(ID)
            if given is not None:
                response = msgspec.structs.replace(response, headers=(*response.headers, (ID, given)))
            return self._framing.encode(response, request)

        self._outbox.answer_when([reading.done], encode, self._outbox.bytes_max)
        return True

    def _without_file(self, message: Message) -> Message:
        """Return what is said where there is no file."""
        request_id = message.headers.get(ID) or self._hub.new_id()
        path = (message.url or "").partition("?")[0]
        if path in ("", "/"):
            return pages.welcome(request_id, self._hub.options.version)
        return text_reply(request_id, m.NOT_FOUND, m.url_not_found(message.url or ""))

    # -- WebSocket ---------------------------------------------------------------------------------------------------

    def _upgrade(self, request: Request) -> None:
        self.session.settle()
        try:
            upgrade = accept_upgrade(request)
        except HttpError as error:
            self._end(error)
            return
        self._outbox.answer(lambda: upgrade.response, len(upgrade.response))
        self._socket = SocketSession(
            self._hub,
            self._outbox,
            self._close,
            address=self._address,
            keys=self._keys,
            session_id=self.session.id,
            options=self._options,
        )
        unread = self._decoder.unread()
        if unread:
            self._socket.receive_data(unread)

    # -- the connection ----------------------------------------------------------------------------------------------

    def take_reply(self, message: Message) -> bool:
        """Send what a service answers; return whether somebody waits for it."""
        if self.session.take_reply(message):
            return True
        return self._socket is not None and self._socket.session.take_reply(message)

    def hold(self) -> None:
        """Take no more deliveries: the server stops."""
        if self._socket is not None:
            self._socket.hold()

    def release(self) -> None:
        """The outbox may have room again for deliveries."""
        if self._socket is not None:
            self._socket.release()

    def tick(self, now: float) -> None:
        """Close the connection when nothing has come or gone for too long (2.5)."""
        socket = self._socket
        if socket is not None and socket.sent:
            socket.sent = False
            self._active = True
        if self._active or self._idle_since is None:
            self._active = False
            self._idle_since = now
        elif now - self._idle_since >= self._hub.options.idle_seconds:
            self._close()

    @property
    def busy(self) -> bool:
        """Whether requests are put off or not answered yet, or the end waits for the last answer."""
        if self._socket is not None:
            return self._socket.busy
        singles = self._singles
        return bool(self._waiting) or self._last_word is not None or (singles is not None and singles.open)

    @property
    def established(self) -> bool:
        """Whether a whole request has come."""
        return self._heard

    def close(self) -> None:
        """The connection is gone."""
        self._hub.peers.pop(self.session.id, None)
        self.session.close()
        if self._socket is not None:
            self._socket.close()
