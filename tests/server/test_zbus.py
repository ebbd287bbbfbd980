"""zbus through real sockets: one port for HTTP and WebSocket, TLS, keys, a restart."""

import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.config import ServerSettings, TopicDefaults, ZbusSettings, load
from babelbus.errors import ConfigError
from babelbus.protocols.zbus.service import read_keys
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.certificates import Authority
from tests.support.server import LiveServer, configure
from tests.support.zbus import HttpClient, SocketClient, command


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(configure(tmp_path, zbus=ZbusSettings(port=0, monitor_port=0))) as running:
        yield running


def ask(
    live: LiveServer, method: str, url: str, body: bytes | None = None, *, port: str = "zbus", **headers: str
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(live.server.addresses[port], timeout=SAFETY_NET_SECONDS)
    connection.request(method, url, body, headers)
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


def join(live: LiveServer, context: ssl.SSLContext | None = None) -> SocketClient:
    return SocketClient(live.server.addresses["zbus"], context)


def test_http_and_websocket_share_one_port_and_one_set_of_queues(live: LiveServer) -> None:
    assert ask(live, "GET", "/?cmd=create&mq=Q&channel=C&mqType=disk")[0] == 200
    with join(live) as client:
        client.do("sub", mq="Q", channel="C", window=1)
        assert ask(live, "POST", "/", b"hi", cmd="pub", mq="Q") == (200, b"OK, PUB (mq=Q)")
        delivery = client.next()
        assert (delivery["headers"]["window"], delivery["headers"]["offset"]) == ("0", "0")


def test_the_monitor_listens_on_its_own_port(live: LiveServer) -> None:
    ask(live, "GET", "/?cmd=create&mq=Q")
    status, body = ask(live, "GET", "/", port="zbus-monitor")
    assert (status, [queue["name"] for queue in json.loads(body)]) == (200, ["Q"])


def test_a_backlog_reaches_a_consumer_that_reads_slowly_whole_and_in_order(live: LiveServer) -> None:
    count, body = 3000, "x" * 10_000
    with join(live) as publisher, join(live) as consumer:
        publisher.do("create", mq="Q", channel="C", mqType="disk")
        consumer.do("sub", mq="Q", channel="C")
        for _ in range(count):
            publisher.say("pub", body, mq="Q", ack=False)
        assert [int(consumer.next()["headers"]["offset"]) for _ in range(count)] == list(range(count))


def test_what_a_consumer_held_when_it_died_is_lost_with_it_and_the_next_goes_on_behind_it(live: LiveServer) -> None:
    with join(live) as publisher:
        publisher.do("create", mq="D", channel="C", mqType="disk")
        for number in range(5):
            publisher.do("pub", number, mq="D")
        with join(live) as consumer:
            consumer.say("sub", mq="D", channel="C", window=3, ack=False)
            assert [consumer.next()["body"] for _ in range(3)] == [0, 1, 2]
        with join(live) as consumer:
            consumer.say("sub", mq="D", channel="C", ack=False)
            assert [consumer.next()["body"] for _ in range(2)] == [3, 4]


def test_consumers_that_come_and_go_under_load_get_no_message_twice_and_lose_no_more_than_their_windows(
    live: LiveServer,
) -> None:
    count, window = 4000, 20
    got: list[int] = []
    with join(live) as publisher:
        publisher.do("create", mq="D", channel="C", mqType="disk")
        consumers: list[SocketClient] = []
        for begin in range(0, count, 100):
            consumers.append(join(live))
            consumers[-1].say("sub", mq="D", channel="C", window=window, ack=False)
            publisher.say_all([command("pub", None, mq="D", ack=False) for _ in range(begin, begin + 100)])
            if len(consumers) == 4:
                with consumers.pop(0) as leaving:
                    got += take_window(leaving)
        publisher.do("query")  # all is published
        with join(live) as last:
            for consumer in consumers:
                with consumer:
                    got += take_window(consumer)
            while (answer := last.do("take", mq="D", channel="C", window=1000))["status"] == 200:
                got += [int(one["headers"]["offset"]) for one in answer["body"]]
    assert len(set(got)) == len(got)
    assert set(got) <= set(range(count))
    lost = count - len(got)
    assert lost <= window * (count // 100)


def take_window(consumer: SocketClient) -> list[int]:
    """What is left of a window, and of another one that is asked for and then given up half way."""
    found = [consumer.next() for _ in range(20)]
    consumer.say("sub", mq="D", channel="C", window=20, ack=False)
    found += [consumer.next() for _ in range(10)]
    return [int(one["headers"]["offset"]) for one in found]


def test_disk_channels_go_on_at_their_position_after_a_restart(tmp_path: Path) -> None:
    config = configure(tmp_path, topics=TopicDefaults(ack="written"))
    for first in (0, 2):
        with LiveServer(config) as live, join(live) as client:
            client.do("create", mq="D", channel="C", mqType="disk")
            if not first:
                for number in range(4):
                    client.do("pub", number, mq="D")
            client.do("sub", mq="D", channel="C", window=2)
            assert [client.next()["body"] for _ in range(2)] == [first, first + 1]


def test_a_listener_with_a_certificate_speaks_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("zbus")
    settings = ZbusSettings(port=0, tls_cert_file=str(cert), tls_key_file=str(key))
    context = authority.client_context()
    with LiveServer(configure(tmp_path / "data", zbus=settings)) as live, join(live, context) as client:
        assert client.do("create", mq="Q")["status"] == 200


def test_a_client_that_does_not_finish_its_tls_handshake_in_time_is_closed(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).issue("zbus")
    settings = ZbusSettings(port=0, tls_cert_file=str(cert), tls_key_file=str(key), handshake_seconds=0.05)
    with LiveServer(configure(tmp_path / "data", zbus=settings)) as live:
        for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00"):
            with HttpClient(live.server.addresses["zbus"]) as client:
                client.send(greeting)
                client.read_to_end()


def test_a_file_of_keys_is_read_and_a_wrong_one_refused_without_showing_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# who may\n\nkey  secret\nother word\n", encoding="utf-8")
    path.chmod(0o600)
    assert read_keys(str(path)) == {"key": "secret", "other": "word"}
    for content in ("key hush\nkey hush\n", "hush\n", "a hush b\n", "# none\n"):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            read_keys(str(path))
        assert "hush" not in str(caught.value)


def test_without_keys_the_listener_stays_on_loopback() -> None:
    with pytest.raises(ConfigError, match=r"without zbus\.auth_file"):
        load(flags={"zbus.host": "0.0.0.0"})
    assert load(flags={"zbus.host": "0.0.0.0", "server.insecure": True}).server == ServerSettings(insecure=True)


def test_one_half_of_a_certificate_is_refused(tmp_path: Path) -> None:
    settings = ZbusSettings(port=0, tls_cert_file="cert.pem")
    with pytest.raises(ConfigError, match="go together"), LiveServer(configure(tmp_path, zbus=settings)):
        pass
