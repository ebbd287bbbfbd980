"""Tokens: 256 random bits that a client sends whole; the server keeps their SHA-256 alone.

A token is `bb_<id>_<secret>`: the prefix lets scanners of repositories find a token that leaked, the id finds the
credential without a comparison of secrets.
"""

import hashlib
import hmac
import re
import secrets
from typing import Final

from babelbus.identities.credential import Credential, Issued

PREFIX: Final = "bb_"
SECRET_BYTES: Final = 32
_TOKEN = re.compile(rf"{PREFIX}([0-9a-f]{{12}})_([A-Za-z0-9_-]{{43}})")


def make_token(now_ms: int, *, lifetime_ms: int | None = None) -> Issued:
    """Build a token; without a lifetime it never expires."""
    credential_id, secret = secrets.token_hex(6), secrets.token_urlsafe(SECRET_BYTES)
    expires = None if lifetime_ms is None else now_ms + lifetime_ms
    credential = Credential("token", credential_id, {"sha256": _digest(secret)}, now_ms, expires)
    return Issued(credential, f"{PREFIX}{credential_id}_{secret}")


def id_of_token(text: str) -> str | None:
    """Return the id of the credential that a token belongs to, `None` for a text that is no token."""
    match = _TOKEN.fullmatch(text)
    return match[1] if match else None


def proves_token(credential: Credential, text: str, now_ms: int) -> bool:
    """Return whether a text is the token of a credential that has not expired, in constant time."""
    match = _TOKEN.fullmatch(text)
    secret = match[2] if match and match[1] == credential.id else ""
    is_equal = hmac.compare_digest(_digest(secret), str(credential.data.get("sha256", "")))
    return credential.kind == "token" and is_equal and credential.is_valid(now_ms)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
