"""A way of the torture does what its faults say."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.way import Way


@contextmanager
def echo() -> Iterator[int]:
    """Run a server that sends back what it gets; yields its port."""

    def serve(end: socket.socket) -> None:
        with end:
            while data := end.recv(2**16):
                end.sendall(data)

    def accept() -> None:
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(end,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def way() -> Iterator[Way]:
    with echo() as port, Way(f"127.0.0.1:{port}") as made:
        yield made
        made.heal()


def dial(way: Way) -> socket.socket:
    return socket.create_connection(("127.0.0.1", way.port), SAFETY_NET_SECONDS)


def receive(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += end.recv(count - len(data))
    return data


def is_closed(end: socket.socket) -> bool:
    try:
        return end.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_way_carries_bytes_both_ways(way: Way) -> None:
    with dial(way) as end:
        end.sendall(b"x" * 200_000)
        assert receive(end, 200_000) == b"x" * 200_000
        end.shutdown(socket.SHUT_WR)
        assert end.recv(1) == b""


def test_a_way_holds_no_small_pieces_back(way: Way) -> None:
    with dial(way) as end:
        end.sendall(b"x")
        assert receive(end, 1) == b"x"
        assert [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in way._ends] == [1, 1]


def test_a_partition_holds_all_and_lets_it_go_when_it_heals(way: Way) -> None:
    with dial(way) as old:
        old.sendall(b"before")
        assert receive(old, 6) == b"before"
        way.partition()
        old.sendall(b"held")
        with dial(way) as new:  # nobody says no in a partition
            new.sendall(b"new")
            new.setblocking(False)
            with pytest.raises(BlockingIOError):
                new.recv(1)
            new.settimeout(SAFETY_NET_SECONDS)
            way.heal()
            assert receive(new, 3) == b"new"
        assert receive(old, 4) == b"held"


def test_a_cut_breaks_connections_and_lets_new_ones_in(way: Way) -> None:
    with dial(way) as old:
        old.sendall(b"x")
        assert receive(old, 1) == b"x"
        way.cut()
        assert is_closed(old)
    with dial(way) as new:
        new.sendall(b"y")
        assert receive(new, 1) == b"y"


def test_a_slow_way_carries_everything_in_order(way: Way) -> None:
    way.slow_down(0.001)
    sent = bytes(range(256)) * 1_000
    with dial(way) as end:
        threading.Thread(target=end.sendall, args=(sent,)).start()
        assert receive(end, len(sent)) == sent


def test_a_way_to_nobody_closes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with Way(f"127.0.0.1:{port}") as nowhere, dial(nowhere) as end:
        assert is_closed(end)
