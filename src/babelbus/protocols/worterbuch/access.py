"""The rights of a client and their proofs (docs/specifications/worterbuch.md, sections 9.2 and 10)."""

from babelbus.protocols.worterbuch.errors import ErrorCode, FinalRefusalError, RefusedError, UnauthorizedError
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.names import is_below_sys
from babelbus.protocols.worterbuch.privileges import Privilege, Privileges, proves_secret

OWN_KEYS = ("graveGoods", "lastWill", "clientName")
"""The keys that a client may write below `$SYS/clients/<its id>` (section 9.2)."""


class Access:
    """The rights of one client: none while a token is needed and it has shown none, then what its token grants."""

    def __init__(self, hub: Hub, client_id: str) -> None:
        self._hub = hub
        self._client_id = client_id
        self._privileges: Privileges | None = None
        self.locked = hub.verifier is not None
        """Whether requests are refused until the client is authorised."""

    @property
    def free(self) -> bool:
        """Whether no request needs a privilege."""
        return not self.locked and self._privileges is None

    def authorize(self, token: str) -> str | None:
        """Check a client's JWT; return the name that it proves, `None` where no client needs a token.

        Raises:
            FinalRefusalError: the token is invalid, or the second of this client.
        """
        verifier = self._hub.verifier
        if self._privileges is not None:
            raise FinalRefusalError(ErrorCode.ALREADY_AUTHORIZED, "already authorized")
        if verifier is None:
            return None
        try:
            self._privileges = verifier.verify(token, self._hub.clock.now_ms() / 1000)
        except UnauthorizedError as error:
            raise FinalRefusalError(ErrorCode.UNAUTHORIZED, str(error)) from error
        self.locked = False
        return self._privileges.name

    def authenticate(self, token: str) -> None:
        """Check the hash that clients of servers 0.42 send.

        Raises:
            FinalRefusalError: the hash is wrong, of no use here, or the second of this client.
        """
        secret, verifier = self._hub.shared_secret, self._hub.verifier
        if secret is None:
            return
        if verifier is not None and verifier.algorithm != "HS256":  # a public key is no secret
            raise FinalRefusalError(ErrorCode.AUTHORIZATION_FAILED, "this server needs a JWT")
        if not self.locked:
            raise FinalRefusalError(ErrorCode.ALREADY_AUTHORIZED, "already authenticated")
        if not proves_secret(token, self._client_id, secret):
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
