"""The client of Wörterbuch for programs without an event loop: `client.Client` in a thread of its own.

with BlockingClient("tcp://127.0.0.1:9090") as client:
    client.set("plant/temp", 21.5)
    for event in client.psubscribe("plant/#"):
        print(event.values, event.deleted)
"""

import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any

from babelbus.clients.portal import Portal, Twin, blocking, building, opening
from babelbus.clients.worterbuch.client import Client, Subscription, connect
from babelbus.clients.worterbuch.errors import ConnectionLostError


class BlockingSubscription(Twin[Subscription]):
    """The events of one subscription: iterate over them, and end it with `close`."""

    close = blocking(Subscription.close)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Wait for the next event; raises as `Subscription.__anext__`."""
        try:
            return self._portal.call(self._twin.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None


class BlockingClient(Twin[Client]):
    """`Client` for threads: the same calls and errors, without `await`. Callbacks run in the client's own thread."""

    @building(connect)
    def __init__(self, connecting: Coroutine[Any, Any, Client]) -> None:
        """Connect; the arguments are those of `connect`."""
        portal = Portal("worterbuch client", lambda: ConnectionLostError("the client is closed"))
        portal.open()
        try:
            super().__init__(portal, portal.call(connecting))
        except BaseException:
            portal.close()
            raise

    def __enter__(self) -> "BlockingClient":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Wait for all answers, unless an error is being raised, and disconnect."""
        try:
            if error is None and self._twin.connected:
                self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Disconnect, and end the thread."""
        if self._portal.is_open:
            self._portal.call(self._twin.close())
            self._portal.close()

    @property
    def client_id(self) -> str:
        """The server's name of this client."""
        return self._twin.client_id

    get = blocking(Client.get)
    cget = blocking(Client.cget)
    pget = blocking(Client.pget)
    set = blocking(Client.set)
    cset = blocking(Client.cset)
    publish = blocking(Client.publish)
    delete = blocking(Client.delete)
    pdelete = blocking(Client.pdelete)
    ls = blocking(Client.ls)
    pls = blocking(Client.pls)
    send = blocking(Client.send)
    send_many = blocking(Client.send_many)
    flush = blocking(Client.flush)
    lock = blocking(Client.lock)
    acquire_lock = blocking(Client.acquire_lock)
    release_lock = blocking(Client.release_lock)
    set_last_will = blocking(Client.set_last_will)
    set_grave_goods = blocking(Client.set_grave_goods)
    set_name = blocking(Client.set_name)

    subscribe = opening(Client.subscribe, BlockingSubscription)
    psubscribe = opening(Client.psubscribe, BlockingSubscription)
    subscribe_ls = opening(Client.subscribe_ls, BlockingSubscription)

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Lock a key, as soon as it is free, for the body of a `with`."""
        self.acquire_lock(key)
        try:
            yield
        finally:
            if self._twin.connected:
                self.release_lock(key)
