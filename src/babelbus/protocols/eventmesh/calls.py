"""Outgoing HTTP of EventMesh: calls of webhooks over kept connections, bounded for each address (specification, 5).

A call is a promise. Connections of one origin take the calls that wait in their order, one at a time each; an address
that hangs delays its own calls alone. Redirects are not followed, and only allowed addresses are connected to: a name
is resolved once for each connection, and what was checked is what is connected to.
"""

import asyncio
import ipaddress
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from babelbus.clock import Clock
from babelbus.core.receipt import Promise
from babelbus.core.request import STOPS
from babelbus.errors import BabelbusError, ConfigError
from babelbus.listening.transports import is_blocked
from babelbus.wire.http import HttpError, Response, ResponseDecoder, encode_fields

CALL_SECONDS = 5.0
"""The time for a connection, and the time for an answer."""
IDLE_SECONDS = 30.0
CONNECTIONS_MAX = 16
"""Connections to one origin."""
WAITING_MAX = 10_000
"""Calls that wait for a connection to one origin."""
ANSWER_BYTES_MAX = 2**20
NOT_GRANTED = "it may not have the message any more"
PORTS = {"http": 80, "https": 443}

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_TRANSLATED = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("::/96"))
"""Networks of IPv6 that stand for all of IPv4: a gateway (RFC 6052) leads from there into private networks, too."""


class CallError(BabelbusError):
    """A webhook could not be called, or gave no answer."""

    retriable = True


class TargetRefusedError(CallError):
    """A webhook is no URL that may be called."""

    retriable = False


def _anybody() -> bool:
    return True


class Call(Promise):
    """One call; `response` is there when it is done without an error."""

    __slots__ = ("data", "deadline", "is_granted", "method", "repeated", "response")

    def __init__(self, method: str = "", data: bytes = b"") -> None:
        super().__init__()
        self.method = method
        self.data = data
        self.deadline = 0.0
        self.repeated = False
        self.response: Response | None = None
        self.is_granted: Callable[[], bool] = _anybody
        """Returns whether the webhook may have the message still: a call that waits is not made otherwise."""


class Allowed:
    """The addresses that may be called: public ones, and the networks of a setting."""

    def __init__(self, networks: Iterable[Network] = ()) -> None:
        self._networks = tuple(networks)

    def has(self, address: str) -> bool:
        """Return whether an IP address may be called."""
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if any(parsed in network for network in self._networks):
            return True
        if isinstance(parsed, ipaddress.IPv6Address):
            inner = parsed.ipv4_mapped
            if inner is None and any(parsed in network for network in _TRANSLATED):
                inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
            if inner is not None:
                return self.has(str(inner))
            if parsed.is_site_local:
                return False
        return parsed.is_global and not parsed.is_multicast


def read_networks(text: str | None) -> Allowed:
    """Read a list of networks with blanks between.

    Raises:
        ConfigError: a word is no network.
    """
    try:
        return Allowed(ipaddress.ip_network(word) for word in (text or "").split())
    except ValueError as error:
        raise ConfigError(f"eventmesh.webhook_networks: {error}; write networks such as 10.1.0.0/16") from None


class Origin:
    """Scheme, host and port of a URL, and the path and query that a request names."""

    __slots__ = ("host", "port", "scheme", "target")

    def __init__(self, url: str) -> None:
        """Read a URL.

        Raises:
            TargetRefusedError: it is no URL of http or https.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise TargetRefusedError(f"invalid URL {url[:200]!r}") from None
        plain = url.isascii() and url.isprintable() and " " not in url
        if parts.scheme not in PORTS or not parts.hostname or parts.username is not None or not plain:
            raise TargetRefusedError(f"invalid URL {url[:200]!r}: write http or https, a host and a path")
        self.scheme = parts.scheme
        self.host = parts.hostname
        self.port = PORTS[parts.scheme] if port is None else port
        self.target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"

    @property
    def key(self) -> tuple[str, str, int]:
        """The part that connections are kept for."""
        return self.scheme, self.host, self.port

    @property
    def authority(self) -> str:
        """The value of the header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


class _Connection(asyncio.Protocol):
    """One connection: at most one call at a time."""

    def __init__(self, pool: "_Pool") -> None:
        self._pool = pool
        self._decoder = ResponseDecoder(body_bytes_max=ANSWER_BYTES_MAX)
        self._transport: Any = None
        self._has_heard = False
        self._is_used = False
        self.call: Call | None = None
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._pool.connections.add(self)

    @property
    def is_closing(self) -> bool:
        """Whether no call can be made any more."""
        return bool(self._transport.is_closing())

    @property
    def is_lost(self) -> bool:
        """Whether the peer does not take a call that it may not have any more."""
        return self.call is not None and not self.call.is_granted() and is_blocked(self._transport)

    def send(self, call: Call, now: float) -> None:
        call.deadline = now + CALL_SECONDS
        self.call = call
        self._has_heard = False
        self._decoder.expect(call.method)
        self._transport.write(call.data)

    def data_received(self, data: bytes) -> None:
        self._has_heard = True
        self._decoder.receive_data(data)
        try:
            responses = self._decoder.responses()
        except HttpError as error:
            self.fail(CallError(f"the answer is no HTTP: {error}"))
            return
        if not responses:
            return
        call, self.call = self.call, None
        if call is None or len(responses) > 1:
            self.fail(CallError("an answer that nobody asked for"))
            return
        self._is_used = True
        call.response = responses[0]
        if responses[0].keep_alive and self._decoder.error is None:
            self._pool.free(self)
        else:
            self.close()
        call.resolve()

    def eof_received(self) -> bool:
        response = self._decoder.receive_end()
        if response is not None and self.call is not None:
            call, self.call = self.call, None
            call.response = response
            call.resolve()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        call, self.call = self.call, None
        if call is not None and self._is_used and not self._has_heard and not call.repeated:
            call.repeated = True  # the peer closed the kept connection while the call was on its way
            self._pool.lost(self, call)
            return
        self._pool.lost(self, None)
        if call is not None:
            call.resolve(CallError(f"the connection broke: {error or 'closed by the peer'}"))

    def fail(self, error: CallError) -> None:
        """End the connection; its call gets the error."""
        call, self.call = self.call, None
        self._transport.abort()
        if call is not None:
            call.resolve(error)

    def close(self) -> None:
        self._transport.close()


class _Pool:
    """The connections to one origin, and the calls that wait for them."""

    def __init__(self, origin: Origin, owner: "Calls") -> None:
        self.waiting: deque[Call] = deque()
        self.connections: set[_Connection] = set()
        self.opening = 0
        self._origin = origin
        self._owner = owner
        self._idle: list[_Connection] = []

    def add(self, call: Call) -> None:
        """Start a call, or let it wait for a connection."""
        if len(self.waiting) >= WAITING_MAX:
            call.resolve(CallError(f"{WAITING_MAX} calls wait for {self._origin.authority} already"))
            return
        self.waiting.append(call)
        self.start()

    def start(self) -> None:
        """Send the calls that wait over idle connections, and open further connections."""
        now = self._owner.clock.monotonic()
        while self._idle and (call := self._next()) is not None:
            self._idle.pop().send(call, now)
        while len(self.waiting) > self.opening and len(self.connections) + self.opening < CONNECTIONS_MAX:
            self.opening += 1
            self._owner.spawn(self._open())

    def free(self, connection: _Connection) -> None:
        """Handle a connection whose call is answered."""
        now = self._owner.clock.monotonic()
        call = self._next()
        if call is not None:
            connection.send(call, now)
        else:
            connection.idle_since = now
            self._idle.append(connection)

    def _next(self) -> Call | None:
        """Return and remove the first call that waits; calls that are not granted any more fail."""
        while self.waiting:
            call = self.waiting.popleft()
            if call.is_granted():
                return call
            call.resolve(CallError(NOT_GRANTED))
        return None

    def access_changed(self) -> None:
        """End the calls that the peer does not take and may not have any more."""
        for connection in list(self.connections):
            if connection.is_lost:
                connection.fail(CallError(NOT_GRANTED))

    def lost(self, connection: _Connection, call: Call | None) -> None:
        """Remove a connection; `call` is to be made again over another connection."""
        self.connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if call is not None:
            self.waiting.appendleft(call)
        self.start()

    def tick(self, now: float) -> None:
        """End calls without an answer, and connections without a call."""
        for connection in list(self.connections):
            if connection.call is not None and connection.call.deadline < now:
                connection.fail(CallError(f"no answer within {CALL_SECONDS:g} s"))
        while self._idle and self._idle[0].idle_since < now - IDLE_SECONDS:
            self._idle.pop(0).close()

    def close(self, error: CallError) -> None:
        """End all connections and calls."""
        waiting = list(self.waiting)
        self.waiting.clear()
        for connection in list(self.connections):
            connection.fail(error)
        for call in waiting:
            call.resolve(error)

    async def _open(self) -> None:
        error: CallError | None = None
        try:
            async with asyncio.timeout(CALL_SECONDS):
                connection = await self._connect()
        except TimeoutError:
            error = CallError(f"no connection within {CALL_SECONDS:g} s")
        except CallError as failure:
            error = failure
        except (OSError, ValueError) as failure:  # ValueError: a label of the name is too long
            error = CallError(f"no connection: {failure}")
        finally:
            self.opening -= 1
        if error is None and not connection.is_closing:
            self.free(connection)
        elif self.waiting:
            self.waiting.popleft().resolve(error or CallError("the peer closed the connection at once"))
            self.start()

    async def _connect(self) -> _Connection:
        origin, loop = self._origin, asyncio.get_running_loop()
        found = await loop.getaddrinfo(origin.host, origin.port, type=1)
        addresses = [address[0] for *_, address in found if self._owner.allowed.has(str(address[0]))]
        if not addresses:
            raise TargetRefusedError(
                f"{origin.host} is an address of this machine or of a private network; "
                "eventmesh.webhook_networks names the networks that may be called"
            )
        is_tls = origin.scheme == "https"
        _, connection = await loop.create_connection(
            partial(_Connection, self),
            str(addresses[0]),
            origin.port,
            ssl=await self._owner.load_tls() if is_tls else None,
            server_hostname=origin.host if is_tls else None,
        )
        return connection


class Calls:
    """All outgoing calls of a server."""

    def __init__(self, clock: Clock, allowed: Allowed) -> None:
        self.clock = clock
        self.allowed = allowed
        self._tls: asyncio.Future[ssl.SSLContext] | None = None
        self._pools: dict[tuple[str, str, int], _Pool] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def call(
        self,
        method: str,
        url: str,
        headers: Sequence[tuple[str, str]],
        body: bytes = b"",
        is_granted: Callable[[], bool] = _anybody,
    ) -> Call:
        """Call a URL; every failure is the error of the call."""
        try:
            origin = Origin(url)
        except TargetRefusedError as error:
            return Call.refused(error)
        if self._closed:
            return Call.refused(CallError(STOPS))
        pool = self._pools.get(origin.key)
        if pool is None:
            pool = self._pools[origin.key] = _Pool(origin, self)
        fields = encode_fields([("host", origin.authority), *headers])
        head = f"{method} {origin.target} HTTP/1.1\r\n{fields}content-length: {len(body)}\r\n\r\n"
        call = Call(method, head.encode("latin-1") + body)
        call.is_granted = is_granted
        pool.add(call)
        return call

    async def load_tls(self) -> ssl.SSLContext:
        """Return the TLS of calls; the first call loads the authorities of the system, in a thread.

        That takes some 100 ms, which no start of a server and no change of the owner of a cluster should wait for.
        """
        if self._tls is None:
            self._tls = asyncio.get_running_loop().run_in_executor(None, ssl.create_default_context)
        return await asyncio.shield(self._tls)  # others wait for it too

    def spawn(self, coroutine: Any) -> None:
        """Run a coroutine in a task of its own."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def access_changed(self) -> None:
        """End the calls that webhooks do not take and may not have any more."""
        for pool in list(self._pools.values()):
            pool.access_changed()

    def tick(self) -> None:
        """End calls whose time is over; called about once a second."""
        now = self.clock.monotonic()
        for key, pool in list(self._pools.items()):
            pool.tick(now)
            if not pool.waiting and not pool.connections and not pool.opening:
                del self._pools[key]

    def close(self) -> None:
        """Close all connections; calls that have no answer fail, and so do later ones."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        pools = list(self._pools.values())
        self._pools.clear()
        for pool in pools:
            pool.close(CallError(STOPS))
