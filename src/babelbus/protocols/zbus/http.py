"""zbus over HTTP, and the upgrade to WebSocket: one port for both (docs/specifications/zbus.md, sections 2.3 and 2.5).

Requests of one connection are done and answered in order; each waits while the outbox is full.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache

import msgspec

from babelbus import __version__, arrays
from babelbus.errors import LocalProtocolError
from babelbus.protocols.contract import Continuation, Outbox, closed_if_refused
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus import pages, routing
from babelbus.protocols.zbus.callers import Caller, KeyRing, is_signed
from babelbus.protocols.zbus.continuation import KeptSession, encode_session
from babelbus.protocols.zbus.errors import AuthenticationError, NotFoundError, RequestError, UnsendableMessageError
from babelbus.protocols.zbus.http_mapping import Response, decode_request, run_kind, target_of
from babelbus.protocols.zbus.http_mapping import encode_response as map_response
from babelbus.protocols.zbus.hub import Hub
from babelbus.protocols.zbus.messages import PUBLISH, Message, Run, text_reply
from babelbus.protocols.zbus.session import PING, Session, is_free
from babelbus.protocols.zbus.signature import verify_request
from babelbus.protocols.zbus.web_options import METHODS, NOTHING_ELSE, StaticFiles, WebOptions
from babelbus.protocols.zbus.websocket import SocketSession
from babelbus.wire.browsers import Refusal
from babelbus.wire.cors import OURS, Cors
from babelbus.wire.http import HttpError, HttpSession, Request, RequestRun, encode_response, tokens
from babelbus.wire.websocket import accept_upgrade

HEAD = "HEAD"
ID = "id"
READING = frozenset({"query", PING})
"""Commands that change nothing; `take` moves its channel on."""
UNREADABLE = Response(m.FAILED, (("content-type", m.TEXT_TYPE),), b"the file cannot be read")


@lru_cache(maxsize=1024)
def _published(mq: str, version: str) -> tuple[bytes, bytes]:
    """Return what stands in front of the id in the answer to `pub` over a connection that stays, and what behind it."""
    response = map_response(text_reply("@", m.OK, m.published(mq)))
    encoded = encode_response(response.status, response.headers, response.body, version=version)
    before, _, after = encoded.partition(b"id: @\r\n")
    return before + b"id: ", b"\r\n" + after


class _Common(msgspec.Struct, gc=False):
    """The common part of a run, and what its publications have in common; no `message` if they are no publications.

    `body` is that of the query; with `None` each publication has a body of its own.
    """

    request: Request
    message: Message | None
    body: bytes | None = None


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
            headers = (*[one for one in headers if one[0].lower() not in OURS], *cors.answer_headers(request.headers))
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

    def published(self, mq: str, ids: Sequence[str], request: Request) -> list[bytes]:
        """Return the responses to `pub`."""
        together = ids[0] if len(ids) == 1 else "".join(ids)
        if together.isascii() and together.isprintable() and self._is_plain(request):
            before, after = _published(mq, request.version)
            return [b"%b%b%b" % (before, request_id.encode(), after) for request_id in ids]
        return [self._published(mq, request_id, request) for request_id in ids]

    def join(self, answers: list[bytes]) -> bytes:
        """Return responses for one write."""
        return b"".join(answers)

    def _is_plain(self, request: Request) -> bool:
        """Return whether the answer has no more headers than usual."""
        if self._cors is not None and "origin" in request.headers:
            return False
        return request.keep_alive and request.method != HEAD

    def _published(self, mq: str, request_id: str, request: Request) -> bytes:
        try:
            return self.reply(text_reply(request_id, m.OK, m.published(mq)), request)
        except UnsendableMessageError as error:
            return self.reply(text_reply(None, error.status, error.text), request)


class WebSession(HttpSession):
    """The bytes of one connection. A connection that becomes a WebSocket keeps its id."""

    _outbox: Outbox

    def __init__(
        self,
        hub: Hub,
        outbox: Outbox,
        close: Callable[[], None],
        *,
        address: str | None,
        keys: Mapping[str, str],
        options: WebOptions = NOTHING_ELSE,
        kept: KeptSession | None = None,
    ) -> None:
        """Begin, or continue a connection that another server has `kept`.

        Raises:
            BabelbusError: what the client has proved, or its rights to a channel, do not hold any more.
        """
        # Where each request proves who sent it, each is looked at by itself.
        super().__init__(
            outbox, options.guard, body_bytes_max=hub.settings.package_bytes_max, varying=None if keys else ID
        )
        self._hub = hub
        self._close = close
        self._address = address
        self._options = options
        self._framing = HttpFraming(options.cors)
        self._common: _Common | None = None
        """The common part of the last run."""
        self._put_off: Message | None = None
        """The message of the first of `_waiting`, if it was verified and could not be handled yet."""
        self._socket: SocketSession | None = None
        self._idle_since: float | None = None
        self.session: Session[Request] = Session(
            hub,
            outbox,
            self._framing,
            receiver=None,
            address=address,
            monitor=options.monitor,
            session_id=None if kept is None else kept.id,
        )
        self._caller = Caller(
            hub.gate,
            KeyRing(keys, hub.gate, hub.directory),
            hub.prover(address, self.session.id),
            self.session.id,
            outbox.peer_certificate,
            None if kept is None else kept.caller,
        )
        self.session.speak_for(self._caller.unproved, None)
        hub.peers[self.session.id] = self
        if kept is not None:
            with closed_if_refused(self.close):
                self._continue(kept)

    # -- requests ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Publish what was gathered, with its answers."""
        self.session.settle()

    def answer_run(self, run: RequestRun) -> bool:
        """Publish a run of requests at once; return `False` if one of them is no plain publication."""
        common = self._common
        if common is None or common.request is not run.request:
            common = self._common = _read_common(run.request)
        message, bodies, values = common.message, run.bodies, run.values
        if message is None or (self._caller.asked and is_signed(message.headers)):
            self._decoder.refuse_runs()
            return False
        if common.body is not None:
            bodies = [common.body] * len(bodies)
        elif not all(bodies):  # no body is something else than an empty one
            return False
        else:
            kind = run_kind(message.headers.get("content-type"), bodies)
            if kind is None:
                return False
            if kind != message.body_kind:
                message = common.message = msgspec.structs.replace(message, body_kind=kind)
        if values is not None and not b"".join(values).isascii():
            return False
        ids = [None] * len(bodies) if values is None else [value.decode() for value in values]
        self.session.speak_for(self._caller.unproved, None)
        self.session.publish(Run(message, ids, bodies), run.request)
        return True

    def proves_sender(self, head: Request) -> bool:
        """Return whether a request names a key that we know, or needs none; the signature covers the body too."""
        if not self._caller.asked:
            return True
        try:
            message = decode_request(head)
            if self._caller.may_send_much(message.headers.get("apiKey")):
                return True
            return self._options.open_urls.has(message, target_of(head))
        except RequestError:
            return False

    def answer_request(self, request: Request, refusal: Refusal | None) -> bool:
        """Handle a request; return `False` to be called again when the outbox has room."""
        # As the decoder looks at it, which reads nothing behind such a request.
        upgrades = "upgrade" in request.headers and "websocket" in tokens(request.headers["upgrade"])
        if upgrades and refusal is not None:
            self.refuse(refusal)
            return True
        if upgrades:
            self._upgrade(request)
            return True
        cors = self._options.cors
        if cors is not None and cors.is_preflight(request.method, request.headers):
            self._answer_preflight(cors, request)
            return True
        message = self._put_off or self._admit(request)
        if message is None:
            return True
        target = None if "cmd" in message.headers else target_of(request)
        if refusal is not None and self._changes(message, target):
            self._guard.refused(refusal)
            self.session.refuse(AuthenticationError(refusal.text), request, routing.request_id_of(message, target))
            return True
        files = self._options.files
        if files is not None and target is not None and request.method in METHODS and self._is_file(message, target):
            done = self._begin_file(files, message, request)
        else:
            done = self.session.handle(message, request, target=target)
        self._put_off = None if done else message  # a second look would take it for a replay
        return done

    def _changes(self, message: Message, target: str | None) -> bool:
        """Return whether a message does more than read: another command than `query`, or a call of a service."""
        if is_free(message):
            return False
        if "cmd" not in message.headers:
            try:
                command = self._route(message, target)
            except RequestError:  # the session answers it
                return False
            if command is None:
                return False
            message = command
        return message.headers["cmd"].lower() not in READING

    def _admit(self, request: Request) -> Message | None:
        """Return the message of a request that proves who sent it; `None` if it is answered already."""
        session = self.session
        request_id = request.headers.get("id")
        try:
            message = decode_request(request)
            caller, api_key = self._caller, None
            if not is_free(message) and caller.must_verify(message, lambda: self._is_open(message, request)):
                request_id = routing.request_id_of(message, target_of(request))
                partial = self._hub.settings.partial_sign_fields
                caller.verify(message, lambda: verify_request(message, caller.keys, partial=partial))
                api_key = message.headers["apiKey"]
            session.speak_for(caller.identity(api_key), api_key)
        except RequestError as error:
            session.refuse(error, request, request_id)
            return None
        return message

    def _is_open(self, message: Message, request: Request) -> bool:
        return self._options.open_urls.has(message, target_of(request))

    def _answer_preflight(self, cors: Cors, request: Request) -> None:
        self.session.settle()
        given = request.headers
        headers = [*cors.answer_headers(given, exposes=False), *cors.preflight_headers(given)]
        response = encode_response(204, headers, keep_alive=request.keep_alive, version=request.version)
        self._outbox.answer(lambda: response, len(response))

    # -- files -------------------------------------------------------------------------------------------------------

    def _is_file(self, message: Message, target: str) -> bool:
        """Return whether no service and no command has this url."""
        try:
            return not is_free(message) and self._route(message, target) is None
        except RequestError as error:
            return isinstance(error, NotFoundError)

    def _route(self, message: Message, target: str | None) -> Message | None:
        return self.session.find_route(message, target)

    def _begin_file(self, files: StaticFiles, message: Message, request: Request) -> bool:
        """Answer with a file when it is read; until then the outbox is full, and nothing else is done here."""
        self.session.settle()
        if self._outbox.full:
            return False
        reading = files.begin(request)

        def encode() -> bytes:
            response = UNREADABLE if reading.error is not None else reading.value
            if response is None:
                return self._framing.reply(self._without_file(message), request)
            given = request.headers.get(ID)
            if given is not None:
                response = msgspec.structs.replace(response, headers=(*response.headers, (ID, given)))
            return self._framing.encode(response, request)

        self._outbox.answer_when([reading], encode, self._outbox.bytes_max)
        return True

    def _without_file(self, message: Message) -> Message:
        """Return what is said where there is no file."""
        request_id = message.headers.get(ID) or self._hub.new_id()
        path = (message.url or "").partition("?")[0]
        if path in ("", "/"):
            return pages.welcome(request_id, __version__)
        return text_reply(request_id, m.NOT_FOUND, m.url_not_found(message.url or ""))

    # -- WebSocket ---------------------------------------------------------------------------------------------------

    def _upgrade(self, request: Request) -> None:
        try:
            upgrade = accept_upgrade(request)
        except HttpError as error:
            self.end(error)
            return
        arrays.load_soon()  # many frames are unmasked together
        self.switch(upgrade.response)
        self.follow(self._begin_socket(held=False))

    def _begin_socket(self, *, held: bool) -> SocketSession:
        self._socket = SocketSession(
            self._hub,
            self._outbox,
            self._close,
            address=self._address,
            caller=self._caller,
            session_id=self.session.id,
            held=held,
            options=self._options,
        )
        return self._socket

    # -- from one server to the next ---------------------------------------------------------------------------------

    @property
    def is_portable(self) -> bool:
        """Whether another server can continue the connection, once its requests are answered."""
        return True

    @property
    def is_copyable(self) -> bool:
        """Whether the connection is a WebSocket whose copy loses nothing; one for plain HTTP is made anew.

        Bound urls die with their server: a client whose connection ends binds its urls again, else nobody does.
        """
        socket = self._socket
        return socket is not None and not self.session.binds and socket.is_copyable

    def continuation(self) -> Continuation | None:
        """Return what another server needs to continue the connection; `None` before its first request."""
        if not self.established or self._decoder.begun is not None:
            return None
        session = self._current
        kept = KeptSession(
            id=session.id,
            is_socket=self._socket is not None,
            is_monitor=self._options.monitor,
            caller=self._caller.keep(),
            called=list(session.called),
            taken=list(session.taken),
            subscriptions=session.keep(),
            binds=self.session.binds or session.binds,
        )
        return Continuation(session.id, encode_session(kept), consumes=bool(kept.subscriptions))

    def _continue(self, kept: KeptSession) -> None:
        self._heard = True
        if kept.is_socket:
            self.follow(self._begin_socket(held=True))
        self._current.restore(kept, self._caller.identity)

    @property
    def _current(self) -> Session[Request] | Session[None]:
        return self.session if self._socket is None else self._socket.session

    # -- the connection ----------------------------------------------------------------------------------------------

    @property
    def principal(self) -> str | None:
        """Name of the principal that has sent the last message; `None` while it has proved nothing."""
        return self._caller.name

    @property
    def called(self) -> Collection[str]:
        """The MQs to which the client has sent what a service may answer on the same connection."""
        return () if self._socket is None else self._socket.session.called

    def access_changed(self) -> bool:
        """Update the rights of the client; close the connection if what it has proved does not hold any more.

        Returns whether the client may hear or read less than before.
        """
        if not self._caller.access_changed():
            self._close()
            return True
        is_lost = self.session.access_changed(self._caller.identity)
        if self._socket is not None:
            is_lost |= self._socket.session.access_changed(self._caller.identity)
        return is_lost

    def take_reply(self, message: Message) -> bool:
        """Send what a service answers; return whether somebody waits for it."""
        if self.session.take_reply(message):
            return True
        return self._socket is not None and self._socket.session.take_reply(message)

    def hold(self) -> None:
        """Stop deliveries: the server stops."""
        if self._socket is not None:
            self._socket.hold()

    def release(self) -> None:
        """Resume deliveries if the outbox has room again."""
        if self._socket is not None:
            self._socket.release()

    def tick(self, now: float) -> None:
        """Close the connection when nothing has come or gone for too long (2.5)."""
        socket = self._socket
        if socket is not None and not self._caller.is_valid:  # a key has expired
            self._close()
            return
        if socket is not None and socket.sent:
            socket.sent = False
            self.active = True
        if self.active or self._idle_since is None:
            self.active = False
            self._idle_since = now
        elif now - self._idle_since >= self._hub.settings.idle_seconds:
            self._close()

    def close(self) -> None:
        """Release the session: the connection is gone."""
        self._hub.peers.pop(self.session.id, None)
        self.session.close()
        super().close()
        self._socket = None  # else the two hold each other, and the bytes of an unfinished message


def _read_common(request: Request) -> _Common:
    """Read the common part of publications by headers or by a query."""
    nothing = _Common(request, None)
    try:
        message: Message | None = decode_request(request)
        if message is not None and "cmd" not in message.headers:
            message = routing.command_of_query(message, target_of(request))
    except RequestError:
        return nothing
    # The answer to HEAD differs, and with OPTIONS browsers ask before they publish.
    if message is None or request.method in (HEAD, "OPTIONS"):
        return nothing
    headers, body = message.headers, message.body
    acked = headers.get("ack", "true").lower() == "true"  # without an ack it is a call (6.3)
    if headers.get("cmd") != PUBLISH or not acked or ID in headers or body == b"":
        return nothing
    return _Common(request, msgspec.structs.replace(message, body=b""), body)
