"""The HTTP port of Wörterbuch: REST, server-sent events, files, and the upgrade to WebSocket.

Specification: docs/specifications/worterbuch.md, 12.

Requests of one connection are done and answered in order; each waits while the outbox is full. Long work (an
export, an import, a file) runs beside the event loop and fills the outbox until it is done.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence

from babelbus import arrays
from babelbus.core.access import NOBODY, AccessRefusedError, Identity
from babelbus.core.quotas import QuotaExceededError
from babelbus.core.receipt import Promise
from babelbus.protocols.contract import Encode, Outbox
from babelbus.protocols.worterbuch.access import Access
from babelbus.protocols.worterbuch.errors import ErrorCode
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.profiles import Endpoint
from babelbus.protocols.worterbuch.rest import TEXT_TYPE, Reply, Rest, absolute, error_reply
from babelbus.protocols.worterbuch.routes import (
    CHANGING,
    STREAMS,
    Action,
    Call,
    Dialect,
    RequestRefusedError,
    is_route,
    read_call,
)
from babelbus.protocols.worterbuch.routes import refusal as refusal_of
from babelbus.protocols.worterbuch.stream import EventStream
from babelbus.protocols.worterbuch.transfer import export_tree, import_tree, read_file
from babelbus.protocols.worterbuch.web_options import WebOptions
from babelbus.protocols.worterbuch.websocket import SUBPROTOCOL, SocketSession
from babelbus.wire.browsers import SAFE_METHODS, Refusal
from babelbus.wire.http import (
    IDLE_SECONDS,
    HttpError,
    HttpSession,
    Request,
    encode_response,
    encode_stream_head,
    percent_decode,
)
from babelbus.wire.websocket import accept_upgrade

log = logging.getLogger(__name__)

HEAVY_BYTES = 65_536
"""Answers of more are not collected with others."""


class WebSession(HttpSession):
    """The bytes of one connection to the HTTP port."""

    _outbox: Outbox

    def __init__(
        self, hub: Hub, outbox: Outbox, close: Callable[[], None], *, address: str | None, options: WebOptions
    ) -> None:
        super().__init__(outbox, options.guard, body_bytes_max=hub.settings.message_bytes_max)
        self._hub = hub
        self._state = hub.state
        self._close = close
        self._address = address
        self._options = options
        self._rest = Rest(hub, str(uuid.uuid4()), address, outbox.peer_certificate)
        self._done: list[tuple[Call, Access, Reply]] = []
        """The requests that were handled, and are neither stored nor answered yet."""
        self._done_bytes = 0
        self._source = ""
        self._stream: EventStream | None = None
        self._job: asyncio.Task[None] | None = None
        self._idle_since = hub.clock.monotonic()
        self._sent = (0, 0)
        """Bytes that were sent, and those of them that the client had not taken, at the last tick."""
        hub.ticking[self] = None

    # -- one request -------------------------------------------------------------------------------------------------

    def keeps_alive(self, request: Request) -> bool:
        """Return whether the connection stays open: never behind a request of HTTP/1.0."""
        return _keeps_alive(request)

    def proves_sender(self, head: Request) -> bool:
        """Return whether a request has a valid token, or needs none."""
        return self._rest.proves_sender(head)

    def answer_request(self, request: Request, refusal: Refusal | None) -> bool:
        """Handle a request; return `False` if it has to wait until the outbox has room."""
        if self._outbox.full:
            return False
        self._hub.received.inc(1, len(request.body))
        path = request.path
        endpoint = self._options.paths.get(path)
        if refusal is not None and (endpoint is not None or request.method not in SAFE_METHODS):
            self.refuse(refusal)
            return True
        if endpoint is not None:
            self._upgrade(request, endpoint)
            return True
        try:
            if request.method == "OPTIONS":
                self._reply(request, self._options_of(request))
            elif is_route(path):
                self._answer_call(read_call(request))
            else:
                self._answer_file(request)
        except RequestRefusedError as error:
            self._reply(request, error_reply(error))
        except HttpError as error:  # a wrong escape: the requests behind it can still be told apart
            self._reply(request, error_reply(RequestRefusedError(error.status, str(error))))
        return True

    def _upgrade(self, request: Request, endpoint: Endpoint) -> None:
        try:
            upgrade = accept_upgrade(request, subprotocols=[SUBPROTOCOL], deflate=self._hub.settings.deflate)
        except HttpError as error:
            self.end(error)
            return
        arrays.load_soon()  # many frames are unmasked together
        self.switch(upgrade.response)
        self.follow(
            SocketSession(
                self._hub,
                self._outbox,
                self._close,
                endpoint=endpoint,
                address=self._address,
                deflate=upgrade.deflate,
            )
        )

    def _options_of(self, request: Request) -> Reply:
        """Return the methods of a path, for browsers also the allowed origins."""
        allowed = read_call(request).action.allowed if is_route(request.path) else "GET, HEAD, OPTIONS"
        headers = [("allow", allowed)]
        if self._options.cors is not None:
            headers += self._options.cors.preflight_headers(request.headers)
        return Reply(status=204, headers=tuple(headers))

    def _answer_call(self, call: Call) -> None:
        action, request = call.action, call.request
        if action is Action.INFO:
            self._reply(request, self._rest.info())
            return
        if action is Action.LOGIN:
            # A page that a proxy sent over TLS says so.
            is_encrypted = self._options.is_tls or request.headers.get("origin", "").lower().startswith("https://")
            self._reply(request, self._rest.login(call, is_encrypted=is_encrypted))
            return
        access = self._rest.identify(request)
        call = absolute(call, access)
        self._rest.need(call, access)
        if action in STREAMS:
            self._begin_stream(call, access)
        elif action is Action.EXPORT:
            self._begin_job(request, lambda: self._export(request, access), access.identity)
        elif action is Action.IMPORT:
            as_text = call.content_type == TEXT_TYPE
            body = request.body
            self._begin_job(request, lambda: import_tree(self._hub, access, body, as_text=as_text), access.identity)
        else:
            self._carry_out(call, access)

    def _carry_out(self, call: Call, access: Access) -> None:
        """Handle a request; `settle` stores and answers it together with others."""
        if access.source != self._source:
            self.settle()
            self._source = access.source
        reply = self._act(call, access)
        self._done.append((call, access, reply))
        self._done_bytes += len(reply.body)
        if self._done_bytes > HEAVY_BYTES:
            self.settle()

    def _act(self, call: Call, access: Access) -> Reply:
        try:
            return self._rest.carry_out(call, access)
        except RequestRefusedError as error:
            return error_reply(error)

    def settle(self) -> None:
        """Answer the requests that were handled so far when their changes are stored."""
        done, size = self._done, self._done_bytes
        if not done:
            return
        self._done, self._done_bytes = [], 0
        receipt = self._state.commit(self._source)

        def encode() -> bytes:
            if receipt.error is None:
                return b"".join([self._encode(call.request, reply) for call, _, reply in done])
            failed = _failed(str(receipt.error))  # nothing of it is stored; what only read is asked again
            return b"".join(
                [
                    self._encode(call.request, failed if call.action in CHANGING else self._act(call, access))
                    for call, access, _ in done
                ]
            )

        self._outbox.answer_when([receipt], encode, size)

    def _answer_file(self, request: Request) -> None:
        files = self._options.files
        if files is None:
            raise RequestRefusedError(404, "not found")
        if request.method not in ("GET", "HEAD"):
            raise RequestRefusedError(405, "the method here is GET", (("allow", "GET, HEAD, OPTIONS"),))
        path = percent_decode(request.path)
        self._begin_job(request, lambda: read_file(files, path))

    # -- streams -----------------------------------------------------------------------------------------------------

    def _begin_stream(self, call: Call, access: Access) -> None:
        request, text = call.request, call.text or ""
        chunked = request.version != "1.0"
        headers = [("content-type", "text/event-stream"), ("cache-control", "no-cache"), *self._headers(request)]
        head = encode_stream_head(200, headers, chunked=chunked)
        if request.method == "HEAD":
            self._send([], lambda: head, len(head))
            return
        self.settle()
        stream = EventStream(self._hub, self._outbox, self._close, access, address=self._address, chunked=chunked)
        unique, live_only = call.flag("unique"), call.flag("liveOnly")
        try:
            if call.action is Action.SUBSCRIBE:
                stream.subscribe(head, text, unique=unique, live_only=live_only)
            elif call.action is Action.PSUBSCRIBE:
                stream.psubscribe(head, text, unique=unique, live_only=live_only)
            else:
                stream.subscribe_ls(head, call.text)
        except (AccessRefusedError, QuotaExceededError) as error:
            stream.close()
            text = access.identity.relative_text(str(error))
            if isinstance(error, QuotaExceededError):
                raise RequestRefusedError(429, text) from error
            raise refusal_of(call.dialect, ErrorCode.UNAUTHORIZED, text) from error
        self.stream()
        self._stream = stream

    # -- what takes long ---------------------------------------------------------------------------------------------

    def _begin_job(self, request: Request, work: Callable[[], Awaitable[Reply]], identity: Identity = NOBODY) -> None:
        """Run a coroutine and answer when it is done; until then the outbox is full, so that later requests wait."""
        done = Promise()
        replies: list[Reply] = []

        async def run() -> None:
            try:
                replies.append(await work())
            except RequestRefusedError as error:
                replies.append(error_reply(error))
            except AccessRefusedError as error:
                text = identity.relative_text(str(error))
                replies.append(error_reply(refusal_of(Dialect.NEW, ErrorCode.UNAUTHORIZED, text)))
            except Exception:
                log.exception("a request failed")
                replies.append(_failed("the server failed; its log says more"))
            done.resolve()

        self._send([done], lambda: self._encode(request, replies[0]), self._outbox.bytes_max)
        self._job = asyncio.get_running_loop().create_task(run())

    def _export(self, request: Request, access: Access) -> Awaitable[Reply]:
        return export_tree(self._hub, access, self._hub.settings.export_name, as_text=_accepts_text(request))

    # -- answers -----------------------------------------------------------------------------------------------------

    def _reply(self, request: Request, reply: Reply) -> None:
        self._send([], lambda: self._encode(request, reply), len(reply.body))

    def _send(self, receipts: Sequence[Promise], encode: Encode, weight: int) -> None:
        self.settle()
        self._outbox.answer_when(receipts, encode, weight)

    def _encode(self, request: Request, reply: Reply) -> bytes:
        return encode_response(
            reply.status,
            [*reply.headers, *self._headers(request)],
            reply.body,
            keep_alive=_keeps_alive(request),
            head_only=request.method == "HEAD",
        )

    def _headers(self, request: Request) -> list[tuple[str, str]]:
        # What clients stored is shown as it is: no browser may take it for anything else than what we say.
        headers = [("x-content-type-options", "nosniff")]
        if self._options.cors is not None:
            headers += self._options.cors.answer_headers(request.headers)
        return headers

    # -- connection --------------------------------------------------------------------------------------------------

    @property
    def principal(self) -> str | None:
        """Name of the principal that the client has proved to be."""
        return self._rest.name if self._successor is None else self._successor.principal

    @property
    def subscriptions(self) -> list[tuple[str, bool]]:
        """Those of the stream of events, or of the WebSocket."""
        return super().subscriptions if self._stream is None else self._stream.subscriptions

    def access_changed(self) -> bool:
        """Check again who the connection is; return whether its answers may hold less than before."""
        return self._rest.access_changed()

    def tick(self) -> None:
        """Close the connection if nothing has come or gone for too long; a stream and a WebSocket stay open."""
        outbox, now = self._outbox, self._hub.clock.monotonic()
        sent = (outbox.sent_bytes, outbox.size_bytes)
        if self.active or outbox.waiting or sent != self._sent or self._stream or self._successor:
            self.active = False
            self._sent = sent
            self._idle_since = now
        elif now - self._idle_since >= IDLE_SECONDS:
            self._close()

    def leave(self) -> None:
        """Release the client: another server continues its WebSocket."""
        self._hub.ticking.pop(self, None)
        if self._successor is not None:
            self._successor.leave()

    def close(self) -> None:
        """End the session: the connection is gone."""
        self._hub.ticking.pop(self, None)
        if self._job is not None:
            self._job.cancel()
        super().close()
        if self._stream is not None:
            self._stream.close()


def _failed(text: str) -> Reply:
    return error_reply(RequestRefusedError(500, text))


def _keeps_alive(request: Request) -> bool:
    return request.keep_alive and request.version != "1.0"


def _accepts_text(request: Request) -> bool:
    kinds = [kind.partition(";")[0].strip().lower() for kind in request.headers.get("accept", "").split(",")]
    return TEXT_TYPE in kinds
