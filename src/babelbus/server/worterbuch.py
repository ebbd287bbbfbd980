"""The Wörterbuch part of a server: hub and listeners, put together from the settings."""

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Callable

from babelbus import __version__
from babelbus.clock import Clock
from babelbus.config import WorterbuchSettings
from babelbus.core.broker import Broker
from babelbus.errors import ConfigError
from babelbus.metrics import Metrics
from babelbus.protocols.contract import Outbox, Session
from babelbus.protocols.worterbuch.hub import PROTOCOL, TICK_SECONDS, Hub, Options
from babelbus.protocols.worterbuch.lines import LineSession
from babelbus.protocols.worterbuch.privileges import Verifier
from babelbus.protocols.worterbuch.profiles import MAIN, PROFILES
from babelbus.protocols.worterbuch.static import Files
from babelbus.protocols.worterbuch.symbols import Symbols
from babelbus.protocols.worterbuch.web import Endpoint, WebOptions, WebSession
from babelbus.server.connection import Connection, MakeSession

MAIN_ENDPOINT = Endpoint(MAIN)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class WorterbuchService:
    """Wörterbuch as a server of topics offers it. `addresses` are those of its listeners by kind."""

    def __init__(
        self,
        settings: WorterbuchSettings,
        broker: Broker,
        metrics: Metrics,
        clock: Clock,
        connections: set[Connection],
        *,
        outbox_bytes_max: int,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._connections = connections
        self._outbox_bytes_max = outbox_bytes_max
        key = _read_key(settings.auth_key_file)
        options = Options(
            version=__version__,
            name=settings.instance_name,
            extended_monitoring=settings.extended_monitoring,
            queue_bytes_max=settings.queue_bytes_max,
            slow=settings.slow,
            message_bytes_max=settings.message_bytes_max,
            verifier=None if key is None else Verifier(key),
            shared_secret=key,
            handshake_wait_seconds=settings.handshake_wait_seconds,
            sse_double_encoding=settings.sse_double_encoding,
        )
        self.hub = Hub(broker, metrics, clock, options)
        self.addresses: dict[str, str] = {}
        self._listeners: list[asyncio.Server] = []
        self._ticker: asyncio.Task[None] | None = None
        self._unix: tuple[str, int | None] | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: an address is taken.
        """
        settings = self._settings
        loop = asyncio.get_running_loop()
        paths = {"/ws": MAIN_ENDPOINT}
        ports = {}
        for place, endpoint in map(read_endpoint, (settings.more_endpoints or "").split()):
            if isinstance(place, str):
                paths[place] = endpoint
            else:
                ports[place] = endpoint
        await self._listen_tcp("worterbuch", settings.port, self._make_web(paths))
        await self._listen_tcp("worterbuch-tcp", settings.tcp_port, self._make_lines(MAIN_ENDPOINT, "TCP"))
        for port, endpoint in ports.items():
            name = f"worterbuch-tcp-{endpoint.profile.name}"
            await self._listen_tcp(name, port, self._make_lines(endpoint, "TCP"))
        if settings.unix_path is not None:
            path = _prepare_path(settings.unix_path)
            connect = self._connect(self._make_lines(MAIN_ENDPOINT, "UNIX"))
            self._listeners.append(await loop.create_unix_server(connect, path, backlog=1024))
            self._unix = (path, _number_of(path))
            self.addresses["worterbuch-unix"] = path
        self._ticker = loop.create_task(self._tick())

    async def _listen_tcp(self, name: str, port: int, make_session: MakeSession) -> None:
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(self._connect(make_session), self._settings.host, port, backlog=1024)
        for bound in listener.sockets:
            # Each connection takes it over: a client that vanished without a word is noticed in the end (section 3).
            with socket.socket(fileno=os.dup(bound.fileno())) as own:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._listeners.append(listener)
        self.addresses[name] = "{}:{}".format(*listener.sockets[0].getsockname()[:2])

    def _connect(self, make_session: MakeSession) -> Callable[[], Connection]:
        return lambda: Connection(
            PROTOCOL,
            make_session,
            self._metrics,
            self._connections,
            bytes_max=self._outbox_bytes_max,
            handshake_seconds=self._settings.handshake_seconds,
            connections_max=self._settings.connections_max,
        )

    def _make_lines(self, endpoint: Endpoint, transport_name: str) -> MakeSession:
        def make(outbox: Outbox, close: Callable[[], None], peer: str | None) -> Session:
            return LineSession(
                self.hub,
                outbox,
                close,
                profile=endpoint.profile,
                symbols=endpoint.symbols,
                transport_name=transport_name,
                address=peer,
            )

        return make

    def _make_web(self, paths: dict[str, Endpoint]) -> MakeSession:
        settings = self._settings
        options = WebOptions(
            paths=paths,
            deflate=settings.deflate,
            cors_origins=read_origins(settings.cors_origins or ""),
            export_name=read_file_name(settings.export_name),
            files=_open_root(settings.web_root, settings.message_bytes_max),
        )

        def make(outbox: Outbox, close: Callable[[], None], peer: str | None) -> Session:
            return WebSession(self.hub, outbox, close, address=peer, options=options)

        return make

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.hub.tick()

    async def stop_listening(self) -> None:
        """Take no more clients."""
        for listener in self._listeners:
            listener.close()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        if self._unix is not None:
            path, number = self._unix
            if _number_of(path) == number:
                os.unlink(path)


def read_endpoint(text: str) -> tuple[str | int, Endpoint]:
    """Read `tcp:PORT=VERSION` or `/PATH=VERSION`, with `:` and the three characters of keys behind it if not `:/?#`.

    Gives the port or the path, and what is spoken there.

    Raises:
        ConfigError: it is none of these.
    """
    place, _, spoken = text.rpartition("=")
    name, colon, characters = spoken.partition(":")
    profile = PROFILES.get(name)
    digits = place.removeprefix("tcp:")
    is_port = digits != place and digits.isascii() and digits.isdigit() and int(digits) < 65536
    if profile is None or not (is_port or place.startswith("/")):
        names = ", ".join(PROFILES)
        raise ConfigError(
            f"worterbuch.more_endpoints: {text!r}: write tcp:PORT=VERSION or /PATH=VERSION with a version of {names}"
        )
    if not colon:
        return int(digits) if is_port else place, Endpoint(profile)
    try:
        symbols = Symbols(*characters)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"worterbuch.more_endpoints: {text!r}: behind the colon stand separator, wildcard and multi-wildcard"
        ) from error
    return int(digits) if is_port else place, Endpoint(profile, symbols)


def read_origins(text: str) -> frozenset[str]:
    """Read a list of origins with commas between, as browsers send them: scheme, host and port, no path.

    Raises:
        ConfigError: one is none; `*` neither, as browsers take it from nobody who lets them send cookies.
    """
    origins = frozenset(one.strip().rstrip("/").lower() for one in text.split(",") if one.strip())
    for origin in origins:
        if _ORIGIN.fullmatch(origin) is None:
            raise ConfigError(f"worterbuch.cors_origins: {origin!r}: write https://host or http://host:port")
    return origins


def read_file_name(name: str) -> str:
    """Read the name of exported files.

    Raises:
        ConfigError: it would need quotes in a header, or leave its folder.
    """
    if _FILE_NAME.fullmatch(name) is None:
        raise ConfigError(f"worterbuch.export_name: {name!r}: write letters, digits and .-_")
    return name


def _open_root(path: str | None, bytes_max: int) -> Files | None:
    if path is None:
        return None
    if not os.path.isdir(path):
        raise ConfigError(f"worterbuch.web_root: {path}: no such folder")
    return Files(path, bytes_max=bytes_max)


def _prepare_path(path: str) -> str:
    """Make the folder of a socket; asyncio itself removes a stale one."""
    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return path


def _number_of(path: str) -> int | None:
    """Say which file is at a path now."""
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def _read_key(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"worterbuch.auth_key_file: {path}: {error}") from error
