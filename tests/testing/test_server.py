"""The server for the tests of programs: it runs, stops, is killed, and leaves nothing behind."""

import json
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import PIPE

import pytest

from babelbus.testing import Server, ServerFailedError
from babelbus.testing.plugin import babelbus_fresh_server, babelbus_server
from babelbus.testing.ports import BLOCK_PORTS, PORTS, free_ports

__all__ = ["babelbus_fresh_server", "babelbus_server"]  # the fixtures, where the plugin is not installed

ASK = """
import sys
from babelbus.testing.ports import BLOCK_PORTS, free_ports
print(free_ports(BLOCK_PORTS), flush=True)
sys.stdin.read()
"""


def test_the_fixture_is_a_server_with_an_administrator(babelbus_server: Server) -> None:
    with babelbus_server.blocking_client() as client:
        client.create_topic("orders")
        client.publish("orders", b"1")
        consumer = client.consume("orders", "g", start="beginning")
        assert next(consumer).payload == b"1"
        consumer.leave()


def test_a_server_that_is_killed_or_stopped_comes_back_at_its_place(babelbus_fresh_server: Server) -> None:
    server, address = babelbus_fresh_server, babelbus_fresh_server.address
    with server.blocking_client() as client:
        client.create_topic("orders")
        client.publish("orders", b"1")
        server.kill()
        server.start()
        assert server.address == address
        client.publish("orders", b"2")
        server.restart()
        assert [record.payload for record in client.follow("orders", until_end=True)] == [b"1", b"2"]


def test_the_port_of_a_server_is_none_that_a_connection_can_get_while_it_is_away(babelbus_server: Server) -> None:
    low, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    port = int(babelbus_server.address.rpartition(":")[2])
    if int(low) < PORTS.stop:
        pytest.skip(f"this machine gives ports from {low} on to connections")
    assert port in PORTS


def test_no_process_beside_another_one_gets_its_ports() -> None:
    program = [sys.executable, "-c", ASK]
    with ExitStack() as stack:
        others = [stack.enter_context(subprocess.Popen(program, stdin=PIPE, stdout=PIPE, text=True)) for _ in range(3)]
        told = [json.loads(one.stdout.readline()) for one in others if one.stdout]
        mine = free_ports(2 * BLOCK_PORTS)
        for one in others:
            one.communicate()
    ports = mine + [port for ports in told for port in ports]
    assert len(set(ports)) == len(ports) == 5 * BLOCK_PORTS
    assert set(ports) <= set(PORTS)


def test_a_port_that_somebody_listens_on_is_left_out() -> None:
    (before,) = free_ports(1)
    taken = []
    with ExitStack() as stack:
        for port in range(before + 1, before + 4):
            listener = stack.enter_context(socket.socket())
            with suppress(OSError):  # somebody else was faster
                listener.bind(("127.0.0.1", port))
            taken.append(port)
        assert not set(taken) & set(free_ports(3))


def test_settings_are_those_of_serve_and_the_folder_goes() -> None:
    with Server({"topics-partitions": 3}) as server:
        with server.blocking_client() as client:
            client.create_topic("orders")
            assert len(client.positions(["orders"])[0].partitions) == 3
        folder = server.folder
        assert folder.exists()
    assert not folder.exists()


def test_a_folder_of_the_test_stays(tmp_path: Path) -> None:
    with Server(folder=tmp_path / "data"):
        pass
    assert (tmp_path / "data" / "conf" / "admin_key").exists()


def test_a_server_that_does_not_start_says_why() -> None:
    server = Server({"topics-partitions": 0})
    with pytest.raises(ServerFailedError, match="partitions"):
        server.start()
    server.close()
