"""The clients of zbus: who sent a message, by its signature, by the certificate of its connection, or nobody known.

While the gate is off, `zbus.auth_file` alone says whose signatures are taken, and without it nobody is asked.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Final

from babelbus.core.access import ANONYMOUS, Action, Identity, Narrowing, Principal
from babelbus.core.access.gate import Gate
from babelbus.core.subject import EVERYTHING
from babelbus.errors import BabelbusError
from babelbus.identities.directory import Directory, NameKind
from babelbus.listening.certificates import PeerCertificate
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus.continuation import KeptCaller
from babelbus.protocols.zbus.errors import AuthenticationError
from babelbus.protocols.zbus.messages import Message
from babelbus.protocols.zbus.proofs import Prover
from babelbus.protocols.zbus.records import ORIGIN_PREFIX

log = logging.getLogger(__name__)

KEYS_ORIGIN: Final = "zbus.auth_file"
"""The origin of the principals that the file of keys names."""
CLIENT_ROLES: Final = ("client",)


def principals_of(keys: Mapping[str, str]) -> list[Principal]:
    """Return the principals that the keys of a file are, named by their apiKeys."""
    return [Principal(api_key, CLIENT_ROLES) for api_key in keys if api_key != ANONYMOUS]


class KeyRing:
    """The API keys that are taken: those of `zbus.auth_file`, and while the gate is on those of the table."""

    def __init__(self, listed: Mapping[str, str], gate: Gate, directory: Directory | None) -> None:
        self.required = bool(listed)
        """Whether there is a file of keys: each message must be signed, unless a certificate says who sends it."""
        self._listed = listed
        self._gate = gate
        self._directory = directory

    @property
    def asked(self) -> bool:
        """Whether it matters who sends a message."""
        return self.required or self._gate.enforcing

    def get(self, api_key: str, /) -> str | None:
        """Return the secret of a key, `None` if the key is unknown, an empty text if the secret cannot be opened."""
        known = self._find(api_key)
        return None if known is None else known[1]

    def principal(self, api_key: str) -> str | None:
        """Return whose a key is, `None` if the key is unknown."""
        known = self._find(api_key)
        return None if known is None else known[0]

    def _find(self, api_key: str) -> tuple[str, str] | None:
        if self._directory is not None and self._gate.enforcing:
            try:
                known = self._directory.api_key(api_key)
            except BabelbusError as error:
                log.error("an API key of zbus cannot be used: %s", error)
                return ANONYMOUS, ""
            if known is not None:
                return known.principal, known.secret
        secret = self._listed.get(api_key)
        if secret is None:
            return None
        table = self._gate.table
        if self._gate.enforcing and (table.principal(api_key) is None or table.origin(api_key) != KEYS_ORIGIN):
            return None  # the name is another's, whose rights a line of a file must not give
        return api_key, secret

    def by_certificate(self, certificate: PeerCertificate | None) -> str | None:
        """Return whose a client certificate is, `None` for a certificate that no principal has, or without one."""
        if certificate is None or self._directory is None or not self._gate.enforcing:
            return None
        names: list[tuple[NameKind, str]] = [("uri", one) for one in certificate.uris]
        names += [("dns", one) for one in certificate.dns_names]
        names += [("cn", one) for one in certificate.common_names]
        return self._directory.by_names(names)


class Caller:
    """The client of one connection, who may be several principals: each message proves for itself."""

    def __init__(
        self,
        gate: Gate,
        keys: KeyRing,
        prover: Prover,
        connection: str,
        certificate: PeerCertificate | None,
        kept: KeptCaller | None = None,
    ) -> None:
        """Begin, or continue with the proofs that another server has `kept`.

        Raises:
            AuthenticationError: one of them does not hold any more.
        """
        self.keys = keys
        self._gate = gate
        self._prover = prover
        self._connection = connection
        self._source = f"{ORIGIN_PREFIX}#{connection}"
        self._certificate = certificate
        self._by_certificate = keys.by_certificate(certificate)
        self._identities: dict[str, Identity] = {}
        """The principals that this connection has proved, by apiKey."""
        self.unproved = self._identify(self._by_certificate)
        """The principal of messages without a signature."""
        self.name: str | None = self._by_certificate
        """Name of the principal that has sent the last message; `None` while that is unknown."""
        if kept is not None:
            self._restore(kept)
        elif self.name is not None:
            gate.note_login(self.name, self._source)

    def _restore(self, kept: KeptCaller) -> None:
        for api_key, name in kept.proved:
            if name is None or self.keys.principal(api_key) != name:
                raise AuthenticationError(m.UNKNOWN_API_KEY)
            self._identities[api_key] = self._identify(name)
        if self._by_certificate != kept.certified or not self.is_valid:
            raise AuthenticationError("the principal of the client is gone")
        self.name = kept.name

    def keep(self) -> KeptCaller:
        """Return what the client has proved, for the next server."""
        proved = [(api_key, self.keys.principal(api_key)) for api_key in self._identities]
        return KeptCaller(self._by_certificate, proved, self.name)

    def _identify(self, name: str | None) -> Identity:
        if not self._gate.enforcing:
            return Identity(self._source, self._connection, None)
        return self._gate.identity(self._source, name or ANONYMOUS)

    @property
    def asked(self) -> bool:
        """Whether it matters who sends a message."""
        return self.keys.asked

    @property
    def must_sign(self) -> bool:
        """Whether a message has to be signed, unless its url is open."""
        return self.keys.required and self._by_certificate is None

    def must_verify(self, message: Message, is_open: Callable[[], bool]) -> bool:
        """Return whether a message has to be verified; `is_open` returns whether its url needs no signature."""
        if self._gate.enforcing and is_signed(message.headers):
            return True
        return self.must_sign and not is_open()

    def verify(self, message: Message, check: Callable[[], str]) -> None:
        """Check the signature of a message with `check`, which returns the apiKey.

        Raises:
            AuthenticationError: the proof fails, is a replay, or comes too soon after wrong proofs.
        """
        try:
            self._prover.check(message, check)
        except AuthenticationError as error:
            api_key = message.headers.get("apiKey", ANONYMOUS)
            is_known = api_key == ANONYMOUS or self.keys.get(api_key) is not None
            self._gate.note_login(api_key, self._source, refused=error.text, is_known=is_known)
            raise
        api_key = message.headers["apiKey"]
        known = self._identities.get(api_key)
        if known is None:
            known = self._identities[api_key] = self._identify(self.keys.principal(api_key))
            self._gate.note_login(known.name, self._source)
        self.name = known.name if known.rights is not None else api_key

    def identity(self, api_key: str | None) -> Identity:
        """Return the principal of a verified message with this apiKey, `None` for a message that proves nothing."""
        return self.unproved if api_key is None else self._identities.get(api_key, self.unproved)

    def may_send_much(self, api_key: str | None) -> bool:
        """Return whether the body of a request is worth waiting for: its key is known, or it needs none."""
        if api_key is not None:
            return self.keys.get(api_key) is not None
        if self.must_sign:
            return False
        rights = self.unproved.rights
        return rights is None or rights.overlaps(Action.PUBLISH, EVERYTHING) is not Narrowing.NONE

    @property
    def is_valid(self) -> bool:
        """Whether what the connection has proved holds still; else it is to be closed."""
        if not self._gate.enforcing:
            return True
        if self.keys.by_certificate(self._certificate) != self._by_certificate and self._by_certificate is not None:
            return False
        names = {api_key: one.name for api_key, one in self._identities.items() if one.rights is not None}
        if self._by_certificate is not None:
            names[""] = self._by_certificate
        if any(api_key and self.keys.principal(api_key) != name for api_key, name in names.items()):
            return False
        return all(self._gate.table.principal(name) is not None or name == ANONYMOUS for name in names.values())

    def access_changed(self) -> bool:
        """Update the principals; return `False` if what the connection has proved does not hold any more."""
        if not self.is_valid:
            return False
        if self._by_certificate is None:
            self._by_certificate = self.keys.by_certificate(self._certificate)
        before = [self.unproved.root, *(one.root for one in self._identities.values())]
        self.unproved = self._identify(self._by_certificate)
        self._identities = {api_key: self._identify(self.keys.principal(api_key)) for api_key in self._identities}
        return before == [self.unproved.root, *(one.root for one in self._identities.values())]


def is_signed(headers: Mapping[str, str]) -> bool:
    """Return whether a message says who sent it."""
    return "apiKey" in headers or "signature" in headers
