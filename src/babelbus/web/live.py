"""Live answers of the administration endpoint: events of all protocols, and changes of the state, as JSON lines.

A line {"dropped": n} stands where n lines are missing because the reader did not take what waited for it. A line
{"end": why} is the last when the reader has lost the right to all of the pattern. An empty line says that nothing has
happened for `HEARTBEAT_SECONDS`: both sides notice when the other is gone.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec
from aiohttp import web

from babelbus.core.access import AccessRefusedError, Action, Identity, Narrowing, overlaps, refusal
from babelbus.core.broker import Broker
from babelbus.core.flow_policy import Bound
from babelbus.core.publish import Publication
from babelbus.core.record import Event
from babelbus.core.rooted import relative_event
from babelbus.core.state import Entry, StateChange, check_state_pattern, size_fault, subscription_pattern
from babelbus.core.topic import RESERVED_PREFIX
from babelbus.metrics import Metrics
from babelbus.records.envelope import SOURCE_HEADER, SUBJECT_HEADER
from babelbus.records.record import Headers
from babelbus.units import MIB
from babelbus.web.answers import answer, read_body, read_number, read_text, write_lines
from babelbus.web.callers import PROTOCOL
from babelbus.web.calls import Answer, Call, Lines, Route
from babelbus.web.errors import InvalidEventError
from babelbus.web.feed import Feed
from babelbus.web.record_lines import UNSET, Unset, bytes_of, headers_of, split_headers, text_or_bytes
from babelbus.web.slots import check_share
from babelbus.web.state import EditorOf, encode_entries, one_line
from babelbus.web.state_views import clip

HEARTBEAT_SECONDS = 10.0
FEEDS_MAX = 64
"""Most live answers at once: each may hold `Bound` of memory."""
FEEDS_PER_PRINCIPAL_MAX = 32
"""Most live answers of one principal, so that nobody keeps out the others; the administrator may have all."""
BODY_BYTES_MAX = 64 * MIB
NO_BOUND = Bound()
LATEST_KEYS_MAX = 10_000
"""Most keys whose last change waits for the next look."""
LATEST_SECONDS_MAX = 60.0
Stop = Callable[[], None]
Granted = Callable[[str], bool]
"""Returns whether a reader may have the lines of a subject."""
Renew = Callable[[], Granted]
"""Asks for the rights of a reader again; raises `AccessRefusedError` if nothing is granted any more."""

encode = msgspec.json.Encoder().encode


class EventLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An event. Bytes that are not UTF-8 are under `..._base64` instead; `payload` is null if an event removes its key.

    `source` is its `ce_source`: the protocol that it came through, and as whom. `timestamp` is milliseconds since 1970.
    """

    timestamp: int
    subject: str | Unset = UNSET
    subject_base64: bytes | Unset = UNSET
    source: str | Unset = UNSET
    key: str | Unset = UNSET
    key_base64: bytes | Unset = UNSET
    payload: str | Unset | None = UNSET
    payload_base64: bytes | Unset = UNSET
    headers: dict[str, str | None] | Unset = UNSET
    headers_base64: list[tuple[bytes, bytes | None]] | Unset = UNSET


class ChangeLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One change of the state: a value, or that it was deleted. `timestamp` is milliseconds since 1970."""

    timestamp: int
    source: str
    key: str
    value: msgspec.Raw | Unset = UNSET
    version: int = 0
    deleted: bool = False
    text: str | Unset = UNSET
    """The beginning of the value instead of `value`, if the request limits its bytes."""
    bytes: int | Unset = UNSET


class SendBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /api/send; of two forms of one thing, that in base64 holds."""

    subject: str = ""
    subject_base64: bytes | None = None
    payload: str = ""
    payload_base64: bytes | None = None
    key: str | None = None
    key_base64: bytes | None = None
    headers: dict[str, str | None] = {}
    headers_base64: list[tuple[bytes, bytes | None]] = []


class Sent(msgspec.Struct, frozen=True):
    """The place of a published event: topic, partition and offset; all three are `None` if no topic recorded it.

    `receivers` is the number of live subscriptions that matched.
    """

    topic: str | None
    partition: int | None
    offset: int | None
    receivers: int


class LiveRoutes:
    """The live requests, and what is published by hand. `bound` is that of each reader's queue."""

    def __init__(self, broker: Broker, editor_of: EditorOf, metrics: Metrics, bound: Bound = NO_BOUND) -> None:
        self._broker = broker
        self._editor_of = editor_of
        self._bound = bound
        self._delivered = metrics.live_delivered(PROTOCOL)
        self._dropped = metrics.live_dropped_total.labels(PROTOCOL, "slow")
        self._feeds: dict[Feed, tuple[Identity, Renew]] = {}

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (
            ("GET", "/api/listen", self._listen),
            ("GET", "/api/state/watch", self._watch),
            ("POST", "/api/send", self._send),
        )

    def close(self) -> None:
        """Close all live answers in good order."""
        for feed in self._feeds:
            feed.close()

    def access_changed(self) -> None:
        """Drop the lines that wait for readers who may not have them any more; close feeds without any right."""
        for feed, (_, renew) in list(self._feeds.items()):
            try:
                feed.keep(renew())
            except AccessRefusedError as error:
                feed.keep(lambda _: False)
                feed.close(str(error))

    async def _listen(self, call: Call) -> Answer:
        principal = call.principal
        pattern, root = principal.absolute(read_text(call, "pattern")), principal.root

        def hear(feed: Feed, events: Sequence[Event]) -> None:
            shown = events if root is None else [relative_event(one, root) for one in events]
            feed.put((one.subject, partial(encode_event, seen)) for one, seen in zip(events, shown, strict=True))

        def begin(feed: Feed) -> tuple[Iterator[bytes], Stop]:
            check_state_pattern(pattern, self._broker.state.key_bytes_max)
            subscription = self._broker.subscribe(
                subscription_pattern(pattern),
                partial(hear, feed),
                principal,
            )
            return iter(()), lambda: self._broker.unsubscribe(subscription)

        def renew() -> Granted:
            if overlaps(principal, Action.SUBSCRIBE, subscription_pattern(pattern)) is Narrowing.NONE:
                raise refusal(principal, Action.SUBSCRIBE, pattern)
            return partial(self._broker.router.may_hear, principal)

        return await self._follow(call, begin, renew)

    async def _watch(self, call: Call) -> Answer:
        """Answer with the present values as lines of `StateLine`, if not `new_only`, then with changes.

        With `every_ms` only the last change of each key in that time is answered, with `bytes_max` only the beginning
        of its value.
        """
        pattern, new_only = read_text(call, "pattern"), "new_only" in call.query
        bytes_max, every_ms = read_number(call, "bytes_max"), read_number(call, "every_ms", 1)
        principal = call.principal
        editor, state = self._editor_of(principal), self._broker.state_for(principal)

        def begin(feed: Feed) -> tuple[Iterator[bytes], Stop]:
            def put(changes: Iterable[StateChange]) -> None:
                # Changes that were kept for a while may not be granted any more.
                feed.put((one.key, partial(encode_change, one, bytes_max)) for one in changes if may_see(one.key))

            latest = None if every_ms is None else Latest(put, every_ms / 1000)
            entries, stop = editor.watch(pattern, put if latest is None else latest.hear)
            # Lines are made as the reader takes them.
            granted = (entry for entry in ([] if new_only else entries) if may_see(entry[0]))
            present = encode_entries(granted) if bytes_max is None else encode_beginnings(granted, bytes_max)
            return present, stop if latest is None else partial(_stop, stop, latest)

        def may_see(key: str) -> bool:
            return state.may_see(principal.absolute(key))

        def renew() -> Granted:
            editor.check_watch(pattern)
            return may_see

        return await self._follow(call, begin, renew)

    async def _follow(
        self, call: Call, begin: Callable[[Feed], tuple[Iterator[bytes], Stop]], renew: "Renew"
    ) -> Answer:
        """Answer with the first lines, then with those of the feed, until either side ends the answer."""
        if len(self._feeds) >= FEEDS_MAX:
            raise web.HTTPServiceUnavailable(text=f"{FEEDS_MAX} live answers are open already, which is the limit")
        principal = call.principal
        check_share(principal, (one for one, _ in self._feeds.values()), FEEDS_PER_PRINCIPAL_MAX, "live answers")
        feed = Feed(self._bound, self._dropped.inc)
        first, stop = begin(feed)
        self._feeds[feed] = principal, renew
        try:
            response = await call.begin_lines()
            await response.write(b"\n")  # tells the reader that the subscription has begun
            await write_lines(response, first)
            await self._pass_on(feed, response, principal)
            return response
        finally:
            stop()
            del self._feeds[feed]

    async def _pass_on(self, feed: Feed, response: Lines, principal: Identity) -> None:
        while True:
            lines, dropped = await feed.take(HEARTBEAT_SECONDS)
            if not lines and feed.closed:
                if feed.end:
                    await response.write(encode({"end": principal.relative_text(feed.end)}) + b"\n")
                return
            if not lines:
                await response.write(b"\n")
                continue
            await write_lines(response, lines)
            self._delivered.inc(len(lines), sum(map(len, lines)))
            if dropped:
                await response.write(b'{"dropped":%d}\n' % dropped)

    async def _send(self, call: Call) -> web.Response:
        """Publish an event; answered when it is as durable as its topic says."""
        principal = call.principal
        event = event_of(await read_body(call, SendBody, BODY_BYTES_MAX), principal)
        fault = size_fault(event.subject, self._broker.state.key_bytes_max)
        if fault is not None:
            raise InvalidEventError(f"the subject {event.subject[:80]!r}... {fault}")
        topic = self._broker.topic_of(event.subject)
        receivers = len(self._broker.router.find(event.subject))
        receipt = await self._broker.publish(Publication(principal, PROTOCOL, [event])).wait()
        if topic is None:
            return answer(Sent(None, None, None, receivers))
        return answer(Sent(principal.relative(topic), receipt.partition, receipt.base_offset, receivers))


def event_of(body: SendBody, principal: Identity) -> Event:
    """Return the event of a body."""
    subject = body.subject
    if body.subject_base64 is not None:
        subject = body.subject_base64.decode("utf-8", "surrogateescape")
    headers = headers_of(body.headers, body.headers_base64 or None)
    check_subject(subject)
    subject = principal.absolute(subject)
    payload, key = bytes_of(body.payload, body.payload_base64), bytes_of(body.key, body.key_base64)
    return Event(subject, payload, key, signed(headers, principal))


def check_subject(subject: str) -> None:
    """Check that a client may use a subject.

    Raises:
        InvalidEventError: it is empty or the server's own.
    """
    if not subject or subject.startswith(RESERVED_PREFIX):
        raise InvalidEventError(f"subject {subject!r}: it is empty or the server's own ({RESERVED_PREFIX}...)")


def signed(headers: Headers, principal: Identity) -> Headers:
    """Return the headers of a client with its source.

    Raises:
        InvalidEventError: a header is the server's own.
    """
    if any(name == SOURCE_HEADER for name, _ in headers):
        raise InvalidEventError("the header ce_source is the server's: it says who an event came from")
    if any(name == SUBJECT_HEADER for name, _ in headers):
        raise InvalidEventError("the header ce_subject is the server's: it holds the subject")
    return (*headers, (SOURCE_HEADER, principal.source.encode()))


def encode_event(event: Event) -> bytes:
    """Return the line of an event."""
    subject, subject_base64 = text_or_bytes(event.subject.encode("utf-8", "surrogateescape"))
    payload, payload_base64 = (None, UNSET) if event.payload is None else text_or_bytes(event.payload)
    key, key_base64 = (UNSET, UNSET) if event.key is None else text_or_bytes(event.key)
    source = dict(event.headers).get(SOURCE_HEADER)
    headers, headers_base64 = split_headers(tuple(pair for pair in event.headers if pair[0] != SOURCE_HEADER))
    return encode(
        EventLine(
            event.timestamp,
            subject,
            subject_base64,
            UNSET if source is None else source.decode("utf-8", "replace"),
            key,
            key_base64,
            payload,
            payload_base64,
            headers,
            headers_base64,
        )
    )


class Latest:
    """Keeps the last change of each key for a while, so that a key that changes often costs its reader little."""

    def __init__(self, put: Callable[[Iterable[StateChange]], None], seconds: float) -> None:
        self._put = put
        self._seconds = min(seconds, LATEST_SECONDS_MAX)
        self._changes: dict[str, StateChange] = {}
        self._timer: asyncio.TimerHandle | None = None

    def hear(self, changes: Sequence[StateChange]) -> None:
        """Keep changes; they are passed on together."""
        for change in changes:
            self._changes[change.key] = change
        if len(self._changes) > LATEST_KEYS_MAX:
            self._pass_on()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._pass_on)

    def _pass_on(self) -> None:
        self.close()
        changes, self._changes = self._changes, {}
        self._put(changes.values())

    def close(self) -> None:
        """Stop waiting; what is kept is dropped."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _stop(stop: Stop, latest: Latest) -> None:
    stop()
    latest.close()


def encode_beginnings(entries: Iterable[Entry], bytes_max: int) -> Iterator[bytes]:
    """Yield a line for each entry, with the beginning of its value as text."""
    for key, value, version in entries:
        yield encode({"key": key, "version": version, "text": clip(value, bytes_max), "bytes": len(value)})


def encode_change(change: StateChange, bytes_max: int | None = None) -> bytes:
    """Return the line of a change of the state; with `bytes_max`, with the beginning of its value as text."""
    value = change.value
    if value is None or bytes_max is None:
        raw = UNSET if value is None else msgspec.Raw(one_line(value))
        return encode(ChangeLine(change.timestamp, change.source, change.key, raw, change.version, value is None))
    line = ChangeLine(change.timestamp, change.source, change.key, version=change.version)
    return encode(msgspec.structs.replace(line, text=clip(value, bytes_max), bytes=len(value)))
