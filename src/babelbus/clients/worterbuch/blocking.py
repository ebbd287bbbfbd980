"""The client of Wörterbuch for programs without an event loop: `client.Client` in a thread of its own.

with BlockingClient("tcp://127.0.0.1:9090") as client:
    client.set("plant/temp", 21.5)
    for event in client.psubscribe("plant/#"):
        print(event.values, event.deleted)
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from babelbus.clients.worterbuch.client import Client, Event, Subscription, Versioned, connect
from babelbus.clients.worterbuch.errors import ConnectionLostError

T = TypeVar("T")


class BlockingSubscription:
    """The events of one subscription: iterate over them, and end it with `close`."""

    def __init__(self, run: Callable[[Coroutine[Any, Any, Any]], Any], subscription: Subscription) -> None:
        self._run = run
        self._subscription = subscription

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Wait for the next event; raises as `Subscription.__anext__`."""
        try:
            return self._run(self._subscription.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """End the subscription; raises as `Subscription.close`."""
        self._run(self._subscription.close())


class BlockingClient:
    """`Client` for threads: the same calls and errors, without `await`. Callbacks run in the client's own thread."""

    def __init__(
        self, url: str = "tcp://127.0.0.1:9090", *, token: str | None = None, timeout_seconds: float = 10.0
    ) -> None:
        """Connect; see `connect`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="worterbuch client", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._client: Client = self._run(connect(url, token=token, timeout_seconds=timeout_seconds))
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> "BlockingClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the answers to what was sent, unless an error is on its way already, and disconnect."""
        try:
            if error is None and self._client.connected:
                self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Disconnect, and end the thread."""
        if not self._closed:
            self._run(self._client.close())
            self._stop()

    def _stop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            coroutine.close()
            raise ConnectionLostError("the client is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    @property
    def client_id(self) -> str:
        """What the server calls us."""
        return self._client.client_id

    def get(self, key: str) -> Any:
        """Return a value; see `Client.get`."""
        return self._run(self._client.get(key))

    def cget(self, key: str) -> Versioned:
        """Return a value and its version; see `Client.cget`."""
        return self._run(self._client.cget(key))

    def pget(self, pattern: str) -> dict[str, Any]:
        """Return all keys that match, with their values."""
        return self._run(self._client.pget(pattern))

    def set(self, key: str, value: Any) -> None:
        """Store a value; see `Client.set`."""
        self._run(self._client.set(key, value))

    def cset(self, key: str, value: Any, version: int) -> None:
        """Store a value if the key has a version; see `Client.cset`."""
        self._run(self._client.cset(key, value, version))

    def publish(self, key: str, value: Any) -> None:
        """Tell the subscribers of a key, and store nothing."""
        self._run(self._client.publish(key, value))

    def delete(self, key: str) -> Any:
        """Delete a key and return the value that it had; see `Client.delete`."""
        return self._run(self._client.delete(key))

    def pdelete(self, pattern: str, *, quiet: bool = False) -> dict[str, Any]:
        """Delete all keys that match; see `Client.pdelete`."""
        return self._run(self._client.pdelete(pattern, quiet=quiet))

    def ls(self, parent: str | None = None) -> list[str]:
        """List the names below a key; see `Client.ls`."""
        return self._run(self._client.ls(parent))

    def pls(self, pattern: str | None = None) -> list[str]:
        """List the names below all keys that match."""
        return self._run(self._client.pls(pattern))

    def send(self, key: str, value: Any, *, store: bool = True, in_flight_max: int = 10_000) -> None:
        """Set or publish without waiting for the answer; see `Client.send`."""
        self._run(self._client.send(key, value, store=store, in_flight_max=in_flight_max))

    def send_many(self, values: Iterable[tuple[str, Any]], *, store: bool = True, in_flight_max: int = 10_000) -> None:
        """Do the same for many, at the cost of one change of threads."""

        async def send_all() -> None:
            for key, value in values:
                await self._client.send(key, value, store=store, in_flight_max=in_flight_max)

        self._run(send_all())

    def flush(self) -> None:
        """Wait for the answers to what was sent; see `Client.flush`."""
        self._run(self._client.flush())

    def subscribe(
        self,
        key: str,
        callback: Callable[[Event], None] | None = None,
        *,
        unique: bool = False,
        live_only: bool = False,
    ) -> BlockingSubscription:
        """Hear of a key; see `Client.subscribe`."""
        made = self._run(self._client.subscribe(key, callback, unique=unique, live_only=live_only))
        return BlockingSubscription(self._run, made)

    def psubscribe(
        self,
        pattern: str,
        callback: Callable[[Event], None] | None = None,
        *,
        unique: bool = False,
        aggregate_ms: int | None = None,
        live_only: bool = False,
    ) -> BlockingSubscription:
        """Hear of all keys that match; see `Client.psubscribe`."""
        made = self._run(
            self._client.psubscribe(pattern, callback, unique=unique, aggregate_ms=aggregate_ms, live_only=live_only)
        )
        return BlockingSubscription(self._run, made)

    def subscribe_ls(
        self, parent: str | None = None, callback: Callable[[list[str]], None] | None = None
    ) -> BlockingSubscription:
        """Hear of the names below a key; see `Client.subscribe_ls`."""
        return BlockingSubscription(self._run, self._run(self._client.subscribe_ls(parent, callback)))

    def lock(self, key: str) -> None:
        """Lock a key; see `Client.lock`."""
        self._run(self._client.lock(key))

    def acquire_lock(self, key: str) -> None:
        """Lock a key as soon as it is free."""
        self._run(self._client.acquire_lock(key))

    def release_lock(self, key: str) -> None:
        """Unlock a key."""
        self._run(self._client.release_lock(key))

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Hold a lock, as soon as it is free, for the body of a `with`."""
        self.acquire_lock(key)
        try:
            yield
        finally:
            if self._client.connected:
                self.release_lock(key)

    def set_last_will(self, will: dict[str, Any]) -> None:
        """Let the server set these when we are gone."""
        self._run(self._client.set_last_will(will))

    def set_grave_goods(self, patterns: Iterable[str]) -> None:
        """Let the server delete these when we are gone, before the last will."""
        self._run(self._client.set_grave_goods(patterns))

    def set_name(self, name: str) -> None:
        """Show a name to who looks at the clients."""
        self._run(self._client.set_name(name))
