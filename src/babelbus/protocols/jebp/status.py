"""What each outcome is called on the wire: status byte and repetition byte (specification, section 4.1).

The document of jeb has two lists of status codes that disagree. The reading `command` (default) takes the list of the
command and asks the general list only where the command's own is silent; the reading `table` takes the general list
everywhere (option `jebp_status=table`). The first hex digit is the same in both: `a` is success, `b` is failure.
"""

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Literal

import msgspec

Reading = Literal["command", "table"]

REPEAT_NO = 0x30
REPEAT_YES = 0x31


class Outcome(Enum):
    """How a request ended; an `Answers` table gives the bytes that say so."""

    TOPIC_CREATED = auto()
    CREATE_TOPIC_EXISTS = auto()
    CREATE_TOPIC_NO_RIGHTS = auto()
    CREATE_TOPIC_BAD_NAME = auto()
    CREATE_TOPIC_DISK = auto()
    RECORD_CREATED = auto()
    CREATE_RECORD_CHECKSUM = auto()
    CREATE_RECORD_REFUSED = auto()  # topic does not exist, malformed request, negative timestamp
    CREATE_RECORD_DISK = auto()
    RECORDS_CREATED = auto()
    CREATE_RECORDS_REFUSED = auto()  # the batch is wrong, or for nobody: sending it again does not help
    CREATE_RECORDS_REPEAT = auto()  # CRC wrong, disk error, sequence ahead of the expected one
    RECORDS_STAGED = auto()
    BATCH_COMMITTED = auto()
    BATCH_ABORTED = auto()
    TRANSACTION_TOLD = auto()
    STAGING_REFUSED = auto()  # asking again does not help; why stands in the content
    STAGING_REPEAT = auto()  # disk error, commit under way, records in front missing
    POSITIONS_TOLD = auto()
    PARTITION_FETCHED = auto()
    GROUP_MOVED = auto()
    PARTITION_NO_TOPIC = auto()  # names stand in the content
    PARTITION_MISSING = auto()  # the topic has fewer
    PARTITION_NO_OFFSET = auto()
    PARTITION_RECORD_TOO_LARGE = auto()
    PARTITION_REFUSED = auto()  # asking again does not help; why stands in the content
    PARTITION_DISK = auto()
    SUBSCRIBED = auto()
    SUBSCRIBE_MISSING = auto()
    SUBSCRIBE_REFUSED = auto()
    FETCHED = auto()
    FETCH_NO_OFFSET = auto()
    FETCH_REFUSED = auto()  # no subscription, malformed, first record over MAX_BYTES
    FETCH_DISK = auto()
    TOPIC_REMOVED = auto()
    REMOVE_TOPIC_REFUSED = auto()
    REMOVE_TOPIC_DISK = auto()
    REMOVE_TOPIC_MISSING = auto()
    REMOVE_TOPIC_NO_RIGHTS = auto()
    UNKNOWN_COMMAND = auto()


class Answer(msgspec.Struct, frozen=True, gc=False):
    """The two bytes in front of every response; `content` is both as they go into the frame."""

    status: int
    repeat: bool
    content: bytes


Answers = Mapping[Outcome, Answer]

# outcome: (status by command, status by table, repeat); the rows of section 4.1 in their order, the extensions added.
_ROWS: dict[Outcome, tuple[int, int, bool]] = {
    Outcome.TOPIC_CREATED: (0xA1, 0xA1, False),
    Outcome.CREATE_TOPIC_EXISTS: (0xB6, 0xB4, False),
    Outcome.CREATE_TOPIC_NO_RIGHTS: (0xB7, 0xB5, False),
    Outcome.CREATE_TOPIC_BAD_NAME: (0xB4, 0xB3, False),
    Outcome.CREATE_TOPIC_DISK: (0xB4, 0xB3, True),
    Outcome.RECORD_CREATED: (0xA1, 0xA1, False),
    Outcome.CREATE_RECORD_CHECKSUM: (0xB3, 0xB3, True),
    Outcome.CREATE_RECORD_REFUSED: (0xB3, 0xB3, False),
    Outcome.CREATE_RECORD_DISK: (0xB3, 0xB3, True),
    Outcome.RECORDS_CREATED: (0xA1, 0xA1, False),
    Outcome.CREATE_RECORDS_REFUSED: (0xB3, 0xB3, False),
    Outcome.CREATE_RECORDS_REPEAT: (0xB3, 0xB3, True),
    Outcome.RECORDS_STAGED: (0xA1, 0xA1, False),
    Outcome.BATCH_COMMITTED: (0xA1, 0xA1, False),
    Outcome.BATCH_ABORTED: (0xA2, 0xA2, False),
    Outcome.TRANSACTION_TOLD: (0xA0, 0xA0, False),
    Outcome.STAGING_REFUSED: (0xB3, 0xB3, False),
    Outcome.STAGING_REPEAT: (0xB3, 0xB3, True),
    Outcome.POSITIONS_TOLD: (0xA0, 0xA0, False),
    Outcome.PARTITION_FETCHED: (0xA0, 0xA0, False),
    Outcome.GROUP_MOVED: (0xA0, 0xA0, False),
    Outcome.PARTITION_NO_TOPIC: (0xB1, 0xB1, False),
    Outcome.PARTITION_MISSING: (0xB6, 0xB6, False),
    Outcome.PARTITION_NO_OFFSET: (0xB2, 0xB2, False),
    Outcome.PARTITION_RECORD_TOO_LARGE: (0xB4, 0xB4, False),
    Outcome.PARTITION_REFUSED: (0xB3, 0xB3, False),  # not b0, which stands for an unknown command
    Outcome.PARTITION_DISK: (0xB3, 0xB3, True),
    Outcome.SUBSCRIBED: (0xA0, 0xA0, False),  # DECISION 17: not a2
    Outcome.SUBSCRIBE_MISSING: (0xB1, 0xB1, False),
    Outcome.SUBSCRIBE_REFUSED: (0xB0, 0xB0, False),
    Outcome.FETCHED: (0xA0, 0xA0, False),
    Outcome.FETCH_NO_OFFSET: (0xB1, 0xB1, False),
    Outcome.FETCH_REFUSED: (0xB0, 0xB0, False),
    Outcome.FETCH_DISK: (0xB0, 0xB0, True),
    Outcome.TOPIC_REMOVED: (0xA2, 0xA2, False),
    Outcome.REMOVE_TOPIC_REFUSED: (0xB8, 0xB6, False),
    Outcome.REMOVE_TOPIC_DISK: (0xB9, 0xB6, True),
    Outcome.REMOVE_TOPIC_MISSING: (0xB7, 0xB7, False),
    Outcome.REMOVE_TOPIC_NO_RIGHTS: (0xB8, 0xB8, False),
    Outcome.UNKNOWN_COMMAND: (0xB0, 0xB0, False),
}


def _answer(status: int, repeat: bool) -> Answer:
    return Answer(status, repeat, bytes((status, REPEAT_YES if repeat else REPEAT_NO)))


_COMMAND: Answers = MappingProxyType({outcome: _answer(row[0], row[2]) for outcome, row in _ROWS.items()})
_TABLE: Answers = MappingProxyType({outcome: _answer(row[1], row[2]) for outcome, row in _ROWS.items()})


def answers(reading: Reading = "command") -> Answers:
    """Return the table of one reading of the document: outcome -> the two bytes that say it (DECISION 16)."""
    return _COMMAND if reading == "command" else _TABLE


def is_success(status: int) -> bool:
    """Tell success from failure by the first hex digit, which both readings share (DECISION 16)."""
    return status >> 4 == 0xA
