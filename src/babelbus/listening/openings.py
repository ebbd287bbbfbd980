"""The TCP listeners of a configuration, as far as an edge opens them: no service is built for them."""

from collections.abc import Mapping, Sequence

import msgspec

from babelbus.config import AdminSettings, EventmeshSettings, WorterbuchSettings, ZbusSettings
from babelbus.listening.certificates import Certificates, Tls


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """One listener."""

    name: str
    """As in `Entrances.by_name`."""
    host: str
    port: int
    section: str
    """Section of the configuration."""
    speaks_tls: bool = True
    """Whether the settings of TLS hold for the listener."""
    tls: bool | None = None
    """The setting `tls` of the section."""
    cert_file: str | None = None
    key_file: str | None = None
    alpn: Sequence[str] = ()
    handshake_seconds: float = 10.0

    def make_tls(self, certificates: Certificates) -> Tls | None:
        """Return the TLS of the listener; `None` if it speaks none.

        Raises:
            ConfigError: a file is missing in the settings, cannot be read, or does not fit the other file.
        """
        if not self.speaks_tls:
            return None
        return certificates.make_tls(
            self.section, self.tls, cert_file=self.cert_file, key_file=self.key_file, alpn=self.alpn
        )


def openings_for(
    section: str,
    settings: AdminSettings | EventmeshSettings | WorterbuchSettings | ZbusSettings,
    ports: Mapping[str, int | None],
    *,
    cert_file: str | None = None,
    key_file: str | None = None,
    alpn: Sequence[str] = (),
) -> list[Opening]:
    """Return the listeners of a section by their names; those without a port are off."""
    return [
        Opening(
            name=name,
            host=settings.host,
            port=port,
            section=section,
            tls=settings.tls,
            cert_file=cert_file,
            key_file=key_file,
            alpn=alpn,
            handshake_seconds=settings.handshake_seconds,
        )
        for name, port in ports.items()
        if port is not None
    ]
