"""The JWT of a client and the privileges in it (docs/specifications/worterbuch.md, section 10)."""

import hashlib
import hmac
from typing import Literal

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from jwt import PyJWS, PyJWTError
from jwt.algorithms import ECAlgorithm, HMACAlgorithm, OKPAlgorithm

from babelbus.core.state import covers
from babelbus.errors import ConfigError
from babelbus.protocols.worterbuch.errors import UnauthorizedError

LEEWAY_SECONDS = 60
TOKEN_BYTES_MAX = 65_536
"""Longer tokens are refused unread; nobody has proved anything yet when they arrive."""

Privilege = Literal["read", "write", "delete"]


class _Granted(msgspec.Struct, frozen=True, rename={"web_login": "web-login"}):
    read: tuple[str, ...] | None = None
    write: tuple[str, ...] | None = None
    delete: tuple[str, ...] | None = None
    profile: bool | None = None
    web_login: bool | None = None


class _Claims(msgspec.Struct, frozen=True, rename={"granted": "worterbuchPrivileges"}):
    sub: str
    name: str
    exp: int | float
    granted: _Granted
    aud: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decode_claims = msgspec.json.Decoder(_Claims).decode


class _AnySecret(HMACAlgorithm):
    """HS256 that takes the secrets upstream takes: the library would give a Python warning for each token."""

    def check_key_length(self, key: bytes) -> None:
        """Check nothing: upstream has no minimum."""


class Privileges(msgspec.Struct, frozen=True):
    """The contents of a token: its owner (`subject`, `name`), and the patterns that it grants."""

    subject: str
    name: str
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    profile: bool = False
    web_login: bool = False

    def may(self, privilege: Privilege, pattern: str) -> bool:
        """Return whether this is granted for a key or a pattern."""
        granted = self.read if privilege == "read" else self.write if privilege == "write" else self.delete
        return any(covers(one, pattern) for one in granted)


EVERYTHING = Privileges("", "", ("#",), ("#",), ("#",), profile=True, web_login=True)
"""The privileges of every client where no key is configured."""


class Verifier:
    """Checks tokens against the one configured key.

    The key chooses the algorithm, never the token: else whoever knows a public key could sign with it as HMAC secret.

    Args:
        secret_or_pem: an HMAC secret (HS256), or a public key in PEM: of P-256 (ES256) or Ed25519 (EdDSA).

    Raises:
        ConfigError: it is empty, or a PEM of something else.
    """

    def __init__(self, secret_or_pem: str) -> None:
        if not secret_or_pem.strip():
            raise ConfigError("the key for tokens is empty")
        algorithm: HMACAlgorithm | ECAlgorithm | OKPAlgorithm = _AnySecret(HMACAlgorithm.SHA256)
        self.algorithm = "HS256"
        self._key: bytes | EllipticCurvePublicKey | Ed25519PublicKey = secret_or_pem.encode()
        if "-----BEGIN" in secret_or_pem:
            self._key = _load(secret_or_pem)
            if isinstance(self._key, Ed25519PublicKey):
                algorithm, self.algorithm = OKPAlgorithm(), "EdDSA"
            else:
                algorithm, self.algorithm = ECAlgorithm(ECAlgorithm.SHA256), "ES256"
        self._signatures = PyJWS(algorithms=[])
        self._signatures.register_algorithm(self.algorithm, algorithm)

    def verify(self, token: str, now_seconds: float) -> Privileges:
        """Return what a token proves at this time (Unix); its end is checked here and not again, with a minute's
        leeway.

        Raises:
            UnauthorizedError: the signature is wrong, the token has expired, or lacks a claim.
        """
        if len(token) > TOKEN_BYTES_MAX:
            raise UnauthorizedError(f"a token of {len(token)} characters, limit {TOKEN_BYTES_MAX}")
        try:
            claims = _decode_claims(self._signatures.decode(token, self._key, algorithms=[self.algorithm]))
        except (PyJWTError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise UnauthorizedError(f"no valid token: {error}") from error
        if claims.aud is not msgspec.UNSET:
            raise UnauthorizedError("the token is for another audience")
        if claims.exp < now_seconds - LEEWAY_SECONDS:
            raise UnauthorizedError("the token has expired")
        granted = claims.granted
        return Privileges(
            claims.sub,
            claims.name,
            granted.read or (),
            granted.write or (),
            granted.delete or (),
            bool(granted.profile),
            bool(granted.web_login),
        )


def _load(pem: str) -> EllipticCurvePublicKey | Ed25519PublicKey:
    try:
        key = load_pem_public_key(pem.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError("the key for tokens is a PEM, but of no public key") from error
    if isinstance(key, Ed25519PublicKey) or (
        isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1)
    ):
        return key
    raise ConfigError("the key for tokens is to be of P-256 or Ed25519")


def hashed_token(client_id: str, secret: str) -> str:
    """Return what a client of server 0.42 sends instead of a JWT: the SHA-256 of id and secret in lower-case hex."""
    return hashlib.sha256(f"{client_id}{secret}".encode()).hexdigest()


def proves_secret(token: str, client_id: str, secret: str) -> bool:
    """Return whether a client of server 0.42 knows the secret; takes the same time for every wrong answer."""
    return hmac.compare_digest(token.encode("utf-8", "replace"), hashed_token(client_id, secret).encode())
