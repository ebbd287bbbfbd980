"""Secrets that must be read back, sealed by libsodium's secret box under the key of `<data>/conf/access.key`.

Backups of the topics hold sealed secrets alone; the key file must be kept apart from them.
"""

import base64
import binascii
import os
import secrets
from typing import Final

import nacl.exceptions
import nacl.secret
import nacl.utils

from babelbus.identities.credential import Credential, Issued, new_id
from babelbus.identities.errors import CredentialError, KeyFileError
from babelbus.identities.key_files import make_key_file, read_key_file

KEY_NAME: Final = "access.key"
_KEYWORD: Final = b"babelbus-access-key"


class Vault:
    """Seals and opens secrets. The key file is made when a secret is sealed first, and read once.

    Args:
        folder: `<data>/conf`.
    """

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, KEY_NAME)
        self._box: nacl.secret.SecretBox | None = None

    def seal(self, owner: str, secret: str) -> str:
        """Return a secret as text that only this vault opens, and only for the same owner (an id).

        Raises:
            KeyFileError: the key file cannot be read or made, or others may read it.
        """
        box = self._open_box(make=True)
        return base64.b64encode(bytes(box.encrypt(f"{owner}\0{secret}".encode()))).decode()

    def open(self, owner: str, sealed: str) -> str:
        """Return the secret.

        Raises:
            KeyFileError: the key file is missing or cannot be read, or others may read it.
            CredentialError: the text is damaged, was sealed under another key, or for another owner.
        """
        box = self._open_box(make=False)
        try:
            name, _, secret = box.decrypt(base64.b64decode(sealed, validate=True)).decode().partition("\0")
        except (nacl.exceptions.CryptoError, binascii.Error, ValueError, TypeError) as error:
            raise CredentialError(f"the secret of {owner} cannot be opened with {self.path}: make a new one") from error
        if name != owner:
            raise CredentialError(f"the secret of {owner} was sealed for another credential: make a new one")
        return secret

    def make_key(self) -> None:
        """Create the key file, if it is missing.

        Raises:
            KeyFileError: it cannot be made.
        """
        if not os.path.exists(self.path):
            key = nacl.utils.random(nacl.secret.SecretBox.KEY_SIZE)
            make_key_file(self.path, b"%b %b\n" % (_KEYWORD, key.hex().encode()))

    def _open_box(self, *, make: bool) -> nacl.secret.SecretBox:
        if self._box is None:
            if make:
                self.make_key()
            keyword, _, digits = read_key_file(self.path).strip().partition(b" ")
            try:
                key = bytes.fromhex(digits.decode("ascii"))
                if keyword != _KEYWORD:
                    raise ValueError
                self._box = nacl.secret.SecretBox(key)
            except (ValueError, nacl.exceptions.ValueError) as error:
                raise KeyFileError(f"{self.path} is damaged: restore it, or remove it and make new API keys") from error
        return self._box


def make_api_key(vault: Vault, now_ms: int, *, key: str | None = None, secret: str | None = None,
                 lifetime_ms: int | None = None) -> Issued:  # fmt: skip
    """Build an API key and its secret; both can be given, as an old key file has them.

    Raises:
        KeyFileError: the key file of the vault cannot be used.
    """
    key = key or f"bbk_{new_id()}"
    secret = secret or secrets.token_urlsafe(32)
    expires = None if lifetime_ms is None else now_ms + lifetime_ms
    credential_id = new_id()
    data: dict[str, str | int] = {"key": key, "sealed": vault.seal(f"{credential_id} {key}", secret)}
    return Issued(Credential("api-key", credential_id, data, now_ms, expires), secret)


def secret_of(vault: Vault, credential: Credential) -> str:
    """Return the secret of an API key, with which a signature is checked.

    Raises:
        KeyFileError: the key file of the vault cannot be used.
        CredentialError: the credential is damaged, or of another data folder.
    """
    if credential.kind != "api-key":
        raise CredentialError(f"{credential.id} is no API key")
    return vault.open(f"{credential.id} {credential.data.get('key')}", str(credential.data.get("sealed")))
