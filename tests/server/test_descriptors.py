"""File descriptors run out: clients are turned away before files and the administration lack any."""

import contextlib
import http.client
import logging
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.descriptors import RESERVE_MAX, is_reserved, raise_limit
from babelbus.limited_log import LINES_MAX
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.jebp import create, create_topic, said
from tests.support.server import LiveServer, configure

ROOM = 60
"""Descriptors beside those that are in use."""


@contextlib.contextmanager
def limited(soft: int) -> Iterator[None]:
    """Lower the limit of this process for a while."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def health(live: LiveServer) -> int:
    connection = http.client.HTTPConnection(live.server.addresses["admin"], timeout=SAFETY_NET_SECONDS)
    connection.request("GET", "/health")
    status = connection.getresponse().status
    connection.close()
    return status


def is_served(live: LiveServer, peers: list[socket.socket]) -> bool:
    """Whether one more client hears the server; it is kept in `peers` then."""
    peer = live.dial().socket
    try:
        if peer.recv(100):
            peers.append(peer)
            return True
    except ConnectionResetError:
        pass
    peer.close()
    return False


def close_all(peers: list[socket.socket]) -> None:
    for peer in peers:
        peer.close()


@pytest.mark.parametrize("use_uvloop", [True, False])
def test_clients_leave_descriptors_to_files_and_to_the_administration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, use_uvloop: bool
) -> None:
    caplog.set_level(logging.WARNING)
    refusals = 3 * LINES_MAX
    with contextlib.ExitStack() as stack:
        live = stack.enter_context(LiveServer(configure(tmp_path, admin=True), use_uvloop=use_uvloop))
        first = stack.enter_context(live.caller())
        stack.enter_context(limited((len(os.listdir("/proc/self/fd")) + ROOM) * 4 // 3))
        peers: list[socket.socket] = []
        stack.callback(close_all, peers)
        while is_served(live, peers):
            assert len(peers) < ROOM
        assert len(peers) >= ROOM // 2 - 2  # both ends are in this process
        for _ in range(refusals - 1):
            assert not is_served(live, peers)
        assert health(live) == 200
        assert said(first.ask(create_topic("news"))[0]) == "a130"
        assert said(first.ask(create("news", b"x"))[0]) == "a130"
        labels = {"protocol": "jebp", "reason": "descriptors"}
        sample = live.server.metrics.registry.get_sample_value
        assert live.call(lambda: sample("babelbus_connections_refused_total", labels)) == refusals
        lines = [record for record in caplog.records if "refused" in record.getMessage()]
        assert len(lines) == LINES_MAX

        close_all(peers)
        live.until(lambda: len(live.connections) == 1)
        assert is_served(live, peers)


def test_half_of_the_reserve_is_for_the_administration() -> None:
    with limited(160):
        assert [is_reserved(119), is_reserved(120)] == [False, True]
        assert [is_reserved(139, is_admin=True), is_reserved(140, is_admin=True)] == [False, True]


def test_the_limit_is_raised_to_the_hard_one(caplog: pytest.LogCaptureFixture) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with limited(256):
        raise_limit(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    assert not caplog.records


@pytest.mark.parametrize(("few", "level"), [(1, "INFO"), (2**40, "WARNING")])
def test_more_connections_than_descriptors_are_logged_and_warned_about_where_they_are_few(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, few: int, level: str
) -> None:
    monkeypatch.setattr("babelbus.descriptors.FEW", few)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with limited(256), caplog.at_level("INFO"):
        raise_limit(hard - RESERVE_MAX + 1)
    (line,) = caplog.records
    assert "LimitNOFILE" in line.message
    assert line.levelname == level
