"""sbus as a server offers it: a hub behind packet sockets (docs/protocols/sbus.md)."""

import logging
import math
import os
from collections.abc import Collection

from babelbus.config import SbusSettings
from babelbus.core.access import ANONYMOUS, Identity
from babelbus.listening.connections import Connected
from babelbus.protocols.sbus.credentials import Credentials
from babelbus.protocols.sbus.hub import PROTOCOL, Hub, identity_of, source_of
from babelbus.protocols.sbus.packets import Door, OpenDoor, PacketServer, open_door, read_door
from babelbus.protocols.service import ServiceContext

log = logging.getLogger(__name__)

RUN_FOLDER = "run"
SOCKET_NAME = "sbus.socket"


class SbusService:
    """sbus as a server of topics offers it."""

    def __init__(self, context: ServiceContext) -> None:
        broker, self._settings = context.broker, context.config.sbus
        self._folder = context.folder
        self._gate, self._directory = broker.gate, context.proofs.directory
        self.hub = Hub(
            broker.router,
            context.metrics,
            self._settings,
            publish=broker.publish,
            topic_of=broker.topic_of,
            retains=broker.retains,
            subscribe=broker.subscribe,
            identify=self._identify,
        )
        self.server = PacketServer(self.hub, context.metrics, self._settings, on_login=self._note_login)
        self._clock, self._client_seconds = context.clock, context.client_seconds
        self._waits_until = math.inf
        """When a server that stops has waited long enough for its clients."""
        self.addresses: dict[str, str] = {}
        self.doors: list[OpenDoor] = []

    async def start(self) -> None:
        """Open every door of the settings.

        Raises:
            ConfigError: a door is described wrongly.
            OSError: an address cannot be bound.
        """
        self.doors = open_doors(self._settings, self._folder)
        for door in self.doors:
            self.server.listen(door)
        self.addresses[PROTOCOL] = self.doors[0].address
        log.info("sbus listens on %s", ", ".join(door.address for door in self.doors))

    def topics_changed(self) -> None:
        """Find again which topic records which key."""
        self.hub.topics_changed()

    def access_changed(self) -> None:
        """Find again which principal each process is."""
        self.server.access_changed()

    def _identify(self, credentials: Credentials) -> Identity:
        """Return the principal of a process by its user, else by one of its groups, else `anonymous`."""
        gate = self._gate
        if not gate.enforcing:
            return identity_of(credentials)
        source = source_of(credentials)
        name = self._directory.by_process(credentials.uid, (credentials.gid, *credentials.groups))
        return gate.anonymous(source) if name is None else gate.identity(source, name)

    def _note_login(self, principal: Identity) -> None:
        if principal.name != ANONYMOUS:
            self._gate.note_login(principal.name, principal.source)

    @property
    def connections(self) -> Collection[Connected]:
        """The open connections."""
        return self.server.connections

    async def drain(self) -> None:
        """Close the doors and read no packets; packets that wait for clients are still sent."""
        self._waits_until = self._clock.monotonic() + self._client_seconds
        self.server.stop_reading()

    @property
    def unsent(self) -> bool:
        """Whether packets wait for a client that has the time to take them."""
        return self.server.waiting_bytes > 0 and self._clock.monotonic() < self._waits_until

    def close(self) -> None:
        """Close all connections; a packet socket sends nothing after its close."""
        self.server.close()

    def abort(self) -> None:
        """Return: `close` leaves nothing open."""


def open_doors(settings: SbusSettings, data_folder: str) -> list[OpenDoor]:
    """Open every door of the settings, or none.

    Raises:
        ConfigError: a door is described wrongly.
        OSError: an address cannot be bound.
    """
    users = tuple(name.strip() for name in (settings.users or "").split(",") if name.strip())
    address = settings.address or default_address(data_folder)
    doors = [Door(address, settings.group, settings.others, users)]
    doors += [read_door(text) for text in (settings.more_doors or "").split()]
    opened: list[OpenDoor] = []
    try:
        if not settings.address:
            os.makedirs(os.path.dirname(address), mode=0o755, exist_ok=True)
        for door in doors:
            opened.append(open_door(door, replace_stale=True, any_length=not settings.address))  # noqa: PERF401
    except BaseException:
        for one in opened:
            one.close()
        raise
    return opened


def default_address(data_folder: str) -> str:
    """Return where a server listens that was not told: beside its data, so that two servers do not meet."""
    return os.path.join(data_folder, RUN_FOLDER, SOCKET_NAME)
