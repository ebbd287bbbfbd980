"""All proofs of identity of a server: what its doors ask, kept up to date with the table of principals."""

import logging
from collections.abc import Mapping

from babelbus.clock import Clock
from babelbus.config import AccessSettings
from babelbus.identities.credential import Credential
from babelbus.identities.directory import Directory, DuplicateProofError
from babelbus.identities.guessing import Guessing
from babelbus.identities.passwords import Passwords
from babelbus.identities.vault import Vault
from babelbus.metrics import Metrics

log = logging.getLogger(__name__)


class Proofs:
    """The parts that prove who a client is; only the event loop uses them.

    Args:
        folder: `<data>/conf`, where the key of the vault is.
    """

    def __init__(self, folder: str, clock: Clock, metrics: Metrics, settings: AccessSettings) -> None:
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

    def close(self) -> None:
        """Stop the threads of the passwords."""
        self.passwords.close()
