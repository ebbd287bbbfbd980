"""The status table of the specification, section 4.1, row by row."""

import pytest

from babelbus.protocols.jebp.status import Outcome, answers, is_success

ROWS = """
TOPIC_CREATED           a1 a1 30
CREATE_TOPIC_EXISTS     b6 b4 30
CREATE_TOPIC_NO_RIGHTS  b7 b5 30
CREATE_TOPIC_BAD_NAME   b4 b3 30
CREATE_TOPIC_DISK       b4 b3 31
RECORD_CREATED          a1 a1 30
CREATE_RECORD_CHECKSUM  b3 b3 31
CREATE_RECORD_REFUSED   b3 b3 30
RECORDS_CREATED         a1 a1 30
CREATE_RECORDS_REFUSED  b3 b3 30
CREATE_RECORDS_REPEAT   b3 b3 31
RECORDS_STAGED          a1 a1 30
BATCH_COMMITTED         a1 a1 30
BATCH_ABORTED           a2 a2 30
TRANSACTION_TOLD        a0 a0 30
STAGING_REFUSED         b3 b3 30
STAGING_REPEAT          b3 b3 31
POSITIONS_TOLD          a0 a0 30
PARTITION_FETCHED       a0 a0 30
GROUP_MOVED             a0 a0 30
PARTITION_NO_TOPIC      b1 b1 30
PARTITION_MISSING       b6 b6 30
PARTITION_NO_OFFSET     b2 b2 30
PARTITION_RECORD_TOO_LARGE b4 b4 30
PARTITION_REFUSED       b3 b3 30
PARTITION_DISK          b3 b3 31
SUBSCRIBED              a0 a0 30
SUBSCRIBE_MISSING       b1 b1 30
SUBSCRIBE_REFUSED       b0 b0 30
SUBSCRIBE_CLOSED        b0 b0 31
FETCHED                 a0 a0 30
FETCH_NO_OFFSET         b1 b1 30
FETCH_REFUSED           b0 b0 30
FETCH_DISK              b0 b0 31
TOPIC_REMOVED           a2 a2 30
REMOVE_TOPIC_REFUSED    b8 b6 30
REMOVE_TOPIC_DISK       b9 b6 31
REMOVE_TOPIC_MISSING    b7 b7 30
REMOVE_TOPIC_NO_RIGHTS  b8 b8 30
UNKNOWN_COMMAND         b0 b0 30
"""
CASES = [line.split() for line in ROWS.strip().splitlines()]


@pytest.mark.parametrize(("name", "command", "table", "repeat"), CASES)
def test_an_outcome_is_answered_as_its_row_says_in_both_readings(
    name: str, command: str, table: str, repeat: str
) -> None:
    assert answers("command")[Outcome[name]].hex() == command + repeat
    assert answers("table")[Outcome[name]].hex() == table + repeat
    assert answers() == answers("command")


def test_every_outcome_has_a_row() -> None:
    assert [case[0] for case in CASES] == [outcome.name for outcome in Outcome]


def test_both_readings_agree_on_success() -> None:
    for outcome in Outcome:
        assert is_success(answers("command")[outcome][0]) is is_success(answers("table")[outcome][0])
    assert is_success(0xA2)
    assert not is_success(0xB0)
