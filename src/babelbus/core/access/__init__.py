"""Access: who may do what to which subjects, in one table for all protocols (docs/access.md).

The gate, which keeps the table in a topic, is `core.access.gate`, the audit `core.access.audit`.
"""

from babelbus.core.access.model import (
    ACTIONS,
    ANONYMOUS,
    CLIENT,
    EVERYBODY,
    ROLE_PREFIX,
    SERVER,
    AccessRefusedError,
    Action,
    Effect,
    Granted,
    Identity,
    InvalidAccessError,
    Narrowing,
    Principal,
    Row,
)
from babelbus.core.access.rights import (
    ADMIN_RIGHTS,
    CLIENT_RIGHTS,
    NOBODY,
    STATE_TOPIC,
    Rights,
    check_may,
    check_topic,
    covers,
    may,
    may_topic,
    overlaps,
    refusal,
    subjects_of_topic,
)
from babelbus.core.access.root import Root
from babelbus.core.access.table import ADMIN_ROLE, CLIENT_ROLE, Explanation, Table
from babelbus.identities.credential import Credential

__all__ = [
    "ACTIONS",
    "ADMIN_RIGHTS",
    "ADMIN_ROLE",
    "ANONYMOUS",
    "CLIENT",
    "CLIENT_RIGHTS",
    "CLIENT_ROLE",
    "EVERYBODY",
    "NOBODY",
    "ROLE_PREFIX",
    "SERVER",
    "STATE_TOPIC",
    "AccessRefusedError",
    "Action",
    "Credential",
    "Effect",
    "Explanation",
    "Granted",
    "Identity",
    "InvalidAccessError",
    "Narrowing",
    "Principal",
    "Rights",
    "Root",
    "Row",
    "Table",
    "check_may",
    "check_topic",
    "covers",
    "may",
    "may_topic",
    "overlaps",
    "refusal",
    "subjects_of_topic",
]
