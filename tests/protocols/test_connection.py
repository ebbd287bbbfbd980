"""A connection whose session may go on at another server."""

from typing import Any

from tests.support.bus import in_loop
from tests.support.hesitant import Hesitant, connect


class Transport:
    """A socket that says whether it is read."""

    def __init__(self) -> None:
        self.reads = True

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
        return 0


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
