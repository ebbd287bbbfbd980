"""Requests over the administration endpoint: a request that waits for its reply, and responders.

    POST /api/request                {"subject": ..., "payload": ..., "headers": {...}, "timeout_seconds": 30}
    GET /api/respond?subject=S       JSON lines: {"responder": id}, then {"question": {"number": 1, ...}}
    POST /api/responders/ID/reply    {"number": 1, "payload": ..., "headers": {...}}, or {"number": 1, "failed": why}

A responder answers for as long as its answer of JSON lines is open. It has at most `window` unanswered questions; other
questions wait for the first responder of the group with room. When the answer ends, its unanswered questions go to
other responders of the group; without any, their requesters are told. An empty line says that no question has come for
`HEARTBEAT_SECONDS`.
"""

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web

from babelbus.clock import Clock
from babelbus.core.access import Action, Identity, may, refusal
from babelbus.core.broker import Broker
from babelbus.core.request import STOPS, Question, Reply, RequestFailedError, TooManyRequestsError
from babelbus.core.router import Subscription
from babelbus.core.state import size_fault
from babelbus.core.subject import exactly
from babelbus.errors import BabelbusError
from babelbus.units import MIB
from babelbus.web.answers import answer, read_body, read_number, read_text
from babelbus.web.callers import is_caller
from babelbus.web.calls import Answer, Call, Route
from babelbus.web.errors import InvalidEventError, UnknownResponderError
from babelbus.web.feed import came
from babelbus.web.lines import QuestionLine, Replied, ReplyLine, ResponderHead, RespondLine
from babelbus.web.live import BODY_BYTES_MAX, SendBody, check_subject, event_of, signed
from babelbus.web.record_lines import UNSET, bytes_of, headers_of, split_headers, text_or_bytes
from babelbus.web.slots import check_share

HEARTBEAT_SECONDS = 10.0
RESPONDERS_MAX = 256
"""Most open responders."""
RESPONDERS_PER_PRINCIPAL_MAX = 64
"""Most open responders of one principal, so that nobody keeps out the others; the administrator may have all."""
WINDOW_MAX = 100
QUESTIONS_MAX = 10_000
QUEUE_BYTES_MAX = 64 * MIB
"""Most questions, and bytes of their payloads, that wait for the responders of a group; only the last may pass."""
TIMEOUT_SECONDS = 30.0
GROUP = "respond"
encode = msgspec.json.Encoder().encode


class RequestBody(SendBody, frozen=True, forbid_unknown_fields=True):
    """The body of POST /api/request: an event without a key, and how long to wait for the reply."""

    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)] = TIMEOUT_SECONDS


class ReplyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reply to a question; with `failed` there is no reply, and the requester is told why."""

    number: int
    payload: str = ""
    payload_base64: bytes | None = None
    headers: dict[str, str | None] = {}
    headers_base64: list[tuple[bytes, bytes | None]] = []
    failed: str = ""


def content_of(payload: bytes | None, headers: Any) -> dict[str, Any]:
    """Return the fields of a `ReplyLine`."""
    text, data = (None, UNSET) if payload is None else text_or_bytes(payload)
    as_object, pairs = split_headers(headers)
    return {"payload": text, "payload_base64": data, "headers": as_object, "headers_base64": pairs}


class _Responder:
    """The responder of one answer: the pool hands it questions, `take` comes from the answer's task."""

    def __init__(self, window: int, count_max: int | None, principal: Identity) -> None:
        self.principal = principal
        self.window = window
        self.left = count_max
        self.held: dict[int, Question] = {}
        self.membership: Subscription | None = None
        self._lines: deque[tuple[int, Question]] = deque()
        self._numbers = itertools.count(1)
        self._something = asyncio.Event()
        self.end = ""

    def deliver(self, question: Question) -> None:
        number = next(self._numbers)
        self.held[number] = question
        self._lines.append((number, question))
        if self.left is not None:
            self.left -= 1
        self._something.set()

    def give_back(self) -> list[Question]:
        """Return and remove the questions that were not sent."""
        lines, self._lines = self._lines, deque()
        return [self.held.pop(number) for number, _ in lines if number in self.held]

    def close(self, reason: str) -> None:
        self.end = self.end or reason
        self._something.set()

    async def take(self, clock: Clock, seconds: float) -> RespondLine | None:
        """Wait up to `seconds` for a question or the end; `None` if neither came."""
        if not self._lines and not self.end:
            self._something.clear()
            if not await came(self._something, seconds):
                return None
        if self.end:
            return RespondLine(end=self.principal.relative_text(self.end))
        number, question = self._lines.popleft()
        content = content_of(question.payload, question.headers)
        seconds_left = max(question.deadline - clock.monotonic(), 0.0)
        return RespondLine(
            QuestionLine(
                number=number,
                subject=self.principal.relative(question.subject),
                timeout_seconds=seconds_left,
                **content,
            )
        )


class _Pool:
    """The responders of one subject and group, and the questions that wait for one of them."""

    def __init__(self, broker: Broker, subject: str, group: str) -> None:
        self._broker = broker
        self.subject = subject
        self._group = group
        self._responders: dict[_Responder, None] = {}
        self._waiting: deque[Question] = deque()
        self._size_bytes = 0

    def join(self, responder: _Responder) -> None:
        responder.membership = self._broker.responders.add(
            exactly(self.subject), self._ask, self._group, responder.principal
        )
        self._responders[responder] = None
        self.dispatch()

    def leave(self, responder: _Responder) -> bool:
        """Remove a responder, and hand its questions to others; return whether the pool is empty."""
        self._retire(responder)
        self._waiting.extendleft(reversed(responder.held.values()))
        self._size_bytes += sum(map(_size_of, responder.held.values()))
        responder.held.clear()
        self.dispatch()
        return not self._responders

    def settle(self, responder: _Responder, number: int) -> Question | None:
        """Return the question of a number, `None` if the responder does not hold it; another one may come."""
        question = responder.held.pop(number, None)
        self.dispatch()
        return question

    def access_changed(self, responder: _Responder) -> bool:
        """Send questions that were not sent yet to others if a responder has lost the right; return whether it has."""
        if may(responder.principal, Action.SUBSCRIBE, self.subject):
            return False
        self._retire(responder)
        back = responder.give_back()
        self._waiting.extendleft(reversed(back))
        self._size_bytes += sum(map(_size_of, back))
        return True

    def _retire(self, responder: _Responder) -> None:
        """Remove a responder from those that get questions."""
        if responder.membership is not None:
            self._broker.responders.remove(responder.membership)
            responder.membership = None
            del self._responders[responder]

    def _ask(self, question: Question) -> BabelbusError | None:
        if len(self._waiting) >= QUESTIONS_MAX or self._size_bytes >= QUEUE_BYTES_MAX:
            text = f"{len(self._waiting)} requests wait for the responders of {self.subject!r}, no more are taken"
            return TooManyRequestsError(text)
        self._waiting.append(question)
        self._size_bytes += _size_of(question)
        self.dispatch()
        return None

    def dispatch(self) -> None:
        """Send the questions that wait to responders who may have them; without any, to others of the group."""
        waits = self._broker.responders.requests.waits
        while self._waiting:
            granted = [one for one in self._responders if may(one.principal, Action.SUBSCRIBE, self.subject)]
            free = [one for one in granted if len(one.held) < one.window]
            if granted and not free:
                return
            question = self._waiting.popleft()
            self._size_bytes -= _size_of(question)
            if not waits(question.key):  # the time is over, or another group was faster
                continue
            if not free:
                self._broker.responders.pass_on(question, self._group)
                continue
            responder = min(free, key=lambda one: len(one.held))
            responder.deliver(question)
            del self._responders[responder]  # the next turn is another's
            self._responders[responder] = None
            if responder.left == 0:
                self._retire(responder)


def _size_of(question: Question) -> int:
    return len(question.payload or b"")


class RequestRoutes:
    """Requests, and those who answer them."""

    def __init__(self, broker: Broker, clock: Clock) -> None:
        self._broker = broker
        self._clock = clock
        self._pools: dict[tuple[str, str], _Pool] = {}
        self._responders: dict[str, tuple[_Responder, _Pool]] = {}

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (
            ("POST", "/api/request", self._request),
            ("GET", "/api/respond", self._respond),
            ("POST", "/api/responders/{id}/reply", self._reply),
        )

    def access_changed(self) -> None:
        """End the answers of responders who have lost the right; their questions go to others, or are refused."""
        for responder, pool in list(self._responders.values()):
            if pool.access_changed(responder):
                responder.close(str(refusal(responder.principal, Action.SUBSCRIBE, pool.subject)))
        for pool in list(self._pools.values()):
            pool.dispatch()

    def close(self) -> None:
        """Close all answers of responders in good order."""
        for responder, _ in self._responders.values():
            responder.close(STOPS)

    async def _request(self, call: Call) -> web.Response:
        """Send a request, and wait for its reply."""
        body = await read_body(call, RequestBody, BODY_BYTES_MAX)
        principal = call.principal
        event = event_of(body, principal)
        self._check_size(event.subject)
        if event.key is not None:
            raise InvalidEventError("a request has no key")
        deadline = self._clock.monotonic() + body.timeout_seconds
        asked = self._broker.request(event.subject, event.payload, event.headers, deadline, principal)
        try:
            reply = (await asked.wait()).reply
        finally:
            self._broker.responders.requests.abandon(asked)  # only if the requester has disconnected
        assert reply is not None
        return answer(ReplyLine(**content_of(reply.payload, reply.headers)))

    async def _respond(self, call: Call) -> Answer:
        """Deliver questions while the answer is open."""
        subject, group = read_text(call, "subject"), call.query.get("group", GROUP)
        window = min(read_number(call, "window", 1) or 1, WINDOW_MAX)
        count_max = read_number(call, "max", 1)
        check_subject(subject)
        principal = call.principal
        subject = principal.absolute(subject)
        self._check_size(subject)
        if len(self._responders) >= RESPONDERS_MAX:
            raise web.HTTPServiceUnavailable(text=f"{RESPONDERS_MAX} responders are open already, which is the limit")
        holders = (one.principal for one, _ in self._responders.values())
        check_share(principal, holders, RESPONDERS_PER_PRINCIPAL_MAX, "responders")
        pool = self._pools.setdefault((subject, group), _Pool(self._broker, subject, group))
        responder, name = _Responder(window, count_max, principal), secrets.token_hex(16)
        self._responders[name] = responder, pool
        try:
            pool.join(responder)
            response = await call.begin_lines()
            await response.write(encode(ResponderHead(name)) + b"\n")
            while not responder.end:
                line = await responder.take(self._clock, HEARTBEAT_SECONDS)
                await response.write(b"\n" if line is None else encode(line) + b"\n")
            return response
        finally:
            del self._responders[name]
            if pool.leave(responder) and not any(other is pool for _, other in self._responders.values()):
                del self._pools[subject, group]

    async def _reply(self, call: Call) -> web.Response:
        responder, pool = self._find(call)
        body = await read_body(call, ReplyBody, BODY_BYTES_MAX)
        payload = bytes_of(body.payload, body.payload_base64)
        headers = signed(headers_of(body.headers, body.headers_base64 or None), responder.principal)
        question = responder.held.get(body.number)
        if question is None:
            return answer(Replied(False))
        delivered = self._broker.responders.requests.waits(question.key)
        if body.failed:
            self._broker.refuse(question.key, RequestFailedError(f"the responder has failed: {body.failed}"))
        else:
            delivered = self._broker.respond(question.key, Reply(payload, headers))
        pool.settle(responder, body.number)
        return answer(Replied(delivered))

    def _find(self, call: Call) -> tuple[_Responder, _Pool]:
        found = self._responders.get(call.path_values["id"])
        if found is None or not is_caller(call, found[0].principal):
            raise UnknownResponderError("this responder is not connected any more; its questions go to others")
        return found

    def _check_size(self, subject: str) -> None:
        fault = size_fault(subject, self._broker.state.key_bytes_max)
        if fault is not None:
            raise InvalidEventError(f"the subject {subject[:80]!r}... {fault}")
