"""A server whose topics are in NATS: it waits for NATS, publishes, reads, and is the same after a kill."""

import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from babelbus.config import JetstreamSettings
from babelbus.core.access import SERVER
from babelbus.core.catalog import TopicExistsError
from babelbus.core.settings import InvalidSettingError
from babelbus.errors import ConfigError
from babelbus.web.server import health_reasons
from tests.server.test_slow_engines import publish_and_fetch
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.child import ROOT
from tests.support.jebp import create, fetch, fetched, said, subscribe
from tests.support.nats import NatsServer, ask_jetstream, nats_server
from tests.support.server import LiveServer, configure


def make_topic(live: LiveServer, name: str, **settings: object) -> None:
    live.call(lambda: live.server.broker.create_topic(name, 1, {"engine": "jetstream"} | settings, SERVER))


def test_a_topic_in_nats_is_published_to_and_read_and_is_there_after_a_restart(
    nats: NatsServer, tmp_path: Path
) -> None:
    config = msgspec.structs.replace(
        configure(tmp_path), jetstream=JetstreamSettings(nats.url, prefix="kept", replicas=1, shards=2)
    )
    with LiveServer(config) as live:
        make_topic(live, "orders", ack="replicated")
        with live.caller() as caller:
            assert publish_and_fetch(caller, "orders", b"1", b"2") == [b"1", b"2"]
    with LiveServer(config) as live, live.caller() as caller:
        assert publish_and_fetch(caller, "orders", b"3") == [b"1", b"2", b"3"]


def test_a_topic_whose_stream_somebody_has_altered_is_refused_and_the_others_are_served(
    nats: NatsServer, tmp_path: Path
) -> None:
    config = msgspec.structs.replace(
        configure(tmp_path), jetstream=JetstreamSettings(nats.url, prefix="altered", replicas=1, shards=1)
    )
    with LiveServer(config) as live, live.caller() as caller:
        for name in ("orders", "news"):
            make_topic(live, name)
            assert publish_and_fetch(caller, name, b"1") == [b"1"]
    assert ask_jetstream(nats.url, "STREAM.PURGE.altered-0", {"filter": "altered.0.orders.0.bounds"})["success"]
    for _ in range(2):
        with LiveServer(config) as live, live.caller() as caller:
            (told,) = health_reasons(live.server)
            assert told.startswith("topic orders is not open: stream altered-0, topic 'orders', partition 0: ")
            with pytest.raises(TopicExistsError, match="cannot be opened"):
                make_topic(live, "orders")
            assert said(caller.ask(create("orders", b"2"))[0]) != "a130"
            assert publish_and_fetch(caller, "news", b"2")[-1] == b"2"
    assert ask_jetstream(nats.url, "STREAM.PURGE.altered-0", {"filter": "altered.0.orders.>"})["success"]
    with LiveServer(config) as live, live.caller() as caller:  # nothing of it is there: no offset is given again
        (told,) = health_reasons(live.server)
        assert told.startswith("topic orders is not open: engine jetstream has 0 of its 1 partitions: give it up")
        assert said(caller.ask(create("orders", b"2"))[0]) == "b331"
        live.call(lambda: live.server.broker.remove_topic("orders", SERVER))
        assert not health_reasons(live.server)
        make_topic(live, "orders")
        assert publish_and_fetch(caller, "orders", b"3") == [b"3"]


@pytest.mark.usefixtures("nats")
def test_while_nats_is_away_its_topics_refuse_and_the_others_go_on(tmp_path: Path) -> None:
    with nats_server() as nats:
        settings = JetstreamSettings(nats.url, replicas=1, shards=1, timeout_seconds=3.0)
        with LiveServer(msgspec.structs.replace(configure(tmp_path), jetstream=settings)) as live:
            make_topic(live, "orders")
            live.call(lambda: live.server.broker.create_topic("news", 1, {}, SERVER))
            with live.caller() as caller, live.caller() as other:
                assert publish_and_fetch(caller, "orders", b"1") == [b"1"]
                nats.kill()
                assert said(caller.ask(create("orders", b"lost"))[0]) != "a130"
                assert publish_and_fetch(other, "news", b"1") == [b"1"]
                nats.start()
                while said(caller.ask(create("orders", b"2"))[0]) != "a130":
                    pass
                _, answer = caller.ask(subscribe("orders"), fetch(0))
                found = fetched(answer)["orders", 0]
                assert [one for one in found if one != b"lost"] == [b"1", b"2"]
                assert found.count(b"lost") <= 1


@pytest.mark.usefixtures("nats")
def test_a_start_that_waits_for_nats_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    config = msgspec.structs.replace(configure(tmp_path), jetstream=JetstreamSettings("nats://127.0.0.1:1", replicas=1))
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.support.child", msgspec.json.encode(config).decode()],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    guard = threading.Timer(SAFETY_NET_SECONDS, child.kill)
    guard.start()
    assert child.stderr is not None
    assert any("waiting for NATS" in line for line in child.stderr)
    child.terminate()
    out, _ = child.communicate()
    guard.cancel()
    assert (child.returncode, out) == (0, "")


@pytest.mark.usefixtures("nats")
def test_a_topic_of_the_engine_without_its_setting_is_refused_with_the_name_of_it(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path)) as live:
        with pytest.raises(ConfigError, match=r"jetstream\.servers"):
            make_topic(live, "orders")
        with pytest.raises(InvalidSettingError, match="replicated needs engine jetstream"):
            live.call(lambda: live.server.broker.create_topic("news", 1, {"ack": "replicated"}, SERVER))
