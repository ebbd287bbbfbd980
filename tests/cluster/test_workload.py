"""The clients of the torture do what they say."""

import random
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nats", reason="the cluster is not tested: the package nats-py is not installed")

from babelbus.protocols.sbus.codec import encode, encode_whoami
from babelbus.protocols.sbus.messages import PACKET_BYTES_MAX, Publish
from tests.cluster.history import History
from tests.cluster.workload import Listener


def test_a_listener_hears_what_comes_before_the_answer_that_it_waits_for(tmp_path: Path) -> None:
    address = str(tmp_path / "sbus")
    history, cluster = History(), SimpleNamespace()
    listener = Listener("l", "t", cluster, history, random.Random(1))  # type: ignore[arg-type]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(address)
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                for _ in range(2):
                    connection.recv(PACKET_BYTES_MAX)
                for packet in (encode(Publish(b"t/x", b"early")), encode_whoami(1, 2, 3)):
                    connection.send(packet)
                connection.send(encode(Publish(b"t/x", b"late")))

        serving = threading.Thread(target=serve)
        serving.start()
        member: Any = SimpleNamespace(addresses={"sbus": address})
        with pytest.raises(ConnectionResetError):
            listener.session(member)
        serving.join()
    assert [(event.kind, event.value) for event in history.events()] == [
        ("joined", ""),
        ("got", "early"),
        ("got", "late"),
    ]
