"""The credentials of all principals by what a client shows: whose token, key, certificate, process or password is it?

The table of principals calls `replace` and `remove` when it changes; the doors of the protocols call the other methods.
A proof that two principals would share is refused when it is added, so that an answer is never a matter of order.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

from babelbus.clock import Clock
from babelbus.errors import BabelbusError
from babelbus.identities.credential import Credential, Place, new_id, places_of
from babelbus.identities.errors import CredentialError
from babelbus.identities.tokens import id_of_token, proves_token
from babelbus.identities.vault import Vault, secret_of

NameKind = Literal["uri", "dns", "cn"]
NAME_KINDS: Final[tuple[NameKind, ...]] = ("uri", "dns", "cn")
"""In the order in which the names of a client certificate are asked."""


class DuplicateProofError(BabelbusError):
    """Another principal has the same proof: a client that shows it could be both."""


class ApiKey(msgspec.Struct, frozen=True):
    """An API key: whose it is, and the secret that its client signs with."""

    principal: str
    secret: str

    def __repr__(self) -> str:
        return f"ApiKey({self.principal!r})"


def make_certificate(fingerprint: str, now_ms: int) -> Credential:
    """Build the credential of a certificate of jebp, by its fingerprint (64 hex digits).

    Raises:
        CredentialError: the text is no fingerprint.
    """
    text = fingerprint.lower()
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise CredentialError(f"{fingerprint!r} is no fingerprint (64 hex digits)")
    return Credential("jebp", new_id(), {"fingerprint": text}, now_ms)


def make_client_name(kind: NameKind, value: str, now_ms: int) -> Credential:
    """Build the credential of a client certificate of TLS that has a name: the row that maps the name to a principal.

    Raises:
        CredentialError: the kind is not one of `NAME_KINDS`, or the name is empty.
    """
    if kind not in NAME_KINDS or not value.strip():
        raise CredentialError(f"a certificate has a name of kind {', '.join(NAME_KINDS)}, not {kind} {value!r}")
    return Credential("tls", new_id(), {"kind": kind, "value": _normal(kind, value.strip())}, now_ms)


def make_process(now_ms: int, *, uid: int | None = None, gid: int | None = None) -> Credential:
    """Build the credential of the processes of a user, or of a group, of this machine.

    Raises:
        CredentialError: not exactly one of both is given.
    """
    if (uid is None) == (gid is None):
        raise CredentialError("name a user or a group of this machine, not both")
    data: dict[str, str | int] = {"gid": gid} if uid is None and gid is not None else {"uid": uid or 0}
    return Credential("peer", new_id(), data, now_ms)


def names_of(certificate: bytes) -> list[tuple[NameKind, str]]:
    """Return the names of a certificate (DER) that TLS has verified: URIs, then DNS names, then common names.

    Raises:
        CredentialError: the bytes are no certificate.
    """
    from cryptography import x509  # takes 30 ms and 8 MiB, and most servers ask for no client certificates
    from cryptography.x509.oid import NameOID

    try:
        parsed = x509.load_der_x509_certificate(certificate)
        try:
            alternative: x509.SubjectAlternativeName | None = parsed.extensions.get_extension_for_class(
                x509.SubjectAlternativeName
            ).value
        except x509.ExtensionNotFound:
            alternative = None
        common = [str(one.value) for one in parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    except ValueError as error:
        raise CredentialError(f"the client certificate cannot be read: {error}") from error
    uris = [] if alternative is None else alternative.get_values_for_type(x509.UniformResourceIdentifier)
    hosts = [] if alternative is None else alternative.get_values_for_type(x509.DNSName)
    names: list[tuple[NameKind, str]] = [("uri", value) for value in uris]
    names += [("dns", value) for value in hosts]
    return names + [("cn", value) for value in common]


class Directory:
    """The credentials of all principals; only the event loop uses it."""

    def __init__(self, vault: Vault, clock: Clock) -> None:
        self._vault = vault
        self._clock = clock
        self._credentials: dict[str, tuple[Credential, ...]] = {}
        self._places: dict[Place, tuple[str, Credential]] = {}
        self._secrets: dict[str, str] = {}

    def replace(self, principal: str, credentials: Iterable[Credential]) -> None:
        """Update the credentials of a principal.

        Raises:
            DuplicateProofError: another principal has one of the proofs; nothing is changed.
        """
        new = tuple(credentials)
        for credential in new:
            for place in places_of(credential):
                owner = self._places.get(place)
                if owner is not None and owner[0] != principal:
                    raise DuplicateProofError(
                        f"credential {credential.id} of {principal!r} is one of {owner[0]!r} too; remove it there first"
                    )
        self.remove(principal)
        self._credentials[principal] = new
        for credential in new:
            for place in places_of(credential):
                self._places[place] = principal, credential

    def remove(self, principal: str) -> None:
        """Remove a principal; its proofs prove nothing from now on."""
        for credential in self._credentials.pop(principal, ()):
            self._secrets.pop(credential.id, None)
            for place in places_of(credential):
                self._places.pop(place, None)

    def passwords(self, principal: str) -> Sequence[Credential]:
        """Return the passwords of a principal, none for an unknown one: the `lookup` of `Passwords`."""
        return [one for one in self._credentials.get(principal, ()) if one.kind == "password"]

    def find_token(self, text: str) -> tuple[str, Credential] | None:
        """Return the principal that a token proves, with the credential of the token."""
        token_id = id_of_token(text)
        entry = None if token_id is None else self._places.get(("token", token_id))
        return entry if entry is not None and proves_token(entry[1], text, self._clock.now_ms()) else None

    def is_expired_token(self, text: str) -> bool:
        """Return whether a text was a token until it expired: no guess, but no proof either."""
        token_id = id_of_token(text)
        entry = None if token_id is None else self._places.get(("token", token_id))
        return entry is not None and proves_token(entry[1], text, 0) and not entry[1].is_valid(self._clock.now_ms())

    def api_key(self, key: str) -> ApiKey | None:
        """Return whose an API key is, with the secret for checking its signature; `None` if it is unknown or expired.

        Raises:
            KeyFileError: the key file of the vault cannot be used.
            CredentialError: the secret cannot be opened.
        """
        entry = self._find("api-key", key)
        if entry is None:
            return None
        principal, credential = entry
        secret = self._secrets.get(credential.id)
        if secret is None:
            secret = self._secrets[credential.id] = secret_of(self._vault, credential)
        return ApiKey(principal, secret)

    def by_fingerprint(self, fingerprint: str) -> str | None:
        """Return the principal of a certificate of jebp, whose key the handshake has proved."""
        return self._name("jebp", fingerprint)

    def by_names(self, names: Iterable[tuple[NameKind, str]]) -> str | None:
        """Return the principal of the first name of a verified client certificate that a principal has."""
        entry = self.find_names(names)
        return None if entry is None else entry[0]

    def find_names(self, names: Iterable[tuple[NameKind, str]]) -> tuple[str, Credential] | None:
        """Return the principal of a verified client certificate, as `by_names`, with the credential that names it."""
        entries = (self._find(f"tls {kind}", _normal(kind, value)) for kind, value in names)
        return next((entry for entry in entries if entry is not None), None)

    def by_process(self, uid: int, gids: Iterable[int]) -> str | None:
        """Return the principal of a process by its user, else by the first of its groups that has one."""
        principal = self._name("uid", uid)
        if principal is not None:
            return principal
        return next((name for gid in gids if (name := self._name("gid", gid)) is not None), None)

    def _find(self, kind: str, value: str | int) -> tuple[str, Credential] | None:
        entry = self._places.get((kind, value))
        return entry if entry is not None and entry[1].is_valid(self._clock.now_ms()) else None

    def _name(self, kind: str, value: str | int) -> str | None:
        entry = self._find(kind, value)
        return None if entry is None else entry[0]


def _normal(kind: str, value: str) -> str:
    """Return the form in which names are compared: DNS names know no letter case and no dot at their end."""
    return value.rstrip(".").lower() if kind == "dns" else value
