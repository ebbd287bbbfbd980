"""The keys of a data folder: the server's own, and one of an administrator; both are made at the first start."""

import logging
import os

from babelbus.protocols.jebp.identity import Identity
from babelbus.protocols.service import SERVER_KEY_NAME
from babelbus.server.access import AccessLists, ClientEntry

log = logging.getLogger(__name__)

ADMIN_KEY_NAME = "admin_key"


def prepare_identities(folder: str, lists: AccessLists) -> str:
    """Return the fingerprint of the server, after making the keys that `folder` lacks.

    Raises:
        IdentityError: a key file cannot be read or made.
    """
    key_path = os.path.join(folder, SERVER_KEY_NAME)
    if not os.path.exists(key_path):
        admin_path = os.path.join(folder, ADMIN_KEY_NAME)
        if not os.path.exists(admin_path):
            Identity.generate().save(admin_path, name="admin")
        lists.put(ClientEntry(Identity.load(admin_path).fingerprint, "admin", admin=True))
        identity = Identity.generate()
        identity.save(key_path, name="server")  # last: this file says that the rest is done
        log.info("first start: made the server certificate %s (%s) and an administrator's identity (%s)",
                    identity.fingerprint, key_path, admin_path)  # fmt: skip
    return Identity.load(key_path).fingerprint
