"""Callers of EventMesh: who says hello or makes a call, by what it proves (docs/identities.md).

TCP sends credentials once for a session, HTTP and gRPC with each call. While the gate is off, credentials are ignored.
"""

import math
from typing import Final

import msgspec

from babelbus.clock import Clock
from babelbus.core.access import ANONYMOUS, Identity, Rights
from babelbus.core.access.gate import Gate
from babelbus.core.work import Work
from babelbus.errors import BabelbusError
from babelbus.identities.credential import Credential
from babelbus.identities.directory import NameKind
from babelbus.identities.errors import InvalidProofError, TooManyProofsError
from babelbus.identities.proofs import Proofs
from babelbus.identities.tokens import id_of_token
from babelbus.listening.certificates import PeerCertificate

PROTOCOL: Final = "eventmesh"
UNSET: Final = frozenset((("username", "passwd"), ("username", "password"), ("eventmesh", "pass")))
"""User and password that SDKs and old servers fill in if the user sets none: they prove nothing, and are no guess."""
BEARER: Final = "Bearer "
LOST: Final = Identity(PROTOCOL, "", Rights(""))
"""A client whose proof does not hold any more, until it is gone."""
PROVE_NOTHING: Final = "the credentials prove nothing"

REFUSALS: Final = (InvalidProofError, TooManyProofsError)
"""Errors of a call whose caller is not known."""


class Given(msgspec.Struct, frozen=True):
    """Credentials as a client sends them; never in a log."""

    user: str = ""
    password: str = ""
    token: str = ""

    def __repr__(self) -> str:
        return "Given()"

    @property
    def is_empty(self) -> bool:
        """Whether they can prove nothing."""
        return not self.token and (not self.password or (self.user, self.password) in UNSET)


NOTHING: Final = Given()


class Caller(msgspec.Struct, frozen=True):
    """The client of a session or a call."""

    principal: Identity
    credentials: tuple[Credential, ...] = ()
    """The credentials of the principal when it proved who it is: if one of them is gone, it proves that again."""
    until_ms: float = math.inf
    """When the proof ends, in milliseconds since 1970."""
    asked: bool = True
    """Whether the gate was on: else the name is what the client calls itself."""
    tried: bool = False
    """Whether the client sent credentials while the gate was off, so that nobody has looked at them."""


class Callers:
    """The callers of all EventMesh connections of one server."""

    def __init__(self, gate: Gate, proofs: Proofs, clock: Clock) -> None:
        self.enforcing = gate.enforcing
        self._gate = gate
        self._proofs = proofs
        self._clock = clock
        self._door = proofs.guessing.door(PROTOCOL)
        self._known: dict[str, Caller] = {}
        """Callers by the names of their principals, until the table changes."""
        self._logged: set[tuple[str, str]] = set()
        """Principals and addresses whose logins the audit has for this second."""

    def identify(self, given: Given, address: str, certificate: PeerCertificate | None) -> Caller | Work[Caller]:
        """Return who makes a call, at once unless a password must be hashed.

        Raises:
            InvalidProofError: the credentials are wrong.
            TooManyProofsError: the client has to wait after wrong ones, or too many passwords wait to be checked.
        """
        if given.token:
            return self._by_token(given.token.removeprefix(BEARER), address)
        if not given.is_empty:
            user, password = given.user, given.password
            self._check_wait(address, user)
            known = self._proofs.passwords.proved(user, password)
            if known is not None:
                return self._proved(user, address, known)
            return Work(self._verify(user, password, address))
        found = None if certificate is None else self._proofs.directory.find_names(_names_of(certificate))
        return self._proved(ANONYMOUS, address) if found is None else self._proved(found[0], address, found[1])

    def unasked(self, group: str, given: Given = NOTHING) -> Caller:
        """Return the caller of a group while the gate is off."""
        return Caller(Identity(f"{PROTOCOL}:{group}", group, None), asked=False, tried=not given.is_empty)

    def renew(self, caller: Caller, address: str, certificate: PeerCertificate | None) -> Caller | None:
        """Return who a caller is after a change of the table; `None`: it must prove again who it is."""
        name = caller.principal.name
        if not self.enforcing:
            if caller.principal.root is not None:  # its topics would have other names
                return None
            return msgspec.structs.replace(caller, principal=Identity(caller.principal.source, name, None))
        if not caller.asked or name == ANONYMOUS:
            found = None if caller.tried else self.identify(NOTHING, address, certificate)
            assert not isinstance(found, Work)
            return found
        if not self.holds(caller):
            return None
        principal = self._gate.identity(caller.principal.source, name)
        if principal.root != caller.principal.root:
            return None
        return msgspec.structs.replace(caller, principal=principal)

    def holds(self, caller: Caller) -> bool:
        """Return whether what a caller has proved is still so."""
        name = caller.principal.name
        if not caller.asked or not self.enforcing or name == ANONYMOUS:
            return True
        principal = self._gate.table.principal(name)
        if principal is None or any(one not in principal.credentials for one in caller.credentials):
            return False
        return self._clock.now_ms() < caller.until_ms

    def of_name(self, name: str) -> Identity:
        """Return the identity of a principal that has proved who it is before, `anonymous` for an empty name."""
        name = name or ANONYMOUS
        return self._gate.identity(f"{PROTOCOL}:{name}", name)

    def is_gone(self, name: str) -> bool:
        """Return whether the gate is on and the table has no principal of a name any more."""
        return self.enforcing and name not in ("", ANONYMOUS) and self._gate.table.principal(name) is None

    def access_changed(self) -> None:
        """Drop what is known of callers: the table has changed."""
        self.enforcing = self._gate.enforcing
        self._known.clear()

    def tick(self) -> None:
        """Begin a new second of the audit."""
        self._logged.clear()

    def _proved(self, name: str, address: str, proof: Credential | None = None) -> Caller:
        caller = self._known.get(name)
        if caller is None:
            principal = self._gate.table.principal(name)
            credentials = () if principal is None else principal.credentials
            caller = self._known[name] = Caller(self.of_name(name), credentials)
        if name != ANONYMOUS:
            self._door.succeeded(address, name)
            if (name, address) not in self._logged:
                self._logged.add((name, address))
                self._gate.note_login(name, f"{PROTOCOL}:{address}")
        if proof is None or proof.expires is None:
            return caller
        return msgspec.structs.replace(caller, until_ms=proof.ends_ms)

    def _by_token(self, token: str, address: str) -> Caller:
        found = self._proofs.directory.find_token(token)
        if found is None:
            token_id = id_of_token(token)
            who = "token" if token_id is None else f"token {token_id}"
            if self._proofs.directory.is_expired_token(token):  # no guess
                source = f"{PROTOCOL}:{address}"
                refusal = self._gate.note_login(who, source, refused="expired token", is_known=True)
                raise InvalidProofError(f"{PROVE_NOTHING} (refusal {refusal})")
            self._check_wait(address, "token")  # nobody guesses a right one, so that right ones never wait
            raise self._refuse(who, "token", address, is_known=True)
        name, credential = found
        return self._proved(name, address, credential)

    async def _verify(self, user: str, password: str, address: str) -> Caller:
        """Return the principal of a password.

        Raises: as `identify`.
        """
        proof = await self._proofs.passwords.verify(user, password, address)
        if proof is None:
            raise self._refuse(user, user, address)
        return self._proved(user, address, proof)

    def _check_wait(self, address: str, who: str) -> None:
        seconds = self._door.check(address, who)
        if seconds:
            raise TooManyProofsError(f"wrong credentials came before: try again in {math.ceil(seconds)} s")

    def _refuse(self, who: str, guessed: str, address: str, *, is_known: bool = False) -> BabelbusError:
        self._door.failed(address, guessed)
        source = f"{PROTOCOL}:{address}"
        refusal = self._gate.note_login(who, source, refused="wrong password or token", is_known=is_known)
        return InvalidProofError(f"{PROVE_NOTHING} (refusal {refusal})")


def _names_of(certificate: PeerCertificate) -> list[tuple[NameKind, str]]:
    names: list[tuple[NameKind, str]] = [("uri", value) for value in certificate.uris]
    names += [("dns", value) for value in certificate.dns_names]
    return names + [("cn", value) for value in certificate.common_names]


def name_of(caller: Caller | None) -> str | None:
    """Return the name of the principal that a client has proved to be, `None` if it has proved nothing."""
    if caller is None or not caller.asked or caller.principal.name in ("", ANONYMOUS):
        return None
    return caller.principal.name


def address_of(peer: str | None) -> str:
    """Return the address in the "ip:port" of a client."""
    return (peer or "local").rpartition(":")[0].strip("[]") or "local"
