"""Identities and grants: may this identity do this to this subject? (docs/design/design.md, section 6)"""

from enum import Enum

import msgspec

from babelbus.core.subject import EVERYTHING, Pattern
from babelbus.errors import BabelbusError


class Action(Enum):
    """The actions that a grant allows."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    ADMIN = "admin"


class Grant(msgspec.Struct, frozen=True):
    """Leave to do something to the subjects of a pattern."""

    action: Action
    pattern: Pattern = EVERYTHING


class Identity(msgspec.Struct, frozen=True):
    """The verified client of a connection. `source` goes into `ce_source`: protocol and name.

    `grants` is `None` for the clients of a protocol that gives no rights by subject.
    """

    source: str
    name: str
    grants: tuple[Grant, ...] | None = ()


def may(principal: Identity, action: Action, subject: str) -> bool:
    """Return whether a grant of a principal covers this; asked for a topic or a batch, not for each message."""
    grants = principal.grants
    if grants is None:
        return True
    for grant in grants:
        if grant.action is action and (grant.pattern is EVERYTHING or grant.pattern.matches(subject)):
            return True
    return False


CLIENT_GRANTS = (Grant(Action.PUBLISH), Grant(Action.SUBSCRIBE))
ADMIN_GRANTS = (*CLIENT_GRANTS, Grant(Action.ADMIN))
SERVER = Identity("server", "server", None)
"""The server itself: nobody else writes the topics whose names it reserves."""
CLIENT = Identity("", "", None)
"""A client of whom nothing is known and who may publish to whatever is not reserved."""
NOBODY = Identity("", "", ())
"""A client that has lost all rights."""


class AccessRefusedError(BabelbusError):
    """The principal has no right to do this."""

    def __init__(self, action: Action, subject: str) -> None:
        super().__init__(f"no right to {action.value} {subject!r}")
        self.action, self.subject = action, subject
