"""The rights of a client and their proofs (docs/specifications/worterbuch.md, sections 9.2 and 10)."""

from babelbus.protocols.worterbuch.errors import ErrorCode, FinalRefusalError, RefusedError, UnauthorizedError
from babelbus.protocols.worterbuch.hub import Hub, host_of
from babelbus.protocols.worterbuch.names import is_below_sys
from babelbus.protocols.worterbuch.privileges import Privilege, Privileges, proves_secret

OWN_KEYS = ("graveGoods", "lastWill", "clientName")
"""The keys that a client may write below `$SYS/clients/<its id>` (section 9.2)."""


class Access:
    """The rights of one client: none while a token is needed and it has shown none, then what its token grants."""

    def __init__(self, hub: Hub, client_id: str, address: str | None) -> None:
        self._hub = hub
        self._address = address
        self._client_id = client_id
        self._privileges: Privileges | None = None
        self.locked = hub.verifier is not None
        """Whether requests are refused until the client is authorised."""

    @property
    def free(self) -> bool:
        """Whether no request needs a privilege."""
        return not self.locked and self._privileges is None

    def authorize(self, token: str) -> Privileges | None:
        """Check a client's JWT; return what it proves, `None` where no client needs a token.

        Raises:
            FinalRefusalError: the token is invalid, or the second of this client.
        """
        verifier = self._hub.verifier
        if self._privileges is not None:
            raise FinalRefusalError(ErrorCode.ALREADY_AUTHORIZED, "already authorized")
        if verifier is None:
            return None
        try:
            self._privileges = self._hub.verify(token, self._address)
        except UnauthorizedError as error:
            raise FinalRefusalError(ErrorCode.UNAUTHORIZED, str(error)) from error
        self.locked = False
        return self._privileges

    def authenticate(self, token: str) -> None:
        """Check the hash that clients of servers 0.42 send.

        Raises:
            FinalRefusalError: the hash is wrong, of no use here, or the second of this client.
        """
        secret, verifier = self._hub.shared_secret, self._hub.verifier
        if secret is None:
            return
        if verifier is not None and not verifier.takes_secret:  # a public key is no secret
            raise FinalRefusalError(ErrorCode.AUTHORIZATION_FAILED, "this server needs a JWT")
        if not self.locked:
            raise FinalRefusalError(ErrorCode.ALREADY_AUTHORIZED, "already authenticated")
        place = host_of(self._address)
        try:
            self._hub.admit(place)  # the secret may be a word
        except UnauthorizedError as error:
            raise FinalRefusalError(ErrorCode.AUTHORIZATION_FAILED, str(error)) from error
        if not proves_secret(token, self._client_id, secret):
            self._hub.refuse(place)
            raise FinalRefusalError(ErrorCode.AUTHORIZATION_FAILED, "wrong token")
        self.locked = False

    def need(self, privilege: Privilege, pattern: str) -> None:
        """Check that the client has a privilege.

        Raises:
            RefusedError: the client lacks the privilege.
        """
        privileges = self._privileges
        if privileges is not None and not privileges.may(privilege, pattern):
            raise RefusedError(ErrorCode.UNAUTHORIZED, f"no privilege to {privilege} '{pattern}'")

    def check_writable(self, key: str) -> None:
        """Check that a key or pattern is not the server's own (section 9.2).

        Raises:
            RefusedError: the key or pattern is the server's own.
        """
        if is_below_sys(key):
            elements = key.split("/")
            own = len(elements) >= 4 and elements[1:3] == ["clients", self._client_id] and elements[3] in OWN_KEYS
            if not own:
                raise RefusedError(ErrorCode.READ_ONLY_KEY, f"'{key}' is read-only")
