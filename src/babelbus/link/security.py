"""The certificates of a link: both ends show one, or the link stays on this machine."""

import ssl

from babelbus.errors import ConfigError
from babelbus.identities.errors import KeyFileError
from babelbus.identities.key_files import check_key_file


def make_contexts(cert_file: str, key_file: str, ca_file: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS contexts of the core and of an edge: each wants a certificate of the authority from the other.

    Reads files, so it blocks.

    Raises:
        ConfigError: a file cannot be read, is open to others, or does not fit the other file.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        check_key_file(key_file)
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_cert_chain(cert_file, key_file, password="")
            context.load_verify_locations(ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
    except (KeyFileError, OSError, ValueError) as error:
        raise ConfigError(f"certificates of the link ({cert_file}, {key_file}, {ca_file}): {error}") from error
    return server, client
