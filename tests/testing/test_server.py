"""The server for the tests of programs: it runs, stops, is killed, and leaves nothing behind."""

from pathlib import Path

import pytest

from babelbus.testing import Server, ServerFailedError
from babelbus.testing.plugin import babelbus_fresh_server, babelbus_server

__all__ = ["babelbus_fresh_server", "babelbus_server"]  # the fixtures, where the plugin is not installed


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
