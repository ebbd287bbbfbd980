"""Bytes that were written to a connection and that its socket does not take."""

import select
from typing import Any, Final

from babelbus.units import KIB

TURN_BYTES: Final = 16 * KIB
"""Bytes that a socket takes in the turn of the event loop in which they were written, if it takes any."""


def is_blocked(transport: Any) -> bool:
    """Return whether bytes wait that the socket of a transport does not take now: the peer reads too slowly."""
    linked = getattr(transport, "is_blocked", None)
    if linked is not None:  # the socket is that of an edge, which has said so
        return bool(linked())
    size_bytes = transport.get_write_buffer_size()
    if size_bytes > TURN_BYTES:
        return True
    # A transport with TLS does not count what waits below the TLS.
    if not size_bytes and transport.get_extra_info("ssl_object") is None:
        return False
    connection = transport.get_extra_info("socket")
    if connection is None or connection.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLOUT)
    return not poll.poll(0)


def is_settled(transport: Any) -> bool:
    """Return whether no bytes wait in this process, above the socket of a transport: that of an edge is elsewhere."""
    return bool(getattr(transport, "is_settled", True))


def holds_data(transport: Any) -> bool:
    """Return whether data that came from a client of an edge waits in a transport for its protocol."""
    return bool(getattr(transport, "held", ()))
