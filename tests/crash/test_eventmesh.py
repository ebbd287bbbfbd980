"""SIGKILL of a server with EventMesh clients on all three transports: nothing that was acknowledged is lost."""

import json
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlencode

import grpc
import pytest

from babelbus.config import EventmeshSettings
from babelbus.protocols.eventmesh.stubs import legacy_pb2
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.child import Child
from tests.support.eventmesh import MeshClient
from tests.support.server import configure
from tests.support.zbus import HttpClient

TOPIC = "killed"
GROUP = "g"
SETTINGS = EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0)


class Publisher(threading.Thread):
    """Publishes until the server is gone; `acknowledged` are the messages that the server answered for."""

    def __init__(self, name: str, publish: Callable[[str], bool], grown: threading.Condition) -> None:
        super().__init__(name=name, daemon=True)
        self.acknowledged: list[str] = []
        self._publish = publish
        self._grown = grown

    def run(self) -> None:
        number = 0
        while True:
            text = f"{self.name} {number}"
            try:
                assert self._publish(text)
            except (OSError, grpc.RpcError):
                return
            with self._grown:
                self.acknowledged.append(text)
                self._grown.notify_all()
            number += 1


def over_tcp(child: Child, opened: ExitStack) -> Callable[[str], bool]:
    client = opened.enter_context(MeshClient(child.addresses["eventmesh-tcp"])).hello("pub")
    return lambda text: client.publish(TOPIC, text)["code"] == 0


def over_http(child: Child, opened: ExitStack) -> Callable[[str], bool]:
    client = opened.enter_context(HttpClient(child.addresses["eventmesh-http"]))

    def publish(text: str) -> bool:
        form = urlencode({"producergroup": "P", "topic": TOPIC, "content": text}).encode()
        return bool(json.loads(client.ask("POST", "/", form, code="104").body)["retCode"] == 0)

    return publish


def over_grpc(child: Child, opened: ExitStack) -> Callable[[str], bool]:
    channel = opened.enter_context(grpc.insecure_channel(child.addresses["eventmesh-grpc"]))
    call = channel.unary_unary(
        "/eventmesh.common.protocol.grpc.PublisherService/publish",
        request_serializer=legacy_pb2.SimpleMessage.SerializeToString,
        response_deserializer=legacy_pb2.Response.FromString,
    )
    header = legacy_pb2.RequestHeader(
        env="e", idc="i", ip="1.1.1.1", pid="7", sys="s", username="u", password="p", language="JAVA"
    )

    def publish(text: str) -> bool:
        message = legacy_pb2.SimpleMessage(
            header=header, producerGroup="P", topic=TOPIC, content=text, ttl="1", uniqueId="1", seqNum="1"
        )
        return bool(call(message, timeout=SAFETY_NET_SECONDS).respCode == "0")

    return publish


def run_until_killed(child: Child, chance: random.Random, name: str) -> tuple[set[str], set[str]]:
    """What was acknowledged and what was delivered until the server was killed under load."""
    with ExitStack() as opened:
        consumer = opened.enter_context(MeshClient(child.addresses["eventmesh-tcp"])).hello(group=GROUP).listen(TOPIC)
        grown = threading.Condition()
        makers = (over_tcp, over_http, over_grpc)
        publishers = [Publisher(f"{make.__name__} {name}", make(child, opened), grown) for make in makers]
        for publisher in publishers:
            publisher.start()
        delivered = {consumer.push()[1]["body"] for _ in range(chance.randint(1, 60))}
        least = chance.randint(5, 40)
        with grown:
            assert grown.wait_for(lambda: all(len(one.acknowledged) >= least for one in publishers), SAFETY_NET_SECONDS)
        child.kill()
        for publisher in publishers:
            publisher.join(SAFETY_NET_SECONDS)
    return {text for publisher in publishers for text in publisher.acknowledged}, delivered


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_what_was_acknowledged_before_a_kill_is_delivered_after_it(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    config = configure(tmp_path, eventmesh=SETTINGS)
    acknowledged: set[str] = set()
    delivered: set[str] = set()
    for number in range(2):
        with Child(config) as child:
            more, came = run_until_killed(child, chance, str(number))
        acknowledged |= more
        delivered |= came
    with Child(config) as child, MeshClient(child.addresses["eventmesh-tcp"]).hello(group=GROUP) as consumer:
        consumer.listen(TOPIC)
        while not acknowledged <= delivered:
            delivered.add(consumer.push()[1]["body"])
