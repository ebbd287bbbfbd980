"""The administration of a server: its listener, and its API for other protocols; both are loaded when somebody asks."""

import asyncio
import logging
import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

from babelbus.core.access import Identity
from babelbus.errors import ConfigError
from babelbus.identities.proofs import Proofs
from babelbus.limited_log import LimitedLog
from babelbus.listening.door import Door
from babelbus.listening.entrances import Entrance
from babelbus.listening.sockets import Waiting, load, open_sockets
from babelbus.metrics import Metrics
from babelbus.protocols.registry import read_value
from babelbus.protocols.service import CONF_NAME, Lines, ServiceContext
from babelbus.storage.files import FileSystem
from babelbus.storage.notes import Note
from babelbus.web.sessions import NOTE_NAME as SESSIONS_NAME
from babelbus.web.sessions import KeptSessions
from babelbus.web.token import ensure_token

if TYPE_CHECKING:
    from babelbus.web.admin import AdminServer
    from babelbus.web.api import AdminApi
    from babelbus.web.server import Host

log = logging.getLogger(__name__)


class Administration:
    """The listener and the API. Their libraries take a quarter of a start, and nobody needs them before he asks."""

    def __init__(self, server: "Host", metrics: Metrics, proofs: Proofs, files: FileSystem) -> None:
        self._server = server
        self._metrics = metrics
        self._proofs = proofs
        self._files = files
        self._waiting: Waiting | None = None
        self.endpoint: AdminServer | None = None
        """Serves the clients of the listener, from the first one on."""
        self.api: AdminApi | None = None
        """Answers requests, from the first one on."""
        self.is_tls = False
        """Whether the listener speaks TLS."""

    async def listen(self, context: ServiceContext) -> str:
        """Open the listener; return its address.

        Raises:
            ConfigError: the folder of the documentation, or a certificate, is wrong.
            OSError: the address is taken.
        """
        settings = self._server.config.admin
        _check_docs_folder(settings.docs_folder)
        tls = context.certificates.make_tls("admin", settings.tls)
        self.is_tls = tls is not None
        door = Door(
            "admin",
            self._metrics,
            LimitedLog(log, context.clock),
            context.crowd,
            connections_max=settings.connections_max,
            handshake_seconds=settings.handshake_seconds,
            is_admin=True,
        )
        parts = {
            "token": ensure_token(self._server.folder),
            "settings": settings,
            "guard": context.browsers.guard("admin", self._metrics, host=settings.host, is_tls=self.is_tls),
            "crowd": context.crowd,
            "tls": tls,
            "door": door,
        }
        sockets = context.entrances.take("admin") or await open_sockets(settings.host, settings.port)
        self._waiting = Waiting("admin", sockets, partial(self._open, sockets, parts))
        context.entrances.add(
            Entrance(
                "admin",
                self._make_guest,
                door,
                tls=tls,
                prepare=self._waiting.serve,
                is_ready=lambda: self.endpoint is not None,
            )
        )
        address = "{}:{}".format(*sockets[0].getsockname()[:2])
        log.info("admin listens on %s", address)
        return address

    async def _open(self, sockets: list[socket.socket], parts: dict[str, Any]) -> None:
        module = await load("babelbus.web.admin")
        endpoint: AdminServer = module.AdminServer(self._server, await self.load_api(), **parts)
        await endpoint.start(sockets)
        self.endpoint = endpoint

    def _make_guest(self) -> asyncio.Protocol:
        assert self.endpoint is not None, "not loaded"
        return self.endpoint.make_guest()

    async def answer(self, principal: Identity, method: str, path: str, body: bytes, lines: Lines) -> tuple[int, bytes]:
        """Answer a request that came through another protocol than HTTP (`protocols.service.Administer`)."""
        return await (await self.load_api()).direct.answer(principal, method, path, body, lines)

    async def load_api(self) -> "AdminApi":
        """Return the API; whoever asks first loads it."""
        if self.api is None:
            module = await load("babelbus.web.api")
            if self.api is None:
                from babelbus.server.views import VIEWS

                path = os.path.join(self._server.folder, CONF_NAME, SESSIONS_NAME)
                self.api = module.AdminApi(
                    self._server,
                    self._metrics,
                    read_value=read_value,
                    proofs=self._proofs,
                    views=VIEWS,
                    sessions=Note(self._files, path, KeptSessions),
                )
        return self.api

    def access_changed(self) -> None:
        """Handle a change of the table of access, for who is logged in."""
        if self.endpoint is not None:
            self.endpoint.access_changed()
        if self.api is not None:
            self.api.access_changed()

    async def stop(self) -> None:
        """Close the listener and its connections."""
        if self._waiting is None:
            return
        await self._waiting.stop()
        if self.endpoint is not None:
            await self.endpoint.stop()
        self._waiting.close()


def _check_docs_folder(folder: str | None) -> None:
    """Check that the folder of the documentation exists: the endpoint opens it when somebody asks first."""
    if folder is not None and not os.path.isdir(folder):
        raise ConfigError(f"admin.docs_folder: {folder}: no such folder; 'make docs' builds the pages")
