"""The listeners that an edge opens are those that a server opens of the same configuration."""

from pathlib import Path

import msgspec

from babelbus.config import AdminSettings, EventmeshSettings, TlsSettings, WorterbuchSettings, ZbusSettings
from babelbus.listening.certificates import Certificates
from babelbus.server.own_listeners import openings_of
from tests.support.certificates import Authority
from tests.support.server import LiveServer, configure


def test_an_edge_opens_what_a_server_opens(tmp_path: Path) -> None:
    cert_file, key_file = Authority(tmp_path).issue("server")
    config = configure(
        tmp_path / "data",
        tls=TlsSettings(cert_file=str(cert_file), key_file=str(key_file)),
        zbus=ZbusSettings(port=0, monitor_port=0, tls=False),
        worterbuch=WorterbuchSettings(port=0, tcp_port=0, more_endpoints="tcp:0=0.7 /old=0.7"),
        eventmesh=EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, admin_port=0, handshake_seconds=3.0),
        admin=True,
    )
    openings = openings_of(config)
    with LiveServer(config) as live:
        entrances = live.server.entrances.by_name
        assert {one.name for one in openings} == set(entrances)
        certificates = Certificates(config.tls)
        for one in openings:
            tls, entrance = one.make_tls(certificates), entrances[one.name]
            assert (tls is None) == (entrance.tls is None), one.name
            if tls is not None and entrance.tls is not None:
                assert (tls.cert_file, tls.alpn) == (entrance.tls.cert_file, entrance.tls.alpn)
            assert one.handshake_seconds == entrance.door.handshake_seconds


def test_what_is_not_enabled_is_not_opened(tmp_path: Path) -> None:
    config = configure(tmp_path)
    config = msgspec.structs.replace(
        config,
        admin=AdminSettings(enabled=False),
        zbus=ZbusSettings(enabled=False),
        worterbuch=WorterbuchSettings(enabled=False),
    )
    names = [one.name for one in openings_of(config)]
    assert names == ["jebp", "eventmesh-tcp", "eventmesh-http", "eventmesh-grpc"]
