"""TLS of the listeners: contexts made from the settings and replaced when the files change, certificates of clients."""

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import ssl
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from babelbus.config import TlsSettings
from babelbus.errors import ConfigError
from babelbus.identities.errors import KeyFileError
from babelbus.identities.key_files import check_key_file

log = logging.getLogger(__name__)

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_VERIFY = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}

Stamp = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and time of change of each file; `None` for a file that is missing."""


class Tls:
    """The files of some listeners, and the context of their next handshake: take `context` anew for each of them."""

    def __init__(
        self, settings: TlsSettings, names: tuple[str, str], cert_file: str, key_file: str, alpn: Sequence[str]
    ) -> None:
        self.names = names
        """Settings that name the two files, for errors."""
        self.cert_file = cert_file
        self.key_file = key_file
        self.settings = settings
        self.alpn = list(alpn)
        self.stamp: Stamp = ()
        """State of the files when they were loaded last, successfully or not."""
        self.context: ssl.SSLContext
        self.load()

    def load(self) -> None:
        """Load the files; blocks. The earlier context stays in use if the files are wrong.

        Raises:
            ConfigError: a file cannot be read, is open to others, or does not fit the other file.
        """
        self.stamp = self.look()
        settings = self.settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _VERSIONS[settings.minimum_version]
        try:
            check_key_file(self.key_file)
            # A password cannot be asked for: the terminal, if there is one, may be of somebody else.
            context.load_cert_chain(self.cert_file, self.key_file, password="")
        except (KeyFileError, OSError, ValueError) as error:
            raise ConfigError(f"{', '.join(self.names)}: {_without_code(error)}") from error
        if settings.client_ca_file is not None:
            try:
                context.load_verify_locations(settings.client_ca_file)
            except OSError as error:
                raise ConfigError(f"tls.client_ca_file: {settings.client_ca_file}: {_without_code(error)}") from error
            if not context.get_ca_certs():
                raise ConfigError(f"tls.client_ca_file: {settings.client_ca_file}: there is no CA certificate in it")
        context.verify_mode = _VERIFY[settings.client_certificates]
        if self.alpn:
            context.set_alpn_protocols(self.alpn)
        self.context = context

    def look(self) -> Stamp:
        """Return the state of the files as it is now; blocks."""
        return look_at(self.cert_file, self.key_file, self.settings.client_ca_file or "")


class Files(Protocol):
    """Files that `Certificates` loads again: those of some listeners, as `Tls` has them, or those of links."""

    cert_file: str
    stamp: Stamp

    def load(self) -> None:
        """Load the files; blocks."""

    def look(self) -> Stamp:
        """Return the state of the files as it is now; blocks."""


class Certificates:
    """Makes the TLS of all listeners, and loads their files again when they change."""

    def __init__(self, settings: TlsSettings) -> None:
        """Check the settings.

        Raises:
            ConfigError: settings that go together are not together.
        """
        self._settings = settings
        self._all: list[Files] = []
        self._lock = threading.Lock()
        """A reload on request and one of the watch may come together."""
        self._watching: asyncio.Task[None] | None = None
        if (settings.cert_file is None) != (settings.key_file is None):
            raise ConfigError("tls.cert_file and tls.key_file go together")
        if (settings.client_ca_file is None) != (settings.client_certificates == "none"):
            raise ConfigError("tls.client_ca_file goes with tls.client_certificates = optional or required")

    def make_tls(
        self,
        section: str,
        chosen: bool | None = None,
        *,
        cert_file: str | None = None,
        key_file: str | None = None,
        alpn: Sequence[str] = (),
    ) -> Tls | None:
        """Return the TLS of the TCP listeners of a section; `None` if they speak none.

        Args:
            section: name of the section in the configuration.
            chosen: its setting `tls`.
            cert_file: its setting `tls_cert_file`, in place of that of all listeners.
            key_file: its setting `tls_key_file`.
            alpn: names of protocols that the listener offers.

        Raises:
            ConfigError: a file is missing in the settings, cannot be read, or does not fit the other file.
        """
        names = (f"{section}.tls_cert_file", f"{section}.tls_key_file")
        if (cert_file is None) != (key_file is None):
            raise ConfigError(f"{names[0]} and {names[1]} go together")
        if cert_file is not None and chosen is False:
            raise ConfigError(f"{section}.tls = false contradicts {names[0]}: remove one of them")
        if cert_file is None or key_file is None:
            names = ("tls.cert_file", "tls.key_file")
            cert_file, key_file = self._settings.cert_file, self._settings.key_file
        if chosen is False:
            return None
        if cert_file is None or key_file is None:
            if chosen:
                raise ConfigError(f"{section}.tls needs tls.cert_file and tls.key_file")
            return None
        tls = Tls(self._settings, names, cert_file, key_file, alpn)
        self._all.append(tls)
        return tls

    def add(self, files: Files) -> None:
        """Load files again, too, that were loaded for something else than a listener."""
        self._all.append(files)

    def reload(self) -> None:
        """Load all files again; blocks. A listener whose files are wrong keeps its certificate.

        Raises:
            ConfigError: some files are wrong; the message names all of them.
        """
        faults: dict[str, None] = {}  # listeners may share their files
        with self._lock:
            for tls in self._all:
                try:
                    tls.load()
                except ConfigError as error:
                    faults[str(error)] = None
        if faults:
            raise ConfigError("; ".join(faults))

    def check(self) -> None:
        """Load the files that changed; blocks. The log tells once that new files are wrong."""
        with self._lock:
            for tls in self._all:
                if tls.look() == tls.stamp:
                    continue
                try:
                    tls.load()
                except ConfigError as error:
                    log.warning("%s; the earlier certificate stays in use", error)
                else:
                    log.info("%s: loaded again", tls.cert_file)

    def watch(self) -> None:
        """Start to look for new files now and then, in a thread."""

        async def run() -> None:
            loop = asyncio.get_running_loop()
            while True:
                await asyncio.sleep(self._settings.reload_seconds)
                await loop.run_in_executor(None, self.check)

        if self._all:
            self._watching = asyncio.get_running_loop().create_task(run())

    async def stop(self) -> None:
        """End the watch."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching


class PeerCertificate(msgspec.Struct, frozen=True):
    """The certificate of a client; one of `tls.client_ca_file` signed it, and the client has its key."""

    uris: tuple[str, ...]
    """Alternative names that are URIs, as `spiffe://example/billing`."""
    dns_names: tuple[str, ...]
    """Alternative names that are names of hosts."""
    common_names: tuple[str, ...]
    """Common names of the subject, for certificates without alternative names."""
    fingerprint: str
    """SHA-256 of the certificate in hexadecimal digits."""
    ends_ms: float = math.inf
    """When the certificate expires, in milliseconds since 1970-01-01 UTC."""


def read_peer_certificate(ssl_object: Any) -> PeerCertificate | None:
    """Return the certificate that the client of a connection showed; `None` if it showed none.

    `ssl_object` is that of the transport, after the handshake.
    """
    fields = ssl_object.getpeercert()
    if not fields:
        return None
    names: list[tuple[str, str]] = list(fields.get("subjectAltName", ()))
    subject: list[tuple[str, str]] = [pair for part in fields.get("subject", ()) for pair in part]
    return PeerCertificate(
        uris=tuple(value for kind, value in names if kind == "URI"),
        dns_names=tuple(value for kind, value in names if kind == "DNS"),
        common_names=tuple(value for kind, value in subject if kind == "commonName"),
        fingerprint=hashlib.sha256(ssl_object.getpeercert(True)).hexdigest(),
        ends_ms=ssl.cert_time_to_seconds(fields["notAfter"]) * 1000,
    )


def explain(error: Exception) -> str:
    """Return why a handshake failed, in words for an operator."""
    reason = (getattr(error, "reason", None) or "").replace("_", " ").lower()
    if reason in ("http request", "https proxy request"):
        return "the client speaks plain HTTP, and this listener speaks TLS alone"
    if reason in ("wrong version number", "unknown protocol", "packet length too long", "record layer failure"):
        return f"the client does not speak TLS, and this listener speaks nothing else ({reason})"
    if reason in ("unsupported protocol", "version too low"):
        return "the client speaks an older TLS than tls.minimum_version"
    if reason == "peer did not return a certificate":
        return "the client showed no certificate, and tls.client_certificates = required"
    return f"the TLS handshake failed: {reason or error or 'the client left'}"


def look_at(*paths: str) -> Stamp:
    """Return the state of some files as it is now; blocks."""
    return tuple(map(_stamp, paths))


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _without_code(error: Exception) -> str:
    """Return the text of an error without the number and the place in the source of OpenSSL."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "it is no file in PEM, or has a password").replace("_", " ").lower()
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    return str(error)
