"""Quotas over real sockets: a principal that sends or reads too much waits, and loses nothing."""

import contextlib
from pathlib import Path

import pytest

from babelbus.config import Config, QuotaSettings
from tests.support.jebp import create_topic, remove_topic, said, subscribe
from tests.support.sbus import is_cut, join
from tests.support.server import LiveServer, configure
from tests.support.zbus import HttpClient

MIB = 2**20


def config_of(folder: Path, **quotas: int) -> Config:
    config = configure(folder)
    return Config(
        **{name: getattr(config, name) for name in config.__struct_fields__ if name != "quotas"},
        quotas=QuotaSettings(**quotas),
    )


def sample(live: LiveServer, name: str, **labels: str) -> float:
    read = live.server.metrics.registry.get_sample_value
    return live.call(lambda: read(f"babelbus_{name}", labels)) or 0.0


@pytest.mark.parametrize("use_uvloop", [True, False])
def test_who_sends_too_much_is_read_later_and_loses_nothing(tmp_path: Path, use_uvloop: bool) -> None:
    config = config_of(tmp_path, publish_bytes_per_second=4 * MIB)
    with LiveServer(config, use_uvloop=use_uvloop) as live, HttpClient(live.server.addresses["zbus"]) as client:
        assert client.do("create", mq="Q").status == 200
        for _ in range(5):
            assert client.do("pub", bytes(MIB), mq="Q").status == 200
        assert client.do("ping").status == 200
        assert sample(live, "quota_rests_total", protocol="zbus", direction="publish") > 0
        assert sample(live, "quota_rest_seconds_total", protocol="zbus", direction="publish") > 0


def test_who_reads_too_much_gets_everything_later(tmp_path: Path) -> None:
    with LiveServer(config_of(tmp_path, read_bytes_per_second=2 * MIB)) as live:
        with HttpClient(live.server.addresses["worterbuch"]) as client:
            value = b'"' + bytes(b"x" * MIB) + b'"'
            answer = client.ask("POST", "/api/v1/set/a", value, content_type="application/json")
            assert answer.status == 200
            for _ in range(3):
                assert client.ask("GET", "/api/v1/get/a").status == 200
        assert sample(live, "quota_rests_total", protocol="worterbuch", direction="read") > 0


def test_a_principal_has_its_connections_and_others_theirs(tmp_path: Path) -> None:
    with LiveServer(config_of(tmp_path, connections=2)) as live:
        with live.caller() as first, live.caller() as second:
            for caller in (first, second):
                assert len(caller.ask(subscribe("none"))) == 1
            with live.caller() as third, contextlib.suppress(ConnectionResetError):
                while third.socket.recv(65536):  # its first chunk may be answered
                    pass
            assert sample(live, "quota_refusals_total", what="connections") == 1
            assert sample(live, "connections_refused_total", protocol="jebp", reason="quota") == 1
            with HttpClient(live.server.addresses["zbus"]) as client:  # of another principal
                assert client.do("ping").status == 200
        live.until(lambda: not live.connections)
        assert live.call(live.server.quotas.describe) == {}
        with live.caller() as caller:
            assert len(caller.ask(subscribe("none"))) == 1


def test_without_quotas_no_connection_has_one(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path)) as live, live.caller() as caller:
        caller.ask(subscribe("none"))
        assert live.call(live.server.quotas.describe) == {}


def test_a_topic_over_the_quota_is_refused_until_another_one_is_gone(tmp_path: Path) -> None:
    with LiveServer(config_of(tmp_path, topics=1)) as live, live.caller() as caller:
        made = said(caller.ask(create_topic("a"))[0])
        assert said(caller.ask(create_topic("b"))[0]) != made
        assert sample(live, "quota_refusals_total", what="topics") == 1
        caller.ask(remove_topic("a"))
        assert said(caller.ask(create_topic("b"))[0]) == made


def test_an_sbus_client_over_the_quota_is_cut_and_gives_back_what_it_had(tmp_path: Path) -> None:
    config = config_of(tmp_path, subscriptions=2)
    with LiveServer(config) as live:
        with join(live, b"a", b"b") as first, join(live) as second:
            second.subscribe(b"c")
            assert is_cut(second)
            assert first.whoami()
            assert sample(live, "quota_refusals_total", what="subscriptions") == 1
        live.until(lambda: not live.server.broker.router.count)
        with join(live, b"c", b"d") as third:
            assert third.whoami()
