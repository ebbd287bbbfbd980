"""Keeps a client connected: the first connection, a new one whenever it is lost, and its waiting requests."""

import asyncio
import contextlib
import random
from collections.abc import Callable

from babelbus.clients.jebp.connection import Link, connect
from babelbus.clients.jebp.errors import (
    ClientClosedError,
    ClientError,
    ConnectionLostError,
    RequestTimeoutError,
    UntrustedServerError,
    copy_error,
)
from babelbus.clients.jebp.producer import Producer
from babelbus.protocols.jebp.handshake import TIMEOUT_SECONDS
from babelbus.protocols.jebp.identity import Identity

RECONNECT_SECONDS_MIN = 0.05
_WATCH_SECONDS_MAX = 1.0


class Keeper:
    """The connection of one client, and the task that opens it again.

    Attributes:
        link: the connection, `None` without a connection.
        fingerprint: of the server that is trusted; after the first connection always the one that answered there.
        dead: why there will be no connection any more.
        beginnings: called with each new connection, before waiting requests go out.
    """

    def __init__(
        self,
        address: str,
        identity: Identity,
        producer: Producer,
        *,
        fingerprint: str | None,
        bare_certificates: bool,
        timeout_seconds: float,
        reconnect: bool,
        reconnect_seconds_max: float,
        on_connection: Callable[[ClientError | None], None] | None = None,
    ) -> None:
        self.link: Link | None = None
        self.fingerprint = fingerprint
        self.dead: ClientError | None = None
        self.beginnings: list[Callable[[Link], None]] = []
        self._address = address
        self._identity = identity
        self._producer = producer
        self._bare_certificates = bare_certificates
        self._timeout_seconds = timeout_seconds
        self._reconnect = reconnect
        self._reconnect_seconds_max = reconnect_seconds_max
        self._on_connection = on_connection
        self._lost: ClientError | None = None  # why there is no connection now
        self._entered = False
        self._opening: asyncio.Timeout | None = None
        self._opened = asyncio.Event()  # or failed to
        self._waiting: dict[asyncio.Future[None], None] = {}  # in order
        self._reconnecting: asyncio.Task[None] | None = None
        self._watch_timer: asyncio.TimerHandle | None = None

    @property
    def entered(self) -> bool:
        """Whether the first connection was begun."""
        return self._entered

    async def open(self) -> None:
        """Connect for the first time; see `Client.__aenter__` for the errors."""
        if self.dead is not None:
            raise self._death()
        if self._entered:
            raise ClientClosedError("a client can be entered once")
        self._entered = True
        try:
            async with asyncio.timeout(None) as self._opening:  # `close` ends it
                link = await self._connect()
        except TimeoutError:
            raise self._death() from None
        finally:
            self._opening = None
            self._opened.set()
        self._begin(link)

    def _begin(self, link: Link) -> None:
        """Start with the first connection, unless the client was closed in the moment between."""
        if self.dead is not None:
            link.close(self.dead)
            raise self._death()
        self._producer.open()
        self._connected(link)
        self._watch()

    async def close(self) -> None:
        """Disconnect; waiting requests raise `ClientClosedError`, and so does `open` in another task."""
        self._die(ClientClosedError("the client was closed"))
        if self._opening is not None:
            if not self._opening.expired():
                self._opening.reschedule(asyncio.get_running_loop().time())
            await self._opened.wait()
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reconnecting
        await asyncio.sleep(0)  # the transport closes in the loop's next turn

    def _death(self) -> ClientError:
        """Return the error to raise when there will be no connection any more."""
        assert self.dead is not None
        return copy_error(self.dead)

    async def get(self, timeout_seconds: float | None) -> Link:
        """Return the connection; wait for a new one this long (`None`: as long as it takes) if it is lost just now.

        Raises:
            ClientError: there will be none, or there was none within this time.
        """
        if self.link is not None:
            return self.link
        if self.dead is None and self._lost is None:
            raise ClientClosedError("the client is not connected: use 'async with'")
        try:
            async with asyncio.timeout(timeout_seconds):
                while self.link is None and self.dead is None:
                    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting[future] = None
                    try:
                        await future
                    finally:
                        self._waiting.pop(future, None)  # a caller that gives up leaves nothing behind
        except TimeoutError:
            raise ConnectionLostError(f"no connection to {self._address}: {self._lost}") from self._lost
        link = self._link_now()
        if link is None:
            raise self._death()
        return link

    def _link_now(self) -> Link | None:
        """Return the connection, if there is one by now (a type checker does not see changes during an await)."""
        return self.link

    async def _connect(self) -> Link:
        return await connect(
            self._address,
            self._identity,
            self.fingerprint,
            bare_certificates=self._bare_certificates,
            timeout_seconds=TIMEOUT_SECONDS,
            on_lost=self._disconnected,
        )

    def _connected(self, link: Link) -> None:
        self.fingerprint = link.fingerprint
        self.link = link
        if link.lost_error is not None:  # in the moment between
            self._disconnected(link, link.lost_error)
            return
        for begin in self.beginnings:
            begin(link)
        self._wake_waiting()
        self._producer.connected(link)

    def _disconnected(self, link: Link, error: ClientError) -> None:
        if link is not self.link:
            return
        self.link, self._lost = None, error
        self._producer.disconnected()
        if self._reconnect and self.dead is None:
            if self._on_connection is not None:
                self._on_connection(error)
            self._reconnecting = asyncio.get_running_loop().create_task(self._try_again())
        else:
            self._die(error)

    async def _try_again(self) -> None:
        pause = RECONNECT_SECONDS_MIN
        while self.dead is None:
            try:
                link = await self._connect()
            except UntrustedServerError as error:
                self._die(error)
                return
            except ClientError as error:
                # Also one that does not know us: a server that stops closes connections in the same way.
                self._lost = error
            else:
                if self._on_connection is not None:
                    self._on_connection(None)
                self._connected(link)
                return
            await asyncio.sleep(pause * random.uniform(0.75, 1.0))  # noqa: S311  # spreads clients, keeps no secret
            pause = min(2 * pause, self._reconnect_seconds_max)

    def _die(self, error: ClientError) -> None:
        """Close for good: raise the error in all requests that wait for a connection."""
        self.dead = self.dead or error
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        link, self.link = self.link, None
        if link is not None:
            link.close(error)
        self._producer.close(self.dead)
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _watch(self) -> None:
        """Check regularly whether the server answers; the only timer besides the one of `send`."""
        if self.dead is not None:
            return
        loop = asyncio.get_running_loop()
        self._watch_timer = loop.call_later(min(self._timeout_seconds / 4, _WATCH_SECONDS_MAX), self._watch)
        link, seconds = self.link, self._timeout_seconds
        if link is not None and link.stalled(loop.time(), seconds):
            link.abort(RequestTimeoutError(f"the server gave no answer for {seconds:g} s"))
        elif link is not None:
            link.check_calls(loop.time(), seconds / 2)
        self._producer.expire(self._lost if link is None else None)
