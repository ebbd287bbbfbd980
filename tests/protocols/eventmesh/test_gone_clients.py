"""Clients of EventMesh that leave while the server waits on their account."""

import socket
import struct
from collections.abc import Iterator
from urllib.parse import urlencode

import grpc
import pytest

from babelbus.core.request import Requests
from tests.protocols.eventmesh.test_grpc import Events, Legacy, Package
from tests.support.eventmesh import MeshClient
from tests.support.server import LiveServer
from tests.support.zbus import request_of

FOREVER_MS = "86400000"


@pytest.fixture
def requests(live: LiveServer) -> Iterator[Requests[object]]:
    """The requests that wait for a reply; a responder takes them and answers nothing."""
    waiting = live.server.broker.responders.requests
    with MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="silent") as responder:
        responder.listen("silent", kind="SYNC")
        assert waiting.in_flight == 0
        yield waiting  # type: ignore[misc]
        live.until(lambda: waiting.in_flight == 0)


def begin(live: LiveServer, requests: Requests[object]) -> None:
    live.until(lambda: requests.in_flight == 1)


def test_a_request_over_tcp_ends_with_its_connection(live: LiveServer, requests: Requests[object]) -> None:
    with MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="q") as client:
        client.send("REQUEST_TO_SERVER", {"topic": "silent", "body": "?", "properties": {"ttl": FOREVER_MS}})
        begin(live, requests)


def test_a_request_over_http_ends_with_its_connection(live: LiveServer, requests: Requests[object]) -> None:
    host, _, port = live.server.addresses["eventmesh-http"].rpartition(":")
    form = urlencode({"producergroup": "P", "topic": "silent", "content": "?", "ttl": FOREVER_MS}).encode()
    with socket.create_connection((host, int(port))) as client:
        client.sendall(request_of("POST", "/", form, code="101"))
        begin(live, requests)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset


@pytest.mark.parametrize("package", [Legacy, Events])
@pytest.mark.parametrize("end", ["cancel", "deadline", "connection"])
def test_a_request_over_grpc_ends_with_its_call(
    live: LiveServer, requests: Requests[object], package: type[Package], end: str
) -> None:
    with grpc.insecure_channel(live.server.addresses["eventmesh-grpc"]) as channel:
        events = package(channel)
        call = events._method("requestReply").future(
            events.publication("silent", "?"), timeout=0.5 if end == "deadline" else None
        )
        if end == "deadline":
            assert call.exception().code() is grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            begin(live, requests)
            if end == "cancel":
                call.cancel()
                live.until(lambda: requests.in_flight == 0)
