"""Wörterbuch as a server offers it: hub and listeners (docs/protocols/worterbuch.md)."""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from babelbus.config import WorterbuchSettings
from babelbus.core.state import Unheard
from babelbus.errors import ConfigError
from babelbus.identities.errors import KeyFileError
from babelbus.identities.key_files import read_key_file
from babelbus.listening.openings import Opening, openings_for
from babelbus.protocols.browsers import read_origins
from babelbus.protocols.connection import MakeSession
from babelbus.protocols.contract import Outbox, Session
from babelbus.protocols.service import Continued, ServiceContext, StreamService
from babelbus.protocols.worterbuch.continuation import decode_session
from babelbus.protocols.worterbuch.gatekeeper import PROTOCOL, Gatekeeper
from babelbus.protocols.worterbuch.hub import TICK_SECONDS, Hub
from babelbus.protocols.worterbuch.lines import LineSession
from babelbus.protocols.worterbuch.names import Symbols
from babelbus.protocols.worterbuch.privileges import Verifier
from babelbus.protocols.worterbuch.profiles import MAIN, PROFILES, Endpoint
from babelbus.protocols.worterbuch.session import Session as WorterbuchSession
from babelbus.protocols.worterbuch.web_options import WebOptions
from babelbus.wire.cors import Cors
from babelbus.wire.http import Files

if TYPE_CHECKING:
    from babelbus.identities.key_sets import KeySet

log = logging.getLogger(__name__)

WEB = "babelbus.protocols.worterbuch.http"
CORS_METHODS = "GET, POST, DELETE, OPTIONS"
CORS_HEADERS = "authorization, content-type"
OTHER_DOORS = ("jebp", "zbus", "eventmesh", "sbus")
MAIN_ENDPOINT = Endpoint(MAIN)
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class WorterbuchService(StreamService):
    """WebSocket, REST and JSON lines over one hub."""

    def __init__(self, context: ServiceContext) -> None:
        settings = self._settings = context.config.worterbuch
        super().__init__(PROTOCOL, context, settings)
        origins = context.browsers.origins | read_origins("worterbuch.cors_origins", settings.cors_origins)
        self._tls = context.certificates.make_tls(PROTOCOL, settings.tls)
        self._guard = context.browsers.guard(
            PROTOCOL, context.metrics, host=settings.host, origins=origins, is_tls=self._tls is not None
        )
        self._cors = Cors(origins, CORS_METHODS, CORS_HEADERS, credentials=True) if origins else None
        key = _read_key(settings.auth_key_file)
        self._key_set = _key_set(settings, context)
        keys = key if self._key_set is None else self._key_set
        self._context = context
        keeper = Gatekeeper(
            context.broker,
            context.clock,
            context.guessing,
            key=key,
            verifier=None if keys is None else _make_verifier(keys, settings),
            by_names=context.proofs.directory.by_names,
        )
        self.hub = Hub(context.broker, context.metrics, context.clock, settings, keeper)
        read_file_name(settings.export_name)

    async def start(self) -> None:
        """Open the listeners.

        Raises:
            OSError: an address is taken.
        """
        settings, listeners, tls = self._settings, self.listeners, self._tls
        self._warn_of_other_doors()
        if self._key_set is not None:
            self._key_set.start()
        paths = {"/ws": MAIN_ENDPOINT}
        ports = {}
        for place, endpoint in map(read_endpoint, (settings.more_endpoints or "").split()):
            if isinstance(place, str):
                paths[place] = endpoint
            else:
                ports[place] = endpoint
        web = self._make_web(paths)
        await listeners.listen("worterbuch", settings.host, settings.port, web, tls=tls, needs=WEB)
        lines = self._make_lines(MAIN_ENDPOINT, "TCP")
        await listeners.listen("worterbuch-tcp", settings.host, settings.tcp_port, lines, tls=tls)
        for port, endpoint in ports.items():
            name = f"worterbuch-tcp-{endpoint.profile.name}"
            await listeners.listen(name, settings.host, port, self._make_lines(endpoint, "TCP"), tls=tls)
        if settings.unix_path is not None:
            lines = self._make_lines(MAIN_ENDPOINT, "UNIX")
            await listeners.listen_unix("worterbuch-unix", settings.unix_path, lines)
        listeners.tick(TICK_SECONDS, self.hub.tick)

    def _warn_of_other_doors(self) -> None:
        """Write a warning if tokens protect nothing from clients of other protocols: while the gate is off."""
        if self.hub.keeper.verifier is None or self.hub.keeper.enforcing:
            return
        config = self._context.config
        others = [name for name in OTHER_DOORS if getattr(config, name).enabled]
        if others:
            log.warning(
                "tokens protect what Wörterbuch stores from its own clients only: %s reach the same data without a "
                "token; 'babelbus access enable' makes all protocols ask one table",
                ", ".join(others),
            )

    def access_changed(self) -> None:
        """Read the rights of each client again."""
        super().access_changed()
        self.hub.access_changed()

    async def drain(self) -> None:
        """Stop to fetch keys, close the listeners and read no more requests."""
        if self._key_set is not None:
            await self._key_set.close()
        await super().drain()

    async def continue_sessions(self, sessions: Sequence[Continued]) -> set[str]:
        """Continue sessions, all with their locks; then they wait for the locks of others, in their order."""
        owners = await super().continue_sessions(sessions)
        clients = [self.hub.clients.get(owner) for owner in owners]
        waits = [(wait, one) for one in clients if isinstance(one, WorterbuchSession) for wait in one.take_waits()]
        for wait, client in sorted(waits, key=lambda pair: pair[0].place):
            client.wait_again(wait)
        return owners

    def tell_again(self, unheard: Sequence[Unheard], heard: Mapping[str, int]) -> None:
        """Send the sessions that go on the changes that they have not heard."""
        self.hub.tell_again(unheard, heard)

    def continue_session(self, content: bytes, outbox: Outbox, close: Callable[[], None], peer: str | None) -> Session:
        """Return a session on lines or in a WebSocket that goes on."""
        kept = decode_session(content)
        endpoint, name = Endpoint(PROFILES[kept.profile], kept.symbols), kept.transport_name
        if name == "WS":
            from babelbus.protocols.worterbuch.websocket import SocketSession

            return SocketSession(self.hub, outbox, close, endpoint=endpoint, address=peer, kept=kept)
        return LineSession(self.hub, outbox, close, endpoint=endpoint, transport_name=name, address=peer, kept=kept)

    def _make_lines(self, endpoint: Endpoint, transport_name: str) -> MakeSession:
        def make(outbox: Outbox, close: Callable[[], None], peer: str | None) -> Session:
            return LineSession(
                self.hub,
                outbox,
                close,
                endpoint=endpoint,
                transport_name=transport_name,
                address=peer,
            )

        return make

    def _make_web(self, paths: dict[str, Endpoint]) -> MakeSession:
        settings = self._settings
        options = WebOptions(
            paths=paths,
            cors=self._cors,
            guard=self._guard,
            files=_open_root(settings.web_root, settings.message_bytes_max),
            is_tls=self._tls is not None,
        )

        def make(outbox: Outbox, close: Callable[[], None], peer: str | None) -> Session:
            from babelbus.protocols.worterbuch.http import WebSession

            return WebSession(self.hub, outbox, close, address=peer, options=options)

        return make


def openings(settings: WorterbuchSettings) -> list[Opening]:
    """Return the TCP listeners of some settings.

    Raises:
        ConfigError: an entry of `worterbuch.more_endpoints` is wrong.
    """
    ports: dict[str, int | None] = {"worterbuch": settings.port, "worterbuch-tcp": settings.tcp_port}
    for place, endpoint in map(read_endpoint, (settings.more_endpoints or "").split()):
        if isinstance(place, int):
            ports[f"worterbuch-tcp-{endpoint.profile.name}"] = place
    return openings_for(PROTOCOL, settings, ports)


def read_endpoint(text: str) -> tuple[str | int, Endpoint]:
    """Read `tcp:PORT=VERSION` or `/PATH=VERSION`, with `:` and the three characters of keys behind it if not `:/?#`.

    Returns the port or the path, and what is spoken there.

    Raises:
        ConfigError: the text has another form.
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


def _read_key(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return read_key_file(path, public=True).decode().strip()
    except (KeyFileError, UnicodeDecodeError) as error:
        raise ConfigError(f"worterbuch.auth_key_file: {error}") from error


def _key_set(settings: WorterbuchSettings, context: ServiceContext) -> "KeySet | None":
    if settings.auth_key_set is None:
        return None
    if settings.auth_key_file is not None:
        raise ConfigError("worterbuch.auth_key_set and worterbuch.auth_key_file exclude each other")
    from babelbus.identities.key_sets import KeySet

    try:
        return KeySet(settings.auth_key_set, context.clock, context.metrics)
    except ConfigError as error:
        raise ConfigError(f"worterbuch.auth_key_set: {error}") from error


def _make_verifier(keys: "str | KeySet", settings: WorterbuchSettings) -> Verifier:
    verifier = Verifier(keys, issuer=settings.auth_issuer, audience=settings.auth_audience, claim=settings.auth_claim)
    if verifier.guessable:
        from babelbus.identities.jwts import SECRET_BYTES_MIN

        log.warning(
            "the secret in worterbuch.auth_key_file is shorter than %d bytes and could be guessed: replace it, as with "
            "'openssl rand -base64 32'",
            SECRET_BYTES_MIN,
        )
    return verifier
