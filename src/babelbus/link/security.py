"""The certificates of a link: both ends show one, or the link stays on this machine."""

import ssl

from babelbus.errors import ConfigError
from babelbus.identities.errors import KeyFileError
from babelbus.identities.key_files import check_key_file
from babelbus.listening.certificates import Stamp, look_at


class LinkTls:
    """The contexts of the next handshake of links: take them anew for each; `Certificates` loads the files again."""

    def __init__(self, cert_file: str, key_file: str, ca_file: str) -> None:
        """Load the files; blocks. Raises: as `load`."""
        self.cert_file = cert_file
        self.stamp: Stamp = ()
        self.server: ssl.SSLContext
        """That of the core, which wants a certificate of the authority."""
        self.client: ssl.SSLContext
        """That of an edge, which wants one, too."""
        self._key_file, self._ca_file = key_file, ca_file
        self.load()

    def load(self) -> None:
        """Load the files; blocks. The earlier contexts stay in use if the files are wrong.

        Raises:
            ConfigError: a file cannot be read, is open to others, or does not fit the other file.
        """
        self.stamp = self.look()
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        files = self.cert_file, self._key_file, self._ca_file
        try:
            check_key_file(self._key_file)
            for context in (server, client):
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.load_cert_chain(self.cert_file, self._key_file, password="")
                context.load_verify_locations(self._ca_file)
                context.verify_mode = ssl.CERT_REQUIRED
        except (KeyFileError, OSError, ValueError) as error:
            raise ConfigError(f"certificates of the link ({', '.join(files)}): {error}") from error
        self.server, self.client = server, client

    def look(self) -> Stamp:
        """Return the state of the files as it is now; blocks."""
        return look_at(self.cert_file, self._key_file, self._ca_file)
