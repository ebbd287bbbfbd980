"""Caps for each address: open connections, and connections whose client has not proved who it is."""

import ipaddress
from collections.abc import Callable

import msgspec

from babelbus.config import ServerSettings
from babelbus.errors import ConfigError
from babelbus.listening.certified import Certified

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
NETWORK_BITS = 64
"""One client of IPv6 has a whole network of addresses of this prefix."""


class _Count(msgspec.Struct):
    connections: int = 0
    handshakes: int = 0


class Crowd:
    """Counts the connections of each address over all TCP listeners of a server."""

    def __init__(self, settings: ServerSettings) -> None:
        """Read the settings.

        Raises:
            ConfigError: `server.uncounted_networks` holds something that is no network.
        """
        self.connections_max = settings.connections_per_address_max
        self.handshakes_max = settings.handshakes_per_address_max
        self._uncounted = read_networks("server.uncounted_networks", settings.uncounted_networks)
        self._counts: dict[str, _Count] = {}
        self.certified: Certified | None = None
        """Ends the connections of clients whose certificates expire."""
        self.may_serve: Callable[[], bool] | None = None
        """Returns whether the lease of the cluster is valid, so that clients may be served; `None` without a lease."""

    def key_of(self, address: str) -> str | None:
        """Return under which name an address is counted; `None` if it is not counted."""
        parsed = _parse(address)
        if parsed is None or any(parsed in network for network in self._uncounted if network.version == parsed.version):
            return None
        return _name(parsed)

    def refusal(self, key: str) -> tuple[str, str] | None:
        """Return reason and text if one more connection is too many."""
        count = self._counts.get(key)
        if count is None:
            return None
        if count.connections >= self.connections_max:
            return "address_connections", f"{self.connections_max} connections of its address are open"
        if count.handshakes >= self.handshakes_max:
            return (
                "address_handshakes",
                f"{self.handshakes_max} clients of its address have not proved who they are",
            )
        return None

    def enter(self, key: str) -> None:
        """Count a connection and its handshake."""
        count = self._counts.setdefault(key, _Count())
        count.connections += 1
        count.handshakes += 1

    def finish_handshake(self, key: str) -> None:
        """Count a handshake as finished."""
        self._counts[key].handshakes -= 1

    def leave(self, key: str) -> None:
        """Count a connection as closed; its handshake is finished before."""
        count = self._counts[key]
        count.connections -= 1
        if not count.connections:
            del self._counts[key]


def name_network(address: str) -> str:
    """Return under which name an address is counted."""
    parsed = _parse(address)
    return address if parsed is None else _name(parsed)


def _name(parsed: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(parsed), NETWORK_BITS), strict=False))
    return str(parsed)


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return an address, one of IPv4 as such however it is written; `None` for a unix socket."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    return (parsed.ipv4_mapped or parsed) if isinstance(parsed, ipaddress.IPv6Address) else parsed


def read_networks(key: str, text: str | None) -> list[Network]:
    """Read a list of networks with blanks between.

    Raises:
        ConfigError: a word is no network.
    """
    try:
        return [ipaddress.ip_network(word) for word in (text or "").split()]
    except ValueError as error:
        raise ConfigError(f"{key}: {error}; write networks with blanks between, as in 10.1.0.0/16") from error
