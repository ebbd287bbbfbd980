"""Identities and grants: may this identity do this to this subject? (docs/design/design.md, section 6)"""

from enum import Enum

import msgspec

from babelbus.core.subject import EVERYTHING, Pattern


class Action(Enum):
    """What a grant allows."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    ADMIN = "admin"


class Grant(msgspec.Struct, frozen=True):
    """Leave to do something to the subjects of a pattern."""

    action: Action
    pattern: Pattern = EVERYTHING


class Identity(msgspec.Struct, frozen=True):
    """Who a connection speaks for, as its protocol proved it. `source` goes into `ce_source`: protocol and name."""

    source: str
    name: str
    grants: tuple[Grant, ...] = ()

    def may(self, action: Action, subject: str) -> bool:
        """Return whether a grant covers this."""
        for grant in self.grants:
            if grant.action is action and (grant.pattern is EVERYTHING or grant.pattern.matches(subject)):
                return True
        return False


CLIENT_GRANTS = (Grant(Action.PUBLISH), Grant(Action.SUBSCRIBE))
ADMIN_GRANTS = (*CLIENT_GRANTS, Grant(Action.ADMIN))
