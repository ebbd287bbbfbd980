"""Requests that wait for one reply: absolute deadlines, no responders told at once, late replies counted.

A request is known by its source and the id that the source gave it; equal ones of a source are answered in their order.
The deadline is absolute (`Clock.monotonic`), so that a request that is passed on keeps it.
"""

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar, cast

import msgspec

from babelbus.clock import Clock
from babelbus.core.access import NOBODY, Action, Identity, check_subscription, may, refusal
from babelbus.core.quotas import QuotaExceededError, Quotas
from babelbus.core.receipt import Promise
from babelbus.core.router import Router, Subscription
from babelbus.core.subject import Pattern, text_of
from babelbus.errors import BabelbusError
from babelbus.metrics import Metrics
from babelbus.records.record import Headers

IN_FLIGHT_MAX = 100_000
ABANDONED_MAX = 10_000
"""So many requests to a subject that nobody waits for any more are remembered, so that no responder works in vain."""

STOPS = "the server stops"
"""Why a request ends that nobody can answer any more."""

R = TypeVar("R")
Key = tuple[str, str]
"""Source and id of a request."""


class NoRespondersError(BabelbusError):
    """Nobody answers requests to this subject now."""


class RequestTimeoutError(BabelbusError):
    """The deadline of a request has passed without a reply."""


class RequestFailedError(BabelbusError):
    """A responder has tried to answer and says that it cannot."""


class RequestAbandonedError(BabelbusError):
    """The requester is gone, or the server stops."""


class TooManyRequestsError(BabelbusError):
    """So many requests wait for a reply that no more are taken."""


class Request(Promise, Generic[R]):
    """A request; it is done when `reply` is there, or with the error that says why there is no reply."""

    __slots__ = ("asked", "deadline", "key", "reply", "subject")

    def __init__(self, key: Key = ("", ""), subject: str = "", deadline: float = 0.0) -> None:
        super().__init__()
        self.key = key
        self.subject = subject
        self.deadline = deadline
        self.asked = 1
        """How many of those who were asked may still reply."""
        self.reply: R | None = None


class Requests(Generic[R]):
    """The requests that wait for replies of one kind. All calls come from the event loop; one timer serves all."""

    def __init__(
        self, clock: Clock, loop: asyncio.AbstractEventLoop, metrics: Metrics, in_flight_max: int = IN_FLIGHT_MAX
    ) -> None:
        self._clock = clock
        self._loop = loop
        self._metrics = metrics
        self._in_flight_max = in_flight_max
        metrics.requests_in_flight_max.set(in_flight_max)
        self._waiting: dict[Key, deque[Request[R]]] = {}
        self._deadlines: list[tuple[float, int, Request[R]]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._abandoned: dict[str, OrderedDict[Key, None]] = {}
        self._idle: asyncio.Future[None] | None = None
        """Done when no request waits, while somebody waits for that."""
        self._closed = False
        self.in_flight = 0
        self.keep_expired = False
        """Whether a request is passed on to a responder although its requester has stopped waiting."""

    def begin(self, subject: str, key: Key, deadline: float) -> Request[R]:
        """Return a request that waits for its reply; it fails at once if too many wait already, or the server stops."""
        request: Request[R] = Request(key, subject, deadline)
        if self._closed:
            request.resolve(RequestAbandonedError(STOPS))
            return request
        if self.in_flight >= self._in_flight_max:
            request.resolve(TooManyRequestsError(f"{self.in_flight} requests wait for a reply, the limit"))
            return request
        self.in_flight += 1
        self._metrics.requests_in_flight.inc()
        self._waiting.setdefault(key, deque()).append(request)
        heappush(self._deadlines, (deadline, next(self._numbers), request))
        self._arm()
        return request

    def respond(self, key: Key, reply: R) -> bool:
        """Deliver the first reply of a request; `False`: nobody waits for the reply, which is counted."""
        waiting = self._waiting.get(key)
        if not waiting:
            self._metrics.requests_late_replies_total.inc()
            return False
        request = waiting[0]
        request.reply = reply
        self._end(request, None)
        return True

    def waits(self, key: Key) -> bool:
        """Return whether somebody waits for the reply of a request."""
        return key in self._waiting

    def when_done(self, key: Key, callback: Callable[[Request[R]], None]) -> None:
        """Call back when the request is done that somebody waits for."""
        self._waiting[key][0].when_done(callback)

    def refuse(self, key: Key, error: BabelbusError) -> None:
        """End a request with the error of its responder, instead of its first reply."""
        if key in self._waiting:
            self._end(self._waiting[key][0], error)

    def decline(self, key: Key, error: BabelbusError) -> None:
        """Record that one of those who were asked will not reply; the last one ends the request with the error."""
        if key in self._waiting:
            request = self._waiting[key][0]
            request.asked -= 1
            if request.asked <= 0:
                self._end(request, error)

    def fail(self, request: Request[R], error: BabelbusError) -> None:
        """End a request that could not be passed on."""
        if not request.done:
            self._end(request, error)

    def abandon(self, request: Request[R], error: BabelbusError | None = None) -> None:
        """End a request for whose reply nobody waits any more; `abandoned` names it if it has a subject."""
        if request.done:
            return
        if request.subject and not self.keep_expired:
            abandoned = self._abandoned.setdefault(request.subject, OrderedDict())
            abandoned[request.key] = None
            if len(abandoned) > ABANDONED_MAX:
                abandoned.popitem(last=False)
        self._end(request, error or RequestAbandonedError("the requester is gone"))

    def abandoned(self, subject: str) -> OrderedDict[Key, None] | None:
        """Return the keys of requests to a subject that nobody waits for, `None` if there are none."""
        return self._abandoned.get(subject)

    def forget(self, subject: str) -> None:
        """Remove the abandoned requests to a subject: their messages are gone."""
        self._abandoned.pop(subject, None)

    def tick(self) -> None:
        """End the requests whose deadline has passed; the timer calls it."""
        now = self._clock.monotonic()
        while self._deadlines and (self._deadlines[0][2].done or self._deadlines[0][0] <= now):
            self.abandon(heappop(self._deadlines)[2], RequestTimeoutError("no reply has come in time"))
        self._arm()

    async def settle(self, seconds: float) -> None:
        """Wait until no request waits for its reply, at most for some seconds."""
        if self.in_flight:
            idle = self._idle = self._loop.create_future()
            await asyncio.wait([idle], timeout=seconds)

    def close(self) -> None:
        """End all requests, and refuse further ones: the server stops."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for _, _, request in self._deadlines:
            self.fail(request, RequestAbandonedError(STOPS))
        self._deadlines.clear()

    def _end(self, request: Request[R], error: BabelbusError | None) -> None:
        waiting = self._waiting[request.key]
        waiting.remove(request)
        if not waiting:
            del self._waiting[request.key]
        self.in_flight -= 1
        self._metrics.requests_in_flight.dec()
        if not self.in_flight and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        if len(self._deadlines) > 64 + 2 * self.in_flight:  # those that are done must not wait for their deadline
            self._deadlines = [one for one in self._deadlines if not one[2].done and one[2] is not request]
            heapify(self._deadlines)
        request.resolve(error)

    def _arm(self) -> None:
        if not self._deadlines:
            return
        deadline = self._deadlines[0][0]
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_later(max(deadline - self._clock.monotonic(), 0.001), self._time_has_come)

    def _time_has_come(self) -> None:
        self._timer = None
        self.tick()


class Reply(msgspec.Struct, frozen=True, gc=False):
    """The answer of a responder."""

    payload: bytes | None
    headers: Headers = ()


class Question(msgspec.Struct, frozen=True, gc=False):
    """A request as a responder gets it; `key` is what `Broker.respond` asks for."""

    key: Key
    subject: str
    payload: bytes | None
    headers: Headers
    deadline: float
    principal: Identity


Answerer = Callable[[Question], BabelbusError | None]
"""Takes a question; it must not block, and answers whenever it likes. Returns why it did not take the question."""


class _Responder(msgspec.Struct, frozen=True):
    group: str
    answerer: Answerer


class Responders:
    """Requests of every protocol to every other: subjects that somebody answers.

    Responders of one group share the questions, each of which goes to one of them in turn; several groups are all
    asked, and the first reply counts.
    """

    def __init__(self, clock: Clock, loop: asyncio.AbstractEventLoop, metrics: Metrics, quotas: Quotas) -> None:
        self.requests: Requests[Reply] = Requests(clock, loop, metrics)
        self._clock = clock
        self._quotas = quotas
        self.whole_patterns = False
        """Whether a responder needs the right to all of its pattern, instead of getting a part."""
        self.requests.keep_expired = True  # a question is passed on at once: no responder looks at abandoned ones
        self._router = Router()
        self._numbers = itertools.count()

    def add(
        self,
        pattern: Pattern,
        answerer: Answerer,
        group: str = "",
        principal: Identity = NOBODY,
        *,
        counted: bool = True,
    ) -> Subscription:
        """Register a responder for the subjects of a pattern; without `counted`, something else counts in the quota.

        Raises:
            QuotaExceededError: the principal has as many subscriptions as it may.
            AccessRefusedError: the principal may subscribe to nothing of the pattern, or not to all of it where that
                is needed.
        """
        check_subscription(principal, pattern, text_of(pattern), whole=self.whole_patterns)
        quota = self._quotas.take_for(principal, "subscriptions") if counted else None
        responder = self._router.add(pattern, lambda _: None, owner=_Responder(group, answerer), principal=principal)
        responder.quota = quota
        return responder

    def access_changed(self) -> None:
        """Find the responders anew: the table of access has changed."""
        self._router.forget_all()

    def remove(self, responder: Subscription) -> None:
        """End what `add` began."""
        self._router.remove(responder)

    def deadline(self, seconds: float) -> float:
        """Return the deadline of a request that waits so long from now on."""
        return self._clock.monotonic() + seconds

    def seconds_left(self, question: Question) -> float:
        """Return how long the requester waits for the reply from now on."""
        return max(question.deadline - self._clock.monotonic(), 0.0)

    def pass_on(self, question: Question, group: str) -> None:
        """Send a question whose responder has left to others of the group; if none takes it, the group declines."""
        owners = [cast("_Responder", one.owner) for one in self._router.find(question.subject)]
        others = [one.answerer for one in owners if one.group == group]
        if not others:
            self.decline(question.key, f"the responders of {question.subject!r} have gone")
            return
        self._offer(question, others, next(self._numbers))

    def decline(self, key: Key, reason: str) -> None:
        """Record that a group will not reply to a question; if no other group may, the requester is told."""
        self.requests.decline(key, NoRespondersError(reason))

    def answers(self, subject: str) -> bool:
        """Return whether somebody answers requests to a subject."""
        return bool(self._router.find(subject))

    def request(
        self, subject: str, payload: bytes | None, headers: Headers, deadline: float, principal: Identity
    ) -> Request[Reply]:
        """Send a request to a responder of the subject; every failure is the error of the request.

        A request is a publication: it needs that right.
        """
        if not may(principal, Action.PUBLISH, subject):
            return Request.refused(refusal(principal, Action.PUBLISH, subject))
        groups: dict[str, list[Answerer]] = {}
        for subscription in self._router.find(subject):
            responder = cast("_Responder", subscription.owner)
            groups.setdefault(responder.group, []).append(responder.answerer)
        if not groups:
            return Request.refused(NoRespondersError(f"nobody answers requests to {subject!r}"))
        try:
            quota = self._quotas.take_for(principal, "requests") if self._quotas.active else None
        except QuotaExceededError as error:
            return Request.refused(error)
        number = next(self._numbers)
        key = (principal.source, str(number))
        request = self.requests.begin(subject, key, deadline)
        if quota is not None:
            request.when_done(lambda _: quota.give("requests"))
        if not request.done:
            request.asked = len(groups)
            question = Question(key, subject, payload, headers, deadline, principal)
            for answerers in groups.values():
                self._offer(question, answerers, number)
        return request

    def _offer(self, question: Question, answerers: Sequence[Answerer], first: int) -> None:
        """Send a question to one of a group after the other, from a number on, until one takes the question."""
        if not self.requests.waits(question.key):  # the time is over, or another group was faster
            return
        error: BabelbusError | None = None
        for turn in range(len(answerers)):
            error = answerers[(first + turn) % len(answerers)](question)
            if error is None:
                return
        assert error is not None
        self.requests.decline(question.key, error)


def reads_too_slowly(question: Question) -> NoRespondersError:
    """Return why a responder with no room for a question does not take the question."""
    return NoRespondersError(f"the responders of {question.subject!r} read too slowly")
