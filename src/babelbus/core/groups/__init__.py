"""Consumer groups: durable cursors shared by members of any protocol, redelivery, dead letters (docs/groups.md)."""

from babelbus.core.groups.dead_letter_topics import (
    DeadLetterTopics,
    Letter,
    LettersWaitingError,
    NoDeadLetterTopicError,
)
from babelbus.core.groups.dead_letters import OURS, DeadLetter
from babelbus.core.groups.delivery_rows import Rows, RowsFilter, Run, pick
from babelbus.core.groups.group import Group
from babelbus.core.groups.in_flight import Delivery, Holder, Lease
from babelbus.core.groups.member import Member
from babelbus.core.groups.registry import COMMIT_SECONDS, READ_AHEAD_BYTES, Groups
from babelbus.core.groups.settings import (
    BEGINNING,
    END,
    GroupClosedError,
    GroupExistsError,
    GroupOwnedError,
    GroupSettings,
    InvalidGroupNameError,
    Place,
    RecordFilter,
    UnknownFilterError,
    UnknownGroupError,
    at_offset,
    check_group_name,
)

__all__ = [
    "BEGINNING",
    "COMMIT_SECONDS",
    "END",
    "OURS",
    "READ_AHEAD_BYTES",
    "DeadLetter",
    "DeadLetterTopics",
    "Delivery",
    "Group",
    "GroupClosedError",
    "GroupExistsError",
    "GroupOwnedError",
    "GroupSettings",
    "Groups",
    "Holder",
    "InvalidGroupNameError",
    "Lease",
    "Letter",
    "LettersWaitingError",
    "Member",
    "NoDeadLetterTopicError",
    "Place",
    "RecordFilter",
    "Rows",
    "RowsFilter",
    "Run",
    "UnknownFilterError",
    "UnknownGroupError",
    "at_offset",
    "check_group_name",
    "pick",
]
