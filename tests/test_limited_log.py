import logging

import pytest

from babelbus.limited_log import LINES_MAX, SECONDS, LimitedLog
from tests.support.clock import ManualClock


def test_a_cause_has_a_few_lines_a_minute_and_then_a_count(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    log = LimitedLog(logging.getLogger("test"), clock)
    for number in range(LINES_MAX + 500):
        log.write(logging.INFO, "jebp protocol errors", "closing %d", number)
    log.write(logging.WARNING, "jebp refusals", "refused")
    clock.advance(SECONDS)
    log.write(logging.INFO, "jebp protocol errors", "closing again")
    assert [record.getMessage() for record in caplog.records] == [
        *[f"closing {number}" for number in range(LINES_MAX)],
        "jebp protocol errors: further lines of this minute are counted only",
        "refused",
        "jebp protocol errors: 500 more lines like those before",
        "closing again",
    ]


def test_a_cause_that_is_rare_has_all_its_lines(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    log = LimitedLog(logging.getLogger("test"), clock)
    for number in range(3 * LINES_MAX):
        clock.advance(SECONDS / LINES_MAX)
        log.write(logging.WARNING, "refusals", "refused %d", number)
    assert [record.getMessage() for record in caplog.records] == [f"refused {number}" for number in range(30)]
