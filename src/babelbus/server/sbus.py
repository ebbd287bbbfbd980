"""The sbus part of a server: hub, sockets and doors, put together from the settings."""

import os

from babelbus.config import SbusSettings
from babelbus.core.broker import Broker
from babelbus.metrics import Metrics
from babelbus.protocols.sbus.credentials import Credentials
from babelbus.protocols.sbus.hub import PROTOCOL, Hub
from babelbus.protocols.sbus.packets import Door, OpenDoor, PacketServer, open_door, read_door
from babelbus.protocols.sbus.ports import Port
from babelbus.protocols.sbus.session import Session

RUN_FOLDER = "run"
SOCKET_NAME = "sbus.socket"


def make_server(hub: Hub, metrics: Metrics, settings: SbusSettings) -> PacketServer:
    """Put a hub behind packet sockets."""

    def make_session(port: Port, credentials: Credentials) -> Session:
        return Session(hub, port, credentials)

    return PacketServer(PROTOCOL, make_session, metrics, settings, hub.drop)


class SbusService:
    """sbus as a server of topics offers it. `addresses` are those of its doors, the first one's first."""

    def __init__(self, settings: SbusSettings, broker: Broker, metrics: Metrics, data_folder: str) -> None:
        self.hub = Hub(
            broker.router,
            metrics,
            settings,
            publish=broker.publish,
            topic_of=broker.topic_of,
        )
        self._server = make_server(self.hub, metrics, settings)
        self.addresses: list[str] = []
        try:
            for door in open_doors(settings, data_folder):
                self._server.listen(door)
                self.addresses.append(door.address)
        except BaseException:
            self._server.close()
            raise

    @property
    def waiting_bytes(self) -> int:
        """What clients have not taken yet."""
        return self._server.waiting_bytes

    def stop_reading(self) -> None:
        """Take no more clients and nothing more from those that are there; what waits for them is still sent."""
        self._server.stop_reading()

    def close(self) -> None:
        """Close everything."""
        self._server.close()


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
