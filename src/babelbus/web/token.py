"""The administration token: a secret in the data folder, so that who may read the data may administer the server."""

import os
import secrets

from babelbus.errors import BabelbusError
from babelbus.identities.errors import KeyFileError
from babelbus.identities.key_files import check_key_file, make_key_file

NAME = "admin_token"


class TokenError(BabelbusError):
    """The token file cannot be read or made, or others than its owner may read it."""


def token_path(data_folder: str) -> str:
    """Return where the token of the server with this data folder is."""
    return os.path.join(data_folder, "conf", NAME)


def read_token(data_folder: str) -> str:
    """Return the token of the server with this data folder, for the command line on the same machine.

    Raises:
        TokenError: the file does not exist yet, is empty, or cannot be read.
    """
    path = token_path(data_folder)
    try:
        with open(path, encoding="ascii") as file:
            token = file.read().strip()
    except FileNotFoundError:
        raise TokenError(f"there is no {path}; the server makes it at its first start") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TokenError(f"cannot read {path}: {error}") from error
    if not token:
        raise TokenError(f"{path} is empty; remove it, and the next start of the server makes a new one")
    check_token(token, path)
    return token


def check_token(token: str, path: str) -> None:
    """Check that what a file holds can be a token. The error does not show it: it may be another secret.

    Raises:
        TokenError: it cannot.
    """
    if not token.isascii() or not token.isprintable() or " " in token or not token:
        raise TokenError(f"{path} holds no token, which is one word, such as bb_...; name the right file")


def ensure_token(data_folder: str) -> str:
    """Return the token, made at the first start: 256 random bits in a file that only its owner may read.

    Raises:
        TokenError: the file cannot be made or read, or it is open to others.
    """
    path = token_path(data_folder)
    try:
        make_key_file(path, f"{secrets.token_urlsafe(32)}\n".encode())
        check_key_file(path)
    except KeyFileError as error:
        # Others may know the token already, so a tighter mode would help nobody.
        raise TokenError(f"{error}. Remove it: the next start makes a new token") from error
    return read_token(data_folder)
