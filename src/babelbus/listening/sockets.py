"""Listening sockets that exist before the part of the server that serves them."""

import asyncio
import errno
import socket

BACKLOG = 100
"""Connections that wait in the system until they are accepted; asyncio's own number."""


async def open_sockets(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of a host; 0 lets the system choose the port.

    Raises:
        OSError: another process uses the address, or this machine does not have it.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((one[0], one[4]) for one in found):
            try:
                sockets.append(socket.create_server(address, family=family, backlog=BACKLOG))
            except OSError as error:
                if error.errno != errno.EAFNOSUPPORT:  # the name has an address of a kind that this system lacks
                    raise
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, f"no address of {host} can be listened on")
    except BaseException:
        for one in sockets:
            one.close()
        raise
    return sockets
