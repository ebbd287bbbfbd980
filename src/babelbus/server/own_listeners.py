"""The TCP listeners of a member that is an edge of another server: those of its own configuration."""

from babelbus.config import Config
from babelbus.link.client import EdgeListener
from babelbus.listening.certificates import Certificates
from babelbus.listening.openings import Opening
from babelbus.listening.sockets import open_sockets
from babelbus.protocols.registry import openings

ADMIN = "admin"
BACKLOG = 1024


def openings_of(config: Config) -> list[Opening]:
    """Return the TCP listeners of a configuration, with the administration endpoint.

    Raises:
        ConfigError: a setting of a section is wrong.
    """
    admin = config.admin
    found = openings(config)
    if admin.enabled:
        found.append(
            Opening(
                name=ADMIN,
                host=admin.host,
                port=admin.port,
                section="admin",
                tls=admin.tls,
                handshake_seconds=admin.handshake_seconds,
            )
        )
    return found


async def open_listeners(config: Config, certificates: Certificates) -> list[EdgeListener]:
    """Open the TCP listeners of a configuration for an edge that runs in this process (`Edge.open`).

    Raises:
        ConfigError: a setting of a section is wrong.
        OSError: an address is taken.
    """
    listeners: list[EdgeListener] = []
    try:
        for one in openings_of(config):
            tls = one.make_tls(certificates)
            sockets = await open_sockets(one.host, one.port, BACKLOG)
            is_admin = one.name == ADMIN
            listeners.append(EdgeListener(one.name, sockets, tls, one.handshake_seconds, is_admin=is_admin))
    except BaseException:
        for listener in listeners:
            for opened in listener.sockets:
                opened.close()
        raise
    return listeners
