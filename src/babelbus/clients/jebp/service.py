"""Programs that run for weeks: handlers of groups and requests, and their life from start to SIGTERM.

    @client.subscriber("orders", group="billing", concurrency=8)
    async def bill(message: Message) -> None:
        ...

    asyncio.run(client.run())

A handler that returns acks its message; one that raises nacks it with the error as the reason, and the group delivers
it again after its back-off. Messages of one key are handled one after the other, whatever the concurrency.
"""

import asyncio
import contextlib
import logging
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from babelbus.clients.jebp.consumer import Consumer
from babelbus.clients.jebp.errors import TEMPORARY_ERRORS
from babelbus.clients.jebp.messages import EXTEND_SECONDS_MAX, Message
from babelbus.clients.jebp.respond import Question, Responder
from babelbus.protocols.jebp.call_messages import Reply

log = logging.getLogger(__name__)

Handler = Callable[[Message], Awaitable[object]]
Answerer = Callable[[Question], Awaitable["bytes | Reply | None"]]
REASON_LENGTH_MAX: Final = 500
PAUSE_SECONDS_MIN: Final = 0.5
PAUSE_SECONDS_MAX: Final = 30.0
Trace = Callable[[str, str, Message | Question], contextlib.AbstractContextManager[None]]


class Service(ABC):
    """One handler: `run` works until `stop`."""

    name: str

    def __init__(self, concurrency: int, timeout: float | None, trace: Trace) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency {concurrency}, at least 1")
        self._stopping = asyncio.Event()
        self._timeout = timeout
        self._trace = trace
        self._free = asyncio.Semaphore(concurrency)
        self._reader: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run the handler until `stop`; temporary troubles of the server are waited out.

        Raises:
            ClientError: it cannot go on.
        """
        loop, pause = asyncio.get_running_loop(), PAUSE_SECONDS_MIN
        while not self._stopping.is_set():
            begun = loop.time()
            self._reader = loop.create_task(self._read())
            try:
                await self._reader
            except asyncio.CancelledError:
                if not self._stopping.is_set():
                    raise
            except TEMPORARY_ERRORS as error:
                if loop.time() - begun > PAUSE_SECONDS_MAX:  # it has worked meanwhile: this is another trouble
                    pause = PAUSE_SECONDS_MIN
                log.warning("%s: %s; trying again in %g s", self.name, error, pause)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause)
                pause = min(2 * pause, PAUSE_SECONDS_MAX)

    @abstractmethod
    async def _read(self) -> None:
        """Start a handler for each message."""

    @abstractmethod
    async def _leave(self) -> None:
        """Return what was not handled to the server."""

    async def stop(self, seconds: float) -> None:
        """Stop to take more, and give running handlers this long to end; then they are cancelled."""
        self._stopping.set()
        if self._reader is not None:
            self._reader.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=seconds)
            for task in late:
                task.cancel()
            if late:
                log.warning("%s: %d handlers did not end within %g s and were cancelled", self.name, len(late), seconds)
                await asyncio.wait(late)
        await self._leave()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class SubscriberService(Service):
    """Handles the messages of a group."""

    def __init__(
        self, consumer: Consumer, handler: Handler, concurrency: int, timeout: float | None, trace: Trace
    ) -> None:
        super().__init__(concurrency, timeout, trace)
        self.name = f"subscriber {consumer.topic!r}, group {consumer.group!r}"
        self._consumer = consumer
        self._handler = handler
        self._queues: dict[tuple[int, bytes], deque[Message]] = {}
        """By partition and key: what waits behind the message that is handled."""
        self._running: dict[int, Message] = {}
        self._extending: asyncio.TimerHandle | None = None

    async def _read(self) -> None:
        await self._consumer.join()
        self._extend()
        try:
            async for message in self._consumer:
                key = message.key
                if key is not None and self._consumer.order == "key":
                    place = (message.partition, key)
                    queue = self._queues.get(place)
                    if queue is not None:
                        queue.append(message)
                        continue
                    self._queues[place] = deque()
                await self._free.acquire()
                self._start(self._handle_all(message))
        finally:
            if self._extending is not None:
                self._extending.cancel()

    async def _handle_all(self, message: Message) -> None:
        """Handle a message, and those of its key that wait behind it."""
        place = (message.partition, message.key or b"")
        queue = self._queues.get(place) if message.key is not None else None
        try:
            await self._handle(message)
            while queue:
                await self._handle(queue.popleft())
        finally:
            if queue is not None:
                self._queues.pop(place, None)
            self._free.release()

    async def _handle(self, message: Message) -> None:
        if not message.held:  # its connection was lost while it waited: it is delivered again
            return
        self._running[id(message)] = message
        try:
            with self._trace(self._consumer.topic, "process", message):
                async with asyncio.timeout(self._timeout):
                    await self._handler(message)
        except asyncio.CancelledError:
            message.nack(delay=0.0, reason="the handler was cancelled")
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:REASON_LENGTH_MAX]
            log.warning("%s: partition %d offset %d, attempt %d: %s", self.name, message.partition, message.offset,
                        message.attempt, reason, exc_info=True)  # fmt: skip
            message.nack(reason=reason)
        else:
            message.ack()
        finally:
            del self._running[id(message)]

    def _extend(self) -> None:
        """Send extensions of all messages that are being handled, or wait behind one of their key."""
        for message in self._running.values():
            message.extend()
        for queue in self._queues.values():
            for message in queue:
                message.extend()
        seconds = min(self._consumer.ack_seconds / 3, EXTEND_SECONDS_MAX)
        self._extending = asyncio.get_running_loop().call_later(seconds, self._extend)

    async def stop(self, seconds: float) -> None:
        """Stop to take more, and give running handlers this long to end; then they are cancelled."""
        self._consumer.set_window(0)
        for queue in self._queues.values():
            queue.clear()  # not begun: they go back as if they had not been delivered
        await super().stop(seconds)

    async def _leave(self) -> None:
        await self._consumer.leave()


class ResponderService(Service):
    """Answers the questions of a pattern."""

    def __init__(
        self, responder: Responder, handler: Answerer, concurrency: int, timeout: float | None, trace: Trace
    ) -> None:
        super().__init__(concurrency, timeout, trace)
        self.name = f"responder {responder.pattern!r}"
        self._responder = responder
        self._handler = handler

    async def _read(self) -> None:
        async for question in self._responder:
            await self._free.acquire()
            self._start(self._handle(question))

    async def _handle(self, question: Question) -> None:
        seconds = question.timeout_seconds if self._timeout is None else min(question.timeout_seconds, self._timeout)
        try:
            with self._trace(question.subject, "respond", question):
                async with asyncio.timeout(seconds):
                    answer = await self._handler(question)
        except asyncio.CancelledError:
            question.fail("the responder stops")
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:REASON_LENGTH_MAX]
            log.warning("%s: %s", self.name, reason, exc_info=True)
            question.fail(reason)
        else:
            if isinstance(answer, Reply):
                question.reply(answer.payload, headers=answer.headers)
            else:
                question.reply(answer)
        finally:
            self._free.release()

    async def _leave(self) -> None:
        await self._responder.close()


async def run_services(services: list[Service], asked: asyncio.Event, *, stop_seconds: float, signals: bool) -> None:
    """Run services until `asked` is set or a signal sets it, or one of them cannot go on; then stop all in order.

    Raises:
        ClientError: why one of them could not go on.
    """
    loop = asyncio.get_running_loop()
    caught = [one for one in (signal.SIGTERM, signal.SIGINT) if signals and _catches(loop, one, asked)]
    tasks = [loop.create_task(one.run()) for one in services]
    waiter = loop.create_task(asked.wait())
    try:
        await asyncio.wait([*tasks, waiter], return_when=asyncio.FIRST_COMPLETED)
    finally:
        log.info("stopping %d services", len(services))
        waiter.cancel()
        await asyncio.gather(*(one.stop(stop_seconds) for one in services), return_exceptions=True)
        for one in caught:
            loop.remove_signal_handler(one)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [one for one in results if isinstance(one, BaseException)]
    if errors:
        raise errors[0]


def _catches(loop: asyncio.AbstractEventLoop, number: int, asked: asyncio.Event) -> bool:
    try:
        loop.add_signal_handler(number, asked.set)
    except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or Windows
        return False
    return True
