"""Files that hold secrets: the server takes them only if nobody but their owner may use them."""

import os

from babelbus.errors import BabelbusError


class NotPrivateError(BabelbusError):
    """A file with a secret is open to others than its owner."""


def check_private(path: str) -> None:
    """Check that only the owner of a file may read or write it.

    Raises:
        NotPrivateError: the mode of the file is wider than 0600.
        OSError: there is no such file.
    """
    mode = os.stat(path).st_mode
    if mode & 0o077:
        raise NotPrivateError(f"{path} may be read by others (mode {mode & 0o777:o}); its mode must be 600")
