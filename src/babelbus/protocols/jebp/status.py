"""The bytes of each outcome on the wire: status byte and repetition byte (specification, section 4.1).

The document of jeb has two lists of status codes that disagree. The reading `command` (default) takes the list of the
command and asks the general list only where the command's own is silent; the reading `table` takes the general list
everywhere (option `jebp_status=table`). The first hex digit is the same in both: `a` is success, `b` is failure.
"""

# ruff: noqa: PIE796 - outcomes of equal bytes are different outcomes

from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Literal

Reading = Literal["command", "table"]

REPEAT_NO = 0x30
REPEAT_YES = 0x31


class Outcome(Enum):
    """How a request ended: the status of the command's list, the repetition, the status of the table if it differs.

    The rows of section 4.1 in their order, the extensions added.
    """

    status: int
    repeat: bool
    table_status: int

    def __new__(cls, status: int, repeat: bool = False, table_status: int | None = None) -> "Outcome":
        """Build a member."""
        outcome = object.__new__(cls)
        outcome._value_ = len(cls.__members__)
        outcome.status, outcome.repeat = status, repeat
        outcome.table_status = status if table_status is None else table_status
        return outcome

    TOPIC_CREATED = 0xA1
    CREATE_TOPIC_EXISTS = 0xB6, False, 0xB4
    CREATE_TOPIC_NO_RIGHTS = 0xB7, False, 0xB5
    CREATE_TOPIC_BAD_NAME = 0xB4, False, 0xB3
    CREATE_TOPIC_DISK = 0xB4, True, 0xB3
    RECORD_CREATED = 0xA1
    CREATE_RECORD_CHECKSUM = 0xB3, True
    CREATE_RECORD_REFUSED = 0xB3  # topic does not exist, malformed request, negative timestamp
    RECORDS_CREATED = 0xA1
    CREATE_RECORDS_REFUSED = 0xB3  # the batch is wrong, or for nobody: sending it again does not help
    CREATE_RECORDS_REPEAT = 0xB3, True  # CRC wrong, disk error, sequence ahead of the expected one
    RECORDS_STAGED = 0xA1
    BATCH_COMMITTED = 0xA1
    BATCH_ABORTED = 0xA2
    TRANSACTION_TOLD = 0xA0
    STAGING_REFUSED = 0xB3  # asking again does not help; why is in the content
    STAGING_REPEAT = 0xB3, True  # disk error, commit under way, records in front missing
    POSITIONS_TOLD = 0xA0
    PARTITION_FETCHED = 0xA0
    GROUP_MOVED = 0xA0
    PARTITION_NO_TOPIC = 0xB1  # names are in the content
    PARTITION_MISSING = 0xB6  # the topic has fewer
    PARTITION_NO_OFFSET = 0xB2
    PARTITION_RECORD_TOO_LARGE = 0xB4
    PARTITION_REFUSED = 0xB3  # asking again does not help; why is in the content. Not b0: an unknown command
    PARTITION_DISK = 0xB3, True
    SUBSCRIBED = 0xA0  # DECISION 17: not a2
    SUBSCRIBE_MISSING = 0xB1
    SUBSCRIBE_REFUSED = 0xB0
    SUBSCRIBE_CLOSED = 0xB0, True
    FETCHED = 0xA0
    FETCH_NO_OFFSET = 0xB1
    FETCH_REFUSED = 0xB0  # no subscription, malformed, first record over MAX_BYTES
    FETCH_DISK = 0xB0, True
    TOPIC_REMOVED = 0xA2
    REMOVE_TOPIC_REFUSED = 0xB8, False, 0xB6
    REMOVE_TOPIC_DISK = 0xB9, True, 0xB6
    REMOVE_TOPIC_MISSING = 0xB7
    REMOVE_TOPIC_NO_RIGHTS = 0xB8
    UNKNOWN_COMMAND = 0xB0


Answers = Mapping[Outcome, bytes]
"""The two bytes in front of every response."""


@cache
def answers(reading: Reading = "command") -> Answers:
    """Return the table of one reading of the document: outcome -> the two bytes that say it (DECISION 16)."""
    return {
        outcome: bytes(
            (
                outcome.status if reading == "command" else outcome.table_status,
                REPEAT_YES if outcome.repeat else REPEAT_NO,
            )
        )
        for outcome in Outcome
    }


def is_success(status: int) -> bool:
    """Return whether a status is one of success: the first hex digit, which both readings share (DECISION 16)."""
    return status >> 4 == 0xA
