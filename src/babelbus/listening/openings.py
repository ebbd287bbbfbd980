"""The TCP listeners of a configuration, as far as an edge opens them: no service is built for them."""

from collections.abc import Sequence

import msgspec

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
