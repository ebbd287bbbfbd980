"""The identity of a client, and the keys that only some clients may hear (docs/specifications/sbus.md, section 8)."""

import re

import msgspec

from babelbus.core.subject import SECRETS
from babelbus.errors import RemoteProtocolError

SECRET = SECRETS.encode()
_FIELD = rb"(0|[1-9][0-9]*|)"  # one spelling for each number: no leading zero
_FULL = re.compile(rb"!/cred/%b/%b/%b/" % (_FIELD, _FIELD, _FIELD))


class Credentials(msgspec.Struct, frozen=True):
    """The process at the other end as it was when it connected (SO_PEERCRED)."""

    gid: int
    uid: int
    pid: int
    groups: tuple[int, ...] = ()
    """The other groups of the process."""

    def fit(self, wanted: tuple[bytes, ...]) -> bool:
        """Return whether these are the numbers `wanted` (gid, uid, pid); an empty one is anybody's."""
        own = (b"%d" % self.gid, b"%d" % self.uid, b"%d" % self.pid)
        return all(not field or field == mine for field, mine in zip(wanted, own, strict=True))


def secret_fields(key: bytes) -> tuple[bytes, ...] | None:
    """Return the gid, uid and pid that a key is secret to, `None` if it is no secret key of the full form."""
    if not key.startswith(SECRET):
        return None
    found = _FULL.match(key)
    return found.groups() if found else None


def patterns_of(pattern: bytes, credentials: Credentials) -> tuple[bytes, ...]:
    """Return the patterns that a subscription stands for: itself, and with its empty fields filled in (section 8.4).

    Raises:
        RemoteProtocolError: the pattern is for other credentials, or a shortened form; the client is disconnected.
    """
    if not pattern.startswith(SECRET):
        return (pattern,)
    fields = secret_fields(pattern)
    if fields is None or not credentials.fit(fields):
        raise RemoteProtocolError("a subscription to a key that is secret to others")
    if all(fields):
        return (pattern,)
    rest = pattern[len(SECRET + b"/".join(fields)) :]
    own = (credentials.gid, credentials.uid, credentials.pid)
    return pattern, SECRET + b"%d/%d/%d" % own + rest
