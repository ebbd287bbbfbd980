import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from babelbus.protocols.busy_poll import SHORT_GAPS, BusyPoll
from tests.support.clock import ManualClock

SECONDS = 0.0001
CLIENT, OTHER = 1, 2


class Turns:
    """Stands for the event loop: what is due in its next turn."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.due.append(call)

    def turn(self) -> None:
        due, self.due = self.due, []
        for call in due:
            call()


@contextmanager
def polling() -> Iterator[tuple[BusyPoll, ManualClock, Turns]]:
    clock, turns = ManualClock(), Turns()
    with patch.object(asyncio, "get_running_loop", lambda: turns):
        yield BusyPoll(SECONDS, clock), clock, turns


def ask(poll: BusyPoll, clock: ManualClock, gap_seconds: float, connection: int = CLIENT) -> None:
    """Let a client be answered, and send again after a gap."""
    poll.answered(connection)
    clock.advance(gap_seconds)
    poll.received(connection)


def test_the_loop_stays_awake_behind_answers_to_a_client_that_asks_again_at_once() -> None:
    with polling() as (poll, clock, turns):
        for _ in range(SHORT_GAPS):
            ask(poll, clock, SECONDS / 2)
            assert not turns.due
        poll.answered(CLIENT)
        for _ in range(3):
            assert len(turns.due) == 1
            turns.turn()
        poll.received(CLIENT)
        turns.turn()
        assert not turns.due, "the request is there"


def test_the_loop_sleeps_after_a_miss_until_the_gaps_are_short_again() -> None:
    with polling() as (poll, clock, turns):
        for _ in range(SHORT_GAPS):
            ask(poll, clock, SECONDS / 2)
        poll.answered(CLIENT)
        clock.advance(2 * SECONDS)
        turns.turn()
        assert not turns.due, "the time is over"
        poll.received(CLIENT)
        for _ in range(SHORT_GAPS):
            ask(poll, clock, SECONDS / 2)
            assert not turns.due
        poll.answered(CLIENT)
        assert turns.due


def test_a_client_that_asks_now_and_then_wakes_the_loop_each_time() -> None:
    with polling() as (poll, clock, turns):
        for _ in range(10 * SHORT_GAPS):
            ask(poll, clock, 2 * SECONDS)
            assert not turns.due


def test_several_clients_keep_the_loop_busy_enough() -> None:
    with polling() as (poll, clock, turns):
        for _ in range(10 * SHORT_GAPS):
            poll.answered(CLIENT)
            poll.answered(OTHER)
            poll.received(CLIENT)
            poll.received(OTHER)
            clock.advance(SECONDS / 10)
            assert not turns.due


def test_one_poll_goes_on_for_answers_that_follow_each_other() -> None:
    with polling() as (poll, clock, turns):
        for _ in range(SHORT_GAPS):
            ask(poll, clock, SECONDS / 2)
        for _ in range(5):
            poll.answered(CLIENT)
            assert len(turns.due) == 1
            clock.advance(SECONDS / 2)
            turns.turn()
