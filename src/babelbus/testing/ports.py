"""Ports for servers that come back on them, which nobody else has meanwhile.

A port that the system chooses is one of those that it gives to connections, too: while its server is away, a connection
can have it, even that of a client that tries to reach the server.
"""

import errno
import socket
import threading

PORTS = range(20_000, 32_000)
"""Below those that Linux and others give to connections, and above those that our protocols have by default."""
BLOCK_PORTS = 100

_lock = threading.Lock()
_left: list[int] = []


def free_ports(count: int) -> list[int]:
    """Return loopback ports that nobody listens on, and that no other call returns, nor one of a process beside this.

    Raises:
        OSError: all are taken.
    """
    with _lock:
        return [_next() for _ in range(count)]


def _next() -> int:
    while True:
        if not _left:
            _left.extend(reversed(_claim()))
        port = _left.pop()
        with socket.socket() as probe:
            if _bind(probe, port):
                return port


def _claim() -> range:
    """Return a block of ports, reserved until this process ends: nobody else can bind its first one."""
    for first in PORTS[::BLOCK_PORTS]:
        with socket.socket() as claim:
            if _bind(claim, first):
                claim.detach()
                return range(first + 1, first + BLOCK_PORTS)
    raise OSError(errno.EADDRINUSE, f"all ports from {PORTS.start} to {PORTS.stop - 1} are taken")


def _bind(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind(("127.0.0.1", port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True
