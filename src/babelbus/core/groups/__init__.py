"""Consumer groups: durable cursors shared by members of any protocol, redelivery, dead letters (docs/groups.md)."""

from babelbus.core.groups.dead_letter_topics import (
    AmbiguousGroupError,
    DeadLetterTopicInfo,
    DeadLetterTopics,
    Letter,
    LettersWaitingError,
    NoDeadLetterTopicError,
    Replayed,
)
from babelbus.core.groups.dead_letters import OURS
from babelbus.core.groups.dead_letters import TOPIC as LETTER_TOPIC
from babelbus.core.groups.dead_letters import topic_name as letters_of
from babelbus.core.groups.delivery_rows import Rows, RowsFilter, Run, pick
from babelbus.core.groups.group import Group, GroupInfo
from babelbus.core.groups.in_flight import Delivery, Holder, Lease
from babelbus.core.groups.inspection import InFlightInfo, MemberInfo, Obstacle
from babelbus.core.groups.member import Member
from babelbus.core.groups.partition_cursor import SeekPreview
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
    "LETTER_TOPIC",
    "OURS",
    "READ_AHEAD_BYTES",
    "AmbiguousGroupError",
    "DeadLetterTopicInfo",
    "DeadLetterTopics",
    "Delivery",
    "Group",
    "GroupClosedError",
    "GroupExistsError",
    "GroupInfo",
    "GroupOwnedError",
    "GroupSettings",
    "Groups",
    "Holder",
    "InFlightInfo",
    "InvalidGroupNameError",
    "Lease",
    "Letter",
    "LettersWaitingError",
    "Member",
    "MemberInfo",
    "NoDeadLetterTopicError",
    "Obstacle",
    "Place",
    "RecordFilter",
    "Replayed",
    "Rows",
    "RowsFilter",
    "Run",
    "SeekPreview",
    "UnknownFilterError",
    "UnknownGroupError",
    "at_offset",
    "check_group_name",
    "letters_of",
    "pick",
]
