"""EventMesh over HTTP: the coded API and the URI API of one connection (docs/specifications/eventmesh.md, 4 to 6)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from babelbus.core.access import AccessRefusedError, Identity
from babelbus.core.quotas import QuotaExceededError
from babelbus.core.receipt import DONE, Promise, all_of
from babelbus.core.record import Event
from babelbus.core.request import Reply, Request
from babelbus.core.work import Work, settled
from babelbus.errors import UNREADABLE, BabelbusError
from babelbus.identities.errors import InvalidProofError, TooManyProofsError
from babelbus.protocols.contract import Outbox
from babelbus.protocols.eventmesh import messages as m
from babelbus.protocols.eventmesh.callers import REFUSALS, Caller, Given
from babelbus.protocols.eventmesh.calls import TargetRefusedError
from babelbus.protocols.eventmesh.hub import CORRELATION, PROTOCOL, Hub, without_correlation
from babelbus.protocols.eventmesh.idle import IdleSession
from babelbus.protocols.eventmesh.messages import SubscriptionItem
from babelbus.protocols.eventmesh.records import (
    InvalidMessageError,
    describe,
    make_event,
    read_cloud_event,
    read_ttl,
    text_body,
    text_of,
)
from babelbus.protocols.eventmesh.webhooks import Webhooks
from babelbus.units import MIB
from babelbus.wire import http
from babelbus.wire.browsers import BrowserGuard, Refusal
from babelbus.wire.http import HttpError, encode_response, parse_form, parse_query, percent_decode

SEND_SYNC = "101"
BATCH = "102"
SEND_ASYNC = "104"
BATCH_V2 = "107"
HEARTBEAT = "203"
SUBSCRIBE = "206"
UNSUBSCRIBE = "207"
REPLY = "301"

PUBLISHING = frozenset((SEND_SYNC, BATCH, SEND_ASYNC, BATCH_V2, REPLY))
"""The codes of requests with a message in them."""

SUCCESS = 0
OVERLOAD = 1
REQUESTCODE_INVALID = 2
WAITING_RR_ERROR = 4
HEADER_ERROR = 6
BODY_ERROR = 7
BODY_SIZE_ERROR = 8
ASYNC_ERROR = 15
REPLY_ERROR = 16
BATCH_ERROR = 17
RUNTIME_ERROR = 18
SUBSCRIBE_ERROR = 19
UNSUBSCRIBE_ERROR = 20
HEARTBEAT_ERROR = 21
ACL_ERROR = 22
OVER_LIMIT_ERROR = 23

SEED_CODES: Final = {
    code: code - 1 if code in (8, 9, 10, 11, 12, 13, 14, 15, 16) else code - 2
    for code in (8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 19, 20, 21, 22, 23)
}
"""The codes of servers up to 1.5 in place of those since 1.6, where the two differ (11.1)."""

CHANGES_AT_ONCE = 100
FIELDS_MAX = 256
LISTS_BYTES_MAX = 4 * MIB
"""Longest body of a request that publishes nothing, as over TCP and gRPC: a list of a million topics is one."""
BATCH_MAX = 10
VERSIONS = ("1.0", "2.0")
ANSWER_BYTES = 512
"""About the size of an answer that waits."""
TTL_MS = 14_400_000
"""How long a request waits for its reply unless the request says so (10)."""
URI_PREFIX: Final = "/eventmesh/"
PUBLISH_PATH: Final = "/eventmesh/publish/"
QUERY_PATH: Final = "/eventmesh/subscrition/query"
DEFAULT_TOPIC: Final = "TEST-HTTP-TOPIC"
PLAIN: Final = "text/plain; charset=UTF-8"
JSON: Final = "application/json"
EVENT_FIELDS: Final = ("bizseqno", "uniqueid", "producergroup", "ttl", "tag")
"""Form fields of a publication that become properties."""

OTHER_NAMES: Final = (("bizseqno", "bizSeqNo"), ("uniqueid", "uniqueId"))

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_decode_items = msgspec.json.Decoder(list[SubscriptionItem | str]).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


class _Beat(msgspec.Struct, frozen=True):
    topic: str
    url: str


class _BatchItem(msgspec.Struct):
    topic: str
    msg: str
    bizSeqNo: str = ""  # noqa: N815 - the name on the wire
    tag: str = ""
    ttl: str | int = ""


class _UriBody(msgspec.Struct):
    """The body of a subscription by the URI API."""

    url: str
    topic: list[SubscriptionItem | str]
    consumerGroup: str = "em-http-consumer"  # noqa: N815 - the name on the wire


_decode_beats = msgspec.json.Decoder(list[_Beat]).decode
_decode_batch = msgspec.json.Decoder(list[_BatchItem]).decode
_decode_uri_body = msgspec.json.Decoder(_UriBody).decode


class _RefusedError(BabelbusError):
    """A request that is refused with a code of 11.1."""

    def __init__(self, code: int, text: str, status: int = 200) -> None:
        super().__init__(text)
        self.code, self.text, self.status = code, text, status


class _Asked(msgspec.Struct, frozen=True):
    """A request of the coded API."""

    request: http.Request
    code: str
    fields: dict[str, str]
    principal: Identity | None
    """The principal of the client, while the gate is on."""

    def identity(self, group: str) -> Identity:
        """Return who asks: without the gate, the client is the group that it names."""
        return self.principal or Identity(f"{PROTOCOL}:{group}", group, None)

    def source(self, group: str) -> str:
        """Return the source of what the client sends."""
        return f"{PROTOCOL}:{group}" if self.principal is None else self.principal.source

    def need(self, *names: str) -> str:
        """Return a field by the first of its names that is there; a header may stand for a field.

        Raises:
            _RefusedError: the field is missing or empty.
        """
        found = self.get(*names)
        if not found:
            raise _RefusedError(BODY_ERROR, f"{names[0]} is missing")
        return found

    def get(self, *names: str) -> str:
        """Return a field, empty if it is missing."""
        for name in names:
            found = self.fields.get(name) or self.request.headers.get(name.lower())
            if found:
                return found
        return ""


class WebSession(IdleSession):
    """The requests of one connection."""

    def __init__(
        self,
        hub: Hub,
        webhooks: Webhooks,
        outbox: Outbox,
        close: Callable[[], None],
        guard: BrowserGuard,
        peer: str | None,
    ) -> None:
        super().__init__(hub, outbox, close, guard, hub.settings.body_bytes_max, peer)
        self._webhooks = webhooks
        self._requests: dict[Request[Reply], None] = {}
        """Requests that wait for their reply."""
        self._success_heads: dict[tuple[str, bool, str], bytes] = {}
        """The heads of answers that say no more than success, by what of the request they depend on."""

    def answer_request(self, request: http.Request, refusal: Refusal | None) -> bool:
        """Handle a request; return `False` to be called again when the outbox has room."""
        if self._outbox.full:
            return False
        if refusal is not None:
            self.refuse(refusal)
            return True
        path = request.path
        is_change = path.startswith(URI_PREFIX) and path.rstrip("/") != QUERY_PATH
        methods = ("POST",) if is_change else ("GET", "POST")
        if request.method not in methods:
            self._send(encode_response(405, [("allow", ", ".join(methods))], keep_alive=request.keep_alive))
            return True
        callers, caller = self._hub.callers, None
        if callers.enforcing:
            try:
                found = callers.identify(credentials_of(request), self._address, self._outbox.peer_certificate)
            except REFUSALS as error:
                self._send(self._encode_error(request, error))
                return True
            if isinstance(found, Work):  # later requests wait: they must not overtake
                work = Work(self._carry_out_later(request, found))
                self._outbox.answer_when([work], partial(self._encode_later, request, work), self._outbox.bytes_max)
                return True
            caller = found
        promise, encode = self._carry_out(request, caller)
        if promise.done:
            self._send(encode())
        else:
            self._outbox.answer_when([promise], encode, ANSWER_BYTES)
        return True

    def _encode_later(self, request: http.Request, work: Work[bytes]) -> bytes:
        return work.value if work.error is None else self._encode_error(request, work.error)

    async def _carry_out_later(self, request: http.Request, caller: Work[Caller]) -> bytes:
        """Return the answer to a request whose password must be checked."""
        await settled(caller)
        if caller.error is not None:
            return self._encode_error(request, caller.error)
        promise, encode = self._carry_out(request, caller.value)
        await settled(promise)
        return encode()

    def _carry_out(self, request: http.Request, caller: Caller | None) -> tuple[Promise, Callable[[], bytes]]:
        """Handle a request; return what its answer waits for, and the answer."""
        self._caller = caller
        principal = None if caller is None else caller.principal
        try:
            path = request.path
            is_uri = path.startswith(URI_PREFIX)  # then no code matters
            publishes = path.startswith(PUBLISH_PATH) if is_uri else request.headers.get("code") in PUBLISHING
            if len(request.body) > LISTS_BYTES_MAX and not publishes:
                text = f"the body has {len(request.body)} bytes, {LISTS_BYTES_MAX} is the limit of this request"
                raise _RefusedError(BODY_SIZE_ERROR, text)
            if is_uri:
                return self._uri(request, path, principal)
            asked = _read(request, principal)
            pid = asked.get("pid")
            if pid and not (pid.isascii() and pid.isdigit()):
                raise _RefusedError(HEADER_ERROR, "pid is no number")
            handle = _HANDLERS.get(asked.code)
            if handle is None:
                raise _RefusedError(REQUESTCODE_INVALID, f"request code {asked.code!r} is not served", 400)
            return handle(self, asked)
        except _RefusedError as fault:
            answer = self._encode_result(request, fault.code, fault.text, status=fault.status)
        except InvalidMessageError as error:
            answer = self._encode_error(request, error, BODY_ERROR)
        except BabelbusError as error:
            answer = self._encode_error(request, error)
        return DONE, lambda: answer

    def close(self) -> None:
        """Release what the session holds: the connection is gone."""
        super().close()
        self._hub.abandon(self._requests)

    def _send(self, data: bytes) -> None:
        self._outbox.answer(lambda: data, len(data))

    # -- the coded API -----------------------------------------------------------------------------------------------

    def _send_async(self, asked: _Asked) -> tuple[Promise, Callable[[], bytes]]:
        failure = ASYNC_ERROR if asked.code == SEND_ASYNC else BATCH_ERROR
        event, _ = self._event(asked)
        receipt = self._hub.publish_to(event.subject, [event], asked.principal)
        return receipt, lambda: self._encode_outcome(asked.request, receipt, failure)

    def _send_batch(self, asked: _Asked) -> tuple[Promise, Callable[[], bytes]]:
        try:
            items = _decode_batch(asked.need("contents"))
        except UNREADABLE as error:
            raise _RefusedError(BODY_ERROR, f"contents cannot be read: {error}") from None
        if not 0 < len(items) <= BATCH_MAX:
            raise _RefusedError(BODY_ERROR, f"a batch of {len(items)} messages, 1 to {BATCH_MAX} are taken")
        group = asked.need("producerGroup", "producergroup")
        events = []
        for item in items:
            self._check_size(item.msg, HEADER_ERROR)
            properties = {"bizseqno": item.bizSeqNo, "tag": item.tag, "ttl": item.ttl, "producergroup": group}
            named = {name: value for name, value in properties.items() if value != ""}
            events.append(make_event(item.topic, item.msg, item.bizSeqNo, named, asked.source(group))[0])
        receipt = self._hub.publish(events, asked.principal)
        return receipt, lambda: self._encode_outcome(asked.request, receipt, BATCH_ERROR)

    def _send_sync(self, asked: _Asked) -> tuple[Promise, Callable[[], bytes]]:
        event, properties = self._event(asked)
        group = asked.need("producergroup")
        request = self._hub.ask(event, read_ttl(properties.get("ttl"), TTL_MS), asked.identity(group))
        self._requests[request] = None
        request.when_done(lambda done: self._requests.pop(done, None))
        if self._outbox.closed:  # the client went while its password was checked
            self._hub.abandon(self._requests)
        return request, partial(self._encode_reply, asked.request, event.subject, request)

    def _encode_reply(self, asked: http.Request, topic: str, request: Request[Reply]) -> bytes:
        reply = request.reply
        if reply is None:
            assert request.error is not None
            return self._encode_error(asked, request.error, WAITING_RR_ERROR)
        text, encoding = text_body(reply.payload)
        properties = describe(dict(reply.headers))[0] | encoding
        message = {"topic": topic, "body": text, "properties": properties}
        return self._encode_result(asked, SUCCESS, _encode(message).decode())

    def _reply(self, asked: _Asked) -> tuple[Promise, Callable[[], bytes]]:
        fields = _object(asked.get("extFields", "extfields"))
        topic = asked.get("origtopic", "topic") or "reply"
        text = asked.get("content")
        event, properties = make_event(
            topic, text, asked.get("uniqueid"), fields, asked.source(asked.get("producergroup"))
        )
        name = properties.get(CORRELATION, "")
        if not self._hub.respond(name, Reply(event.payload, without_correlation(event.headers)), asked.principal):
            raise _RefusedError(REPLY_ERROR, "nobody waits for this reply")
        return DONE, lambda: self._encode_result(asked.request, SUCCESS, "success")

    def _subscribe(self, asked: _Asked) -> tuple[Promise, Callable[[], bytes]]:
        items = self._check_count(_read_items(asked.need("topic")))
        group = asked.need("consumerGroup", "consumergroup")
        url, principal = asked.need("url"), asked.principal
        saved = self._save_webhook(group, items, url, asked.get("idc"), asked.get("pid"), principal)
        return saved, lambda: self._encode_outcome(asked.request, saved, SUBSCRIBE_ERROR)

    def _save_webhook(
        self,
        group: str,
        items: Sequence[SubscriptionItem],
        url: str,
        idc: str = "",
        pid: str = "",
        principal: Identity | None = None,
    ) -> Promise:
        """Subscribe a webhook; every failure is the error of the promise."""
        try:
            return self._webhooks.subscribe(group, items, url, idc, pid, principal)
        except BabelbusError as error:
            return Promise.refused(error)

    def _unsubscribe(self, asked: _Asked) -> tuple[Promise, Callable[[], bytes]]:
        topics = [item.topic for item in self._check_count(_read_items(asked.need("topic")))]
        group = asked.need("consumerGroup", "consumergroup")
        url, principal = asked.need("url"), asked.principal
        saved = self._webhooks.unsubscribe(group, topics, url, asked.get("pid"), principal)
        return saved, lambda: self._encode_outcome(asked.request, saved, UNSUBSCRIBE_ERROR)

    def _heartbeat(self, asked: _Asked) -> tuple[Promise, Callable[[], bytes]]:
        if asked.get("clientType", "clienttype") != "SUB":
            raise _RefusedError(BODY_ERROR, "clientType is SUB")
        group = asked.need("consumerGroup", "consumergroup")
        try:
            beats = _decode_beats(asked.need("heartbeatEntities", "heartbeatentities"))
        except UNREADABLE as error:
            raise _RefusedError(BODY_ERROR, f"heartbeatEntities cannot be read: {error}") from None
        known, principal = self._webhooks.beat, asked.principal
        unknown = [beat for beat in dict.fromkeys(beats) if not known(group, beat.topic, beat.url, principal)]
        try:  # before topics are made
            self._webhooks.check_room("" if principal is None else principal.name, len(unknown))
        except BabelbusError as error:
            done = Promise.refused(error)
        else:
            done = all_of([self._add_webhook(asked, group, beat) for beat in unknown])
        return done, lambda: self._encode_outcome(asked.request, done, HEARTBEAT_ERROR)

    def _add_webhook(self, asked: _Asked, group: str, beat: _Beat) -> Promise:
        """Subscribe a webhook that sends heartbeats and is not known (4.7)."""
        item, idc, pid = SubscriptionItem(beat.topic), asked.get("idc"), asked.get("pid")
        saved = self._save_webhook(group, [item], beat.url, idc, pid, asked.principal)
        saved.when_done(partial(self._beat_again, group, beat, asked.principal))
        return saved

    def _beat_again(self, group: str, beat: _Beat, principal: Identity | None, _: Promise) -> None:
        self._webhooks.beat(group, beat.topic, beat.url, principal)

    def _event(self, asked: _Asked) -> tuple[Event, dict[str, str]]:
        """Return the event that a publication or a request carries, and its properties."""
        headers = asked.request.headers
        group = asked.need("producergroup")
        content = asked.need("content", "msg")
        self._check_size(content, BODY_ERROR if asked.code == SEND_SYNC else BODY_SIZE_ERROR)
        if headers.get("protocoltype") == m.CLOUD_EVENT:
            return read_cloud_event(content.encode(), asked.source(group))
        given = asked.fields
        named = _object(asked.get("extFields", "extfields"))
        own = {name: text for name in EVENT_FIELDS if (text := given.get(name) or headers.get(name))}
        for name, other in OTHER_NAMES:
            if name not in own and given.get(other):
                own[name] = given[other]
        named |= own
        identifier = own.get("uniqueid") or str(self._hub.next_number())
        return make_event(asked.need("topic"), content, identifier, named, asked.source(group))

    def _check_size(self, content: str, code: int = BODY_SIZE_ERROR) -> None:
        limit = self._hub.settings.content_bytes_max
        if len(content) > limit or len(content.encode()) > limit:
            raise _RefusedError(code, f"event size exceeds the limit: {limit}")

    # -- the URI API -------------------------------------------------------------------------------------------------

    def _uri(self, request: http.Request, path: str, principal: Identity | None) -> tuple[Promise, Callable[[], bytes]]:
        if path.startswith(PUBLISH_PATH) and path != f"{PUBLISH_PATH}batch":
            return self._publish_uri(request, path, principal)
        action = path.removeprefix(URI_PREFIX).rstrip("/")
        if action in ("subscribe/local", "subscribe/remote"):
            body = _read_uri_body(request)
            items = _items(self._check_count(body.topic))
            saved = self._save_webhook(body.consumerGroup, items, body.url, principal=principal)
            return saved, lambda: self._encode_outcome(request, saved, SUBSCRIBE_ERROR)
        if action in ("unsubscribe/local", "unsubscribe/remote"):
            body = _read_uri_body(request)
            topics = [item.topic for item in _items(self._check_count(body.topic))]
            saved = self._webhooks.unsubscribe(body.consumerGroup, topics, body.url, "", principal)
            return saved, lambda: self._encode_outcome(request, saved, UNSUBSCRIBE_ERROR)
        if action in ("topic/create", "topic/delete"):
            return self._change_topics(request, action, principal)
        if action == "subscrition/query":
            entries = self._webhooks.entries(principal)
            if principal is not None and principal.root is not None:
                entries = [msgspec.structs.replace(one, topic=principal.relative(one.topic)) for one in entries]
            found = _encode(entries).decode()
            return DONE, lambda: self._encode_result(request, SUCCESS, found)
        raise _RefusedError(REQUESTCODE_INVALID, f"no such path: {path[:100]}", 404)

    def _publish_uri(
        self, request: http.Request, path: str, principal: Identity | None
    ) -> tuple[Promise, Callable[[], bytes]]:
        try:
            topic = percent_decode(path.removeprefix(PUBLISH_PATH)).strip("/") or DEFAULT_TOPIC
        except HttpError as error:
            raise _RefusedError(BODY_ERROR, str(error)) from None
        try:
            text = request.body.decode()
        except UnicodeDecodeError:
            raise _RefusedError(BODY_ERROR, "the body is no UTF-8") from None
        self._check_size(text)
        given = request.headers
        group = given.get("producergroup") or "em-http-producer"
        number = str(self._hub.next_number())
        named = {name: given[name] for name in ("bizseqno", "uniqueid", "ttl") if given.get(name)}
        more = {"type": "http_request", "path": path, "method": request.method, "producergroup": group}
        content_type = {"datacontenttype": given.get("content-type", JSON)}
        source = f"{PROTOCOL}:{group}" if principal is None else principal.source
        event, _ = make_event(topic, text, number, more | named, source, content_type, m.HTTP)
        receipt = self._hub.publish_to(topic, [event], principal)
        return receipt, lambda: self._encode_outcome(request, receipt, ASYNC_ERROR)

    def _change_topics(
        self, request: http.Request, action: str, principal: Identity | None
    ) -> tuple[Promise, Callable[[], bytes]]:
        text = text_of(_object(request.body).get("topic", ""))
        names = self._check_count(text.split(";", self._hub.settings.subscriptions_max))
        if not all(names):
            raise _RefusedError(BODY_ERROR, "topic is missing")
        create, remove = self._hub.create_topic, self._hub.remove_topic

        def change(name: str) -> Promise:
            return Work(create(name, principal)) if action == "topic/create" else remove(name, principal)

        changed = Work(_change_each(names, change))
        return changed, lambda: self._encode_outcome(request, changed, RUNTIME_ERROR)

    def _check_count(self, items: list[T]) -> list[T]:
        """Return a list that one request may have: each item of it takes its time, and room.

        Raises:
            _RefusedError: it is too long.
        """
        limit = self._hub.settings.subscriptions_max
        if len(items) > limit:
            raise _RefusedError(BODY_ERROR, f"more than {limit} topics are named, which is the limit")
        return items

    # -- answers -----------------------------------------------------------------------------------------------------

    def _encode_outcome(self, request: http.Request, promise: Promise, failure: int) -> bytes:
        if promise.error is None:
            return self._encode_success(request)
        return self._encode_error(request, promise.error, failure)

    def _encode_error(self, request: http.Request, error: BabelbusError, failure: int = RUNTIME_ERROR) -> bytes:
        text = str(error) if self._caller is None else self._caller.principal.relative_text(str(error))
        if isinstance(error, TargetRefusedError):
            failure, text = BODY_ERROR, f"invalid URL: {error}"
        elif isinstance(error, AccessRefusedError | InvalidProofError):
            failure = ACL_ERROR
        elif isinstance(error, TooManyProofsError):
            failure = OVERLOAD
        elif isinstance(error, QuotaExceededError):
            failure = OVER_LIMIT_ERROR
        return self._encode_result(request, failure, text)

    def _encode_success(self, request: http.Request) -> bytes:
        """Encode the answer to each publication; its head repeats, because its time has 13 digits until 2286."""
        code = request.headers.get("code", "")
        if code not in _HANDLERS or request.path.startswith(URI_PREFIX):
            return self._encode_result(request, SUCCESS, "success")
        key = code, request.keep_alive, request.version
        head = self._success_heads.get(key)
        if head is None:
            answer = self._encode_result(request, SUCCESS, "success")
            self._success_heads[key] = answer[: answer.index(b"\r\n\r\n") + 4]
            return answer
        return b'%b{"retCode":0,"retMsg":"success","resTime":%d}' % (head, self._hub.clock.now_ms())

    def _encode_result(self, request: http.Request, code: int, text: str, *, status: int = 200) -> bytes:
        is_uri = request.path.startswith(URI_PREFIX)
        if self._hub.settings.retcodes == "seed":
            code = SEED_CODES.get(code, code)
        result: dict[str, Any] = {"retCode": code, "retMsg": text, "resTime": self._hub.clock.now_ms()}
        headers = [("content-type", JSON if is_uri else PLAIN), *self._webhooks.cluster.items()]
        if is_uri:
            headers.append(("uri", request.path))
            if code:
                result["retMessage"] = text
        else:
            code_asked = request.headers.get("code") or dict(_query(request)).get("code", "")
            headers.append(("code", code_asked if code_asked.isascii() and code_asked.isprintable() else ""))
        return encode_response(status, headers, _encode(result), keep_alive=request.keep_alive, version=request.version)


_HANDLERS: Final[dict[str, Callable[[WebSession, _Asked], tuple[Promise, Callable[[], bytes]]]]] = {
    SEND_ASYNC: WebSession._send_async,
    SEND_SYNC: WebSession._send_sync,
    BATCH: WebSession._send_batch,
    BATCH_V2: WebSession._send_async,
    HEARTBEAT: WebSession._heartbeat,
    SUBSCRIBE: WebSession._subscribe,
    UNSUBSCRIBE: WebSession._unsubscribe,
    REPLY: WebSession._reply,
}
"""No methods of one session: they would hold it, and what it has received, until the cycle collector runs."""


async def _change_each(names: Sequence[str], change: Callable[[str], Promise]) -> None:
    """Run the change of each topic, some at a time: ten thousand that begin together would hold all other clients up.

    Raises:
        BabelbusError: the first failure; the other topics are changed all the same.
    """
    errors: list[BabelbusError] = []
    for at in range(0, len(names), CHANGES_AT_ONCE):
        some = all_of(list(map(change, names[at : at + CHANGES_AT_ONCE])))
        await settled(some)
        if some.error is not None:
            errors.append(some.error)
    if errors:
        raise errors[0]


def credentials_of(request: http.Request) -> Given:
    """Return the credentials of a request; they come in its head alone, because logs have URLs."""
    headers = request.headers
    return Given(_utf_8(headers.get("username", "")), _utf_8(headers.get("passwd", "")), headers.get("token", ""))


def _utf_8(value: str) -> str:
    return value if value.isascii() else value.encode("latin-1").decode("utf-8", "surrogateescape")


def _read(request: http.Request, principal: Identity | None) -> _Asked:
    """Read a request of the coded API.

    Raises:
        _RefusedError: it cannot be read.
    """
    if request.headers.get("version", "1.0") not in VERSIONS:
        raise _RefusedError(REQUESTCODE_INVALID, "version is neither 1.0 nor 2.0", 400)
    try:
        if request.method == "GET":
            fields = dict(parse_query(request.query))
            return _Asked(request, fields.get("code", ""), fields, principal)
        fields = _read_form(request.body)
    except (HttpError, ValueError) as error:
        raise _RefusedError(RUNTIME_ERROR, f"the fields cannot be read: {error}", 500) from None
    return _Asked(request, request.headers.get("code", ""), fields, principal)


def _read_form(body: bytes) -> dict[str, str]:
    """Return the fields of a form (4.1).

    Raises:
        ValueError: the form is not UTF-8 and would be stored with other characters, or has too many fields.
    """
    return dict(parse_form(body.decode(), FIELDS_MAX, "strict"))


def _query(request: http.Request) -> list[tuple[str, str]]:
    """Return the pairs of a query; a query that cannot be read has none."""
    try:
        return list(parse_query(request.query))
    except (HttpError, ValueError):
        return []


def _read_items(text: str) -> list[SubscriptionItem]:
    """Return the topics of a subscription: a JSON list, or the name of one topic."""
    if not text.startswith("["):
        return [SubscriptionItem(text)]
    try:
        return _items(_decode_items(text))
    except UNREADABLE as error:
        raise _RefusedError(BODY_ERROR, f"topic cannot be read: {error}") from None


def _items(found: Sequence[SubscriptionItem | str]) -> list[SubscriptionItem]:
    if not found:
        raise _RefusedError(BODY_ERROR, "topic is missing")
    return [SubscriptionItem(item) if isinstance(item, str) else item for item in found]


def _object(text: str | bytes) -> dict[str, Any]:
    if not text:
        return {}
    try:
        return _decode_object(text)
    except UNREADABLE as error:
        raise _RefusedError(BODY_ERROR, f"a field is no JSON object: {error}") from None


def _read_uri_body(request: http.Request) -> _UriBody:
    try:
        if "form" in request.headers.get("content-type", ""):
            fields = _read_form(request.body)
            return _UriBody(
                fields["url"], list(_read_items(fields["topic"])), fields.get("consumerGroup", "em-http-consumer")
            )
        return _decode_uri_body(request.body)
    except (KeyError, ValueError, *UNREADABLE) as error:
        raise _RefusedError(BODY_ERROR, f"the body cannot be read: {error}") from None
