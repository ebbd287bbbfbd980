"""The identity of a client or server: an Ed25519 key, its fingerprint, and the file that keeps it (DECISION 10 and 11).

The file is text, readable by its owner only:

    # Babelbus identity: console
    # fingerprint: 7db0b01f39d179aacf7b03dbd7dd9d71f641598bed40fb9839d3c1e1117e666f
    jebp-ed25519-seed 4343434343434343434343434343434343434343434343434343434343434343

Only the last line counts; lines that start with `#` are for people.
"""

import hashlib
import os
from typing import Final

import nacl.bindings
import nacl.exceptions
from nacl.signing import SigningKey

from babelbus.errors import BabelbusError

SEED_BYTES: Final = 32
CERTIFICATE_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
_KEYWORD: Final = "jebp-ed25519-seed"
_FILE_BYTES_MAX: Final = 4_096


class IdentityError(BabelbusError):
    """A key file cannot be used or made; the message names the file and what to do."""


def fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate as 64 lower-case hex digits (DECISION 11)."""
    return hashlib.sha256(certificate).hexdigest()


def is_signature(certificate: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether the owner of `certificate` signed `message`; any length of any argument is allowed."""
    if len(certificate) != CERTIFICATE_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        nacl.bindings.crypto_sign_open(signature + message, certificate)
    except nacl.exceptions.BadSignatureError:
        return False
    return True


class Identity:
    """An Ed25519 key pair; `certificate` is its public key, 32 bytes. The secret part never shows in a repr."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"seed of {len(seed)} bytes, not {SEED_BYTES}")
        self._key = SigningKey(seed)
        self.certificate = bytes(self._key.verify_key)
        self.fingerprint = fingerprint(self.certificate)

    @classmethod
    def generate(cls) -> "Identity":
        """Build a new key from the operating system's randomness."""
        return cls(os.urandom(SEED_BYTES))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Identity":
        """Read a key file.

        Raises:
            IdentityError: the file is missing, readable by others, or does not hold one key.
        """
        path = os.fspath(path)
        try:
            with open(path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                content = file.read(_FILE_BYTES_MAX + 1)
        except OSError as error:
            raise IdentityError(f"cannot read the key file {path}: {error.strerror}") from error
        if os.name == "posix" and mode & 0o077:
            raise IdentityError(f"the key file {path} is open to others (mode {mode & 0o777:03o}): chmod 600 it")
        return cls(_read_seed(path, content))

    def save(self, path: str | os.PathLike[str], *, name: str = "") -> None:
        """Write a new key file with mode 0600; it is on disk, whole, when this returns, or not there at all.

        Raises:
            IdentityError: there is such a file already (a key is never overwritten), or it cannot be written.
        """
        path = os.fspath(path)
        label = " ".join(name.split())  # one line, whatever the name is
        text = f"# Babelbus identity: {label}\n# fingerprint: {self.fingerprint}\n{_KEYWORD} {bytes(self._key).hex()}\n"
        # Written beside and linked: a crash leaves no half a key under the name, and a link never overwrites.
        draft = f"{path}.{os.urandom(8).hex()}.new"
        try:
            _write_new(draft, text.encode())
            try:
                os.link(draft, path)
            finally:
                os.unlink(draft)
            _flush_folder(os.path.dirname(path) or ".")
        except FileExistsError as error:
            raise IdentityError(f"the key file {path} exists already; a key is never overwritten") from error
        except OSError as error:
            raise IdentityError(f"cannot write the key file {path}: {error.strerror}") from error

    @property
    def seed(self) -> bytes:
        """The secret part."""
        return bytes(self._key)

    def sign(self, message: bytes) -> bytes:
        """Return the signature of `message`, 64 bytes; Ed25519 gives the same one each time."""
        return self._key.sign(message).signature

    def __repr__(self) -> str:
        return f"Identity({self.fingerprint})"


def _read_seed(path: str, content: bytes) -> bytes:
    if len(content) > _FILE_BYTES_MAX:
        raise IdentityError(f"{path} is no key file: it has over {_FILE_BYTES_MAX} bytes")
    lines = [line.strip() for line in content.decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    keyword, _, digits = lines[0].partition(" ") if len(lines) == 1 else ("", "", "")
    if keyword != _KEYWORD:
        raise IdentityError(f"{path} is no key file: it must have one line `{_KEYWORD} <64 hex digits>`")
    try:
        seed = bytes.fromhex(digits)
    except ValueError:
        seed = b""
    if len(seed) != SEED_BYTES:
        # Without the digits: they are the secret.
        raise IdentityError(f"the key in {path} is damaged: it must have {2 * SEED_BYTES} hex digits")
    return seed


def _write_new(path: str, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        os.unlink(path)
        raise


def _flush_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
