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
from babelbus.errors import BabelbusError
from babelbus.identities.errors import InvalidProofError, TooManyProofsError
from babelbus.protocols.contract import Outbox
from babelbus.protocols.eventmesh import http_requests as r
from babelbus.protocols.eventmesh import messages as m
from babelbus.protocols.eventmesh.callers import REFUSALS, Caller
from babelbus.protocols.eventmesh.calls import TargetRefusedError
from babelbus.protocols.eventmesh.http_requests import (
    Beat,
    CodedRequest,
    HttpRefusedError,
    credentials_of,
    items_of,
    query_of,
    read_batch,
    read_beats,
    read_coded,
    read_items,
    read_object,
    read_uri_body,
)
from babelbus.protocols.eventmesh.hub import CORRELATION, PROTOCOL, Hub, without_correlation
from babelbus.protocols.eventmesh.idle import IdleSession
from babelbus.protocols.eventmesh.messages import SubscriptionItem
from babelbus.protocols.eventmesh.records import (
    InvalidMessageError,
    convert_reply,
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
from babelbus.wire.http import HttpError, encode_response, percent_decode

CHANGES_AT_ONCE = 100
LISTS_BYTES_MAX = 4 * MIB
"""Longest body of a request that publishes nothing, as over TCP and gRPC: a list of a million topics is one."""
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
            publishes = path.startswith(PUBLISH_PATH) if is_uri else request.headers.get("code") in r.PUBLISHING
            if len(request.body) > LISTS_BYTES_MAX and not publishes:
                text = f"the body has {len(request.body)} bytes, {LISTS_BYTES_MAX} is the limit of this request"
                raise HttpRefusedError(r.BODY_SIZE_ERROR, text)
            if is_uri:
                return self._uri(request, path, principal)
            asked = read_coded(request, principal)
            pid = asked.get("pid")
            if pid and not (pid.isascii() and pid.isdigit()):
                raise HttpRefusedError(r.HEADER_ERROR, "pid is no number")
            handle = _HANDLERS.get(asked.code)
            if handle is None:
                raise HttpRefusedError(r.REQUESTCODE_INVALID, f"request code {asked.code!r} is not served", 400)
            return handle(self, asked)
        except HttpRefusedError as fault:
            answer = self._encode_result(request, fault.code, fault.text, status=fault.status)
        except InvalidMessageError as error:
            answer = self._encode_error(request, error, r.BODY_ERROR)
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

    def _send_async(self, asked: CodedRequest) -> tuple[Promise, Callable[[], bytes]]:
        failure = r.ASYNC_ERROR if asked.code == r.SEND_ASYNC else r.BATCH_ERROR
        event, _ = self._event(asked)
        receipt = self._hub.publish_to(event.subject, [event], asked.principal)
        return receipt, lambda: self._encode_outcome(asked.request, receipt, failure)

    def _send_batch(self, asked: CodedRequest) -> tuple[Promise, Callable[[], bytes]]:
        items = read_batch(asked)
        group = asked.need("producerGroup", "producergroup")
        events = []
        for item in items:
            self._check_size(item.msg, r.HEADER_ERROR)
            properties = {"bizseqno": item.bizSeqNo, "tag": item.tag, "ttl": item.ttl, "producergroup": group}
            named = {name: value for name, value in properties.items() if value not in ("", None)}
            identifier = text_of(named.get("bizseqno", ""))
            events.append(make_event(item.topic, item.msg, identifier, named, asked.source(group))[0])
        receipt = self._hub.publish(events, asked.principal)
        return receipt, lambda: self._encode_outcome(asked.request, receipt, r.BATCH_ERROR)

    def _send_sync(self, asked: CodedRequest) -> tuple[Promise, Callable[[], bytes]]:
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
            return self._encode_error(asked, request.error, r.WAITING_RR_ERROR)
        text, encoding = text_body(reply.payload)
        headers = convert_reply(m.MESSAGE, reply.payload, reply.headers)
        properties = describe(dict(headers))[0] | encoding
        message = {"topic": topic, "body": text, "properties": properties}
        return self._encode_result(asked, r.SUCCESS, _encode(message).decode())

    def _reply(self, asked: CodedRequest) -> tuple[Promise, Callable[[], bytes]]:
        fields = read_object(asked.get("extFields", "extfields"))
        topic = asked.get("origtopic", "topic") or "reply"
        text = asked.get("content")
        event, properties = make_event(
            topic, text, asked.get("uniqueid"), fields, asked.source(asked.get("producergroup"))
        )
        name = properties.get(CORRELATION, "")
        if not self._hub.respond(name, Reply(event.payload, without_correlation(event.headers)), asked.principal):
            raise HttpRefusedError(r.REPLY_ERROR, "nobody waits for this reply")
        return DONE, lambda: self._encode_result(asked.request, r.SUCCESS, "success")

    def _subscribe(self, asked: CodedRequest) -> tuple[Promise, Callable[[], bytes]]:
        items = self._check_count(read_items(asked.need("topic")))
        group = asked.need("consumerGroup", "consumergroup")
        url, principal = asked.need("url"), asked.principal
        saved = self._save_webhook(group, items, url, asked.get("idc"), asked.get("pid"), principal)
        return saved, lambda: self._encode_outcome(asked.request, saved, r.SUBSCRIBE_ERROR)

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

    def _unsubscribe(self, asked: CodedRequest) -> tuple[Promise, Callable[[], bytes]]:
        topics = [item.topic for item in self._check_count(read_items(asked.need("topic")))]
        group = asked.need("consumerGroup", "consumergroup")
        url, principal = asked.need("url"), asked.principal
        saved = self._webhooks.unsubscribe(group, topics, url, asked.get("pid"), principal)
        return saved, lambda: self._encode_outcome(asked.request, saved, r.UNSUBSCRIBE_ERROR)

    def _heartbeat(self, asked: CodedRequest) -> tuple[Promise, Callable[[], bytes]]:
        if asked.get("clientType", "clienttype") != "SUB":
            raise HttpRefusedError(r.BODY_ERROR, "clientType is SUB")
        group = asked.need("consumerGroup", "consumergroup")
        beats = read_beats(asked)
        known, principal = self._webhooks.beat, asked.principal
        unknown = [beat for beat in dict.fromkeys(beats) if not known(group, beat.topic, beat.url, principal)]
        try:  # before topics are made
            self._webhooks.check_room("" if principal is None else principal.name, len(unknown))
        except BabelbusError as error:
            done = Promise.refused(error)
        else:
            done = all_of([self._add_webhook(asked, group, beat) for beat in unknown])
        return done, lambda: self._encode_outcome(asked.request, done, r.HEARTBEAT_ERROR)

    def _add_webhook(self, asked: CodedRequest, group: str, beat: Beat) -> Promise:
        """Subscribe a webhook that sends heartbeats and is not known (4.7)."""
        item, idc, pid = SubscriptionItem(beat.topic), asked.get("idc"), asked.get("pid")
        saved = self._save_webhook(group, [item], beat.url, idc, pid, asked.principal)
        saved.when_done(partial(self._beat_again, group, beat, asked.principal))
        return saved

    def _beat_again(self, group: str, beat: Beat, principal: Identity | None, _: Promise) -> None:
        self._webhooks.beat(group, beat.topic, beat.url, principal)

    def _event(self, asked: CodedRequest) -> tuple[Event, dict[str, str]]:
        """Return the event that a publication or a request carries, and its properties."""
        headers = asked.request.headers
        group = asked.need("producergroup")
        content = asked.need("content", "msg")
        self._check_size(content, r.BODY_ERROR if asked.code == r.SEND_SYNC else r.BODY_SIZE_ERROR)
        given = asked.fields
        own = {name: text for name in EVENT_FIELDS if (text := given.get(name) or headers.get(name))}
        for name, other in OTHER_NAMES:
            if name not in own and given.get(other):
                own[name] = given[other]
        if headers.get("protocoltype") == m.CLOUD_EVENT:
            return read_cloud_event(content.encode(), asked.source(group), own)
        named = read_object(asked.get("extFields", "extfields")) | own
        identifier = own.get("uniqueid") or str(self._hub.next_number())
        return make_event(asked.need("topic"), content, identifier, named, asked.source(group))

    def _check_size(self, content: str, code: int = r.BODY_SIZE_ERROR) -> None:
        limit = self._hub.settings.content_bytes_max
        if len(content) > limit or len(content.encode()) > limit:
            raise HttpRefusedError(code, f"event size exceeds the limit: {limit}")

    # -- the URI API -------------------------------------------------------------------------------------------------

    def _uri(self, request: http.Request, path: str, principal: Identity | None) -> tuple[Promise, Callable[[], bytes]]:
        if path.startswith(PUBLISH_PATH) and path != f"{PUBLISH_PATH}batch":
            return self._publish_uri(request, path, principal)
        action = path.removeprefix(URI_PREFIX).rstrip("/")
        if action in ("subscribe/local", "subscribe/remote"):
            body = read_uri_body(request)
            items = items_of(self._check_count(body.topic))
            saved = self._save_webhook(body.consumerGroup, items, body.url, principal=principal)
            return saved, lambda: self._encode_outcome(request, saved, r.SUBSCRIBE_ERROR)
        if action in ("unsubscribe/local", "unsubscribe/remote"):
            body = read_uri_body(request)
            topics = [item.topic for item in items_of(self._check_count(body.topic))]
            saved = self._webhooks.unsubscribe(body.consumerGroup, topics, body.url, "", principal)
            return saved, lambda: self._encode_outcome(request, saved, r.UNSUBSCRIBE_ERROR)
        if action in ("topic/create", "topic/delete"):
            return self._change_topics(request, action, principal)
        if action == "subscrition/query":
            entries = self._webhooks.entries(principal)
            if principal is not None and principal.root is not None:
                entries = [msgspec.structs.replace(one, topic=principal.relative(one.topic)) for one in entries]
            found = _encode(entries).decode()
            return DONE, lambda: self._encode_result(request, r.SUCCESS, found)
        raise HttpRefusedError(r.REQUESTCODE_INVALID, f"no such path: {path[:100]}", 404)

    def _publish_uri(
        self, request: http.Request, path: str, principal: Identity | None
    ) -> tuple[Promise, Callable[[], bytes]]:
        try:
            topic = percent_decode(path.removeprefix(PUBLISH_PATH)).strip("/") or DEFAULT_TOPIC
        except HttpError as error:
            raise HttpRefusedError(r.BODY_ERROR, str(error)) from None
        try:
            text = request.body.decode()
        except UnicodeDecodeError:
            raise HttpRefusedError(r.BODY_ERROR, "the body is no UTF-8") from None
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
        return receipt, lambda: self._encode_outcome(request, receipt, r.ASYNC_ERROR)

    def _change_topics(
        self, request: http.Request, action: str, principal: Identity | None
    ) -> tuple[Promise, Callable[[], bytes]]:
        text = text_of(read_object(request.body).get("topic", ""))
        names = self._check_count(text.split(";", self._hub.settings.subscriptions_max))
        if not all(names):
            raise HttpRefusedError(r.BODY_ERROR, "topic is missing")
        create, remove = self._hub.create_topic, self._hub.remove_topic

        def change(name: str) -> Promise:
            return Work(create(name, principal)) if action == "topic/create" else remove(name, principal)

        changed = Work(_change_each(names, change))
        return changed, lambda: self._encode_outcome(request, changed, r.RUNTIME_ERROR)

    def _check_count(self, items: list[T]) -> list[T]:
        """Return a list that one request may have: each item of it takes its time, and room.

        Raises:
            HttpRefusedError: it is too long.
        """
        limit = self._hub.settings.subscriptions_max
        if len(items) > limit:
            raise HttpRefusedError(r.BODY_ERROR, f"more than {limit} topics are named, which is the limit")
        return items

    # -- answers -----------------------------------------------------------------------------------------------------

    def _encode_outcome(self, request: http.Request, promise: Promise, failure: int) -> bytes:
        if promise.error is None:
            return self._encode_success(request)
        return self._encode_error(request, promise.error, failure)

    def _encode_error(self, request: http.Request, error: BabelbusError, failure: int = r.RUNTIME_ERROR) -> bytes:
        text = str(error) if self._caller is None else self._caller.principal.relative_text(str(error))
        if isinstance(error, TargetRefusedError):
            failure, text = r.BODY_ERROR, f"invalid URL: {error}"
        elif isinstance(error, AccessRefusedError | InvalidProofError):
            failure = r.ACL_ERROR
        elif isinstance(error, TooManyProofsError):
            failure = r.OVERLOAD
        elif isinstance(error, QuotaExceededError):
            failure = r.OVER_LIMIT_ERROR
        return self._encode_result(request, failure, text)

    def _encode_success(self, request: http.Request) -> bytes:
        """Encode the answer to each publication; its head repeats, because its time has 13 digits until 2286."""
        code = request.headers.get("code", "")
        if code not in _HANDLERS or request.path.startswith(URI_PREFIX):
            return self._encode_result(request, r.SUCCESS, "success")
        key = code, request.keep_alive, request.version
        head = self._success_heads.get(key)
        if head is None:
            answer = self._encode_result(request, r.SUCCESS, "success")
            self._success_heads[key] = answer[: answer.index(b"\r\n\r\n") + 4]
            return answer
        return b'%b{"retCode":0,"retMsg":"success","resTime":%d}' % (head, self._hub.clock.now_ms())

    def _encode_result(self, request: http.Request, code: int, text: str, *, status: int = 200) -> bytes:
        is_uri = request.path.startswith(URI_PREFIX)
        if self._hub.settings.retcodes == "seed":
            code = r.SEED_CODES.get(code, code)
        result: dict[str, Any] = {"retCode": code, "retMsg": text, "resTime": self._hub.clock.now_ms()}
        headers = [("content-type", JSON if is_uri else PLAIN), *self._webhooks.cluster.items()]
        if is_uri:
            headers.append(("uri", request.path))
            if code:
                result["retMessage"] = text
        else:
            code_asked = request.headers.get("code") or dict(query_of(request)).get("code", "")
            headers.append(("code", code_asked if code_asked.isascii() and code_asked.isprintable() else ""))
        return encode_response(status, headers, _encode(result), keep_alive=request.keep_alive, version=request.version)


_HANDLERS: Final[dict[str, Callable[[WebSession, CodedRequest], tuple[Promise, Callable[[], bytes]]]]] = {
    r.SEND_ASYNC: WebSession._send_async,
    r.SEND_SYNC: WebSession._send_sync,
    r.BATCH: WebSession._send_batch,
    r.BATCH_V2: WebSession._send_async,
    r.HEARTBEAT: WebSession._heartbeat,
    r.SUBSCRIBE: WebSession._subscribe,
    r.UNSUBSCRIBE: WebSession._unsubscribe,
    r.REPLY: WebSession._reply,
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
