"""One subscription of a Wörterbuch client: its events, until it is closed or the connection is gone."""

import asyncio
import collections
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from babelbus.clients.worterbuch.codec import LsState, PState, State
from babelbus.clients.worterbuch.errors import ClientError


class Event(msgspec.Struct, frozen=True):
    """An event of a subscription: values by key, or the values of keys that were deleted."""

    values: dict[str, Any] = {}
    deleted: dict[str, Any] = {}


class Subscription:
    """The events of one subscription: iterate over them, or give `subscribe` a callback. End it with `close`.

    `unsubscribe` sends the request to the server, and calls `end`.
    """

    def __init__(
        self,
        unsubscribe: Callable[[int], Awaitable[None]],
        transaction_id: int,
        key: str,
        callback: Callable[[Any], None] | None,
    ) -> None:
        self.transaction_id = transaction_id
        self._unsubscribe = unsubscribe
        self._key = key
        self._callback = callback
        self._events: collections.deque[Any] = collections.deque()
        self._more = asyncio.Event()
        self._error: ClientError | None = None
        self._over = False

    def take(self, message: State | PState | LsState) -> None:
        """Add an event of this subscription."""
        event: Any
        if isinstance(message, LsState):
            event = list(message.children)
        else:
            values = {self._key: message.content} if isinstance(message, State) else message.content
            event = Event(values) if message.deleted is msgspec.UNSET else Event(deleted=values)
        if self._callback is not None:
            self._callback(event)
        else:
            self._events.append(event)
            self._more.set()

    def end(self, error: ClientError | None) -> None:
        """Stop the iteration behind the events received so far, with `error` if there is one."""
        self._over, self._error = True, error
        self._more.set()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        """Wait for the next event; the iteration ends when the subscription was closed.

        Raises:
            ConnectionLostError: the connection is gone, and all that came was given.
        """
        while not self._events:
            if self._over:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._more.clear()
            await self._more.wait()
        return self._events.popleft()

    async def close(self) -> None:
        """Close the subscription; events under way are dropped.

        Raises:
            ClientError: the server refused, or is gone.
        """
        if not self._over:
            await self._unsubscribe(self.transaction_id)
