"""Requests and replies over calls: `request` waits for one reply, `respond` answers.

A responder has at most `window` questions without an answer; further ones wait for it here. When its stream ends, all
of them go to another responder of its group.
"""

from collections import deque
from typing import Final

import msgspec

from babelbus.core.access import Action, Narrowing, may, refusal
from babelbus.core.request import Question, Reply, Request, RequestFailedError, TooManyRequestsError
from babelbus.core.subject import PathPattern, text_of
from babelbus.errors import BabelbusError
from babelbus.protocols.jebp.call_messages import Answer, Ask, Asked, Respond
from babelbus.protocols.jebp.calls.call import Call, Method, Stream
from babelbus.protocols.jebp.calls.errors import CallRefusedError
from babelbus.protocols.jebp.calls.subjects import check_subject, read_pattern, signed
from babelbus.protocols.jebp.messages import Data

WINDOW_MAX: Final = 10_000
TIMEOUT_SECONDS_MAX: Final = 3_600.0
QUESTIONS_MAX: Final = 10_000
QUEUE_BYTES_MAX: Final = 64 * 2**20
"""Most questions, and bytes of their payloads, that wait for one responder; only the last may pass."""
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_answer: Final = msgspec.msgpack.Decoder(Answer).decode


class Requester(Stream):
    """A request that waits for its reply; the client may give it up."""

    def __init__(self, call: Call, request: Ask) -> None:
        if not 0 < request.timeout_seconds <= TIMEOUT_SECONDS_MAX:
            raise CallRefusedError("bad_argument", f"a request waits for 0 to {TIMEOUT_SECONDS_MAX:g} seconds")
        broker, principal = call.broker, call.principal
        subject = principal.absolute(request.subject)
        check_subject(subject, broker.state.key_bytes_max)
        headers = signed(request.headers, principal)
        deadline = broker.responders.deadline(request.timeout_seconds)
        self._call = call
        self._request = broker.request(subject, request.payload, headers, deadline, principal)
        self._request.when_done(self._done)

    def _done(self, request: Request[Reply]) -> None:
        if request.error is not None:
            self._call.fail(request.error)
            return
        reply = request.reply
        assert reply is not None
        self._call.end((reply.payload, reply.headers))

    def close(self, *, lost: bool) -> None:
        """End the request, unless it is answered."""
        self._call.broker.responders.requests.abandon(self._request)


class Responder(Stream):
    """A responder of one stream."""

    def __init__(self, call: Call, request: Respond) -> None:
        if not 1 <= request.window <= WINDOW_MAX:
            raise CallRefusedError("bad_argument", f"a window of {request.window} questions, 1 to {WINDOW_MAX}")
        self._call = call
        self._window = request.window
        self._group = request.group
        self._held: dict[int, Question] = {}
        self._waiting: deque[Question] = deque()
        self._waiting_bytes = 0
        self._number = 0
        pattern = call.principal.absolute(request.pattern)
        self._pattern: PathPattern = read_pattern(pattern, call.broker.state.key_bytes_max)
        self._membership = call.broker.responders.add(
            self._pattern, self._ask, group=request.group, principal=call.principal
        )
        call.send(_encode(None))

    def _ask(self, question: Question) -> BabelbusError | None:
        if not may(self._call.principal, Action.SUBSCRIBE, question.subject):
            return refusal(self._call.principal, Action.SUBSCRIBE, question.subject)
        if len(self._waiting) >= QUESTIONS_MAX or self._waiting_bytes >= QUEUE_BYTES_MAX:
            text = f"{len(self._waiting)} requests wait for a responder of {question.subject!r}, no more are taken"
            return TooManyRequestsError(text)
        self._waiting.append(question)
        self._waiting_bytes += len(question.payload or b"")
        self._drain()
        return None

    def _drain(self) -> None:
        responders = self._call.broker.responders
        while self._waiting and len(self._held) < self._window and not self._call.full:
            question = self._waiting.popleft()
            self._waiting_bytes -= len(question.payload or b"")
            if not responders.requests.waits(question.key):  # the time is over, or another group was faster
                continue
            self._number = number = (self._number + 1) & 0xFFFFFFFF
            subject = self._call.principal.relative(question.subject)
            asked = Asked(number, subject, question.payload, question.headers, responders.seconds_left(question))
            body = _encode(asked)
            if len(body) > self._call.body_bytes_max:
                error = RequestFailedError(f"the request of {len(body)} bytes is over the responder's frame limit")
                self._call.broker.decline(question.key, error)  # another group may still reply
                continue
            self._held[number] = question
            self._call.send(body)

    def receive(self, body: Data) -> None:
        """Handle an answer."""
        answer = _decode_answer(body)
        headers = signed(answer.headers, self._call.principal)
        question = self._held.pop(answer.number, None)
        if question is None:
            return
        if answer.failed:
            error = RequestFailedError(f"the responder has failed: {answer.failed}")
            self._call.broker.refuse(question.key, error)
        else:
            self._call.broker.respond(question.key, Reply(answer.payload, headers))
        self._drain()

    def resume(self) -> None:
        """Resume sending."""
        self._drain()

    def access_changed(self) -> None:
        """Update the rights: questions that wait go to others if the client may not see them any more.

        The stream ends when the client may answer nothing of the pattern.
        """
        principal, responders = self._call.principal, self._call.broker.responders
        self._membership.principal = principal
        if self._membership.narrowing is Narrowing.NONE:
            self._call.fail(refusal(principal, Action.SUBSCRIBE, text_of(self._pattern)))
            return
        waiting, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
        for question in waiting:
            if may(principal, Action.SUBSCRIBE, question.subject):
                self._waiting.append(question)
                self._waiting_bytes += len(question.payload or b"")
            else:
                responders.pass_on(question, self._group)

    def close(self, *, lost: bool) -> None:
        """End the membership, and pass its questions on."""
        responders = self._call.broker.responders
        responders.remove(self._membership)
        questions = [*self._held.values(), *self._waiting]
        self._held.clear()
        self._waiting.clear()
        for question in questions:
            responders.pass_on(question, self._group)


METHODS: Final = {"request": Method(Ask, Requester), "respond": Method(Respond, Responder)}
