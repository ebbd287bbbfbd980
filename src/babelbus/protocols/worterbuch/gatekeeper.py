"""The proofs of identity of clients, and the gate: tokens, client certificates, rights (docs/access.md).

A token names the principal by a claim and grants patterns of its own (docs/specifications/worterbuch.md, section 10);
while the gate is on, the table has to grant the request too.
"""

from collections.abc import Callable

from babelbus.clock import Clock
from babelbus.core.access import ANONYMOUS, Identity
from babelbus.core.access.table import KEPT
from babelbus.core.broker import Broker
from babelbus.core.state import GuardedState, State
from babelbus.identities.directory import NameKind
from babelbus.identities.guessing import Guessing
from babelbus.listening.certificates import PeerCertificate
from babelbus.protocols.worterbuch.errors import MisfitTokenError, TooManyTokensError, UnauthorizedError
from babelbus.protocols.worterbuch.privileges import Privileges, Verifier

PROTOCOL = "worterbuch"
Names = list[tuple[NameKind, str]]


class Gatekeeper:
    """The proofs of all clients of one server.

    Args:
        key: clients of servers 0.42 hash this secret with their id.
        verifier: checks tokens; without a verifier, no client needs a token (section 10).
        by_names: returns the principal of the names of a client certificate.
    """

    def __init__(
        self,
        broker: Broker,
        clock: Clock,
        guessing: Guessing,
        *,
        key: str | None = None,
        verifier: Verifier | None = None,
        by_names: Callable[[Names], str | None] = lambda names: None,
    ) -> None:
        self.verifier = verifier
        self.shared_secret = key
        self.state = broker.state
        self._broker = broker
        self._gate = broker.gate
        self._clock = clock
        self._door = guessing.door(PROTOCOL)
        self._by_names = by_names

    # -- proofs ------------------------------------------------------------------------------------------------------

    def verify(self, token: str, address: str | None) -> Privileges:
        """Return what the token of a client proves now. A token that proves nothing stands in the audit.

        Raises:
            TooManyTokensError: the client has to wait after wrong tokens.
            UnauthorizedError: the token proves nothing, or names no principal of the table while the gate is on.
        """
        try:
            privileges = self._verify(token, host_of(address))
        except UnauthorizedError as error:
            self.login("", address, refused=str(error))
            raise
        if not self.may_claim(privileges.principal):
            unknown = MisfitTokenError("the token names no principal of the table of access")
            self.login(privileges.principal, address, refused=str(unknown))
            raise unknown
        return privileges

    def _verify(self, token: str, place: str) -> Privileges:
        verifier = self.verifier
        assert verifier is not None
        if verifier.guessable:
            self.admit(place)
        try:
            return verifier.verify(token, self.now_seconds())
        except MisfitTokenError:
            raise
        except UnauthorizedError:
            # A right token passes also while others of its address wait: nobody guesses 256 bits.
            if not verifier.guessable:
                self.admit(place)
            self.refuse(place)
            raise

    def proves(self, token: str) -> bool:
        """Return whether a token is valid now; counts no guess."""
        assert self.verifier is not None
        try:
            self.verifier.verify(token, self.now_seconds())
        except UnauthorizedError:
            return False
        return True

    def now_seconds(self) -> float:
        """Return the time (Unix)."""
        return self._clock.now_ms() / 1000

    def admit(self, place: str) -> None:
        """Check that the clients of an address do not have to wait.

        Raises:
            TooManyTokensError: they have to.
        """
        wait = self._door.check(place, "")
        if wait:
            raise TooManyTokensError(wait)

    def refuse(self, place: str) -> None:
        """Record a wrong token of an address."""
        self._door.failed(place, "")

    def certified(self, certificate: PeerCertificate | None) -> str | None:
        """Return the principal of a client certificate, `None` without a certificate or a principal for it."""
        if certificate is None:
            return None
        names: Names = [("uri", name) for name in certificate.uris]
        names += [("dns", name) for name in certificate.dns_names]
        return self._by_names([*names, *(("cn", name) for name in certificate.common_names)])

    def login(self, name: str, address: str | None, *, refused: str = "") -> None:
        """Record in the audit that a client has proved a name, or why it has not."""
        self._gate.note_login(name, f"{PROTOCOL}:{host_of(address)}", refused=refused, is_known=True)

    # -- the gate ----------------------------------------------------------------------------------------------------

    @property
    def enforcing(self) -> bool:
        """Whether the gate is on."""
        return self._gate.enforcing

    def identify(self, name: str | None, source: str) -> Identity:
        """Return the identity of a principal, `None` for a client that has proved nothing."""
        return self._gate.identity(source, ANONYMOUS if name is None else name)

    def knows(self, name: str | None) -> bool:
        """Return whether a client may go on under a name: while the gate is on, the table must have the principal."""
        gate = self._gate
        return name is None or not gate.enforcing or gate.table.principal(name) is not None

    def may_claim(self, name: str) -> bool:
        """Return whether a token may name a principal: while the gate is on, one that the table itself has.

        A client of a list is known by its own key or certificate, and an issuer of tokens must not give its rights.
        """
        table = self._gate.table
        return not self.enforcing or (table.principal(name) is not None and table.origin(name) == KEPT)

    def state_for(self, identity: Identity) -> State | GuardedState:
        """Return the state as a principal may read and change it."""
        return self._broker.state_for(identity)


def host_of(address: str | None) -> str:
    """Return the address of a client without its port; all unix sockets are one address."""
    return "local" if address is None else address.rpartition(":")[0]
