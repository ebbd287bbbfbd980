"""The JWT of a client and the privileges in it (docs/specifications/worterbuch.md, section 10)."""

import hashlib
import hmac
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from babelbus.core.state import covers
from babelbus.identities.errors import InvalidProofError, MisfitProofError
from babelbus.protocols.worterbuch.errors import MisfitTokenError, UnauthorizedError

if TYPE_CHECKING:
    from babelbus.identities.jwts import Keys

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
    granted: _Granted


_decode_claims = msgspec.json.Decoder(_Claims).decode


class Privileges(msgspec.Struct, frozen=True):
    """The contents of a token: its owner (`subject`, `name`), and the patterns that it grants."""

    subject: str
    name: str
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    profile: bool = False
    web_login: bool = False
    ends_seconds: float = math.inf
    """Unix time at which the privileges end, and with them every connection and stream that the token opened."""
    principal: str = ""
    """The name of the principal of the table of access."""
    key: str = ""
    """Fingerprint of the key that signed the token, if the key is one of a set."""

    def may(self, privilege: Privilege, pattern: str) -> bool:
        """Return whether this is granted for a key or a pattern."""
        granted = self.read if privilege == "read" else self.write if privilege == "write" else self.delete
        return any(covers(one, pattern) for one in granted)


class Verifier:
    """Checks tokens against the configured keys, and reads the privileges in them.

    Args:
        keys: an HMAC secret of any length (HS256), as upstream takes it; a public key in PEM; or the keys of a set.
        issuer: the claim `iss` that a token must have, if set.
        audience: what the claim `aud` must name; without an audience, a token for any audience is refused.
        claim: the claim that names the principal.

    Raises:
        ConfigError: the key is empty, or a PEM of something else.
    """

    def __init__(
        self, keys: "str | Keys", *, issuer: str | None = None, audience: str | None = None, claim: str = "sub"
    ) -> None:
        from babelbus.identities import jwts  # loads the cryptography of public keys, which few servers need

        self.takes_secret = False
        """Whether tokens are signed with a secret that clients of servers 0.42 prove by its hash."""
        self.guessable = False
        """Whether the secret is so short that wrong tokens could find it."""
        if isinstance(keys, str):
            is_public = "-----BEGIN" in keys
            self.takes_secret = not is_public
            self.guessable = not is_public and len(keys.encode()) < jwts.SECRET_BYTES_MIN
            keys = jwts.OneKey(jwts.public_key(keys) if is_public else jwts.secret_key(keys))
        name = msgspec.defstruct("Name", [("principal", str)], rename={"principal": claim})
        self._decode_name: Callable[[bytes], Any] = msgspec.json.Decoder(name).decode
        self._tokens = jwts.Verifier(keys, issuer=issuer, audience=audience)
        self.has_lost = keys.has_lost
        """Returns whether a key, named by its fingerprint, was removed from the set."""

    def verify(self, token: str, now_seconds: float) -> Privileges:
        """Return what a token proves at this time (Unix), and until when, with a minute's leeway.

        Raises:
            MisfitTokenError: the token has expired, is not valid yet, lacks a claim, or its key is not known yet.
            UnauthorizedError: the signature is wrong, or the text is no token.
        """
        try:
            proof = self._tokens.verify(token, now_seconds)
            claims = _decode_claims(proof.claims)
            principal: str = self._decode_name(proof.claims).principal
        except MisfitProofError as error:
            raise MisfitTokenError(str(error)) from error
        except InvalidProofError as error:
            raise UnauthorizedError(str(error)) from error
        except msgspec.MsgspecError as error:
            raise MisfitTokenError(f"no valid token: {error}") from error
        granted = claims.granted
        return Privileges(
            claims.sub,
            claims.name,
            granted.read or (),
            granted.write or (),
            granted.delete or (),
            bool(granted.profile),
            bool(granted.web_login),
            proof.ends_seconds,
            principal,
            proof.key,
        )


def hashed_token(client_id: str, secret: str) -> str:
    """Return what a client of server 0.42 sends instead of a JWT: the SHA-256 of id and secret in lower-case hex."""
    return hashlib.sha256(f"{client_id}{secret}".encode()).hexdigest()


def proves_secret(token: str, client_id: str, secret: str) -> bool:
    """Return whether a client of server 0.42 knows the secret; takes the same time for every wrong answer."""
    return hmac.compare_digest(token.encode("utf-8", "replace"), hashed_token(client_id, secret).encode())
