"""A stored proof of identity of one principal; the table of principals keeps it, this package makes and checks it."""

import math
import secrets
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

Kind = Literal["password", "token", "api-key", "jebp", "tls", "peer"]

Place = tuple[str, str | int]
"""A proof that finds its credential: two principals never have one place."""

ID_BYTES: Final = 9
LIFETIME_MS_MAX: Final = 100 * 365 * 86_400_000


class Credential(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One proof that a principal has. `data` holds no secret that can be read back without `<data>/conf/access.key`.

    | kind | data |
    | --- | --- |
    | `password` | `hash`: argon2id in the form of libsodium |
    | `token` | `sha256`: of the secret part, in hex |
    | `api-key` | `key`: what the client sends openly, `sealed`: its secret, sealed |
    | `jebp` | `fingerprint` of a certificate |
    | `tls` | `kind` (`uri`, `dns` or `cn`) and `value`, a name of a client certificate |
    | `peer` | `uid` or `gid` of a process of this machine |
    """

    kind: Kind
    id: str
    """Names the credential in lists, the audit and commands; is no secret."""
    data: dict[str, str | int] = {}
    created: int = 0
    """Milliseconds since 1970-01-01 UTC."""
    expires: int | None = None
    """The same; `None` never expires."""

    @property
    def ends_ms(self) -> float:
        """When it proves nothing any more, infinite for one that never expires."""
        return math.inf if self.expires is None else self.expires

    def is_valid(self, now_ms: int) -> bool:
        """Return whether the credential has not expired."""
        return self.expires is None or now_ms < self.expires


class Issued(msgspec.Struct, frozen=True):
    """A new credential, and the secret that is shown once and stored nowhere."""

    credential: Credential
    secret: str

    def __repr__(self) -> str:
        return f"Issued({self.credential!r})"


def places_of(credential: Credential) -> Iterator[Place]:
    """Yield where a credential is looked up; a damaged one has no place."""
    data = credential.data
    match credential.kind:
        case "token":
            yield "token", credential.id
        case "api-key" if "key" in data:
            yield "api-key", data["key"]
        case "jebp" if "fingerprint" in data:
            yield "jebp", data["fingerprint"]
        case "tls" if "kind" in data and "value" in data:
            yield f"tls {data['kind']}", data["value"]
        case "peer":
            for name in ("uid", "gid"):
                if name in data:
                    yield name, data[name]


def new_id() -> str:
    """Return an id for a credential: 12 letters, digits, - and _."""
    return secrets.token_urlsafe(ID_BYTES)
