"""The rights of a client and their proofs (docs/specifications/worterbuch.md, sections 9.2 and 10).

A request needs the privilege in the client's token, if the client has a token; while the gate is on, the table of
access must grant the request too, which `state` asks.
"""

import math
from collections.abc import Sequence

import msgspec

from babelbus.core.access import Action, Identity, may, refusal
from babelbus.core.state import GuardedState, KeyPattern, NoSuchKeyError, State, Testament, store_pattern
from babelbus.core.subject import is_secret
from babelbus.listening.certificates import PeerCertificate
from babelbus.protocols.worterbuch.errors import ErrorCode, FinalRefusalError, RefusedError, UnauthorizedError
from babelbus.protocols.worterbuch.gatekeeper import PROTOCOL, Gatekeeper, host_of
from babelbus.protocols.worterbuch.names import SYS, check_writable, may_be_secret
from babelbus.protocols.worterbuch.privileges import Privilege, Privileges, proves_secret

OWN_KEYS = ("graveGoods", "lastWill", "clientName")
"""The keys that a client may write below `$SYS/clients/<its id>` (section 9.2)."""


class Access:
    """The rights of one client: none while a token is needed and it has shown none, then those of its principal."""

    def __init__(
        self, keeper: Gatekeeper, client_id: str, address: str | None, certificate: PeerCertificate | None = None
    ) -> None:
        self._keeper = keeper
        self._address = address
        self._certificate = certificate
        self._client_id = client_id
        self._own = f"{SYS}/clients/{client_id}/"
        self.privileges: Privileges | None = None
        """The privileges in the token of the client."""
        self.ends_seconds = math.inf
        """Unix time at which the token of the client ends."""
        self.name = keeper.certified(certificate)
        """The principal, `None` for a client that has proved no name."""
        proved = self.name is not None and keeper.enforcing
        self.locked = keeper.verifier is not None and not proved
        """Whether requests are refused until the client is authorised."""
        self.source = f"{PROTOCOL}:{self.name if proved else client_id}"
        self.identity: Identity
        self.state: State | GuardedState
        self._ask()
        if self.name is not None:
            keeper.login(self.name, address)

    def _ask(self) -> None:
        """Read the rights of the principal from the gate."""
        self.identity = self._keeper.identify(self.name, self.source)
        self.state = self._keeper.state_for(self.identity)

    def find_end(self, now_seconds: float) -> str | None:
        """Return why the token of the client proves nothing any more at this time (Unix), `None` while it does."""
        if now_seconds > self.ends_seconds:
            return "the token has expired"
        verifier, privileges = self._keeper.verifier, self.privileges
        if privileges is not None and verifier is not None and verifier.has_lost(privileges.key):
            return "the key of the token was removed"
        return None

    @property
    def free(self) -> bool:
        """Whether no request needs a privilege of a token."""
        return not self.locked and self.privileges is None

    # -- proofs ------------------------------------------------------------------------------------------------------

    def authorize(self, token: str) -> None:
        """Check a client's JWT, where clients need a token; the caller records the success.

        Raises:
            FinalRefusalError: the token is the second of this client.
            UnauthorizedError: the token is invalid.
        """
        keeper = self._keeper
        if self.privileges is not None:
            raise FinalRefusalError(ErrorCode.ALREADY_AUTHORIZED, "already authorized")
        if keeper.verifier is None:
            return
        self.privileges = privileges = keeper.verify(token, self._address)
        self.name, self.ends_seconds = privileges.principal, privileges.ends_seconds
        self.source = f"{PROTOCOL}:{self.name if keeper.enforcing else privileges.name}"
        self._ask()
        self.locked = False

    def authenticate(self, token: str) -> None:
        """Check the hash that clients of servers 0.42 send; it proves no name.

        Raises:
            FinalRefusalError: the hash is wrong, of no use here, or the second of this client.
        """
        keeper = self._keeper
        secret, verifier = keeper.shared_secret, keeper.verifier
        if secret is None:
            return
        if verifier is not None and not verifier.takes_secret:  # a public key is no secret
            raise FinalRefusalError(ErrorCode.AUTHORIZATION_FAILED, "this server needs a JWT")
        if not self.locked:
            raise FinalRefusalError(ErrorCode.ALREADY_AUTHORIZED, "already authenticated")
        place = host_of(self._address)
        try:
            keeper.admit(place)  # the secret may be a word
        except UnauthorizedError as error:
            keeper.login("", self._address, refused=str(error))
            raise FinalRefusalError(ErrorCode.AUTHORIZATION_FAILED, str(error)) from error
        if not proves_secret(token, self._client_id, secret):
            keeper.refuse(place)
            keeper.login("", self._address, refused="wrong hash of the secret")
            raise FinalRefusalError(ErrorCode.AUTHORIZATION_FAILED, "wrong token")
        self.locked = False

    def restore(self, privileges: Privileges | None, *, locked: bool) -> None:
        """Set what the client has proved to another server of this cluster.

        Raises:
            UnauthorizedError: the principal is not known any more.
        """
        self.privileges, self.locked = privileges, locked
        if privileges is not None:
            self.name, self.ends_seconds = privileges.principal, privileges.ends_seconds
            self.source = f"{PROTOCOL}:{self.name if self._keeper.enforcing else privileges.name}"
            self._ask()
        if not self.refresh():
            raise UnauthorizedError("the principal of the client is gone")

    def refresh(self) -> bool:
        """Read the rights again; return whether the client is still who it was."""
        keeper = self._keeper
        if self.privileges is None and self.name is not None and keeper.certified(self._certificate) != self.name:
            return False
        root = self.identity.root
        self._ask()
        if self.identity.root != root:
            return False
        if self.privileges is not None:
            return keeper.may_claim(self.privileges.principal)
        return keeper.knows(self.name)

    # -- rights ------------------------------------------------------------------------------------------------------

    def need(self, privilege: Privilege, pattern: str) -> None:
        """Check that the token of the client grants a privilege.

        Raises:
            RefusedError: the token lacks the privilege.
        """
        privileges = self.privileges
        if privileges is not None and not privileges.may(privilege, self.identity.relative(pattern)):
            raise RefusedError(ErrorCode.UNAUTHORIZED, f"no privilege to {privilege} '{pattern}'")

    def may_set_all(self, keys: Sequence[str]) -> bool:
        """Return whether the client may set keys that are neither secret nor below `$SYS`; records no refusal."""
        if not self.free:
            return False
        rights = self.identity.rights
        return rights is None or rights.find_refused(Action.WRITE_STATE, keys) is None

    def check_all(self, keys: Sequence[str]) -> None:
        """Check that the table grants the client to set keys.

        Raises:
            AccessRefusedError: it does not.
        """
        rights = self.identity.rights
        refused = None if rights is None else rights.find_refused(Action.WRITE_STATE, keys)
        if refused is not None:
            raise refusal(self.identity, Action.WRITE_STATE, refused)

    def check_writable(self, key: str) -> None:
        """Check that a key or pattern is not the server's own (section 9.2).

        Raises:
            RefusedError: the key or pattern is the server's own.
        """
        if not (key.startswith(self._own) and key[len(self._own) :].partition("/")[0] in OWN_KEYS):
            check_writable(key)

    def state_of(self, key: str) -> State | GuardedState:
        """Return where a key is read or changed: what the server shows about a client, that client may see.

        Raises:
            NoSuchKeyError: the key is secret.
        """
        if is_secret(key):
            raise NoSuchKeyError(key)
        return self._keeper.state if key.startswith(self._own) else self.state

    def match(self, pattern: KeyPattern) -> list[tuple[str, bytes]]:
        """Return the keys and values that match a pattern and may be seen.

        Raises:
            AccessRefusedError: nothing of the pattern is granted.
        """
        self.state.check_watch(pattern)
        return self.match_visible(pattern)

    def may_hear(self, key: str | None) -> bool:
        """Return whether a pattern of the client means a key: what shows keys of others is its own, or it sees all."""
        if key is not None and key.startswith(self._own):
            return may(self.identity, Action.SUBSCRIBE, key)
        return self.state.may_see(key)

    def find_visible(self, key: str) -> bytes | None:
        """Return a value, `None` without a value or a right; records no refusal."""
        state = self._keeper.state
        return state.find(key) if self.state.may_see(key) or key.startswith(self._own) else None

    def match_visible(self, pattern: KeyPattern) -> list[tuple[str, bytes]]:
        """Return the keys and values that match a pattern and may be seen; records no refusal."""
        pairs = self._keeper.state.match(pattern)
        if self.identity.rights is not None:
            may_hear = self.may_hear
            pairs = [pair for pair in pairs if may_hear(pair[0])]
        return without_secrets(pattern, pairs)

    def children(self, parent: str | None) -> list[str]:
        """Return the names below a key that may be seen, none if the key does not exist."""
        try:
            return self.state.children(parent)
        except NoSuchKeyError:
            return []

    def check_testament(self, goods: Sequence[str], will: Sequence[str]) -> None:
        """Check that the client may do itself what its grave goods and its last will do: the rights count when it sets
        them, and those of the table again when the testament is executed.

        Raises:
            RefusedError: its token lacks a privilege.
            AccessRefusedError: the table does not grant it.
        """
        for pattern in goods:
            self.need("delete", pattern)
        for key in will:
            self.need("write", key)
        if isinstance(self.state, GuardedState):
            entries = tuple((key, msgspec.Raw(b"null")) for key in will)
            self.state.check_testament(Testament(tuple(map(store_pattern, goods)), entries))


def without_secrets(pattern: KeyPattern, pairs: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Return the pairs whose keys are not secret."""
    if not may_be_secret(pattern):
        return pairs
    return [pair for pair in pairs if not is_secret(pair[0])]
