"""Builds the guard of each HTTP door from the settings: names of this server, and pages that may use it."""

import logging
import re
import socket
from collections.abc import Iterable

import msgspec

from babelbus.config import ServerSettings
from babelbus.errors import ConfigError
from babelbus.metrics import Metrics
from babelbus.wire.browsers import ANY_ORIGIN, BrowserGuard, Refusal

log = logging.getLogger(__name__)

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Browsers(msgspec.Struct, frozen=True):
    """Names and origins that hold for the HTTP doors of all protocols."""

    host_names: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    """Of pages that may use every door."""

    def guard(
        self, protocol: str, metrics: Metrics, *, host: str, origins: Iterable[str] = (), is_tls: bool = False
    ) -> BrowserGuard:
        """Build the guard of one door, which listens on `host` and lets pages of further `origins` in."""
        reasons: set[str] = set()

        def count(refusal: Refusal) -> None:
            metrics.browser_requests_refused_total.labels(protocol, refusal.reason).inc()
            # Once: any page can make the server refuse as often as it likes.
            if refusal.reason not in reasons:
                reasons.add(refusal.reason)
                log.warning("%s: %s; further ones are counted, not logged", protocol, refusal.text)

        return BrowserGuard(
            hosts=self.host_names | {host.lower()},
            origins=self.origins.union(origins),
            is_tls=is_tls,
            on_refused=count,
        )


def read_browsers(settings: ServerSettings) -> Browsers:
    """Read the settings, and add the name of this machine.

    Raises:
        ConfigError: a setting holds something that is no name or no origin.
    """
    machine = socket.gethostname().lower()
    names = {name.lower().removesuffix(".") for name in read_words(settings.host_names)}
    for name in names:
        if _NAME.fullmatch(name) is None:
            raise ConfigError(f"server.host_names: {name!r}: write names without scheme and port, commas between")
    return Browsers(
        host_names=frozenset(names | {machine, machine.partition(".")[0]} - {""}),
        origins=read_origins("server.allowed_origins", settings.allowed_origins),
    )


def read_origins(key: str, text: str | None, *, any_allowed: bool = False) -> frozenset[str]:
    """Read a list of origins with commas between, as browsers send them: scheme, host and port, no path.

    Raises:
        ConfigError: a word is no origin, or it is `*` where that is not allowed.
    """
    origins = set()
    for word in read_words(text):
        origin = word.rstrip("/").lower()
        if origin != ANY_ORIGIN or not any_allowed:
            if _ORIGIN.fullmatch(origin) is None:
                more = ", or *" if any_allowed else ""
                raise ConfigError(f"{key}: {origin!r}: write https://host or http://host:port{more}")
            # Browsers leave out the port that the scheme has by default.
            origin = origin.removesuffix(_DEFAULT_PORTS.get(origin.partition(":")[0], "/"))
        origins.add(origin)
    return frozenset(origins)


def read_words(text: str | None) -> list[str]:
    """Return the words of a setting that has commas between them."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]
