"""Files of secrets: only their owner may read them, else they are refused."""

import os
import secrets
from typing import Final

from babelbus.identities.errors import KeyFileError

BYTES_MAX: Final = 1_048_576


def read_key_file(path: str, *, bytes_max: int = BYTES_MAX, public: bool = False) -> bytes:
    """Return the content of a file of secrets; `public` allows a file with public keys alone, whatever its mode.

    Raises:
        KeyFileError: the file cannot be read, is too long, or others may read it.
    """
    try:
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            content = file.read(bytes_max + 1)
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}; name a file that this user can read") from error
    if len(content) > bytes_max:
        raise KeyFileError(f"{path} has over {bytes_max} bytes: it is no file of keys")
    if not (public and is_public(content)):
        refuse_wide_mode(path, about)
    return content


def check_key_file(path: str) -> None:
    """Check the mode of a file of secrets that a library reads.

    Raises:
        KeyFileError: there is no such file, or others may read it.
    """
    try:
        about = os.stat(path)
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}; name a file that this user can read") from error
    refuse_wide_mode(path, about)


def refuse_wide_mode(path: str, about: os.stat_result) -> None:
    """Check that a file of secrets is readable by its owner alone.

    A file of root may be readable by a group: a key of TLS is often handed to a service so.

    Raises:
        KeyFileError: others may read the file. A secret that others may have read stays theirs, whatever the mode is
            from now on, so the text asks for a new secret.
    """
    denied = 0o027 if about.st_uid == 0 and os.geteuid() != 0 else 0o077
    mode = about.st_mode & 0o777
    if mode & denied:
        raise KeyFileError(
            f"{path} may be read by others (mode {mode:o}); 'chmod 600' it, and replace the secret in it"
        )


def is_public(content: bytes) -> bool:
    """Return whether a file holds a public key or a certificate in PEM, and no private key."""
    return b"-----BEGIN" in content and b"PRIVATE KEY" not in content


def make_key_file(path: str, content: bytes) -> bool:
    """Write a new file with mode 0600; return `False` if there is such a file, which is never overwritten.

    Raises:
        KeyFileError: the disk refused; there is no half a file.
    """
    draft = f"{path}.{secrets.token_hex(8)}.new"
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(draft, path)  # a link never overwrites, and shows the whole content at once
            finally:
                os.unlink(draft)
        except FileExistsError:
            return False
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise KeyFileError(f"cannot make {path}: {error.strerror}") from error
    return True
