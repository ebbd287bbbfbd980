"""The keys of a data folder: the server's own, and one of an administrator; both are made at the first start.

In a cluster the owner keeps them, the token and the key of the vault among the files of the cluster. Each member that
comes to own them has copies in its folder, where the server and the commands on its machine read them.
"""

import logging
import os
from collections.abc import Callable

from babelbus.identities.vault import KEY_NAME as VAULT_KEY_NAME
from babelbus.protocols.jebp.identity import Identity
from babelbus.protocols.service import SERVER_KEY_NAME
from babelbus.server.access import AccessLists, ClientEntry
from babelbus.storage.files import FileSystem
from babelbus.web.token import NAME as TOKEN_NAME

log = logging.getLogger(__name__)

ADMIN_KEY_NAME = "admin_key"


def prepare_identities(folder: str, lists: AccessLists, keep: Callable[[str], None] = lambda name: None) -> str:
    """Return the fingerprint of the server, after making the keys that `folder` lacks.

    `keep` is called with the name of each key when it is made, before anybody relies on it.

    Raises:
        IdentityError: a key file cannot be read or made.
    """
    key_path = os.path.join(folder, SERVER_KEY_NAME)
    if not os.path.exists(key_path):
        admin_path = os.path.join(folder, ADMIN_KEY_NAME)
        if not os.path.exists(admin_path):
            Identity.generate().save(admin_path, name="admin")
        keep(ADMIN_KEY_NAME)
        lists.put(ClientEntry(Identity.load(admin_path).fingerprint, "admin", admin=True))
        identity = Identity.generate()
        identity.save(key_path, name="server")  # last: this file says that the rest is done
        keep(SERVER_KEY_NAME)
        log.info("first start: made the server certificate %s (%s) and an administrator's identity (%s)",
                    identity.fingerprint, key_path, admin_path)  # fmt: skip
    return Identity.load(key_path).fingerprint


def bring_keys(read: Callable[[str], bytes | None], local: FileSystem, folder: str) -> None:
    """Write the keys of a cluster into the folder `conf` of a member: the commands on its machine read them there.

    `read` returns a key by its name.
    """
    for name in SharedKeys.NAMES:
        path, content = os.path.join(folder, name), read(name)
        if content is not None and (not local.exists(path) or local.read_file(path) != content):
            local.replace_file(path, content)


class SharedKeys:
    """The key files of a cluster: among its files, and as copies in the folder of this member."""

    NAMES = (ADMIN_KEY_NAME, TOKEN_NAME, VAULT_KEY_NAME, SERVER_KEY_NAME)

    def __init__(self, shared: FileSystem, local: FileSystem, folder: str) -> None:
        """Write the keys of the cluster into the folder `conf` of this member."""
        self._shared, self._local, self._folder = shared, local, folder
        bring_keys(self._read, local, folder)

    def _read(self, name: str) -> bytes | None:
        path = os.path.join(self._folder, name)
        return self._shared.read_file(path) if self._shared.exists(path) else None

    def keep(self, name: str) -> None:
        """Keep a key that this member has made among the files of the cluster, durably."""
        path = os.path.join(self._folder, name)
        if not self._shared.exists(path) and self._local.exists(path):
            self._shared.replace_file(path, self._local.read_file(path))

    def keep_all(self) -> None:
        """Keep all keys that this member has made."""
        for name in self.NAMES:
            self.keep(name)
