"""What callers over plain HTTP wait for: the answer of a service behind an MQ (docs/specifications/zbus.md, 6.3)."""

import asyncio
from collections import OrderedDict, deque

from babelbus.clock import Clock
from babelbus.core.receipt import Promise
from babelbus.protocols.zbus.messages import GATEWAY_TIMEOUT, Message, text_reply

GIVEN_UP_MAX = 10_000
"""So many calls that nobody waits for any more are remembered for each MQ, so that no service is asked for nothing."""
NO_ANSWER = "no service has answered in time"


class Call:
    """One call. `done` resolves when `reply` is there."""

    __slots__ = ("deadline", "done", "id", "mq", "reply", "source")

    def __init__(self, mq: str, source: str, request_id: str, deadline: float) -> None:
        self.mq = mq
        self.source = source
        self.id = request_id
        self.deadline = deadline
        self.done = Promise()
        self.reply: Message | None = None

    def answer(self, reply: Message) -> None:
        """Return the caller its answer, the first one that comes."""
        if self.reply is None:
            self.reply = reply
            self.done.resolve()


class Calls:
    """All calls of a server: one timer for the one that ends first."""

    def __init__(self, clock: Clock, loop: asyncio.AbstractEventLoop, *, seconds: float, keep: bool) -> None:
        self._clock = clock
        self._loop = loop
        self._seconds = seconds
        self._keep = keep
        self._waiting: deque[Call] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._given_up: dict[str, OrderedDict[tuple[str, str], None]] = {}

    def begin(self, mq: str, source: str, request_id: str) -> Call:
        """Build a call, which is answered with 504 when its time is over."""
        call = Call(mq, source, request_id, self._clock.monotonic() + self._seconds)
        self._waiting.append(call)
        self._arm()
        return call

    def tick(self) -> None:
        """Answer those whose time is over; the timer calls it."""
        now, waiting = self._clock.monotonic(), self._waiting
        while waiting and (waiting[0].reply is not None or waiting[0].deadline <= now):
            call = waiting.popleft()
            if call.reply is None:
                self.give_up(call)
                call.answer(text_reply(call.id, GATEWAY_TIMEOUT, NO_ANSWER))
        self._arm()

    def give_up(self, call: Call) -> None:
        """Nobody waits for a call any more: its message is not handed out, unless such ones are to be kept."""
        if self._keep:
            return
        given_up = self._given_up.setdefault(call.mq, OrderedDict())
        given_up[call.source, call.id] = None
        if len(given_up) > GIVEN_UP_MAX:
            given_up.popitem(last=False)

    def given_up(self, mq: str) -> OrderedDict[tuple[str, str], None] | None:
        """Return source and id of the calls to an MQ that nobody waits for, `None` if there are none."""
        return self._given_up.get(mq)

    def forget(self, mq: str) -> None:
        """An MQ was removed, and its messages with it."""
        self._given_up.pop(mq, None)

    def _arm(self) -> None:
        if self._timer is None and self._waiting:
            delay = max(self._waiting[0].deadline - self._clock.monotonic(), 0.001)
            self._timer = self._loop.call_later(delay, self._time_has_come)

    def _time_has_come(self) -> None:
        self._timer = None
        self.tick()

    def close(self) -> None:
        """The server stops: who still waits is told."""
        if self._timer is not None:
            self._timer.cancel()
        for call in self._waiting:
            call.answer(text_reply(call.id, GATEWAY_TIMEOUT, "the server stops"))
        self._waiting.clear()
