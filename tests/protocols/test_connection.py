"""A connection whose session may go on at another server."""

from typing import Any

from tests.support.bus import in_loop
from tests.support.hesitant import Hesitant, connect


class Transport:
    """A socket that says whether it is read, and how it was closed."""

    def __init__(self) -> None:
        self.reads = True
        self.unsent_bytes = 0
        self.blocked = False
        self.is_settled = True
        self.held: list[bytes] = []
        self.end = ""

    def is_blocked(self) -> bool:
        return self.blocked

    def close(self) -> None:
        self.end = "closed"

    def abort(self) -> None:
        self.end = "aborted"

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> Any:
        return None

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        return

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes


@in_loop
async def test_a_client_that_stays_is_answered_and_not_read_any_more() -> None:
    session, transport = Hesitant(), Transport()
    connection = connect(session)
    connection.connection_made(transport)
    connection.data_received(b"request")
    assert not transport.reads
    connection.stop_reading()
    assert connection.continuation() is None
    session.may_go_on = True
    connection.room()
    assert (connection.busy, transport.reads) == (False, False)
    assert connection.continuation() is not None
    connection.leave()


@in_loop
async def test_a_client_that_may_be_read_is_read_on_when_its_request_is_done() -> None:
    session, transport = Hesitant(), Transport()
    connection = connect(session)
    connection.connection_made(transport)
    connection.data_received(b"request")
    session.may_go_on = True
    connection.room()
    assert transport.reads
    connection.leave()


@in_loop
async def test_bytes_that_are_below_the_transport_of_a_client_that_stays_are_not_waited_for() -> None:
    transport = Transport()
    connection = connect(Hesitant())
    connection.connection_made(transport)
    transport.unsent_bytes = 1
    unsent = [connection.unsent]
    connection.stay()
    unsent.append(connection.unsent)
    transport.is_settled = False
    assert [*unsent, connection.unsent] == [True, False, True]
    assert not connection.unanswered
    connection.leave()


@in_loop
async def test_a_client_that_had_its_time_is_closed_at_once_if_it_does_not_take_what_was_sent() -> None:
    transport = Transport()
    connection = connect(Hesitant())
    connection.connection_made(transport)
    connection.close_late()
    assert transport.end == "closed"
    transport.blocked = True
    connection.close_late()
    assert transport.end == "aborted"
    connection.leave()


@in_loop
async def test_what_came_is_owed_an_answer_unless_the_client_holds_it_up() -> None:
    session, transport = Hesitant(), Transport()
    connection = connect(session)
    connection.connection_made(transport)
    connection.stay()
    transport.held = [b"request"]
    owed = [connection.unanswered]
    transport.unsent_bytes = 2**18 + 1  # a quarter of what the outbox of this connection has room for, and more
    owed.append(connection.unanswered)
    transport.held, transport.unsent_bytes = [], 0
    owed.append(connection.unanswered)
    connection.data_received(b"request")
    owed.append(connection.unanswered)
    transport.unsent_bytes = 2**18 + 1
    owed.append(connection.unanswered)
    assert owed == [True, False, False, True, False]
    connection.leave()
