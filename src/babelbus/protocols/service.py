"""The shape that every protocol has for the server: built from one context, started, drained and closed."""

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec

from babelbus.clock import Clock
from babelbus.config import Config
from babelbus.core.access import Identity
from babelbus.core.broker import Broker
from babelbus.core.quotas import Quotas
from babelbus.core.state import Unheard
from babelbus.errors import BabelbusError
from babelbus.identities.guessing import Guessing
from babelbus.identities.proofs import Proofs
from babelbus.listening.certificates import Certificates
from babelbus.listening.connections import Connected
from babelbus.listening.crowd import Crowd
from babelbus.listening.entrances import Entrances
from babelbus.metrics import Metrics
from babelbus.protocols.browsers import Browsers
from babelbus.protocols.budget import Budget
from babelbus.protocols.connection import Connection
from babelbus.protocols.contract import Outbox, Session
from babelbus.protocols.listeners import Listeners
from babelbus.storage.files import FileSystem

log = logging.getLogger(__name__)

CLIENT_SECONDS = 0.5
"""How long a member of a cluster that gives the data away waits for its clients: all others wait meanwhile."""
TURN_SESSIONS = 100
"""Sessions that are continued in one turn of the event loop."""


class Lines(Protocol):
    """Where an answer of the administration API goes that has no end yet."""

    address: str
    """The address of the client."""

    async def write(self, data: bytes) -> None:
        """Send a part of the answer, when there is room."""


Administer = Callable[[Identity, str, str, bytes, Lines], Awaitable[tuple[int, bytes]]]
"""Answers a request of a principal: method, path, body; returns the status and the body behind what was written."""


class ServiceContext(msgspec.Struct, frozen=True):
    """The parts of a server that its services share."""

    config: Config
    broker: Broker
    metrics: Metrics
    clock: Clock
    files: FileSystem
    folder: str
    """The data folder."""
    authorise: Callable[[str], Identity | None]
    """Returns who owns the certificate with a fingerprint, `None` if the lists of clients have no such fingerprint."""
    browsers: Browsers
    """Builds the guards of HTTP listeners."""
    budget: Budget
    """Bounds the memory of messages that have not come whole."""
    certificates: Certificates
    """Makes the TLS of listeners."""
    crowd: Crowd
    """Counts the connections of each address."""
    quotas: Quotas
    """Bounds what each principal uses."""
    entrances: Entrances
    """Lists the TCP listeners, whose clients may come over links."""
    proofs: Proofs
    """Knows what principals prove their identity with, and makes clients wait that send wrong proofs."""
    read_value: Callable[[bytes], bytes]
    """Returns a text as a value of the state that every client can read, or raises `ValueError`."""
    administer: Administer | None = None
    """Answers requests of the administration API; `None` where no protocol offers it."""

    @property
    def client_seconds(self) -> float:
        """How long a stop waits for clients that do not take what was sent to them."""
        seconds = self.config.server.drain_seconds
        return min(seconds, CLIENT_SECONDS) if self.config.cluster.enabled else seconds

    @property
    def guessing(self) -> Guessing:
        """The wrong proofs of all doors."""
        return self.proofs.guessing

    @property
    def server_key(self) -> str:
        """Path of the file with the key of the server; the server makes the file at its first start."""
        return os.path.join(self.folder, CONF_NAME, SERVER_KEY_NAME)


CONF_NAME = "conf"
SERVER_KEY_NAME = "server_key"


class Continued(msgspec.Struct, frozen=True):
    """A session that another server has begun."""

    owner: str
    content: bytes
    """Owner and content of its `Continuation`."""
    transport: asyncio.Transport
    """Keeps what is sent until the client comes."""


class UnknownFormError(BabelbusError):
    """A session comes from a release that keeps sessions in another form."""


class Service(Protocol):
    """One protocol as a server offers it. Each call comes from the event loop of the server.

    `config` has a section with the name of the service, and `enabled` in the section says whether the service is made.
    """

    addresses: dict[str, str]
    """Address of each listener by the name of the listener, filled by `start`."""

    async def start(self) -> None:
        """Open the listeners.

        Raises:
            ConfigError: a setting of the section is wrong.
            OSError: an address is taken.
        """

    def topics_changed(self) -> None:
        """Handle that topics were made, altered or removed."""

    def access_changed(self) -> None:
        """Close connections of clients that are not listed any more: the lists of clients were read again."""

    @property
    def connections(self) -> Collection[Connected]:
        """The open connections."""

    async def drain(self) -> None:
        """Close the listeners, read no more requests, and end waits for events; requests that came are answered."""

    @property
    def unsent(self) -> bool:
        """Whether an answer is outstanding or has not gone out."""

    def close(self) -> None:
        """Close all connections as soon as what was written to them is sent."""

    def abort(self) -> None:
        """Close at once what is still open."""


MakeService = Callable[[ServiceContext], Service]


class StreamSettings(Protocol):
    """The limits that the section of every stream protocol has."""

    @property
    def handshake_seconds(self) -> float:
        """Time within which a client must have proved who it is."""

    @property
    def connections_max(self) -> int:
        """Limit of open connections."""


class StreamService:
    """A service over stream sockets; a protocol adds `start`, and what it does beside its connections."""

    def __init__(self, name: str, context: ServiceContext, settings: StreamSettings) -> None:
        self.name = name
        self.listeners = Listeners(
            name,
            context.metrics,
            context.clock,
            context.budget,
            context.crowd,
            context.quotas,
            context.entrances,
            bytes_max=context.config.server.outbox_bytes_max,
            handshake_seconds=settings.handshake_seconds,
            connections_max=settings.connections_max,
            busy_poll_seconds=context.config.server.busy_poll_us / 1e6,
        )
        self.addresses = self.listeners.addresses
        self._clock = context.clock
        self._client_seconds = context.client_seconds
        self._waits_until = math.inf
        """When a server that stops has waited long enough for its clients."""

    def topics_changed(self) -> None:
        """Return: sessions ask the broker."""

    def access_changed(self) -> None:
        """Check the rights of each client again."""
        for connection in list(self.listeners.connections):
            connection.access_changed()

    @property
    def connections(self) -> Collection[Connected]:
        """The open connections."""
        return self.listeners.connections

    async def settle(self) -> None:
        """Return: nothing that was sent to clients is outstanding when another server goes on."""

    def keep(self) -> bytes:
        """Return what another server needs beside the sessions that it continues: nothing."""
        return b""

    def restore(self, content: bytes) -> None:
        """Continue with the content that another server has kept; nothing was served so far."""
        assert not content, "a service that keeps something restores it"

    async def continue_sessions(self, sessions: Sequence[Continued]) -> set[str]:
        """Continue sessions that another server has begun; return the owners of those that go on."""
        for number, one in enumerate(sessions, 1):
            try:
                self.listeners.continue_client(one.transport, partial(self._continue, one.content))
            except Exception:  # a defect in one session must not end all others
                log.exception("a session of %s does not go on", self.name)
                one.transport.abort()
            if number % TURN_SESSIONS == 0:
                await asyncio.sleep(0)
        return {one.owner for one in sessions if not one.transport.is_closing()}

    def _continue(self, content: bytes, outbox: Outbox, close: Callable[[], None], peer: str | None) -> Session:
        try:
            return self.continue_session(content, outbox, close, peer)
        except msgspec.MsgspecError as error:
            raise UnknownFormError(f"the session is of another release: {error}") from error

    def continue_session(self, content: bytes, outbox: Outbox, close: Callable[[], None], peer: str | None) -> Session:
        """Return the session that goes on; a protocol whose sessions are portable overrides it.

        Raises:
            BabelbusError: it cannot go on.
        """
        raise UnknownFormError(f"sessions of {self.name} do not go on at another server")

    def tell_again(self, unheard: Sequence[Unheard], heard: Mapping[str, int]) -> None:
        """Send the sessions that go on changes of the state that they have not heard: most protocols tell none.

        `heard` says by owner up to which offset of the log of the state a session has heard all.
        """

    @property
    def is_ending(self) -> bool:
        """Whether connections are open whose sessions go on nowhere else."""
        return bool(self._ending)

    async def drain(self) -> None:
        """Close the listeners and read no more requests; requests that came are answered."""
        await self.listeners.stop()
        self._waits_until = self._clock.monotonic() + self._client_seconds
        for connection in self._ending:
            connection.drain()

    @property
    def _ending(self) -> list[Connection]:
        """The connections whose sessions go on nowhere else."""
        return [connection for connection in self.listeners.connections if not connection.stays]

    @property
    def unsent(self) -> bool:
        """Whether an answer is outstanding, or has not gone out although its client has had the time to take it."""
        connections = self.listeners.connections
        if self._clock.monotonic() < self._waits_until:
            return any(connection.unsent for connection in connections)
        return any(connection.unanswered for connection in connections)

    def close(self) -> None:
        """Close all connections as soon as what was written to them is sent; nobody has more time than a stop has."""
        is_late = self._clock.monotonic() >= self._waits_until
        for connection in self._ending:
            if is_late:
                connection.close_late()
            else:
                connection.close()

    def abort(self) -> None:
        """Close all connections at once."""
        for connection in self._ending:
            connection.abort()
