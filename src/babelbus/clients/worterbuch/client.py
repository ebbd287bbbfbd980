"""A client of Wörterbuch for an event loop: TCP, WebSocket and unix sockets, any server of protocol 1.1 or 0.11.

    async with await connect("tcp://127.0.0.1:9090") as client:
        await client.set("plant/temp", 21.5)
        async for event in await client.psubscribe("plant/#"):
            print(event.values, event.deleted)

Values are those of `json`. Requests of several tasks, and `send`, are on their way together. `blocking` has
the same for threads.
"""

import asyncio
import collections
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from math import inf
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from babelbus.clients.worterbuch.codec import (
    Ack,
    Answer,
    CState,
    Err,
    LsState,
    PState,
    Reply,
    State,
    Welcome,
    encode_message,
)
from babelbus.clients.worterbuch.connection import Connection, dial
from babelbus.clients.worterbuch.errors import (
    ClientError,
    ConnectionLostError,
    RequestError,
    RequestTimeoutError,
    error_of,
)
from babelbus.clients.worterbuch.subscription import Event, Subscription
from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.protocols.worterbuch import messages as m

__all__ = ["Client", "Event", "Subscription", "Versioned", "connect"]

SWITCH_ID = 0

P = ParamSpec("P")
T = TypeVar("T")
_write = msgspec.json.Encoder().encode


class Versioned(msgspec.Struct, frozen=True):
    """A value and its version, 0 if it has none."""

    value: Any
    version: int


async def connect(
    url: str = "tcp://127.0.0.1:9090",
    *,
    token: str | None = None,
    timeout_seconds: float = 10.0,
    request_timeout_seconds: float = 30.0,
    tls: ssl.SSLContext | None = None,
) -> "Client":
    """Connect and wait until requests are taken.

    Args:
        url: `tcp://host:port`, `ws://host:port/path` or `unix:///path`; with TLS `tcps://...` or `wss://...`.
        token: the JWT with our privileges.
        timeout_seconds: most seconds for the whole greeting.
        request_timeout_seconds: how long one request may go without an answer.
        tls: whom to trust, and the certificate to show; without it, the certificates of the system are trusted.

    Raises:
        LocalProtocolError: the address is invalid.
        ConnectionLostError: nothing listens there, or it is no Wörterbuch server.
        UnauthorizedError: the token was refused.
    """
    client = Client(request_timeout_seconds)
    try:
        async with asyncio.timeout(timeout_seconds):
            await client.open(url, token, tls)
    except TimeoutError as error:
        await client.close()
        raise ConnectionLostError(f"{url}: no greeting within {timeout_seconds} s") from error
    except BaseException:
        await client.close()
        raise
    return client


class Client:
    """A connection; `connect` makes it. All calls come from its event loop.

    Its calls raise `RequestError` if refused, `RequestTimeoutError` if not answered, `ConnectionLostError` if cut off.
    """

    def __init__(self, request_timeout_seconds: float = 30.0) -> None:
        self.client_id = ""
        self._timeout_seconds = request_timeout_seconds
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._welcome: asyncio.Future[Welcome] = self._loop.create_future()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._sent: collections.deque[int] = collections.deque()
        self._subscriptions: dict[int, Subscription] = {}
        self._locks: collections.Counter[str] = collections.Counter()  # calls that hold or await each
        self._next_id = 1
        self._texts: list[bytes] = []
        self._gone: ClientError | None = None
        self._failure: RequestError | None = None
        self._room = asyncio.Event()
        self._asked_at = -inf  # loop time of the last question for a sign of life
        self._watch_timer: asyncio.TimerHandle | None = None

    # -- connection --------------------------------------------------------------------------------------------------

    async def open(self, url: str, token: str | None, tls: ssl.SSLContext | None = None) -> None:
        """Connect to a server; see `connect`."""
        self._connection = await dial(url, self._hear, self._lose, tls)
        welcome = await self._welcome
        self.client_id = welcome.client_id
        if (1, 1) in (welcome.info.supported_protocol_versions or ()):
            await self._ask_as(SWITCH_ID, m.ProtocolSwitch(1))
        if token is not None:
            await self._ask_as(SWITCH_ID, m.Authorization(token))
        self._watch()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Wait for all answers, unless an error is being raised, and disconnect."""
        try:
            if error is None and self._gone is None:
                await self.flush()
        finally:
            await self.close()

    async def close(self) -> None:
        """Disconnect; requests without an answer raise `ConnectionLostError`, subscriptions end."""
        connection = self._connection
        if connection is not None and self._gone is None:
            self._hand_over()
            connection.say_goodbye()
            connection.transport.close()
        self._lose(None, closed=True)
        if connection is not None:
            connection.transport.abort()

    @property
    def connected(self) -> bool:
        """Whether requests can be made."""
        return self._connection is not None and self._gone is None

    def _lose(self, error: Exception | None, *, closed: bool = False) -> None:
        if self._gone is not None:
            return
        self._gone = ConnectionLostError(f"the connection is gone: {error or 'closed'}")
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        lost: list[asyncio.Future[Any]] = [self._welcome, *self._waiting.values()]
        for answer in lost:
            if not answer.done():
                answer.set_exception(self._gone)
                answer.exception()  # its waiter may be gone
        self._waiting.clear()
        for subscription in self._subscriptions.values():
            subscription.end(None if closed else self._gone)
        self._subscriptions.clear()
        self._room.set()

    def _watch(self) -> None:
        """Send a silent server a question while answers or events are awaited, and disconnect if it says nothing.

        For a connection whose other end has gone without a word, and for `acquire_lock`, which may wait for long.
        """
        connection = self._connection
        if self._gone is not None or connection is None:
            return
        self._watch_timer = self._loop.call_later(self._timeout_seconds / 4, self._watch)
        now = self._loop.time()
        if connection.heard_at < self._asked_at:
            if now - self._asked_at >= self._timeout_seconds:
                connection.transport.abort()
                self._lose(TimeoutError(f"the server was silent for {now - connection.heard_at:.3g} s"))
        elif now - connection.heard_at >= self._timeout_seconds / 2 and (
            self._waiting or self._sent or self._subscriptions
        ):
            self._asked_at = now
            self._write(m.Get(self._take_id(), f"$SYS/clients/{self.client_id}/protocol"))  # needs no right

    # -- requests ----------------------------------------------------------------------------------------------------

    def _hear(self, message: Reply) -> None:
        if isinstance(message, Welcome):
            if not self._welcome.done():
                self._welcome.set_result(message)
            return
        answer = self._waiting.pop(message.transaction_id, None)
        if answer is not None:
            if not answer.done():
                answer.set_result(message)
            return
        subscription = self._subscriptions.get(message.transaction_id)
        if subscription is not None and isinstance(message, State | PState | LsState):
            subscription.take(message)
        elif self._sent and isinstance(message, Ack | Err) and message.transaction_id == self._sent[0]:
            self._sent.popleft()
            if isinstance(message, Err) and self._failure is None:
                self._failure = error_of(message)
            self._room.set()

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _write(self, message: m.ClientMessage) -> None:
        """Send a message with those of the same turn of the loop.

        Raises:
            LocalProtocolError: it cannot be said.
            ConnectionLostError: the connection is gone.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("a client was called from another event loop than its own; threads use BlockingClient")
        if self._gone is not None:
            raise self._gone
        try:
            text = encode_message(message)
        except UnicodeEncodeError as error:
            raise LocalProtocolError("a text that is not valid Unicode cannot be said in JSON") from error
        if not self._texts:
            self._loop.call_soon(self._hand_over)
        self._texts.append(text)

    def _hand_over(self) -> None:
        if self._texts and self._connection is not None and self._gone is None:
            texts, self._texts = self._texts, []
            self._connection.send(texts)

    async def _ask_as(self, transaction_id: int, message: m.ClientMessage, *, bounded: bool = True) -> Answer:
        """Send a request and wait for its answer, unless `bounded` as long as the server gives signs of life.

        Raises:
            RequestError: the server refused.
            RequestTimeoutError: there was no answer in time.
            ConnectionLostError: the connection is gone.
        """
        self._write(message)
        waiting: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[transaction_id] = waiting
        timer = self._loop.call_later(self._timeout_seconds, self._give_up, waiting, message) if bounded else None
        try:
            answer = await waiting
        finally:
            if timer is not None:
                timer.cancel()
            self._waiting.pop(transaction_id, None)
        if isinstance(answer, Err):
            raise error_of(answer)
        return answer

    def _give_up(self, waiting: "asyncio.Future[Answer]", message: m.ClientMessage) -> None:
        if not waiting.done():
            waiting.set_exception(self._late(m.name_of(type(message))))

    def _gave_up(self, error: BaseException) -> bool:
        """Return whether a request that ended with `error` is still under way, and may be carried out."""
        return self._gone is None and isinstance(error, asyncio.CancelledError | RequestTimeoutError)

    def _late(self, what: str) -> RequestTimeoutError:
        return RequestTimeoutError(f"{what}: no answer within {self._timeout_seconds:g} s; it may be done or not")

    async def _ask(
        self, request: Callable[Concatenate[int, P], m.ClientMessage], *args: P.args, **kwargs: P.kwargs
    ) -> Answer:
        """Send a request under a new number and wait for its answer; raises as `_ask_as`."""
        number = self._take_id()
        return await self._ask_as(number, request(number, *args, **kwargs))

    async def get(self, key: str) -> Any:
        """Return a value.

        Raises:
            NoSuchValueError: the key has none.
        """
        return _expect(State, await self._ask(m.Get, key)).content

    async def cget(self, key: str) -> Versioned:
        """Return a value and its version; raises as `get`."""
        answer = _expect(CState, await self._ask(m.CGet, key))
        return Versioned(answer.value, answer.version)

    async def pget(self, pattern: str) -> dict[str, Any]:
        """Return all keys that match (`?` one element, `#` at the end any number), with their values."""
        return _expect(PState, await self._ask(m.PGet, pattern)).content

    async def set(self, key: str, value: Any) -> None:
        """Set a value.

        Raises:
            VersionedError: the key has a value with a version.
        """
        await self._ask(m.Set, key, _write(value))

    async def cset(self, key: str, value: Any, version: int) -> None:
        """Set a value with the next version if the key has `version`, 0 for none.

        Raises:
            VersionedError: the key has another version.
        """
        await self._ask(m.CSet, key, _write(value), version)

    async def publish(self, key: str, value: Any) -> None:
        """Send a value to the subscribers of a key, and store nothing."""
        await self._ask(m.Publish, key, _write(value))

    async def delete(self, key: str) -> Any:
        """Delete a key and return the value that it had.

        Raises:
            NoSuchValueError: the key had none.
        """
        return _expect(State, await self._ask(m.Delete, key)).content

    async def pdelete(self, pattern: str, *, quiet: bool = False) -> dict[str, Any]:
        """Delete all keys that match; return the values that they had, nothing with `quiet`."""
        return _expect(PState, await self._ask(m.PDelete, pattern, quiet)).content

    async def ls(self, parent: str | None = None) -> list[str]:
        """List the names below a key, or those of the root.

        Raises:
            NoSuchValueError: there is no such node.
        """
        return list(_expect(LsState, await self._ask(m.Ls, parent)).children)

    async def pls(self, pattern: str | None = None) -> list[str]:
        """List the names below all keys that match."""
        return list(_expect(LsState, await self._ask(m.PLs, pattern)).children)

    # -- many at once ------------------------------------------------------------------------------------------------

    async def send(self, key: str, value: Any, *, store: bool = True, in_flight_max: int = 10_000) -> None:
        """Set, or without `store` publish, and wait for no answer but while `in_flight_max` are outstanding.

        `flush` waits for the answers, and raises the first refusal.

        Raises:
            RequestTimeoutError: no answer came in time to make room.
        """
        number = self._take_id()
        text = _write(value)
        self._write(m.Set(number, key, text) if store else m.Publish(number, key, text))
        self._sent.append(number)
        while len(self._sent) >= in_flight_max and self._gone is None:
            await self._next_answer("send")

    async def send_many(
        self, values: Iterable[tuple[str, Any]], *, store: bool = True, in_flight_max: int = 10_000
    ) -> None:
        """Set or publish many values; see `send`."""
        for key, value in values:
            await self.send(key, value, store=store, in_flight_max=in_flight_max)

    async def flush(self) -> None:
        """Wait for all answers.

        Raises:
            RequestError: the first that was refused since the last `flush`.
            RequestTimeoutError: no further answer came for `request_timeout_seconds`.
            ConnectionLostError: the connection is gone, and answers are missing.
        """
        while self._sent and self._gone is None:
            await self._next_answer("flush")
        if self._sent and self._gone is not None:
            raise self._gone
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    async def _next_answer(self, what: str) -> None:
        """Wait for an answer to `send`, or the end of the connection.

        Raises:
            RequestTimeoutError: neither came in time.
        """
        self._room.clear()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await self._room.wait()
        except TimeoutError:
            raise self._late(what) from None

    # -- subscriptions -----------------------------------------------------------------------------------------------

    async def subscribe(
        self,
        key: str,
        callback: Callable[[Event], None] | None = None,
        *,
        unique: bool = False,
        live_only: bool = False,
    ) -> Subscription:
        """Subscribe to a key: to its value, unless `live_only`, and to changes; with `unique` to other values only."""
        return await self._subscribe(key, callback, m.Subscribe, key, unique, live_only)

    async def psubscribe(
        self,
        pattern: str,
        callback: Callable[[Event], None] | None = None,
        *,
        unique: bool = False,
        aggregate_ms: int | None = None,
        live_only: bool = False,
    ) -> Subscription:
        """Subscribe to all keys that match; the first event has their values. `aggregate_ms` collects events."""
        return await self._subscribe(pattern, callback, m.PSubscribe, pattern, unique, aggregate_ms, live_only)

    async def subscribe_ls(
        self, parent: str | None = None, callback: Callable[[list[str]], None] | None = None
    ) -> Subscription:
        """Subscribe to the names below a key; each event has all of them."""
        return await self._subscribe(parent or "", callback, m.SubscribeLs, parent)

    async def _subscribe(
        self,
        key: str,
        callback: Callable[[Any], None] | None,
        request: Callable[Concatenate[int, P], m.ClientMessage],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Subscription:
        number = self._take_id()
        subscription = self._subscriptions[number] = Subscription(self._end_subscription, number, key, callback)
        try:
            await self._ask_as(number, request(number, *args, **kwargs))
        except BaseException as error:
            self._subscriptions.pop(number, None)
            if self._gave_up(error):
                self._write(m.Unsubscribe(number))  # or its events would come for nobody
            raise
        return subscription

    async def _end_subscription(self, number: int) -> None:
        subscription = self._subscriptions.pop(number, None)
        if subscription is not None:
            subscription.end(None)
            await self._ask_as(number, m.Unsubscribe(number))

    # -- locks, last will and grave goods ----------------------------------------------------------------------------

    async def lock(self, key: str) -> None:
        """Lock a key. A call that is given up does not keep the lock.

        Raises:
            KeyLockedError: another client has it.
        """
        await self._take_lock(m.Lock, key)

    async def acquire_lock(self, key: str) -> None:
        """Lock a key as soon as it is free: the longest waiter is next. A call that is given up leaves the queue.

        It waits as long as it takes; `asyncio.timeout` bounds it. A silent server is noticed, and ends the connection.
        """
        await self._take_lock(m.AcquireLock, key)

    async def _take_lock(self, request: Callable[[int, str], m.ClientMessage], key: str) -> None:
        number = self._take_id()
        self._locks[key] += 1
        try:
            await self._ask_as(number, request(number, key), bounded=request is not m.AcquireLock)
        except BaseException as error:
            self._locks[key] -= 1
            # The lock is the connection's: of another call that has or awaits it, it must not be taken.
            if self._locks[key] <= 0:
                del self._locks[key]
                if self._gave_up(error):
                    self._write(m.ReleaseLock(self._take_id(), key))
            raise

    async def release_lock(self, key: str) -> None:
        """Release the lock of a key."""
        self._locks.pop(key, None)
        await self._ask(m.ReleaseLock, key)

    @contextlib.asynccontextmanager
    async def locked(self, key: str) -> AsyncIterator[None]:
        """Lock a key, as soon as it is free, for the body of an `async with`."""
        await self.acquire_lock(key)
        try:
            yield
        finally:
            if self._gone is None:
                await self.release_lock(key)

    async def set_last_will(self, will: dict[str, Any]) -> None:
        """Register values that the server sets when this client is gone."""
        entries = [{"key": key, "value": value} for key, value in will.items()]
        await self.set(f"$SYS/clients/{self.client_id}/lastWill", entries)

    async def set_grave_goods(self, patterns: Iterable[str]) -> None:
        """Register patterns that the server deletes when this client is gone, before the last will."""
        await self.set(f"$SYS/clients/{self.client_id}/graveGoods", list(patterns))

    async def set_name(self, name: str) -> None:
        """Set the name that lists of clients show."""
        await self.set(f"$SYS/clients/{self.client_id}/clientName", name)


def _expect(kind: type[T], answer: Answer) -> T:
    if not isinstance(answer, kind):
        raise RemoteProtocolError(f"{type(answer).__name__} where {kind.__name__} was awaited")
    return answer
