"""Limits and addresses of listeners of any protocol, and their TLS."""

import ipaddress
from typing import Annotated, Literal, Protocol, runtime_checkable

import msgspec

from babelbus.config.settings import of

Connections = Annotated[
    int, of("open connections; further ones are closed at once, so descriptors are left for files", "count", ge=1)
]
SpeaksTls = Annotated[
    bool, of("true needs TLS, false has none on these TCP ports; none is TLS as soon as tls.cert_file is set")
]


@runtime_checkable
class Listening(Protocol):
    """A section whose listeners other machines may reach."""

    @property
    def enabled(self) -> bool:
        """Whether there are listeners."""

    @property
    def host(self) -> str:
        """Address of the listeners."""

    @property
    def exposure(self) -> str | None:
        """How strangers get in who reach a listener; `None` if each client proves who it is."""

    @property
    def overheard(self) -> str | None:
        """The harm that others on the way can do if the listener does not speak TLS; `None` for no harm."""


class TlsSettings(msgspec.Struct, frozen=True):
    """The certificate of all TCP listeners (docs/security.md, "TLS"); jebp has an encryption of its own."""

    cert_file: (
        Annotated[str, of("certificate chain in PEM: with it, all TCP listeners but that of jebp speak TLS alone")]
        | None
    ) = None
    key_file: Annotated[str, of("its private key in PEM, which nobody but the owner may read (mode 0600)")] | None = (
        None
    )
    client_ca_file: (
        Annotated[str, of("certificates in PEM of those who sign certificates of clients; goes with the next")] | None
    ) = None
    client_certificates: Annotated[
        Literal["none", "optional", "required"],
        of("whether clients are asked for a certificate; required closes connections of clients that show none"),
    ] = "none"
    minimum_version: Annotated[Literal["1.2", "1.3"], of("oldest version of TLS that clients may use")] = "1.2"
    reload_seconds: Annotated[
        float, of("how often the server looks for new files; SIGHUP looks at once", "seconds", gt=0)
    ] = 60.0


def is_loopback(host: str) -> bool:
    """Return whether a listener on `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # any other name may resolve to another machine


def speaks_tls(section: object, tls: TlsSettings) -> bool:
    """Return whether the TCP listeners of a section speak TLS; jebp has no setting for it."""
    chosen: bool | None = getattr(section, "tls", False)
    own = getattr(section, "tls_cert_file", None)
    return own is not None or (tls.cert_file is not None if chosen is None else chosen)
