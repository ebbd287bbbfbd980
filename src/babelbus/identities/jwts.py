"""JWTs: which key may sign with which algorithm, and what a token proves until when.

The key chooses the algorithms, never the token: else a client that knows a public key could sign with it as the secret
of an HMAC. `exp` is required; the session that a token opened ends with it (`Proof.ends_seconds`).
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import jwt
import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, SECP384R1, SECP521R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from jwt.algorithms import Algorithm, ECAlgorithm, HMACAlgorithm, OKPAlgorithm, RSAAlgorithm, RSAPSSAlgorithm

from babelbus.errors import ConfigError
from babelbus.identities.errors import InvalidProofError, MisfitProofError, UnknownKeyError

LEEWAY_SECONDS: Final = 60
TOKEN_BYTES_MAX: Final = 65_536
"""Longer tokens are refused unread; nobody has proved anything yet when they arrive."""
SECRET_BYTES_MIN: Final = 32
RSA_BITS_MIN: Final = 2048
PRINCIPAL_MAX: Final = 255


class _Secret(HMACAlgorithm):
    """HMAC whose secret was checked when it was configured: the library would give a Python warning for each token."""

    def check_key_length(self, key: bytes) -> None:
        """Check nothing."""


_CURVES: Final = {"ES256": SECP256R1, "ES384": SECP384R1, "ES512": SECP521R1}
_ALGORITHMS: Final[dict[str, Algorithm]] = {
    "HS256": _Secret(HMACAlgorithm.SHA256),
    "RS256": RSAAlgorithm(RSAAlgorithm.SHA256),
    "RS384": RSAAlgorithm(RSAAlgorithm.SHA384),
    "RS512": RSAAlgorithm(RSAAlgorithm.SHA512),
    "PS256": RSAPSSAlgorithm(RSAPSSAlgorithm.SHA256),
    "PS384": RSAPSSAlgorithm(RSAPSSAlgorithm.SHA384),
    "PS512": RSAPSSAlgorithm(RSAPSSAlgorithm.SHA512),
    "ES256": ECAlgorithm(ECAlgorithm.SHA256),
    "ES384": ECAlgorithm(ECAlgorithm.SHA384),
    "ES512": ECAlgorithm(ECAlgorithm.SHA512),
    "EdDSA": OKPAlgorithm(),
}
RSA_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")


class Key(msgspec.Struct, frozen=True):
    """A key that tokens are checked with, and the algorithms that it allows."""

    value: Any
    algorithms: tuple[str, ...]
    fingerprint: str = ""
    """SHA-256 of the public key in hexadecimal digits; empty for a key that cannot be removed from its set."""


class Keys(Protocol):
    """Keys of tokens, as they are now."""

    def find(self, key_id: str | None) -> Sequence[Key]:
        """Return the keys that may have signed a token with this key id, or without a key id.

        Raises:
            UnknownKeyError: no key has this id yet.
        """

    def has_lost(self, fingerprint: str) -> bool:
        """Return whether a key was removed, so that the tokens that it has signed prove nothing any more."""


class OneKey:
    """One configured key, which is asked whatever key id a token names."""

    def __init__(self, key: Key) -> None:
        self.key = key

    def find(self, key_id: str | None) -> Sequence[Key]:
        """Return the key."""
        return (self.key,)

    def has_lost(self, fingerprint: str) -> bool:
        """Return `False`: the key stays until the server stops."""
        return False


class Proof(msgspec.Struct, frozen=True):
    """The proof that a token is. `claims` are the bytes of its JSON object."""

    principal: str
    claims: bytes
    ends_seconds: float
    """Unix time after which the token proves nothing, leeway included: a session that holds the token ends then."""
    key: str = ""
    """Fingerprint of the key that signed the token: a session that holds the token ends when the key is removed."""


class _Claims(msgspec.Struct, frozen=True):
    exp: int | float
    nbf: int | float | None = None
    iss: str | None = None
    aud: str | list[str] | msgspec.UnsetType | None = msgspec.UNSET


_decode_claims = msgspec.json.Decoder(_Claims).decode
_decode_all = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode


class Verifier:
    """Checks tokens.

    Args:
        issuer: the claim `iss` that a token must have, if set.
        audience: what the claim `aud` must name; without an audience, a token for any audience is refused.
        claim: the claim whose text is the name of the principal.
    """

    def __init__(
        self, keys: Keys, *, issuer: str | None = None, audience: str | None = None, claim: str = "sub"
    ) -> None:
        self.keys = keys
        self._issuer = issuer
        self._audience = audience
        self._claim = claim
        self._signatures = jwt.PyJWS(algorithms=[])
        for name, algorithm in _ALGORITHMS.items():
            self._signatures.register_algorithm(name, algorithm)

    def verify(self, token: str, now_seconds: float) -> Proof:
        """Return what a token proves at this time (Unix).

        Raises:
            UnknownKeyError: the key set has no such key yet.
            MisfitProofError: the token has expired, is not valid yet, is for others, or lacks a claim.
            InvalidProofError: the signature is wrong, or the text is no token.
        """
        if len(token) > TOKEN_BYTES_MAX:
            raise InvalidProofError(f"a token of {len(token)} characters, limit {TOKEN_BYTES_MAX}")
        try:
            claims, key = self._check_signature(token)
        except (jwt.PyJWTError, msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise InvalidProofError(f"no valid token: {error}") from error
        try:
            known = _decode_claims(claims)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise MisfitProofError(f"no valid token: {error}") from error
        if not math.isfinite(known.exp) or known.exp < now_seconds - LEEWAY_SECONDS:
            raise MisfitProofError("the token has expired")
        if known.nbf is not None and known.nbf > now_seconds + LEEWAY_SECONDS:
            raise MisfitProofError("the token is not valid yet")
        if self._issuer is not None and known.iss != self._issuer:
            raise MisfitProofError("the token is of another issuer")
        if not self._is_for_us(known.aud):
            raise MisfitProofError("the token is for another audience")
        return Proof(self._principal_of(claims), claims, known.exp + LEEWAY_SECONDS, key)

    def _is_for_us(self, named: str | list[str] | msgspec.UnsetType | None) -> bool:
        if self._audience is None:
            return named is msgspec.UNSET
        return self._audience == named or (isinstance(named, list) and self._audience in named)

    def _check_signature(self, token: str) -> tuple[bytes, str]:
        """Return the claims of a token, and the fingerprint of the key that signed it."""
        # The header counts for the choice of the key alone; the key says which algorithms there are.
        key_id = jwt.get_unverified_header(token).get("kid")
        keys = self.keys.find(key_id if isinstance(key_id, str) else None)
        error: Exception = InvalidProofError("no key of the set fits this token")
        for key in keys:
            try:
                content: bytes = self._signatures.decode(token, key.value, algorithms=list(key.algorithms))
                return content, key.fingerprint
            except jwt.PyJWTError as failure:
                error = failure
        raise error

    def _principal_of(self, claims: bytes) -> str:
        try:
            name = _decode_text(_decode_all(claims)[self._claim])
        except (KeyError, msgspec.MsgspecError) as error:
            raise MisfitProofError(f"the token lacks the claim {self._claim!r}") from error
        if not name or len(name) > PRINCIPAL_MAX or not name.isprintable():
            raise MisfitProofError(f"the claim {self._claim!r} of the token is no name")
        return name


def secret_key(secret: str | bytes) -> Key:
    """Return the key of an HMAC secret (HS256); one shorter than `SECRET_BYTES_MIN` can be guessed.

    Raises:
        ConfigError: the secret is empty.
    """
    value = secret.encode() if isinstance(secret, str) else secret
    if not value.strip():
        raise ConfigError("the key for tokens is empty")
    return Key(value, ("HS256",))


def public_key(pem: str | bytes) -> Key:
    """Return the key of a public key in PEM: RSA of 2048 bits or more, P-256, P-384, P-521 or Ed25519.

    Raises:
        ConfigError: the text is no such key.
    """
    try:
        key = load_pem_public_key(pem.encode() if isinstance(pem, str) else pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError("the key for tokens is a PEM, but of no public key") from error
    algorithms = algorithms_of(key)
    if not algorithms:
        raise ConfigError(
            f"the key for tokens is to be of RSA ({RSA_BITS_MIN} bits or more), P-256, P-384, P-521 or Ed25519"
        )
    return Key(key, algorithms)


def algorithms_of(key: object) -> tuple[str, ...]:
    """Return the algorithms that a public key allows, none for a key of another kind."""
    if isinstance(key, Ed25519PublicKey):
        return ("EdDSA",)
    if isinstance(key, EllipticCurvePublicKey):
        return tuple(name for name, curve in _CURVES.items() if isinstance(key.curve, curve))
    if isinstance(key, RSAPublicKey) and key.key_size >= RSA_BITS_MIN:
        return RSA_ALGORITHMS
    return ()


def key_of(jwk: Mapping[str, Any]) -> Key | None:
    """Return the key of a JWK, `None` for a key that is not for checking signatures, or of a kind not listed above."""
    try:
        if jwk.get("use", "sig") != "sig" or "verify" not in jwk.get("key_ops", ["verify"]):
            return None
        match jwk.get("kty"):
            case "RSA" if "d" not in jwk:
                key: object = RSAAlgorithm.from_jwk(dict(jwk))
            case "EC" if "d" not in jwk:
                key = ECAlgorithm.from_jwk(dict(jwk))
            case "OKP" if "d" not in jwk:
                key = OKPAlgorithm.from_jwk(dict(jwk))
            case _:  # a secret is no public key, and a private key in a published set is everybody's
                return None
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError):
        return None
    algorithms = algorithms_of(key)
    named = jwk.get("alg")
    if named is not None:
        algorithms = tuple(name for name in algorithms if name == named)
    if not algorithms:
        return None
    content = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
    return Key(key, algorithms, hashlib.sha256(content).hexdigest())


__all__ = ["Key", "Keys", "OneKey", "Proof", "UnknownKeyError", "Verifier", "key_of", "public_key", "secret_key"]
