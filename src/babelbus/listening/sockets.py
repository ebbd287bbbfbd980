"""Listening sockets that exist before the part of the server that serves them."""

import asyncio
import errno
import importlib
import logging
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)

BACKLOG = 100
"""Connections that wait in the system until they are accepted; asyncio's own number."""


async def open_sockets(
    host: str, port: int, backlog: int = BACKLOG, *, make: Callable[..., socket.socket] = socket.create_server
) -> list[socket.socket]:
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
                sockets.append(make(address, family=family, backlog=backlog))
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


def reserve(address: tuple[Any, ...], *, family: int, backlog: int = BACKLOG) -> socket.socket:
    """Return a socket that keeps an address for processes that listen there together (`share`).

    Raises:
        OSError: another process listens on the address.
    """
    with _bound(address, family, shared=False) as first:  # which fails where somebody else listens
        address = first.getsockname()
    return _bound(address, family, shared=True)


def share(address: tuple[Any, ...], *, family: int, backlog: int = BACKLOG) -> socket.socket:
    """Return one of several sockets that listen on a reserved address; the system spreads the clients over them.

    Raises:
        OSError: the address is taken.
    """
    one = _bound(address, family, shared=True)
    try:
        one.listen(backlog)
    except BaseException:
        one.close()
        raise
    return one


def _bound(address: tuple[Any, ...], family: int, *, shared: bool) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
    except BaseException:
        one.close()
        raise
    return one


class Waiting:
    """Listening sockets that are served from their first connection on: what serves them is loaded then."""

    def __init__(self, name: str, sockets: list[socket.socket], serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._sockets = sockets
        self._serve = serve
        self._serving: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        for one in sockets:
            self._loop.add_reader(one, self._begin)

    def _begin(self) -> None:
        self._leave()
        self._serving = self._loop.create_task(self._serve())
        self._serving.add_done_callback(self._check)

    async def serve(self) -> None:
        """Open the sockets for their clients now; return when clients are served."""
        if self._serving is None:
            self._begin()
        assert self._serving is not None
        await asyncio.shield(self._serving)

    def _leave(self) -> None:
        for one in self._sockets:
            self._loop.remove_reader(one)

    def _check(self, serving: "asyncio.Task[None]") -> None:
        if not serving.cancelled() and serving.exception() is not None:
            log.error("%s cannot serve its clients", self._name, exc_info=serving.exception())

    async def stop(self) -> None:
        """Wait no longer; sockets that are about to be served are served when this returns."""
        if self._serving is None:
            self._leave()
        else:
            await asyncio.wait([self._serving])

    def close(self) -> None:
        """Close the sockets."""
        for one in self._sockets:
            one.close()


async def load(module: str) -> ModuleType:
    """Return a module, imported in a thread.

    The thread is one of its own: those of the event loop may all wait for a disk that hangs.
    """
    with ThreadPoolExecutor(1) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, importlib.import_module, module)
