"""What a connection has written and its socket does not take."""

import socket
from contextlib import suppress
from typing import Any

import pytest

from babelbus.listening.transports import TURN_BYTES, is_blocked


class Written:
    """A transport over a socket, with bytes that wait."""

    def __init__(self, connection: socket.socket | None, size_bytes: int, *, is_tls: bool = False) -> None:
        self._known = {"socket": connection, "ssl_object": object() if is_tls else None}
        self._size_bytes = size_bytes

    def get_write_buffer_size(self) -> int:
        return self._size_bytes

    def get_extra_info(self, name: str) -> Any:
        return self._known[name]


@pytest.fixture
def pair() -> Any:
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        yield one, other


def fill(connection: socket.socket) -> None:
    with suppress(BlockingIOError):
        while True:
            connection.send(bytes(65_536))


def test_what_a_socket_takes_in_this_turn_is_not_blocked(pair: Any) -> None:
    assert not is_blocked(Written(pair[0], 0))
    assert not is_blocked(Written(pair[0], TURN_BYTES))
    assert is_blocked(Written(pair[0], TURN_BYTES + 1))
    assert not is_blocked(Written(pair[0], 0, is_tls=True))


def test_bytes_behind_a_full_socket_are_blocked_and_what_the_kernel_has_is_not(pair: Any) -> None:
    fill(pair[0])
    assert is_blocked(Written(pair[0], 1))
    assert not is_blocked(Written(pair[0], 0))
    assert is_blocked(Written(pair[0], 0, is_tls=True))  # what waits below the TLS is not known


def test_a_closed_socket_takes_nothing(pair: Any) -> None:
    pair[0].close()
    assert is_blocked(Written(pair[0], 1))
    assert is_blocked(Written(None, 1))
