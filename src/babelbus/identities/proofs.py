"""All proofs of identity of a server: what its doors ask, kept up to date with the table of principals."""

import logging
from collections.abc import Mapping
from typing import Annotated

import msgspec

from babelbus.clock import Clock
from babelbus.config import AccessSettings
from babelbus.identities.credential import LIFETIME_MS_MAX, Credential, Issued, Kind
from babelbus.identities.directory import (
    Directory,
    DuplicateProofError,
    NameKind,
    make_certificate,
    make_client_name,
    make_process,
)
from babelbus.identities.guessing import Guessing
from babelbus.identities.passwords import Passwords
from babelbus.identities.tokens import make_token
from babelbus.identities.vault import Vault, make_api_key
from babelbus.metrics import Metrics

log = logging.getLogger(__name__)


class Wish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A credential to be made: `kind`, and what belongs to the kind.

    Without a `password`, a `key` or a `secret` the server makes one. `name_kind` and `value` are of `tls`.
    """

    kind: Kind
    password: str | None = None
    key: str | None = None
    secret: str | None = None
    fingerprint: str = ""
    name_kind: NameKind = "cn"
    value: str = ""
    uid: int | None = None
    gid: int | None = None
    lifetime_ms: Annotated[int, msgspec.Meta(gt=0, le=LIFETIME_MS_MAX)] | None = None

    def __repr__(self) -> str:
        return f"Wish({self.kind!r})"


class Proofs:
    """The parts that prove who a client is; only the event loop uses them.

    Args:
        folder: `<data>/conf`, where the key of the vault is.
    """

    def __init__(self, folder: str, clock: Clock, metrics: Metrics, settings: AccessSettings) -> None:
        self._clock = clock
        self.vault = Vault(folder)
        self.directory = Directory(self.vault, clock)
        self.guessing = Guessing(clock, metrics)
        self.passwords = Passwords(
            self.directory.passwords,
            clock,
            metrics,
            strength=settings.password_strength,
            threads=settings.password_threads,
            waiting_max=settings.passwords_waiting_max,
        )
        self._known: dict[str, tuple[Credential, ...]] = {}

    def update(self, principals: Mapping[str, tuple[Credential, ...]]) -> None:
        """Replace the credentials of all principals; what was verified of those that changed is forgotten.

        If two principals have one proof, the first keeps its proofs, and the other has none.
        """
        known = self._known
        self._known = dict(principals)
        changed = [name for name, credentials in principals.items() if known.get(name) != credentials]
        for name in (*changed, *(known.keys() - principals.keys())):
            self.directory.remove(name)  # all of them first: a proof may go from a principal to another
            self.passwords.forget(name)
        for name in changed:
            try:
                self.directory.replace(name, principals[name])
            except DuplicateProofError as error:
                log.error("the proofs of principal %r are not taken: %s", name, error)
                del self._known[name]  # asked for again with the next change

    async def issue(self, wish: Wish) -> Issued:
        """Build a credential; its secret is empty unless the server made a secret.

        Raises:
            InvalidProofError, CredentialError: what belongs to the kind is not valid.
            TooManyProofsError: too many passwords wait.
            KeyFileError: the key of the vault cannot be used.
        """
        made = await self._make(wish)
        if wish.lifetime_ms is None:
            return made
        credential = msgspec.structs.replace(made.credential, expires=made.credential.created + wish.lifetime_ms)
        return Issued(credential, made.secret)

    async def _make(self, wish: Wish) -> Issued:
        now_ms = self._clock.now_ms()
        match wish.kind:
            case "password":
                return await self.passwords.issue(wish.password)
            case "token":
                return make_token(now_ms)
            case "api-key":
                made = make_api_key(self.vault, now_ms, key=wish.key, secret=wish.secret)
                return Issued(made.credential, "" if wish.secret else made.secret)
            case "jebp":
                return Issued(make_certificate(wish.fingerprint, now_ms), "")
            case "tls":
                return Issued(make_client_name(wish.name_kind, wish.value, now_ms), "")
            case "peer":
                return Issued(make_process(now_ms, uid=wish.uid, gid=wish.gid), "")

    def close(self) -> None:
        """Stop the threads of the passwords."""
        self.passwords.close()
