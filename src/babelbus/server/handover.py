"""Sessions of clients, from one owner of the data to the next (docs/cluster.md, "Sessions that go on").

The last act of an owner that stops in order is one file with everything that the next owner needs to continue these
sessions. The next owner continues them before it serves anybody, so no client misses a change, loses a lock or has its
testament executed; what is sent to a client waits until the client comes over the link of its member.

Each session is guarded by itself: a session that cannot go on, whatever the reason, ends alone.
"""

import asyncio
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from babelbus.core.broker import Broker
from babelbus.errors import BabelbusError
from babelbus.link.client import Client, EdgeListener
from babelbus.link.core import CoreEnd, CoreLink
from babelbus.link.frames import Copy, Secured
from babelbus.link.transport import LinkedTls, LinkedTransport
from babelbus.protocols.connection import Connection
from babelbus.protocols.contract import Continuation
from babelbus.protocols.service import CLIENT_SECONDS, Continued, Service, StreamService
from babelbus.storage.files import FileSystem

log = logging.getLogger(__name__)

FILE_NAME = "sessions"
"""In the data folder, which all members share."""
SESSIONS_MAX = 10_000
BYTES_MAX = 16 * 2**20
"""Most sessions, and bytes of them, that go on: the file stands between the clients and their next owner."""
PAUSE_SECONDS = 1.0
"""How long a member may take to read nothing more of its clients."""
END_SECONDS = 1.0
"""How long the connections that end may take for it."""
ROUNDS_MAX = 10
"""How often the ends of sessions may end others, which do not take what they are told of them."""
STEP_SECONDS = 0.01
ABSENT_SECONDS = 15.0
"""How long a client may take to come over the link of its member."""

_Address = list[str | int] | None


class _Session(msgspec.Struct, frozen=True):
    id: str
    service: str
    owner: str
    peer: _Address
    """`None` for a client of a unix socket."""
    local: _Address
    secured: Secured | None
    """The certificate of a client that speaks TLS."""
    content: bytes
    unsent: bytes = b""
    """Bytes that wait for a client that has not come to this owner either."""


class _Sessions(msgspec.Struct, frozen=True):
    epoch: int
    """That of the owner that hands over: only the next one may continue."""
    sessions: list[msgspec.Raw]
    """Each a `_Session`, encoded by itself."""
    kept: dict[str, bytes] = {}
    """Content that services need beside their sessions, by service."""
    ended: list[str] = []
    """Owners of testaments whose sessions ended with this owner: the next one executes them, and tells the others."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Sessions).decode
_decode_session = msgspec.msgpack.Decoder(_Session).decode


def encode_session(session_id: str, connection: Connection, continuation: Continuation, unsent: bytes = b"") -> bytes:
    """Return a session as `Handover` continues it."""
    transport = connection.transport
    tls = transport.get_extra_info("ssl_object")
    session = _Session(
        session_id,
        connection.protocol,
        continuation.owner,
        _address(transport.get_extra_info("peername")),
        _address(transport.get_extra_info("sockname")),
        None if tls is None else Secured(tls.getpeercert(True) or b"", tls.getpeercert() or {}),
        continuation.content,
        unsent,
    )
    return _encode(session)


class _Client:
    """A client whose session may go on: one of this server, over its own socket."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.id = str(uuid.uuid4())
        self.owner = ""
        self.session = b""
        """The encoded session, once the client can go on."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing of the client waits below its connection."""
        return not self.connection.transport.is_closing()

    @property
    def unsent(self) -> bytes:
        """Bytes that the next owner sends before all others."""
        return b""

    def look(self) -> bool:
        """Encode the session; return whether it can go on now."""
        continuation = self.connection.continuation() if self.is_settled else None
        if continuation is None:
            return False
        self.owner = continuation.owner
        self.session = encode_session(self.id, self.connection, continuation, self.unsent)
        return True

    def release(self) -> None:
        """Release the session: from now on nothing that happens here changes it, or is told to it."""
        connection = self.connection
        try:
            connection.leave()
        except Exception:  # a defect in one session must not end all others; this one is written down, too
            log.exception("%s %s: the session cannot be released", connection.protocol, connection.peer)

    def pass_on(self) -> Client | None:
        """Keep the client, whose session is released, for the next owner; return it if it waits at this member."""
        connection = self.connection
        if connection.transport.is_closing():  # the client has left meanwhile
            return None
        return Client.of_session(connection.transport, EdgeListener(connection.protocol, []), self.id)

    def stay(self) -> None:
        """Read nothing more of the client, and keep its session for the next owner."""
        self.connection.stop_reading()
        self.connection.stay()

    def end(self) -> None:
        """End the session here."""
        self.connection.stays = False
        self.connection.drain()
        self.connection.close_late()

    def close(self) -> None:
        """Close the connection of a client whose session is released."""
        self.connection.close()


class _LinkedClient(_Client):
    """The same, of a client that is connected to a member."""

    def __init__(self, connection: Connection, link: CoreLink, transport: LinkedTransport) -> None:
        super().__init__(connection)
        self._link = link
        self._transport = transport

    @property
    def is_settled(self) -> bool:
        """Whether nothing of the client waits in its transport, in either direction, nor in a batch of its member.

        Any batch may hold up a client of the same listener: its front waits for the answer.
        """
        return self._transport.is_settled and not self._link.batches[self.connection.protocol]

    def stay(self) -> None:
        """Keep the session for the next owner: the member of the client reads nothing more."""
        self.connection.stay()

    def pass_on(self) -> None:
        """Send to the member of the client which session waits for it; if the link broke, no owner hears of it."""
        if not self._transport.is_lost:
            self._link.hand_over(self._transport, self.id)


class _AbsentClient(_Client):
    """The same, of a client that has not come since an earlier owner has handed its session over."""

    def __init__(self, connection: Connection, core_end: CoreEnd, transport: LinkedTransport, session_id: str) -> None:
        super().__init__(connection)
        self.id = session_id  # its member knows the client by it
        self._core_end = core_end
        self._transport = transport

    @property
    def is_settled(self) -> bool:
        """Whether the client is still absent, and nothing but bytes waits for it."""
        is_absent = self._core_end.absent.get(self.id) is self._transport
        return is_absent and self._transport.is_settled and self._transport.unclaimed is not None

    @property
    def unsent(self) -> bytes:
        """Everything that was sent to the client."""
        return self._transport.unclaimed or b""

    def stay(self) -> None:
        """Keep the session for the next owner: nothing comes of a client that is not there."""
        self.connection.stay()

    def release(self) -> None:
        """Release the session, and the place where the client was waited for."""
        self._core_end.absent.pop(self.id, None)
        super().release()

    def pass_on(self) -> None:
        """Return: the client waits at its member for whichever owner is next."""

    def end(self) -> None:
        """End the session here, at once: nobody is there who could take a last word."""
        self.connection.stays = False
        self._core_end.absent.pop(self.id, None)
        self._transport.abort()


class Handover:
    """The sessions that one owner of the data of a cluster continues, and those that it hands over."""

    def __init__(self, files: FileSystem, folder: str, epoch: int) -> None:
        self._files = files
        self._path = os.path.join(folder, FILE_NAME)
        self.epoch = epoch
        self._sessions: list[_Session] = []
        self._ended: list[str] = []
        self._kept: dict[str, bytes] = {}
        self._clients: list[_Client] = []
        self._timer: asyncio.TimerHandle | None = None
        self.gather: Callable[[], Awaitable[list[Copy]]] | None = None
        """Returns the copies of sessions of an owner that has handed nothing over."""
        self._heard: dict[str, int] = {}
        """By the ids of sessions that were copied, up to which offset their clients have heard the state."""

    # -- at the next owner -------------------------------------------------------------------------------------------

    @property
    def since(self) -> int | None:
        """The offset of the log of the state from which some session has to hear the changes; `None` if none has."""
        return min(self._heard.values()) if self._heard else None

    async def read(self) -> list[str]:
        """Read what the last owner has handed over; return the owners of testaments that are not to be executed.

        If it has handed nothing over, read the copies of sessions.
        """
        away = await self._read_file()
        if not away and self.gather is not None:
            owners: set[str] = set()
            for copy in await self.gather():
                self._add_copy(copy, owners)
            away = list(owners)
        return away

    def _add_copy(self, copy: Copy, owners: set[str]) -> None:
        """Add the session of a copy, and its owner, unless another copy is of the same one."""
        try:
            session = _decode_session(copy.session)
        except msgspec.MsgspecError as error:
            log.warning("a session of the last owner does not go on: %s", error)
            return
        if session.id == copy.id and session.owner not in owners:
            owners.add(session.owner)
            self._sessions.append(session)
            self._heard[session.id] = copy.heard

    async def _read_file(self) -> list[str]:
        try:
            handed = await asyncio.get_running_loop().run_in_executor(None, self._take)
        except (BabelbusError, OSError, msgspec.MsgspecError) as error:  # the clients connect again
            log.warning("the sessions of the last owner do not go on: %s", error)
            return []
        self._kept, self._ended = handed.kept, handed.ended
        for raw in handed.sessions:
            try:
                self._sessions.append(_decode_session(raw))
            except msgspec.MsgspecError as error:
                log.warning("a session of the last owner does not go on: %s", error)
        return [*(session.owner for session in self._sessions), *self._ended]

    def _take(self) -> _Sessions:
        nothing = _Sessions(0, [])
        if not self._files.exists(self._path):
            return nothing
        content = self._files.read_file(self._path)
        self._files.unlink(self._path)
        handed = _decode(content)
        return handed if handed.epoch == self.epoch - 1 else nothing

    async def go_on(self, services: Mapping[str, Service], core_end: CoreEnd, broker: Broker) -> None:
        """Continue the sessions, before anybody is served."""
        sessions, self._sessions = self._sessions, []
        ended, self._ended = self._ended, []
        kept, self._kept = self._kept, {}
        heard, self._heard = self._heard, {}
        unheard = broker.state.unheard
        broker.state.unheard = []
        if unheard is None:
            log.warning("the sessions of the last owner end: the log does not tell what their clients have not heard")
            sessions = [session for session in sessions if session.id not in heard]
        present: set[str] = set()
        for service in _stream_services(services.values()):
            mine = [session for session in sessions if session.service == service.name]
            made = [Continued(session.owner, session.content, _absent(session, core_end)) for session in mine]
            try:
                if service.name in kept:
                    service.restore(kept[service.name])
                mine_present = await service.continue_sessions(made)
                present |= mine_present
                marks = {one.owner: heard[one.id] for one in mine if one.id in heard and one.owner in mine_present}
                if marks and unheard:
                    service.tell_again(unheard, marks)
            except Exception:  # a defect in this must not keep the data from everybody
                log.exception("sessions of %s do not go on", service.name)
                for one in made:
                    one.transport.abort()
        if not sessions and not ended and not broker.state.away:
            return
        broker.state.call_back(present)
        log.info("%d of %d sessions of the last owner go on", len(present), len(sessions))
        self._timer = asyncio.get_running_loop().call_later(ABSENT_SECONDS, self._end_absence, core_end)

    def _end_absence(self, core_end: CoreEnd) -> None:
        absent = list(core_end.absent.values())
        core_end.absent.clear()
        for transport in absent:
            transport.abort()
        if absent:
            log.info("%d sessions of the last owner end: their clients did not come", len(absent))

    # -- at the owner that stops -------------------------------------------------------------------------------------

    async def settle(self, services: Iterable[Service], broker: Broker) -> None:
        """Wait a moment for replies and acknowledgements of clients, while what they send is still read."""
        waits = [service.settle() for service in _stream_services(services)]
        await asyncio.gather(broker.settle_requests(CLIENT_SECONDS), *waits)

    async def begin(self, services: Iterable[Service], core_end: CoreEnd, *, goes_on: bool) -> None:
        """Find the clients whose sessions may go on: the end of the services passes over their connections.

        No further request of them is read. Clients of this process are among them if it `goes_on`.
        """
        if self._timer is not None:
            self._timer.cancel()
        for link in await core_end.pause_members(PAUSE_SECONDS):
            if goes_on or not link.is_local:
                for transport in list(link.transports.values()):  # to stay may end a client
                    self._invite(transport.protocol, partial(_LinkedClient, link=link, transport=transport))
        for session_id, transport in list(core_end.absent.items()):
            make = partial(_AbsentClient, core_end=core_end, transport=transport, session_id=session_id)
            if not self._invite(transport.protocol, make):
                del core_end.absent[session_id]
                transport.abort()
        if goes_on:
            for service in _stream_services(services):
                for connection in list(service.listeners.connections):
                    if not isinstance(connection.transport, LinkedTransport):
                        self._invite(connection, _Client)

    def _invite(self, connection: asyncio.BaseProtocol | None, make: Callable[[Connection], _Client]) -> bool:
        """Keep a client while the server stops, if its session may go on; return whether that is so."""
        if not isinstance(connection, Connection):
            return False
        try:
            if not connection.is_portable:
                return False
            client = make(connection)
            client.stay()
        except Exception:  # a defect in one session must not end the stop of all
            log.exception("%s %s: the session cannot go on", connection.protocol, connection.peer)
            connection.stays = False
            return False
        self._clients.append(client)
        return True

    async def end(self, services: Iterable[Service], broker: Broker) -> list[Client]:
        """Move the sessions of these clients to the next owner, when all others have ended and every change is told.

        Returns those that wait at this member for the next owner.
        """
        clients, self._clients = self._clients, []
        try:
            return await self._hand_over(clients, _stream_services(services), broker)
        except Exception:  # a defect in this must not keep the data from the next owner
            log.exception("sessions do not go on at the next owner")
            broker.state.away = frozenset()
            for client in clients:
                client.close()
            return []

    async def _hand_over(self, clients: list[_Client], services: list[StreamService], broker: Broker) -> list[Client]:
        staying, ended = await _end_others(clients, services, broker)
        # In the turn of the last look, so that nothing comes between: a lock would be passed on here and there, too.
        for client in (*staying, *ended):
            client.release()
        owners, gone = [client.owner for client in staying], [client.owner for client in ended]
        broker.state.away = frozenset((*owners, *gone))
        kept = _keep(services)
        handed = _Sessions(self.epoch, [msgspec.Raw(client.session) for client in staying], kept, gone)
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._write, handed)
        except (BabelbusError, OSError) as error:
            log.warning("no session goes on at the next owner: %s", error)
            broker.state.away = frozenset()
            staying, ended = [], [*staying, *ended]
        for client in ended:
            client.close()
        if staying:
            log.info("%d sessions go on at the next owner", len(staying))
        return [waiting for client in staying if (waiting := _pass_on(client)) is not None]

    def _write(self, handed: _Sessions) -> None:
        if handed.sessions or handed.kept or handed.ended:
            self._files.replace_file(self._path, _encode(handed))


async def _end_others(
    clients: list[_Client], services: list[StreamService], broker: Broker
) -> tuple[list[_Client], list[_Client]]:
    """End the sessions that cannot go on, until those that go on have heard of every end.

    Returns the clients that go on, and clients that could go on until this turn of the event loop.
    """
    staying, others = _look(clients, services)
    is_told, rounds = False, ROUNDS_MAX
    while rounds and (others or not is_told):
        rounds -= 1
        for client in others:
            client.end()
        await _until_gone(services)
        await broker.state.hand_over(client.owner for client in staying)
        await broker.settle()
        is_told = True
        staying, others = _look(staying, services)  # some have become slow, or are gone
    return staying, others


def _look(clients: list[_Client], services: list[StreamService]) -> tuple[list[_Client], list[_Client]]:
    """Return the clients whose sessions can go on, and the others."""
    size_bytes = sum(map(len, _keep(services).values()))
    staying: list[_Client] = []
    others: list[_Client] = []
    for client in clients:
        try:
            can_stay = client.look()
        except Exception:  # a defect in one session must not end all others
            connection = client.connection
            log.exception("%s %s: the session cannot go on", connection.protocol, connection.peer)
            can_stay = False
        if can_stay and size_bytes + len(client.session) <= BYTES_MAX and len(staying) < SESSIONS_MAX:
            size_bytes += len(client.session)
            staying.append(client)
        else:
            others.append(client)
    return staying, others


def _keep(services: list[StreamService]) -> dict[str, bytes]:
    """Return the content that services need beside their sessions."""
    kept: dict[str, bytes] = {}
    for service in services:
        try:
            content = service.keep()
        except Exception:  # a defect in one service must not end the sessions of all
            log.exception("%s keeps nothing for the next owner", service.name)
            continue
        if content:
            kept[service.name] = content
    return kept


def _pass_on(client: _Client) -> Client | None:
    try:
        return client.pass_on()
    except Exception:  # a defect in one client must not leave others that nobody reads
        connection = client.connection
        log.exception("%s %s: the client cannot wait for the next owner", connection.protocol, connection.peer)
        client.close()
        return None


def _stream_services(services: Iterable[Service]) -> list[StreamService]:
    return [service for service in services if isinstance(service, StreamService)]


async def _until_gone(services: list[StreamService]) -> None:
    """Wait until the connections that end are gone: what that changes is told to the others."""
    turns = int(END_SECONDS / STEP_SECONDS)
    while turns and any(service.is_ending for service in services):
        turns -= 1
        await asyncio.sleep(STEP_SECONDS)
    for service in services:
        service.abort()
    await asyncio.sleep(STEP_SECONDS)


def _address(name: Any) -> _Address:
    """Return the address of a socket; that of a unix socket tells nobody anything."""
    return list(name) if isinstance(name, tuple) else None


def _absent(session: _Session, core_end: CoreEnd) -> LinkedTransport:
    """Return the transport of a client whose member has no link so far."""
    facts = {
        "peername": None if session.peer is None else tuple(session.peer),
        "sockname": None if session.local is None else tuple(session.local),
    }
    transport = LinkedTransport.absent(facts, session.unsent)
    if session.secured is not None:
        transport.secure(LinkedTls(session.secured))
    core_end.absent[session.id] = transport
    return transport
