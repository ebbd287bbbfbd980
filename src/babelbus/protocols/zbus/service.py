"""zbus as a server offers it: hub and listeners (docs/protocols/zbus.md)."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence

import msgspec

from babelbus.config import ZbusSettings
from babelbus.errors import ConfigError
from babelbus.identities.errors import KeyFileError
from babelbus.identities.key_files import read_key_file
from babelbus.listening.openings import Opening, openings_for
from babelbus.listening.sockets import load
from babelbus.protocols.browsers import read_origins, read_words
from babelbus.protocols.connection import MakeSession
from babelbus.protocols.contract import Outbox, Session
from babelbus.protocols.service import CLIENT_SECONDS, Continued, ServiceContext, StreamService
from babelbus.protocols.zbus.callers import KEYS_ORIGIN, principals_of
from babelbus.protocols.zbus.continuation import KeptSession, decode_bindings, decode_session, encode_bindings
from babelbus.protocols.zbus.hub import Hub
from babelbus.protocols.zbus.messages import PROTOCOL
from babelbus.protocols.zbus.web_options import OpenUrls, StaticFiles, WebOptions
from babelbus.wire.cors import Cors
from babelbus.wire.http import TOKEN, Files

TICK_SECONDS = 1.0
WEB = "babelbus.protocols.zbus.http"


class ZbusService(StreamService):
    """HTTP and WebSocket over one hub, and a port for the list of queues."""

    def __init__(self, context: ServiceContext) -> None:
        settings = self._settings = context.config.zbus
        super().__init__(PROTOCOL, context, settings)
        self._keys = read_keys(settings.auth_file)
        self._tls = context.certificates.make_tls(
            PROTOCOL, settings.tls, cert_file=settings.tls_cert_file, key_file=settings.tls_key_file
        )
        web = read_web_options(settings, context.browsers.origins)
        self._web = msgspec.structs.replace(
            web,
            guard=context.browsers.guard(
                PROTOCOL,
                context.metrics,
                host=settings.host,
                origins=() if web.cors is None else web.cors.origins,
                is_tls=self._tls is not None,
            ),
        )
        if self._keys:
            context.broker.gate.import_entries(KEYS_ORIGIN, principals_of(self._keys))
        self.hub = Hub(
            context.broker,
            context.files,
            context.folder,
            metrics=context.metrics,
            clock=context.clock,
            guessing=context.guessing,
            directory=context.proofs.directory,
            settings=settings,
            loop=asyncio.get_running_loop(),
        )

    async def settle(self) -> None:
        """Wait a moment for the answers of services."""
        await self.hub.calls.settle(CLIENT_SECONDS)

    async def drain(self) -> None:
        """Stop all deliveries: later deliveries might not arrive."""
        self.hub.stop()
        await super().drain()

    async def start(self) -> None:
        """Open the listeners.

        Raises:
            OSError: an address is taken.
        """
        settings, tls = self._settings, self._tls
        maker = self._maker(self._options(monitor=False))
        await self.listeners.listen("zbus", settings.host, settings.port, maker, tls=tls, needs=WEB)
        if settings.monitor_port is not None:
            maker = self._maker(self._options(monitor=True))
            await self.listeners.listen("zbus-monitor", settings.host, settings.monitor_port, maker, tls=tls, needs=WEB)
        self.listeners.tick(TICK_SECONDS, self.hub.tick)

    def keep(self) -> bytes:
        """Return the bound urls, which survive their clients."""
        bindings = self.hub.bindings.keep()
        return encode_bindings(bindings) if bindings else b""

    def restore(self, content: bytes) -> None:
        """Register the bound urls that another server has kept."""
        self.hub.bindings.restore(decode_bindings(content))

    async def continue_sessions(self, sessions: Sequence[Continued]) -> set[str]:
        """Continue connections that another server has begun; return the ids of those that go on."""
        if sessions:
            await load(WEB)
        return await super().continue_sessions(sessions)

    def continue_session(self, content: bytes, outbox: Outbox, close: Callable[[], None], peer: str | None) -> Session:
        """Return the session of a connection that goes on."""
        kept = decode_session(content)
        return self._maker(self._options(monitor=kept.is_monitor), kept)(outbox, close, peer)

    def _options(self, *, monitor: bool) -> WebOptions:
        if not monitor:
            return self._web
        # Files and open urls are not for it: there no url is a service's.
        return WebOptions(monitor=True, cors=self._web.cors, guard=self._web.guard)

    def _maker(self, options: WebOptions, kept: KeptSession | None = None) -> MakeSession:
        def make(outbox: Outbox, close: Callable[[], None], peer: str | None) -> Session:
            from babelbus.protocols.zbus.http import WebSession

            return WebSession(self.hub, outbox, close, address=peer, keys=self._keys, options=options, kept=kept)

        return make


def openings(settings: ZbusSettings) -> list[Opening]:
    """Return the TCP listeners of some settings."""
    ports = {"zbus": settings.port, "zbus-monitor": settings.monitor_port}
    return openings_for(PROTOCOL, settings, ports, cert_file=settings.tls_cert_file, key_file=settings.tls_key_file)


def read_keys(path: str | None) -> Mapping[str, str]:
    """Read a file of keys: a line is an apiKey, blanks and its secretKey; empty lines and comments (`#`) are skipped.

    Raises:
        ConfigError: the file cannot be read, a line is wrong, or there is no key; the secret is not shown.
    """
    if path is None:
        return {}
    try:
        lines = read_key_file(path).decode().splitlines()
    except (KeyFileError, UnicodeDecodeError) as error:
        raise ConfigError(f"zbus.auth_file: {error}") from error
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[0] in keys:
            raise ConfigError(f"zbus.auth_file: {path}, line {number}: write an apiKey of its own and its secretKey")
        keys[words[0]] = words[1]
    if not keys:
        raise ConfigError(f"zbus.auth_file: {path}: there is no key in it, so nobody could do anything")
    return keys


def read_web_options(settings: ZbusSettings, origins: frozenset[str] = frozenset()) -> WebOptions:
    """Read what is offered to browsers; `origins` are those of pages that may use every door.

    Raises:
        ConfigError: a setting is invalid, or names a folder that does not exist.
    """
    files = None
    if settings.web_root is not None:
        if not os.path.isdir(settings.web_root):
            raise ConfigError(f"zbus.web_root: {settings.web_root}: no such folder")
        root = Files(settings.web_root, bytes_max=settings.package_bytes_max)
        files = StaticFiles(root, cache_seconds=settings.web_cache_seconds)
    patterns = (settings.auth_excluded or "").split()
    if patterns and settings.auth_file is None:
        raise ConfigError("zbus.auth_excluded: without zbus.auth_file nothing needs a signature anyway")
    for pattern in patterns:
        if not pattern.startswith("/") or "*" in pattern[:-1] or "?" in pattern:
            raise ConfigError(f"zbus.auth_excluded: {pattern!r}: write a path, or its beginning and a *")
    return WebOptions(cors=_read_cors(settings, origins), files=files, open_urls=OpenUrls(patterns))


def _read_cors(settings: ZbusSettings, origins: frozenset[str]) -> Cors | None:
    origins |= read_origins("zbus.cors_origins", settings.cors_origins, any_allowed=True)
    if not origins:
        return None
    lists = []
    for name in ("cors_methods", "cors_headers", "cors_expose_headers"):
        words = read_words(getattr(settings, name))
        for word in words:
            if TOKEN.fullmatch(word) is None:
                raise ConfigError(f"zbus.{name}: {word!r}: write names with commas between, or *")
        lists.append(", ".join(words))
    methods, headers, exposed = lists
    return Cors(origins, methods, headers, exposed)
